"""Several envs in one run: which env each group is drawn from, who plays it, and weights that change on the way.

Invariants: the env and the task at a position depend on the seed, the position, and the weights that were in force as
earlier positions were drawn, which are part of the state; a checkpoint therefore goes on with the same groups. Each env
goes through its own tasks in its own order, without leaving one out, however seldom it is drawn.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any, Protocol

import numpy as np

from molt_gym.errors import ConfigError, RunFailed
from molt_gym.threads import call_in_thread
from molt_gym.tokens import Trajectory

from ..config import Config
from .env_calls import carried
from .pool import Batch, Plan, Pool, TaskStream
from .ticket import Ticket

Curriculum = Callable[[dict[str, Any]], Mapping[str, float] | None]
"""From the metrics line of the step before to weights by env id; an env that is not named, or None, keeps its own."""

_SALT = 0x6D6978
"""Keeps the draws of envs apart from those of tasks."""


def split(config: Config) -> list[Config]:
    """The settings of each env by itself: of those of the mixture, or of the one that `config.env` names."""
    if not config.mixture:
        return [config]
    parts = []
    for env in [config.env] if config.env in config.mixture else config.mixture:
        own = config.mixture[env]
        turns = own.get("max_turns", config.rollout.max_turns)
        parts.append(config.model_copy(update={
            "env": env, "mixture": {}, "curriculum": None, "env_kwargs": own.get("env_kwargs", {}),
            "rollout": config.rollout.model_copy(update={"max_turns": turns})}))
    return parts


class Mixture:
    """From a position to the number of an env and the index of a task of its own.

    Args:
        weights: by env id, in proportion to which they are drawn.
        streams: the tasks of each.
    """

    def __init__(self, weights: Mapping[str, float], streams: Sequence[TaskStream], seed: int) -> None:
        self._streams, self._seed = streams, seed
        self._initial = dict(weights)
        self.load_state(None)

    @property
    def weights(self) -> dict[str, float]:
        """Those in force for positions that are still to be drawn."""
        return dict(self._schedule[-1][1])

    def __getitem__(self, position: int) -> tuple[int, int]:
        """The env's number and its task. Raises IndexError if that env has no tasks."""
        while len(self._drawn) <= position:
            place = len(self._drawn)
            weights = next(chosen for first, chosen in reversed(self._schedule) if first <= place)
            shares = np.array(list(weights.values())) / math.fsum(weights.values())
            env = int(np.random.default_rng([self._seed, _SALT, place]).choice(len(shares), p=shares))
            self._drawn.append((env, self._counts[env]))
            self._counts[env] += 1
        env, number = self._drawn[position]
        return env, self._streams[env][number]

    def reweigh(self, position: int, weights: Mapping[str, float]) -> None:
        """Draw from `position` on, up to which all were drawn, in other proportions.

        Raises:
            ValueError: an env is not in the mixture, or its weight is no weight.
        """
        checked = check_weights(self.weights | dict(weights), known=self._initial)
        if checked != self.weights:
            self._schedule.append((position, checked))

    def state(self) -> list[Any]:
        """The weights and the positions from which they hold."""
        return [[position, weights] for position, weights in self._schedule]

    def load_state(self, state: Sequence[Any] | None) -> None:
        """Go on from what `state` returned, or begin anew."""
        self._schedule = [(position, dict(weights)) for position, weights in state or [(0, self._initial)]]
        self._drawn: list[tuple[int, int]] = []
        self._counts: Counter[int] = Counter()


def check_weights(weights: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, float]:
    """Weights by env id as numbers; raises ValueError."""
    for env, weight in weights.items():
        if env not in known:
            raise ValueError(f"{env!r} is not in the mixture of {', '.join(known)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
            raise ValueError(f"{env}: got {weight!r}; write a number from 0 on")
    if not any(weights.values()):
        raise ValueError("all weights are 0; write one above")
    return {env: float(weight) for env, weight in weights.items()}


class Player(Protocol):
    """A `Runner`, or what plays in its place elsewhere."""

    retried: Counter[str]

    async def play(self, ticket: Ticket) -> Trajectory:
        """See `Runner.play`."""
        ...

    async def aclose(self) -> None:
        """See `Runner.aclose`."""
        ...


class MixedRunner:
    """Plays each ticket with the runner of its env."""

    def __init__(self, runners: Sequence[Player]) -> None:
        self._runners = runners

    @property
    def retried(self) -> Counter[str]:
        """Those of all runners; setting it clears them."""
        return sum((runner.retried for runner in self._runners), Counter())

    @retried.setter
    def retried(self, counts: Counter[str]) -> None:
        for runner in self._runners:
            runner.retried = Counter()
        self._runners[0].retried.update(counts)

    async def play(self, ticket: Ticket) -> Trajectory:
        """The rollout."""
        return await self._runners[ticket.env].play(ticket)

    async def aclose(self) -> None:
        """Close the envs of all."""
        await asyncio.gather(*(runner.aclose() for runner in self._runners))


class MixedPool(Pool):
    """A pool over a mixture, whose weights a curriculum may change before each step but the first.

    Args:
        last_line: the metrics line of the step before.
    """

    def __init__(
        self, runner: MixedRunner, mixture: Mixture, plan: Plan, *, seed: int, curriculum: Curriculum | None = None,
        last_line: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        super().__init__(runner, mixture, plan, seed=seed)
        self._mixture, self._configured = mixture, mixture.weights
        self._curriculum, self._last_line = curriculum, last_line

    def state(self) -> dict[str, object]:
        """As of `Pool`, with the weights."""
        return super().state() | {"mixture": self._mixture.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """As of `Pool`; without a curriculum, the weights of the configuration hold for what was not drawn yet."""
        super().load_state(state)
        self._mixture.load_state(state.get("mixture"))
        if self._curriculum is None:
            self._mixture.reweigh(self._cursor, self._configured)

    async def next_batch(self, step: int) -> Batch:
        """As of `Pool`, with the weights of new groups.

        Raises:
            RunFailed: also where the curriculum fails, or gives what are no weights.
        """
        if self._curriculum is not None and step > 1:
            await self._reweigh(self._curriculum)
        batch = await super().next_batch(step)
        batch.weights = self._mixture.weights
        return batch

    async def _reweigh(self, curriculum: Curriculum) -> None:
        try:
            call = partial(carried, curriculum, self._last_line())
            weights = await asyncio.wrap_future(call_in_thread(call, "molt-gym-curriculum"))
            self._mixture.reweigh(self._cursor, {} if weights is None else weights)
        except Exception as error:  # noqa: BLE001  whatever a user's function raises
            raise RunFailed(f"curriculum: {type(error).__name__}: {error}") from error


def load_curriculum(name: str) -> Curriculum:
    """The function that "module:function" names.

    Raises:
        ConfigError: there is none.
    """
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"curriculum: {name!r} cannot be imported ({error}); write module:function, or pass the "
                          "function itself") from error
    if not callable(found):
        raise ConfigError(f"curriculum: {name!r} is {found!r:.100} and no function; write module:function")
    return found
