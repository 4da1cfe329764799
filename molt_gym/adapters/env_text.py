"""What a Gymnasium env says of itself: in its docstring, its spaces and its terminal rendering."""

import inspect
import itertools
import re
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space, Tuple

from .action_text import number_text

__all__ = ["action_names", "describe", "observation_names", "plain_ansi", "purpose"]

_COLOURS = {0: "black", 1: "red", 2: "green", 3: "yellow", 4: "blue", 5: "magenta", 6: "cyan", 7: "white"}
_STYLE = re.compile(r"\x1b\[([\d;]*)m")
_OF_MANY = (38, 48)
"""Codes before one of more colours than have names."""
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|<[^>]+>")


def plain_ansi(text: str) -> str:
    """Terminal output as plain text: what is coloured stands in a tag of that colour, such as <red>S</red>."""
    first, *pieces = _STYLE.split(text)
    told, colour = [first], None
    for style, words in zip(pieces[::2], pieces[1::2], strict=True):
        codes = [int(code or 0) for code in style.split(";")]
        for code in codes if codes[0] not in _OF_MANY else [0]:
            # 0, 39 and 49 end a colour; bold and the like leave it as it is.
            if code == 0 or code // 10 in (3, 4, 9, 10):
                colour = _COLOURS.get(code % 10) if code else None
        told.append(f"<{colour}>{words}</{colour}>" if colour and words else words)
    return _ESCAPE.sub("", "".join(told)).strip("\n")


def purpose(env: gym.Env, *, observations: bool = False, most: int = 1500) -> str:
    """What the docstring of an env says of its task, rewards and ends, cut at a paragraph after `most` characters.

    observations: and of what is observed.
    """
    sections = _sections(env)
    wanted = {"description", "rewards", "reward", "episode end"} | ({"observation space"} if observations else set())
    parts = [sections.get(""), *(text for title, text in sections.items() if title in wanted)]
    paragraphs, size = [], 0
    for paragraph in "\n\n".join(filter(None, parts)).split("\n\n"):
        size += len(paragraph)
        if paragraphs and size > most:
            break
        if not paragraph.lstrip().startswith(("```", "@")):
            paragraphs.append(paragraph)
    text = "\n\n".join(paragraphs).replace("<sup>", "^").replace("**", "")
    return _LINK.sub(lambda match: match[1] or "", text).strip()


def action_names(env: gym.Env) -> list[str]:
    """Names of the actions of a Discrete space, or of the numbers of a Box, where the docstring lists them all."""
    space = env.action_space
    if not isinstance(space, Discrete | Box):
        return []
    return _listed(_sections(env).get("action space", ""), int(space.n) if isinstance(space, Discrete)
                   else int(np.prod(space.shape)))


def observation_names(env: gym.Env) -> list[str]:
    """Names of the numbers of a Box observation, where the docstring lists them all."""
    space = env.observation_space
    return _listed(_sections(env).get("observation space", ""), int(np.prod(space.shape))) if isinstance(
        space, Box) else []


def describe(observation: Any, space: Space | None, names: list[str] | None = None) -> str:
    """An observation in words; names: of the numbers of a Box."""
    if isinstance(space, Dict):
        return "\n".join(f"{key}: {describe(observation[key], part)}" for key, part in space.items())
    if isinstance(observation, tuple):
        spaces = space.spaces if isinstance(space, Tuple) else itertools.repeat(getattr(space, "feature_space", None))
        return "(" + ", ".join(describe(*pair) for pair in zip(observation, spaces, strict=False)) + ")"
    if isinstance(observation, np.ndarray):
        if observation.ndim == 1 and names:
            return "\n".join(f"{name}: {number_text(value)}" for name, value in zip(names, observation, strict=True))
        return np.array2string(observation, separator=", ", threshold=2000, formatter={"float_kind": number_text})
    return str(observation)


def _sections(env: gym.Env) -> dict[str, str]:
    """The docstring of an env by its headings in lower case; what comes before the first under an empty one."""
    text = inspect.cleandoc(type(env.unwrapped).__doc__ or "")
    title, lines = "", {"": []}
    for line in text.splitlines():
        if heading := re.match(r"\s*#+\s*(.*?):?\s*$", line):
            title = heading[1].casefold()
            lines.setdefault(title, [])
        else:
            lines[title].append(line.strip())
    return {title: "\n".join(found).strip() for title, found in lines.items()}


def _listed(text: str, count: int) -> list[str]:
    """The entries 0 to count - 1 of a list `- 0: name` or of a table `| 0 | name |`; [] unless all are there."""
    found: dict[int, str] = {}
    for number, name in re.findall(r"^[-*|]\s*(\d+)\s*[:|]\s*([^|\n]+)", text, re.MULTILINE):
        found.setdefault(int(number), name.strip().replace("`", ""))
    return [found[i] for i in range(count)] if set(range(count)) <= set(found) else []
