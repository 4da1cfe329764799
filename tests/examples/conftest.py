"""The agents of examples/agents, imported as scripts beside each other are, and who plays them token by token."""

import importlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from molt_gym import text_of
from molt_gym.tokens import Generation

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
END = 257

_spec = importlib.util.spec_from_file_location("toy", ROOT / "tests" / "molt_gym" / "tokens" / "conftest.py")
toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy)
TOKENIZER = toy.make_tokenizer("tools", ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"))


@pytest.fixture(scope="session")
def agents_folder():
    return AGENTS


@pytest.fixture(scope="module")
def example():
    """Imports an example by its name, which registers its env for the time of the module."""
    before, names = dict(gym.registry), {path.stem for path in AGENTS.glob("*.py")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(AGENTS)
        yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    gym.registry.clear()
    gym.registry.update(before)


@pytest.fixture(scope="session")
def renderer():
    """Of the toy tokenizer, with tools."""
    return toy.make_renderer("tools")


class Player:
    """A gate behind which a policy, which knows nothing of tokens, is a model that does.

    received: the prompts. sampled: the replies to them. Every sampled id has a log-probability of its own.
    """

    def __init__(self, policy):
        self.policy, self.received, self.sampled = policy, [], []
        self._logprob = itertools.count(1)

    async def generate(self, request):
        ids = self._reply(request.ids) if self.policy else _noise(request.sampling.seed)
        ids = ids[: request.sampling.max_tokens]
        self.received.append(list(request.ids))
        self.sampled.append(ids)
        reason = "stop" if ids[-1] == END else "length"
        return Generation(ids, [-float(next(self._logprob)) for _ in ids], [0] * len(ids), reason)

    def _reply(self, prompt):
        reply = self.policy(_observation(TOKENIZER.decode(prompt)))
        reply = {"content": reply} if isinstance(reply, str) else reply
        calls = (call["function"] for call in reply.get("tool_calls") or ())
        calls = (f'{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}' for call in calls)
        text = "\n".join([text_of(reply), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]).strip()
        return [*TOKENIZER.encode(text, add_special_tokens=False), END]


def _noise(seed):
    """What a model that has learnt nothing says."""
    rng = random.Random(seed)
    return [*rng.choices([*range(32, 127), 10, 262, 264, 267, 268], k=rng.randrange(1, 24)), END]


def _observation(text):
    """The conversation that the template "tools" wrote as this text."""
    messages, tools = [], []
    for role, content in re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", text, re.DOTALL):
        if role == "system" and content.startswith("Tools:\n"):
            tools = [json.loads(line) for line in content.splitlines()[1:]]
            continue
        if result := re.fullmatch(r"<tool_response>\n(.*)\n</tool_response>", content, re.DOTALL):
            role, content = "tool", result[1]
        messages.append({"role": role, "content": content})
    return {"messages": messages, "tools": tools}


@pytest.fixture
def player():
    return Player


@pytest.fixture
def curl(tmp_path, monkeypatch):
    """Sees to it that there is a `curl`: where none is installed, one that can do what the example needs."""
    if shutil.which("curl") is None:
        (tmp_path / "curl").write_text(f"#!{sys.executable}\n{CURL}")
        (tmp_path / "curl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


CURL = '''
import sys
import urllib.error
import urllib.request

arguments = sys.argv[1:]
headers = dict(text.split(": ", 1) for flag, text in zip(arguments, arguments[1:]) if flag == "--header")
url = next(text for text in arguments if text.startswith("http"))
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    answer = opener.open(urllib.request.Request(url, sys.stdin.buffer.read(), headers))
except urllib.error.HTTPError as error:
    sys.exit(f"curl: (22) {error}")
sys.stdout.buffer.write(answer.read())
'''
