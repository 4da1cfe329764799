"""What makes the envs of a run, here or where it is sent."""

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from molt_gym.agents import AgentEnv
from molt_gym.errors import ConfigError
from molt_gym.judge_source import Address, desk
from molt_gym.registry import creators, find_spec, make

from .env_calls import survey
from .env_process import CLOSE_TIMEOUT
from .env_worker import EnvWorker


@dataclass(frozen=True)
class EnvMaker:
    """Makes envs of one id and keywords, in whichever process it is sent to.

    own_process: whether each of them is to have a process of its own.
    """

    env_id: str
    spec: EnvSpec
    kwargs: dict[str, Any]
    own_process: bool = False

    @classmethod
    def of(
        cls, env_id: str, kwargs: dict[str, Any], processes: Literal["auto", "always", "never"] = "auto"
    ) -> "EnvMaker":
        """Of an id; for `processes` see `RolloutConfig.env_processes`. Raises as `find_spec` does."""
        spec = find_spec(env_id)
        creator, tasks = creators(spec)
        # What a script itself defines has no name in other processes.
        if str(spec.entry_point).startswith("__main__:"):
            spec.entry_point = creator
        if str(spec.kwargs.get("agent")).startswith("__main__:"):
            spec.kwargs["agent"] = tasks
        declared = processes == "auto" and getattr(tasks, "own_process", False)
        return cls(env_id, spec, kwargs, processes == "always" or bool(declared))

    def __call__(self) -> gym.Env:
        """A new env."""
        env = make(self.spec, **self.kwargs)
        # In another process nothing may have registered it, and envs look themselves up.
        gym.registry.setdefault(self.spec.id, self.spec)
        return env

    @property
    def is_agent(self) -> bool:
        """Whether they are agents, with loops of their own."""
        return creators(self.spec)[0] is AgentEnv

    def num_tasks(self) -> int | None:
        """How many tasks there are; None for no end of them. Makes an env, so that bad keywords show at once.

        Raises:
            ConfigError: it is no number of tasks.
        """
        worker = EnvWorker(self, own_process=self.own_process)
        try:
            count, _judges[self.env_id] = worker.submit(survey).result()
        finally:
            wait([worker.retire()], CLOSE_TIMEOUT)
        if count is not None and (not isinstance(count, int | np.integer) or count < 0):
            raise ConfigError(f"{self.env_id}: num_tasks is {count!r}; write an integer from 0 on, or None for no end")
        return None if count is None else int(count)

    @property
    def judges(self) -> set[str]:
        """Models here, or of the run, that judge, as far as the last `num_tasks` of this id found them."""
        return _judges.get(self.env_id, set())


_judges: dict[str, set[str]] = {}


@dataclass(frozen=True)
class Seated:
    """Makes an env of `make` in whose thread, or process, judges find the run. address: gives its address there."""

    make: Callable[[], gym.Env]
    address: Callable[[], Address]

    def __call__(self) -> gym.Env:
        """A new env."""
        desk.set(self.address)
        return self.make()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process cannot ask this one.
        try:
            found: Address | str = self.address()
        except Exception as error:  # noqa: BLE001  without a judge, nobody misses it
            found = f"{type(error).__name__}: {error}"
        return Seated, (self.make, partial(_found, found))


def _found(address: Address | str) -> Address:
    if isinstance(address, str):
        raise RuntimeError(address)
    return address
