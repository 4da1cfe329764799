"""Compares answers by algebra, in processes that can be killed.

Computer algebra can take any time and memory for a short text, in code that no exception or handler of a signal
interrupts. So a process that does not answer in time is killed and replaced.

Invariants: a call returns within its limit and two seconds of the start of a comparison; any thread may call; workers
end with their parent, at the latest when a verdict is overdue.
"""

import atexit
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Pipe
from pathlib import Path

from molt_gym.errors import ConfigError, EnvFailure

__all__ = ["WORKERS", "check_installed", "equal", "pids"]

WORKERS = max(4, min(16, os.cpu_count() or 1))
"""How many comparisons run at a time in one process of the env; a worker is started when it is first needed."""

_PROGRAM = Path(__file__).with_name("worker.py")
_MEMORY_MB = 512
_START_SECONDS = 120.0
_QUEUE_SECONDS = 300.0
_REAP_SECONDS = 30.0
# What a comparison can do to its own process: run out of stack or memory, or of the time that the worker sets itself.
_BY_ITS_ANSWER = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGALRM, -signal.SIGBUS}


def check_installed() -> None:
    """Raises ConfigError if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("Math-v0 compares answers with math-verify: pip install 'molt-gym[math]'")


def equal(gold: str, answer: str, seconds: float) -> bool | None:
    """Whether math-verify takes two pieces of LaTeX for the same.

    Args:
        gold: the right answer.
        answer: what is compared with it.
        seconds: the limit, without the time to wait for a worker.

    Returns:
        None: no verdict within the limits of time and memory.

    Raises:
        EnvFailure: reason "grader": no worker could be had, or one died by no fault of the answer.
    """
    pool = _pool
    if not pool.turns.acquire(timeout=_QUEUE_SECONDS):
        raise EnvFailure("grader", f"no worker was free in {_QUEUE_SECONDS:g} s")
    try:
        worker = pool.take()
        try:
            verdict, usable = worker.compare(gold, answer, seconds)
        except BaseException:
            worker.end()
            raise
        if usable:
            pool.idle.append(worker)
        else:
            worker.end()
        return verdict
    finally:
        pool.turns.release()


def pids() -> list[int]:
    """The processes that wait for something to compare."""
    return [worker.process.pid for worker in list(_pool.idle)]


class _Worker:
    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            fd = theirs.fileno()
            arguments = map(str, (_PROGRAM, fd, os.getpid(), _MEMORY_MB))
            silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", *arguments], pass_fds=(fd,), start_new_session=True, **silent
                )
            except OSError as error:
                self.connection.close()
                raise EnvFailure("grader", f"cannot start a worker: {error}") from error
        try:
            said = self._receive(_START_SECONDS)
        except BaseException:
            self.end()
            raise
        if said != b"ready":
            self.end()
            what = f"no sign in {_START_SECONDS:g} s" if said is None else said.decode() or "it died"
            raise EnvFailure("grader", f"a worker did not start: {what}")

    def compare(self, gold: str, answer: str, seconds: float) -> tuple[bool | None, bool]:
        """The verdict, and whether the worker can go on."""
        try:
            self.connection.send_bytes(json.dumps([gold, answer, seconds]).encode())
        except ConnectionError as error:
            raise EnvFailure("grader", f"a worker is gone: {error}") from error
        said = self._receive(seconds)
        if said:
            return said[:1] == b"1", said[1:] != b"r"
        if said is not None and (code := self.process.wait(_REAP_SECONDS)) not in _BY_ITS_ANSWER:
            raise EnvFailure("grader", f"a worker ended with code {code}")
        return None, False

    def end(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.connection.close()
        try:
            self.process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            raise EnvFailure("grader", f"worker {self.process.pid} was killed and does not end") from None

    def _receive(self, seconds: float) -> bytes | None:
        """A message; b"": the worker is gone; None: nothing came in time."""
        try:
            return self.connection.recv_bytes() if self.connection.poll(seconds) else None
        except (EOFError, ConnectionError):
            return b""


class _Pool:
    def __init__(self) -> None:
        self.turns = threading.BoundedSemaphore(WORKERS)
        self.idle: list[_Worker] = []

    def take(self) -> _Worker:
        """A worker that runs."""
        while True:
            try:
                worker = self.idle.pop()
            except IndexError:
                return _Worker()
            if worker.process.poll() is None:
                return worker
            worker.end()


_pool = _Pool()


def _new_pool() -> None:
    global _pool
    _pool = _Pool()


@atexit.register
def _end_idle() -> None:
    for worker in _pool.idle:
        worker.end()


# The workers of the parent answer the parent.
os.register_at_fork(after_in_child=_new_pool)
