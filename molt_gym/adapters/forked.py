"""A call in a forked child that can be killed: for code of others that may hang, or eat the memory, on a policy's text.

For processes of few threads only, such as that of an env which has one of its own; a fork of a process that uses torch
may hang.
"""

import contextlib
import os
import resource
import select
import signal
from collections.abc import Callable

__all__ = ["number_in_fork"]


def number_in_fork(work: Callable[[], float], seconds: float, memory_mb: int = 2048) -> float | None:
    """What `work` returns; None if it raised, took too long or too much memory, or ended its process.

    Args:
        work: called in a copy of this process, whose changes to it are lost.
        seconds: the limit, after which the copy and all that it started in its session are killed.
        memory_mb: how much address space the copy may add.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(work, writer, memory_mb)
    os.close(writer)
    try:
        # What the copy started may keep the pipe open, so that its end cannot be waited for.
        ready, _, _ = select.select([reader], [], [], seconds)
        said = os.read(reader, 64) if ready else b""
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
    return float(said) if said else None


def _child(work: Callable[[], float], writer: int, memory_mb: int) -> None:
    status = 1
    try:
        os.setsid()
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(writer, repr(float(work())).encode())
        status = 0
    finally:
        # Nothing of the parent's, such as its exit handlers, is to run here.
        os._exit(status)
