"""The answer in a reply, found by one function for training, evaluation and the end of an episode alike.

Invariants: the work is linear in the length of the text, and no text raises.
"""

import re
from typing import Literal

from ..thinking import without_thinking

__all__ = ["RULES", "Rule", "find_answer", "find_boxed"]

Rule = Literal["any", "boxed"]
RULES: tuple[Rule, ...] = ("any", "boxed")

_TOKEN = re.compile(r"(\\{1,4}(?:boxed|fbox)\s*\{)|\\{1,4}boxed\s*(-?[0-9]+(?:[.,/][0-9]+)*)|\\.|[{}]", re.DOTALL)
_SAYS = re.compile(
    r"(?:\banswers?\b\**\s*(?:is\b|are\b|[:=])|<answer>)"
    r"(?:\s+(?:therefore|thus|approximately|about|option)\b)*[\s:*]*"
    r"|^#{4}\s*(?=[-+$]?[0-9])", re.IGNORECASE | re.MULTILINE)
_MATH = re.compile(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE = re.compile(r"[.!?](?=\s|\*|$)|</answer>|[;\n]|,?\s(?=(?:which|because|since|so|not)\b)")
_NUMBER = re.compile(
    r"""(?:(?<![0-9A-Za-z.)}])[-\u2212])?
    (?: (?:[0-9]+\s*)?\\[dt]?frac(?:\{-?[0-9]+\}|[0-9]){2}
      | (?:[0-9]+\ )?[0-9]+/[0-9]+
      | (?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|(?<![0-9A-Za-z.)}])\.[0-9]+)(?:/[0-9]+|[eE][-+]?[0-9]+)?
        (?:\s*(?:\\times|\\cdot|[\u00d7*])\s*10(?=\^))?(?:\^(?:-?[0-9]+|\{-?[0-9]+\}))?
    )(?:\s?\\?%)?""", re.VERBOSE)
_NEAR = 1000


def find_answer(text: str, rule: Rule = "any") -> str | None:
    r"""The answer that a reply gives; None: it gives none.

    What is thought does not count: text up to the last `</think>`, and from a `<think>` that is never closed. Of the
    rest, the answer is what is in the last `\boxed{}` or `\fbox{}`, as it is written. That is all with the rule
    "boxed". With "any", where there is no box at all, not even one that is cut off, it is the formula or the rest of
    the sentence after the last "answer is", "answer:", "<answer>" or "####" before a number; failing that, the last
    number, or, of the formula that it stands in, what comes after the last equals sign.
    """
    text = without_thinking(text)
    boxed, cut_off = find_boxed(text)
    if boxed is not None or cut_off or rule == "boxed":
        return boxed
    return _said(text) or _last_number(text)


def find_boxed(text: str) -> tuple[str | None, bool]:
    r"""The contents of a box, and whether there is a box that is never closed.

    Of all `\boxed{}` and `\fbox{}` whose braces close and that are not blank, the one that opens last; `\{` and `\}`
    are no braces. A number needs none: `\boxed 5`.
    """
    found, at = None, -1
    open_braces: list[tuple[bool, int]] = []
    for token in _TOKEN.finditer(text):
        if token[1] or token[0] == "{":
            open_braces.append((bool(token[1]), token.end()))
        elif token[2]:
            found, at = token[2], token.start(2)
        elif token[0] == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box and start > at and text[start : token.start()].strip():
                found, at = text[start : token.start()], start
    return found, any(is_box for is_box, _ in open_braces)


def _said(text: str) -> str | None:
    end = None
    for marker in _SAYS.finditer(text):
        end = marker.end()
    if end is None:
        return None
    if formula := _MATH.match(text, end):
        return _inside(formula)
    stop = _SENTENCE.search(text, end)
    return text[end : stop.start() if stop else len(text)].strip(" \t*`\"'") or None


def _last_number(text: str) -> str | None:
    number = None
    for match in _NUMBER.finditer(text):
        number = match
    if number is None:
        return None
    paragraph = text.rfind("\n\n", 0, number.start()) + 1
    if number.start() - paragraph < _NEAR:
        for formula in _MATH.finditer(text, paragraph, number.end() + _NEAR):
            if formula.start() < number.start() and number.end() < formula.end():
                return _inside(formula).rpartition("=")[2].strip()
    return number[0]


def _inside(formula: re.Match[str]) -> str:
    return next(filter(None, formula.groups()))
