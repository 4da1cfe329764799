"""No process of an engine outlives the one that started it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started its process ends. Linux alone has that."""
    parent = os.getppid()
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
