"""Finds the program in a reply."""

__all__ = ["program_in"]

_LANGUAGES = ("", "python", "python3", "py")


def program_in(text: str) -> str | None:
    """The last fenced Python block of a text, or None.

    A fence is a line of its own that starts with three backticks, indented or not. A block counts once it is closed,
    and if it names no other language; an unclosed one is no answer.
    """
    program: str | None = None
    block: list[str] = []
    language: str | None = None
    for line in text.split("\n"):
        fence = line.strip()
        if language is None:
            if fence.startswith("```"):
                language, block = fence[3:].strip().lower(), []
        elif fence == "```":
            program = "\n".join(block) if language in _LANGUAGES else program
            language = None
        else:
            block.append(line)
    return program
