"""Environments in threads of their own, so that a slow or hung one holds up nobody else.

Invariants: an env lives in one thread from `make` to `close`; a call past its deadline gives its worker up, thread and
all, and the next rollout gets a new one.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium as gym

from molt_gym.task_env import TaskEnv
from molt_gym.threads import Worker

T = TypeVar("T")
CLOSE_TIMEOUT = 5.0
"""Seconds that all envs together may take to close."""


class DeadlinePassed(Exception):
    """A call to an env took too long. Not a TimeoutError, which the env's own code may raise."""


class EnvWorker:
    """One env and its thread."""

    def __init__(self, make: Callable[[], gym.Env]) -> None:
        self._worker = Worker("molt-gym-env")
        self._make = make
        self._env: gym.Env | None = None
        self.usable = True

    async def call(self, work: Callable[[gym.Env], T], timeout: float) -> T:
        """Run `work(env)` in the env's thread; the first call makes the env.

        Raises:
            DeadlinePassed: `timeout` seconds passed; the worker is not usable any more.
        """
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                return await asyncio.wrap_future(self._worker.submit(lambda: self._run(work)))
        except BaseException as error:
            # After an exception the env's state is unknown, after a cancellation its thread may still be at it.
            self.usable = False
            if deadline.expired():
                raise DeadlinePassed(f"no answer within {timeout:g} s") from error
            raise

    def _run(self, work: Callable[[gym.Env], T]) -> T:
        try:
            if self._env is None:
                self._env = self._make()
            return work(self._env)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # A future cannot carry StopIteration, and an env that calls exit() must not end the run.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def retire(self) -> "concurrent.futures.Future[None]":
        """Close the env once its thread is free; does not wait."""
        self.usable = False
        closed = self._worker.submit(lambda: self._env.close() if self._env is not None else None)
        self._worker.stop()
        return closed


class EnvPool:
    """Workers that are free, handed out one a rollout."""

    def __init__(self, make: Callable[[], gym.Env]) -> None:
        self._make = make
        self._free: list[EnvWorker] = []

    def take(self) -> EnvWorker:
        """A worker that nobody else holds."""
        return self._free.pop() if self._free else EnvWorker(self._make)

    def give_back(self, worker: EnvWorker) -> None:
        """Return a worker; one that is not usable is retired."""
        if worker.usable:
            self._free.append(worker)
        else:
            worker.retire()

    def close(self) -> None:
        """Close all free envs, and wait up to `CLOSE_TIMEOUT` seconds for it."""
        concurrent.futures.wait([worker.retire() for worker in self._free], CLOSE_TIMEOUT)
        self._free.clear()


def choose_task(env: gym.Env, index: int, seed: int) -> dict[str, Any]:
    """The keywords for `reset` that play task `index`: our envs take it as an option, others as the seed."""
    if isinstance(env.unwrapped, TaskEnv):
        return {"seed": seed, "options": {"index": index}}
    return {"seed": index}
