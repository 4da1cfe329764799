"""The actions of a Gymnasium space in words: what may be written, and which action a reply means.

Invariant: a reply that does not clearly name one action of the space is illegal; nothing is guessed.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space

__all__ = ["IllegalReply", "is_small", "number_text", "parse_action", "said", "words_for"]

MOST_NUMBERS = 16
"""Numbers of an action that a reply may have to hold."""
_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_LABEL = re.compile(r"^\W*(?:final\s+)?(?:action|answer|move)\W*:\s*", re.IGNORECASE)
_AROUND = " \t`'\"*!()[]"
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_WORD = re.compile(r"[+-]?\d+(?:\.\d+)?|\w(?:[\w'-]*\w)?")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_DASHES = str.maketrans(dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{FULLWIDTH HYPHEN-MINUS}\N{SMALL HYPHEN-MINUS}", "-"))
_LOOSE_MINUS = re.compile(r"-\s+[\d.]|\d-|-[-+]")
"""A minus that may be a sign, a bullet or a range."""


class IllegalReply(ValueError):
    """The reply names no action; the message says what to write."""


def is_small(space: Space) -> bool:
    """Whether actions of the space can be written in a reply: one or a few numbers."""
    if isinstance(space, Discrete):
        return True
    return isinstance(space, Box | MultiDiscrete | MultiBinary) and 0 < math.prod(space.shape) <= MOST_NUMBERS


def number_text(value: Any) -> str:
    """A number in few digits, but an integer in all of its own."""
    if isinstance(value, np.integer | np.bool_):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.8g}"


def words_for(space: Space, names: Sequence[str] = (), legal: Sequence[int] | None = None) -> str:
    """What the actions are, for the policy to read.

    Args:
        space: one that `is_small`.
        names: of the actions of a Discrete space from its first on, or of the numbers of a Box.
        legal: the only actions of a Discrete space that make sense now; None for all.
    """
    if isinstance(space, Discrete):
        chosen = range(space.start, space.start + space.n) if legal is None else legal
        if not names and legal is None:
            return f"an integer from {space.start} to {space.start + space.n - 1}"
        return ", ".join(f"{action} ({names[action - space.start]})" if names else str(action) for action in chosen)
    if isinstance(space, Box):
        low, high = ([number_text(end) for end in ends.ravel()] for ends in (space.low, space.high))
        each = [f"{names[i] if names else f'number {i + 1}'} from {low[i]} to {high[i]}" for i in range(len(low))]
        return f"{len(each)} number{'s' * (len(each) > 1)}: " + ", ".join(each)
    if isinstance(space, MultiBinary):
        return f"{math.prod(space.shape)} numbers, each 0 or 1"
    sizes, starts = space.nvec.ravel(), np.broadcast_to(space.start, space.nvec.shape).ravel()
    return f"{len(sizes)} integers: " + ", ".join(
        f"from {start} to {start + size - 1}" for size, start in zip(sizes, starts, strict=True))


def said(text: str) -> str:
    """The part of a reply that names the action: of the last <action> tag, or of all, the last line, without a label.

    Lines of quotes and brackets alone, such as the end of a code block, are none.
    """
    tagged = _TAGGED.findall(text)
    lines = [line.strip() for line in (tagged[-1] if tagged else text).splitlines() if line.strip(_AROUND)]
    # A point may begin a number, and ends a sentence.
    return _LABEL.sub("", lines[-1]).strip(_AROUND).rstrip(f".{_AROUND}") if lines else ""


def parse_action(text: str, space: Space, names: Sequence[str] = ()) -> Any:
    """The action that a reply means.

    Args:
        text: of the reply; see `said` for the part that counts.
        space: one that `is_small`.
        names: of the actions of a Discrete space, from its first on.

    Raises:
        IllegalReply: it is none of the space.
    """
    words = said(text).translate(_DASHES)
    if _LOOSE_MINUS.search(words) and np.min(getattr(space, "low", getattr(space, "start", 0))) < 0:
        raise IllegalReply(f"{words!r:.80} may be meant below zero or not; write {words_for(space, names)}")
    if isinstance(space, Discrete):
        return _discrete(words, space, names)
    numbers = [float(number) for number in _NUMBER.findall(words)]
    if len(numbers) != math.prod(space.shape):
        raise IllegalReply(f"{len(numbers)} numbers in {words!r:.80}; write {words_for(space, names)}")
    whole = np.issubdtype(space.dtype, np.integer)
    if whole and not all(number.is_integer() for number in numbers):
        raise IllegalReply(f"{words!r:.80} has fractions; write {words_for(space, names)}")
    # A bound of a float32 box may lie a rounding below its decimal; an integer that is too large would wrap around.
    with np.errstate(all="ignore"):
        action = np.array(numbers, dtype=np.float64).astype(space.dtype).reshape(space.shape)
    kept = action.ravel().tolist() == numbers if whole else np.isfinite(action).all()
    if not kept or action not in space:
        raise IllegalReply(f"{words!r:.80} is out of range; write {words_for(space, names)}")
    return action


def _discrete(words: str, space: Discrete, names: Sequence[str]) -> int:
    plain = _plain(words)
    if _INTEGER.fullmatch(plain) and int(plain) in space:
        return int(plain)
    known = [_plain(name) for name in names]
    found = [i for i, name in enumerate(known) if name == plain] or _named(plain, known)
    if len(found) == 1:
        return int(space.start) + found[0]
    # "2 (Move right)" or "2: right"
    number, _, rest = plain.partition(" ")
    if not found and _INTEGER.fullmatch(number) and int(number) in space and names:
        named = known[int(number) - int(space.start)]
        if set(rest.split()) <= set(named.split()):
            return int(number)
    raise IllegalReply(f"{words!r:.80} is no action; write " + words_for(space, names))


def _named(plain: str, known: Sequence[str]) -> list[int]:
    """Names that hold all the words of the reply, or all of whose words the reply holds."""
    words = plain.split()
    return [i for i, name in enumerate(known) if words and set(words) <= set(name.split())]


def _plain(text: str) -> str:
    """Its words and numbers, in lower case."""
    return " ".join(_WORD.findall(text.casefold()))
