"""`molt-gym new-env NAME` and `new-agent NAME`: a small package that is found, checked and trained at once."""

import importlib.util
import keyword
import re
from pathlib import Path
from string import Template

import gymnasium as gym

from .errors import ConfigError

__all__ = ["create"]

_PYPROJECT = Template('''[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$dist"
version = "0.1.0"
description = "$title for molt-gym"
requires-python = ">=3.11"
dependencies = ["molt-gym"]

# Installed packages that name a module here are found by their ids, without an import.
[project.entry-points."molt_gym.envs"]
$module = "$module"

[tool.setuptools]
packages = ["$module"]
''')

_README = Template('''# $dist

```bash
pip install -e .
molt-gym check-env $id
molt-gym rollout $id --human
molt-gym train $id --model tiny
pytest
```
''')

_TEST = Template('''from molt_gym.conformance import check


def test_the_env_keeps_to_the_contract():
    assert [finding for finding in check("$id") if finding.problem] == []
''')

_ENV = Template('''"""$id: asks for the larger of two numbers.

Replace the task by yours; `molt_gym.load_tasks` reads tasks from a file.
"""

import random

import molt_gym


class $cls(molt_gym.ChatEnv):
    """Name the larger of two numbers."""

    def __init__(self, *, split: str = "train", render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self._split = split

    def begin(self, index: int) -> list[dict]:
        """The messages that open task `index`; they must depend on it (or on self.np_random) alone."""
        self._numbers = random.Random(f"{self._split}/{index}").sample(range(1, 100), 2)
        return [{"role": "user", "content": "Which number is larger: {} or {}?".format(*self._numbers)}]

    def answer(self, message: dict) -> molt_gym.Turn:
        """What the env makes of a reply. Give messages and no end to go on with another turn."""
        right = molt_gym.text_of(message).strip() == str(max(self._numbers))
        return molt_gym.Turn(reward=float(right), terminated=True)

    def demonstrations(self, count: int, seed: int = 0) -> list[list[dict]]:
        """For `--model tiny` alone, which knows nothing before it is shown some (noisy) examples."""
        rng = random.Random(seed)
        return [[*self.begin(rng.randrange(2**31)), {"role": "assistant", "content": str(rng.choice(self._numbers))}]
                for _ in range(count)]


molt_gym.register("$id", $cls, max_episode_steps=1)
''')

_AGENT = Template('''"""$id: an agent on a stock OpenAI client names the larger of two numbers. Replace it by yours."""

import molt_gym


@molt_gym.register_agent("$id", max_turns=4)
async def agent(ctx: molt_gym.AgentContext) -> float:
    """Name the larger of two numbers."""
    a, b = ctx.rng.integers(1, 100, size=2)
    client = ctx.openai()
    reply = await client.chat.completions.create(
        model=ctx.model, messages=[{"role": "user", "content": f"Which number is larger: {a} or {b}?"}])
    return float((reply.choices[0].message.content or "").strip() == str(max(a, b)))
''')


def create(kind: str, name: str, folder: Path) -> list[Path]:
    """Writes the package.

    Args:
        kind: "env" or "agent".
        name: of the env, such as "Larger" or "my-larger"; its id is the name in capitals-at-the-beginning with -v0.
        folder: of the package, which must not exist or be empty.

    Returns:
        The files.

    Raises:
        ConfigError: the name makes no package, or is that of a module or an env that is here, or the folder has
            something in it.
    """
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)
    module = "_".join(words).lower()
    if not re.fullmatch(r"[A-Za-z][\w-]*", name) or not words or not module.isidentifier() or (
            keyword.iskeyword(module) or module == "tests"):
        raise ConfigError(f"name: {name!r} makes no package; write letters and digits, such as Larger or my-larger")
    if (found := importlib.util.find_spec(module)) is not None and found.origin is not None:
        raise ConfigError(f"name: a module {module} is here already, {found.origin}; write another name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out: {folder} has something in it; write a new folder")
    title = "".join(word[:1].upper() + word[1:] for word in words)
    if there := [spec.id for spec in gym.registry.values() if (spec.namespace, spec.name) == (None, title)]:
        raise ConfigError(f"name: an env {there[0]} is here already; write another name than {name}")
    fields = {"dist": module.replace("_", "-"), "module": module, "id": f"{title}-v0", "cls": f"{title}Env",
              "title": f"An {kind}"}
    files = {"pyproject.toml": _PYPROJECT, "README.md": _README, f"{module}/__init__.py": _ENV if kind == "env" else
             _AGENT, f"tests/test_{module}.py": _TEST}
    written = []
    for file, template in files.items():
        text = template.substitute(fields)
        if kind == "agent" and file == "README.md":
            # A toy that is shown no examples learns nothing.
            text = text.replace(" --model tiny", "")
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
