"""What the words of a command mean: envs, weights, settings, and the run to go on with.

Invariant: a word that means nothing is refused as a ConfigError that names it.
"""

import argparse
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError

__all__ = ["env_and_overrides", "envs_and_overrides", "mixture_of", "numbers", "read_toml", "refuse", "run_to_resume"]


def numbers(text: str) -> list[int]:
    """Integers with commas between them."""
    return [int(number) for number in text.split(",")]


def envs_and_overrides(
    options: argparse.Namespace, rest: list[str], *, env_needed: bool = True
) -> tuple[list[str], dict[str, Any]]:
    """The envs, one or more, and the overrides, as `env_and_overrides`."""
    end = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
    env, overrides = env_and_overrides(options, rest[: min(end, 1)] + rest[end:], env_needed=env_needed)
    return [env, *rest[1:end]], overrides


def mixture_of(words: Sequence[str]) -> dict[str, float]:
    """Weights by env id, of words such as CodeExec-v0=.7."""
    mixture = {}
    for word in words:
        env, _, weight = word.rpartition("=")
        try:
            mixture[env] = float(weight)
        except ValueError:
            env = ""
        if not env:
            raise ConfigError(f"{word!r}: no env with a weight; write ID=WEIGHT for each env of a mixture, such as "
                              "CodeExec-v0=.7 Math-v0=.3")
    return mixture


def env_and_overrides(
    options: argparse.Namespace, rest: list[str], *, env_needed: bool = True
) -> tuple[str, dict[str, Any]]:
    """The env ("" without one) and the overrides among the words that are no options of the command itself."""
    from .trainers.config import parse_cli

    env = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    if env_needed and not env:
        example = f"molt-gym {options.verb} CodeExec-v0"
        raise ConfigError(f"env: missing; write it first, such as {example} (`molt-gym envs` lists them)")
    return env, parse_cli(rest)


def refuse(rest: Sequence[str]) -> None:
    """Raise ConfigError if there are words left."""
    if rest:
        raise ConfigError(f"{rest[0]!r} is no option of this command; see --help")


def run_to_resume(resume: str, env: str, out: str | None) -> str | None:
    """The folder that `--resume` names; None for a new one."""
    from .trainers.run_dir import holds_run, latest_run

    if resume != "auto":
        if out is not None and Path(out).resolve() != Path(resume).resolve():
            raise ConfigError(f"--out {out} with --resume {resume}: a run goes on in its own folder; leave --out out")
        if not holds_run(resume):
            raise ConfigError(f"--resume {resume}: no run is there (no config.toml); name a folder that train wrote")
        return resume
    if out is not None:
        return out
    found = latest_run(env or None)
    print(f"resuming {found}" if found else f"no run{f' of {env}' if env else ''} under runs/; starting a new one")
    return None if found is None else str(found)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a settings file holds; nothing if it is not there."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path}: {error}") from None
