"""Finds the program in a reply."""

import re
from typing import NamedTuple

from ..thinking import without_thinking

__all__ = ["program_in"]

_FENCE = re.compile(r"([ \t]*)(?:(`{3,})([^`]*)|(~{3,})(.*))")
_PYTHON = re.compile(r"(?:py|python)?[0-9.]*|\{\.?python\}", re.IGNORECASE)
_NEAR = 3
_DEEPEST = 8


class _Block(NamedTuple):
    """An open block: its first line, its fence, how far that is indented, and whether it is Python."""

    start: int
    fence: str
    indent: int
    is_python: bool


def program_in(text: str) -> str | None:
    """The fenced Python block of a text that is closed last, or None.

    A fence is a line of its own that starts with three or more backticks or tildes, indented or not; the lines of a
    block are indented less by as much. A block counts once it is closed, by the same fence at about the same
    indentation (another one is text of the block, as in a docstring), and if it names no other language; an unclosed
    one is no answer, nor is what is thought (`without_thinking`).
    """
    program: str | None = None
    lines = without_thinking(text).split("\n")
    open_blocks: list[_Block] = []
    for number, line in enumerate(lines):
        if (match := _FENCE.fullmatch(line.rstrip())) is None:
            continue
        indent, fence, language = len(match[1]), match[2] or match[4], (match[3] or match[5] or "").strip()
        closed = [] if language else [
            (abs(indent - block.indent), -place) for place, block in enumerate(open_blocks)
            if block.fence == fence and indent - block.indent <= _NEAR]
        if not closed:
            open_blocks.append(_Block(number + 1, fence, indent, _PYTHON.fullmatch(language) is not None))
            del open_blocks[:-_DEEPEST]
            continue
        place = -min(closed)[1]
        block = open_blocks[place]
        del open_blocks[place:]
        if block.is_python:
            program = "\n".join(_indented_less(line, block.indent) for line in lines[block.start : number])
    return program


def _indented_less(line: str, indent: int) -> str:
    return line[min(indent, len(line) - len(line.lstrip(" \t"))) :]
