"""A process that compares answers with math-verify, one after the other.

Started as `python -P worker.py FD PARENT MEMORY_MB`; the package is not imported here. It ends when the other end of
the connection or the parent is gone, and the kernel ends it when a verdict is overdue: no library is asked to agree.
"""

import json
import math
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

_PATIENCE = 2.0


def main(fd: int, parent: int, memory_mb: int) -> None:
    """Answers requests `[gold, answer, seconds]` with "1" or "0", and "0r" or "1r" if it has to be replaced."""
    connection = Connection(fd)
    limit = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        _equal("(x+1)^2", "x^2+2x+1")  # the first comparison takes longest
    except Exception as error:  # noqa: BLE001  whatever keeps it from working, the parent has to tell
        connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        return
    connection.send_bytes(b"ready")
    while True:
        while not connection.poll(_PATIENCE):
            if os.getppid() != parent:
                return
        gold, answer, seconds = json.loads(connection.recv_bytes())
        signal.alarm(math.ceil(seconds + _PATIENCE))
        try:
            verdict = b"1" if _equal(gold, answer) else b"0"
        except Exception:  # noqa: BLE001  nothing that an answer makes the library do is the fault of the worker
            verdict = b"0"
        signal.alarm(0)
        # What a large answer left behind would be missing for the next one.
        spent = _peak_memory() > limit / 2
        connection.send_bytes(verdict + b"r" * spent)
        if spent:
            return


def _equal(gold: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    # Without the other kind of expressions, which are evaluated as Python.
    kinds = [LatexExtractionConfig(boxed_match_priority=-1)]
    ours, theirs = (
        parse(f"${text.replace('$', '')}$", kinds, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (answer, gold)
    )
    return any(
        verify(right, value, allow_set_relation_comp=True, timeout_seconds=None) and _as_large(right, value)
        for right in theirs for value in ours)


def _as_large(right: Any, value: Any) -> bool:
    """Whether two numbers agree to a hundred-thousandth part: verify takes all that are near 0 for the same."""
    if not all(getattr(side, "is_number", False) and not side.is_infinite for side in (right, value)):
        return True
    ours, theirs, difference = (abs(part.evalf(30)) for part in (value, right, value - right))
    return not ours or not theirs or bool(difference <= 1e-5 * max(ours, theirs))


def _peak_memory() -> int:
    """The largest part of the memory in use so far, in bytes; what getrusage tells begins with that of the parent."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except (EOFError, ConnectionError):
        pass
