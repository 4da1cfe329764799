"""An env in a process of its own, which can be killed.

Invariants: after `kill` or `close`, and when this process ends in whatever way, nothing is left of the env's process or
of what it started; an error that is raised there is raised here, with the traceback from there as its cause.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import gymnasium as gym

from molt_gym.errors import EnvFailure

T = TypeVar("T")
CLOSE_TIMEOUT = 5.0
"""Seconds that an env may take to close, and its process to end when it is killed."""
_SUPERVISOR = Path(__file__).with_name("env_supervisor.py")


class _There(Exception):
    """A traceback in another process."""


class EnvProcess:
    """Starts when it is first used; all but `kill` is for one thread, which must live as long as the process.

    Args:
        make: makes the env; sent by value where it cannot be imported, as what a script itself defines.
    """

    def __init__(self, make: Callable[[], gym.Env]) -> None:
        self._make, self._lock, self._killed = make, threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None

    def run(self, work: Callable[[gym.Env], T], answer: Callable[[], Any] | None = None) -> T:
        """Do `work(env)` there, making the env first if there is none.

        Args:
            answer: gives what the work asks for meanwhile.

        Raises:
            EnvFailure: reason "env_died": the process ended, by itself or killed. And whatever `work` raises.
        """
        message = cloudpickle.dumps(work)
        while True:
            try:
                connection = self._connection or self._start()
                connection.send_bytes(message)
                kind, value = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                raise EnvFailure("env_died", f"the env's process has ended (exit code {self._end()})") from None
            if kind == "done":
                return value
            if kind == "raised":
                error, there = value
                raise error from _There(f"in the env's process:\n{there}")
            message = cloudpickle.dumps(answer())

    def kill(self) -> None:
        """End it and all that it started at once, from any thread; a call that is under way fails."""
        with self._lock, suppress(OSError):
            self._killed = True
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the env, and end the process."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.send_bytes(b"")
                self._connection.poll(CLOSE_TIMEOUT)
        self._end()

    def _start(self) -> Connection:
        make = cloudpickle.dumps(self._make)
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._killed:
                raise EOFError
            self._socket = ours
            # Some suites draw from sets, whose order hashes decide: a task has to be the same in all processes.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SUPERVISOR), str(theirs.fileno())], pass_fds=[theirs.fileno()],
                env={"PYTHONHASHSEED": "0", **os.environ}, stdin=subprocess.DEVNULL, start_new_session=True)
        self._connection = Connection(os.dup(ours.fileno()))
        self._connection.send(sys.path)
        self._connection.send_bytes(make)
        return self._connection

    def _end(self) -> int | None:
        self.kill()
        for end in filter(None, (self._connection, self._socket)):
            end.close()
        self._connection = None
        if self._process is None:
            return None
        try:
            return self._process.wait(CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()
