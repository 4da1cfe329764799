"""Ends programs that were started here and what they started, also when this process dies without a chance to do so.

Such programs are known by a variable in their environment, which what they start inherits. The first of them has a
guard started: this file, run as a program of its own, which waits for the end of this process, be it by a signal.
Nothing but the standard library is imported, as that program has nothing else.
"""

import os
import secrets
import select
import signal
import sys
import threading
import time
from contextlib import suppress

__all__ = ["MARK", "end_all", "marked"]

MARK = "MOLT_GYM_RUN"
"""The variable."""
_ROUNDS = 20
_STARTING = 0.1
"""Seconds after which a program that was being started when its starter died has its environment."""


def marked(environment: dict[str, str]) -> tuple[dict[str, str], str]:
    """The environment for one more program, and the mark in it, for `end_all`."""
    secret = f"{_guarded()}-{secrets.token_hex(16)}"
    return environment | {MARK: secret}, f"{MARK}={secret}"


def end_all(mark: str) -> None:
    """Kill the processes whose environment holds a variable that begins with `mark`, each with its process group."""
    # A process may fork while the list is read: look again until none is left.
    for _ in range(_ROUNDS):
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, mark)]
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)
        if not left:
            return


def _has(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + mark.encode() in b"\0" + file.read()
    except OSError:
        return False


_lock = threading.Lock()
_owner = ""
"""What the marks of this process begin with, once there is a guard."""


def _guarded() -> str:
    global _owner
    with _lock:
        if not _owner:
            owner = secrets.token_hex(16)
            command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), f"{MARK}={owner}"]
            # Who reads this process's output to its end does not wait for the guard.
            closed = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
            # Who ends this process by the mark of another one leaves it the guard.
            environment = {name: value for name, value in os.environ.items() if name != MARK}
            os.posix_spawn(command[0], command, environment, file_actions=closed, setsid=True)
            _owner = owner
        return _owner


def _forget() -> None:
    global _lock, _owner
    _lock, _owner = threading.Lock(), ""


# What a forked child starts ends with the child.
os.register_at_fork(after_in_child=_forget)


def _guard(pid: int, mark: str) -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    time.sleep(_STARTING)
    end_all(mark)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
