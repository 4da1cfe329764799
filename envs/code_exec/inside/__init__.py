"""Programs that run inside of sandboxes, as text: `checks.py` runs the tests, `solution.py` the code under test.

The two talk over pipes, in lines of JSON: first the solution says ["ready"] or ["failed", error]; then each call
[name, arguments, keyword arguments] is answered by ["value", result, arguments after the call] or
["error", exception name, message, name of the builtin exception that it is of, its arguments]. Values cross as plain
data (`values.py`), never pickled, so that what comes from the code under test has no behaviour; it never sees the
tests, their process or the verdict.
"""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["PASSED", "RAISED", "UNFIT", "checks_program", "solution_program"]

PASSED, RAISED, UNFIT = 0, 3, 4
"""Exit codes of the program of checks: all passed; the solution raised (stdout tells what); no tests of a solution."""

_FOLDER = Path(__file__).parent


def checks_program(checks: Sequence[str], entry_point: str | None) -> str:
    """The program that runs tests, for the first place of `Sandbox.run_pair`."""
    return _text("values.py", "checks.py") + f"main({list(checks)!r}, {entry_point!r})\n"


def solution_program(code: str) -> str:
    """The program that defines the functions under test and answers calls to them, for the second place."""
    return _text("values.py", "solution.py") + f"main({code!r})\n"


def _text(*names: str) -> str:
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)
