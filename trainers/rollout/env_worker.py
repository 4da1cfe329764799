"""Environments in threads or processes of their own, so that a slow or hung one holds up nobody else.

Invariants: an env lives in one thread from `make` to `close`; a call past its deadline gives its worker up, thread and
all, and the next rollout gets a new one. A process is killed then.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium as gym

from molt_gym.threads import Worker

from .env_calls import carried, leave
from .env_process import CLOSE_TIMEOUT, EnvProcess

T = TypeVar("T")


class DeadlinePassed(Exception):
    """A call to an env took too long. Not a TimeoutError, which the env's own code may raise."""


class EnvWorker:
    """One env and its thread.

    Args:
        own_process: whether the env lives in a process, which the thread waits for.
    """

    def __init__(self, make: Callable[[], gym.Env], *, own_process: bool = False) -> None:
        self._worker = Worker("molt-gym-env")
        self._make = make
        self._env: gym.Env | None = None
        self._process = EnvProcess(make) if own_process else None
        self.usable = True

    @property
    def own_process(self) -> bool:
        """Whether the env lives in a process of its own."""
        return self._process is not None

    async def call(
        self, work: Callable[[gym.Env], T], timeout: float, answer: Callable[[], Any] | None = None
    ) -> T:
        """Run `work(env)` in the env's thread or process; the first call makes the env.

        Args:
            work: for a process, what `cloudpickle` can send there; and so must be its result.
            answer: see `EnvProcess.run`.

        Raises:
            DeadlinePassed: `timeout` seconds passed; the worker is not usable any more.
        """
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                return await asyncio.wrap_future(self.submit(work, answer))
        except BaseException as error:
            # After an exception the env's state is unknown, after a cancellation its thread may still be at it.
            self.usable = False
            late = deadline.expired()
            if self._process is not None and (late or isinstance(error, asyncio.CancelledError)):
                self._process.kill()
            if late:
                raise DeadlinePassed(f"no answer within {timeout:g} s") from error
            raise

    def submit(
        self, work: Callable[[gym.Env], T], answer: Callable[[], Any] | None = None
    ) -> "concurrent.futures.Future[T]":
        """As `call`, without a deadline; does not wait."""
        return self._worker.submit(lambda: self._run(work, answer))

    def _run(self, work: Callable[[gym.Env], T], answer: Callable[[], Any] | None) -> T:
        if self._process is not None:
            return self._process.run(work, answer)
        if self._env is None:
            self._env = carried(self._make)
        return carried(work, self._env)

    def leave(self) -> None:
        """Free what the last episode holds, before the next call; does not wait."""
        self.submit(leave)

    def retire(self) -> "concurrent.futures.Future[None]":
        """Close the env once its thread is free; does not wait."""
        self.usable = False
        closed = self._worker.submit(self._close)
        self._worker.stop()
        return closed

    def _close(self) -> None:
        for closable in (self._process, self._env):
            if closable is not None:
                closable.close()


class EnvPool:
    """Workers that are free, handed out one a rollout."""

    def __init__(self, make: Callable[[], gym.Env], *, own_process: bool = False) -> None:
        self._make, self._own_process = make, own_process
        self._free: list[EnvWorker] = []

    def take(self) -> EnvWorker:
        """A worker that nobody else holds."""
        return self._free.pop() if self._free else EnvWorker(self._make, own_process=self._own_process)

    def give_back(self, worker: EnvWorker) -> None:
        """Return a worker; one that is not usable is retired."""
        if worker.usable:
            worker.leave()
            self._free.append(worker)
        else:
            worker.retire()

    def close(self) -> None:
        """Close all free envs, and wait up to `CLOSE_TIMEOUT` seconds for it."""
        concurrent.futures.wait([worker.retire() for worker in self._free], CLOSE_TIMEOUT)
        self._free.clear()
