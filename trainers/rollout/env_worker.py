"""Environments in threads of their own, so that a slow or hung one holds up nobody else.

Invariants: an env lives in one thread from `make` to `close`; a call past its deadline gives its worker up, thread and
all, and the next rollout gets a new one.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium as gym

from molt_gym.threads import Worker

T = TypeVar("T")


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
                return await asyncio.wrap_future(self._worker.submit(lambda: work(self._made())))
        except BaseException as error:
            # After an exception the env's state is unknown, after a cancellation its thread may still be at it.
            self.usable = False
            if deadline.expired():
                raise DeadlinePassed(f"no answer within {timeout:g} s") from error
            raise

    def _made(self) -> gym.Env:
        if self._env is None:
            self._env = self._make()
        return self._env

    def retire(self) -> None:
        """Close the env once its thread is free; does not wait."""
        self.usable = False
        self._worker.submit(lambda: self._env.close() if self._env is not None else None)
        self._worker.stop()


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
        """Close all free envs."""
        while self._free:
            self._free.pop().retire()


def choose_task(env: gym.Env, index: int, seed: int) -> dict[str, Any]:
    """The keywords for `reset` that play task `index`: chat envs take it as an option, others as the seed."""
    from molt_gym import ChatEnv

    if isinstance(env.unwrapped, ChatEnv):
        return {"seed": seed, "options": {"index": index}}
    return {"seed": index}
