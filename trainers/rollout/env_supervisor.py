"""Run as a program, not imported: forks the process in which an env lives, and ends all of it.

Invariants: when the trainer hangs up or dies, or the env's process ends, everything that was started from there is
killed, also what left its session or lost its parent; no code of a user's runs in this process, so none can hold it up.
Nothing but the standard library is imported before the fork.
"""

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _main(descriptor: int) -> None:
    prctl = ctypes.CDLL(None).prctl
    # Orphans become children of this process, wherever in the tree they were started.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Not an exception, which might be raised while all are being ended.
    told, tell = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(tell, b"x"))
    # The hang-up alone would do, if no fork of the trainer kept its end of the socket open.
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    child = os.fork()
    if child:
        _supervise(descriptor, told, child)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(descriptor)
    sys.path[:] = connection.recv()
    from molt_gym.trainers.rollout.env_calls import serve

    serve(connection)


def _supervise(descriptor: int, told: int, child: int) -> None:
    try:
        poll = select.poll()
        poll.register(descriptor, 0)  # reports a hang-up alone
        poll.register(told, select.POLLIN)
        poll.register(os.pidfd_open(child), select.POLLIN)
        poll.poll()
    finally:
        os._exit(_end_all(child))


def _end_all(child: int) -> int:
    """Kill and reap all descendants; the exit code of `child`, as a shell would tell it."""
    code = 0
    while True:
        for pid in _children():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The name of a program, in parentheses, may hold anything.
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    _main(int(sys.argv[1]))
