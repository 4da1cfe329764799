"""Finds the program in a reply."""

import re

from ..thinking import without_thinking

__all__ = ["program_in"]

_FENCE = re.compile(
    r"([ \t]*(?:(?:[-*+]|[0-9]+[.)])[ \t]+)?)(?:<answer>[ \t]*)?(`{3,}(?=[^`]*$)|~{3,})(.*?)(?:[ \t]*</answer>)?")
_PYTHON = re.compile(r"(?:\{\s*\.?)?(?:py|python)[0-9.]*(?![^\s:{},])", re.IGNORECASE)
_OTHER, _NO_LANGUAGE, _NAMED_PYTHON = range(3)
_NEAR = 3
_DEEPEST = 8


def program_in(text: str) -> str | None:
    """The fenced Python block of a text that is closed last, or None.

    A fence is a line of its own that starts with three or more backticks or tildes, indented or not, as an item of a
    list, or beside the tags of an answer; the lines of a block are indented less by as much. A block counts once it is
    closed, by the same fence at about the same indentation (another one is text of the block, as in a docstring), and
    if the first word behind the fence is Python; where there is no such block, those without a word count, which else
    show an output, or how to run it. An unclosed one is no answer, nor is what is thought (`without_thinking`).
    """
    program: str | None = None
    least = _NO_LANGUAGE
    lines = without_thinking(text).split("\n")
    blocks: list[tuple[int, str, int, int]] = []  # that are open: indentation, fence, first line, language
    for number, line in enumerate(lines):
        if (match := _FENCE.fullmatch(line.rstrip())) is None:
            continue
        indent, fence, language = len(match[1]), match[2], match[3].strip()
        closed = [] if language else [(abs(indent - block[0]), -place) for place, block in enumerate(blocks)
                                      if block[1] == fence and indent - block[0] <= _NEAR]
        if closed:
            place = -min(closed)[1]
            (indent, _, start, kind), blocks = blocks[place], blocks[:place]
            if kind >= least:
                least = kind
                program = "\n".join(re.sub(rf"^[ \t]{{0,{indent}}}", "", line) for line in lines[start:number])
        else:
            blocks = [*blocks[1 - _DEEPEST :], (indent, fence, number + 1, _language(language))]
    return program


def _language(words: str) -> int:
    return (_NAMED_PYTHON if _PYTHON.match(words) else _OTHER) if words else _NO_LANGUAGE
