r"""Inequalities as intervals, which algebra can compare: "x<2 or x\ge3" is "(-\infty, 2) \cup [3, \infty)"."""

import re

__all__ = ["as_intervals"]

_BUILDER = re.compile(
    r"\\\{\s*[A-Za-z](?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\\(?:mid|vert)(?![A-Za-z])|[|:])(.*)\\\}", re.DOTALL)
_OR = re.compile(r"\bor\b|\\lor(?![A-Za-z])")
_AND = re.compile(r"\band\b|\\land(?![A-Za-z])|,")
_SIGNS = [(re.compile(rf"\\(?:{name}|{name}q|{name}qslant)(?![A-Za-z])|{plain}="), sign)
          for name, plain, sign in (("le", "<", "\u2264"), ("ge", ">", "\u2265"))]
_TURNED = {"<": ">", ">": "<", "\u2264": "\u2265", "\u2265": "\u2264"}

Inequality = tuple[str, str, str]
"""A sign, "<" or "\u2264", and what stands before and after it."""


def as_intervals(text: str) -> str:
    """What inequalities of one variable say that are joined by words or stand in a set; another text as it is."""
    builder = _BUILDER.fullmatch(text)
    said = builder[1] if builder else text
    if not builder and not _OR.search(text) and not _AND.search(text):
        return text
    of_one = len(set(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", said))) == 1
    found = [_interval([_inequalities(part) for part in _AND.split(either)]) for either in _OR.split(said)]
    return " \\cup ".join(found) if of_one and all(found) else text


def _inequalities(text: str) -> list[Inequality]:
    """The two of "1<x<2", or the one of "x>2"; none of another text."""
    for spelling, sign in _SIGNS:
        text = spelling.sub(sign, text)
    parts = [part.strip() for part in re.split("([<>\u2264\u2265])", text)]
    if len(parts) > 1 and parts[1] in ">\u2265":
        parts = [_TURNED.get(part, part) for part in reversed(parts)]
    whole = len(parts) in (3, 5) and all(parts) and not {">", "\u2265"} & set(parts)
    return [(parts[at], parts[at - 1], parts[at + 1]) for at in range(1, len(parts), 2)] if whole else []


def _interval(joined: list[list[Inequality]]) -> str:
    """Where all of them hold, if each end is told but once; "" if it is not."""
    said = [inequality for part in joined for inequality in part]
    lows, highs = ([one for one in said if one[variable].isalpha()] for variable in (2, 1))
    if not all(joined) or max(len(lows), len(highs)) > 1 or len(lows) + len(highs) < len(said):
        return ""
    low = f"{'(' if lows[0][0] == '<' else '['}{lows[0][1]}" if lows else "(-\\infty"
    high = f"{highs[0][2]}{')' if highs[0][0] == '<' else ']'}" if highs else "\\infty)"
    return f"{low}, {high}"
