"""Groups of rollouts in flight, and the batches that they make.

Invariants: at most `Plan.most_in_flight` groups are in flight, and another is dispatched for each that comes in;
on-policy (`max_staleness` 0) no more are dispatched than the batch still lacks, so that none is in flight when the
weights change; a task that was dispatched and not yet trained is in `pending`, so that a resumed run plays it again;
every group that is not trained is counted.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from molt_gym.errors import RunFailed
from molt_gym.tokens import Trajectory

from ..algorithms.shaping import trains
from .ticket import Ticket

if TYPE_CHECKING:
    from .mixture import Mixture, Player

MAX_REPLACEMENTS = 8
"""Groups that a dynamic filter may drop for each one that it keeps, before the run stops."""


@dataclass
class Batch:
    """What a step trains on.

    `groups` has one group for each task or, of a game, one for each seat; `kept` is the number of tasks with a group.
    `played` holds every rollout of the step, also the failed and the dropped ones; `weights` those of a mixture.
    """

    groups: list[list[Trajectory]] = field(default_factory=list)
    played: list[Trajectory] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)
    retried: Counter = field(default_factory=Counter)
    weights: dict[str, float] = field(default_factory=dict)
    dispatched: int = 0
    exhausted: bool = False
    kept: int = 0


class TaskStream:
    """Task indices in a seeded order: shuffled epochs of a finite set, or draws without end.

    Args:
        num_tasks: size of the set; None for an unbounded one.
        epochs: how often the set is gone through; None for ever.
    """

    def __init__(self, num_tasks: int | None, seed: int, *, epochs: int | None = None) -> None:
        self._num_tasks, self._seed, self._epochs = num_tasks, seed, epochs

    def __getitem__(self, position: int) -> int:
        """The task at `position`.

        Raises:
            IndexError: all epochs are over, or there are no tasks.
        """
        if self._num_tasks is None:
            return int(np.random.default_rng([self._seed, position]).integers(2**31))
        if not self._num_tasks or (self._epochs is not None and position >= self._epochs * self._num_tasks):
            raise IndexError(position)
        epoch, offset = divmod(position, self._num_tasks)
        return int(_order(self._seed, epoch, self._num_tasks)[offset])


@lru_cache(maxsize=16)
def _order(seed: int, epoch: int, tasks: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(tasks)


@dataclass(frozen=True)
class Plan:
    """How many groups of how many rollouts, how far ahead, and which groups train."""

    groups_per_step: int
    group_size: int
    max_staleness: int = 0
    dynamic_filter: tuple[float, float] | None = None
    capacity: int | None = None
    """Most groups in flight; by default what `max_staleness` allows to be trained in time."""

    @property
    def most_in_flight(self) -> int:
        """`capacity`, or its default.

        When a batch is full, one fewer are in flight: as many as the next `max_staleness` batches take.
        """
        return self.capacity or max(self.groups_per_step, self.groups_per_step * self.max_staleness + 1)


class Pool:
    """Dispatches groups and collects them in the order of completion (on-policy: of dispatch).

    Args:
        ended: called with each group as its last rollout ends.
    """

    def __init__(
        self, runner: "Player", tasks: "TaskStream | Mixture", plan: Plan, *, seed: int,
        ended: Callable[[list[Trajectory]], None] = lambda _: None,
    ) -> None:
        self._runner, self._tasks, self._plan, self._seed, self._ended = runner, tasks, plan, seed, ended
        self._flying: dict[asyncio.Task[list[Trajectory]], int] = {}
        self._again: list[int] = []
        self._pending: set[int] = set()
        self._cursor = 0

    @property
    def in_flight(self) -> int:
        """Groups being played."""
        return len(self._flying)

    def state(self) -> dict[str, object]:
        """Where the data stand: the next position, and those before it that no finished step has trained."""
        return {"cursor": self._cursor, "pending": sorted(self._pending)}

    def load_state(self, state: dict[str, object]) -> None:
        """Go on from what `state` returned; what was in flight then is played again first."""
        self._cursor, self._again = int(state["cursor"]), sorted(state["pending"])
        self._pending = set(self._again)

    def confirm(self, batch: Batch) -> None:
        """The groups of `batch` are trained or dropped for good; a resumed run does not play them again."""
        self._pending -= {trajectory.group for trajectory in batch.played}

    async def next_batch(self, step: int) -> Batch:
        """Play until `groups_per_step` groups have come in, or the tasks are over.

        Raises:
            RunFailed: the dynamic filter drops nearly everything.
        """
        batch, most = Batch(), self._plan.groups_per_step * MAX_REPLACEMENTS
        strict = self._plan.max_staleness == 0
        while (missing := self._plan.groups_per_step - batch.kept) > 0:
            room = (missing if strict else self._plan.most_in_flight) - self.in_flight
            batch.dispatched += self._dispatch(room, step)
            if not self._flying:
                batch.exhausted = True
                break
            waiting = asyncio.ALL_COMPLETED if strict else asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait(self._flying, return_when=waiting)
            for task in sorted(done, key=self._flying.__getitem__)[: None if strict else 1]:
                del self._flying[task]
                self._collect(batch, task.result())
            if sum(batch.dropped.values()) > most:
                raise RunFailed(f"{sum(batch.dropped.values())} groups were dropped for {len(batch.groups)} that train "
                                f"({dict(batch.dropped)}); the tasks are too easy or too hard for "
                                f"rollout.dynamic_filter = {self._plan.dynamic_filter}")
        batch.retried, self._runner.retried = self._runner.retried, Counter()
        return batch

    async def close(self) -> None:
        """Cancel what is in flight."""
        for task in self._flying:
            task.cancel()
        await asyncio.gather(*self._flying, return_exceptions=True)
        self._flying.clear()
        self._runner.retried = Counter()

    def _dispatch(self, count: int, step: int) -> int:
        for done in range(count):
            try:
                position = self._again.pop(0) if self._again else self._cursor
                task = self._tasks[position]
            except IndexError:
                return done
            self._cursor = max(self._cursor, position + 1)
            self._pending.add(position)
            # Of a mixture, with the number of the env.
            env, index = task if isinstance(task, tuple) else (0, task)
            tickets = [Ticket(index, position, rollout, self._seed, step, env)
                       for rollout in range(self._plan.group_size)]
            self._flying[asyncio.create_task(self._group(tickets))] = position
        return count

    async def _group(self, tickets: list[Ticket]) -> list[Trajectory]:
        played = await asyncio.gather(*(self._runner.play(ticket) for ticket in tickets))
        group = [seat for trajectory in played for seat in (trajectory, *trajectory.others)]
        self._ended(group)
        return group

    def _collect(self, batch: Batch, group: list[Trajectory]) -> None:
        batch.played += group
        seats = by_seat(group)
        kept = [seat for seat in seats if not self._filtered(seat)]
        if len(kept) < len(seats):
            batch.dropped["filtered"] += len(seats) - len(kept)
        batch.groups += kept
        batch.kept += bool(kept)

    def _filtered(self, group: list[Trajectory]) -> bool:
        scores = [trajectory.reward for trajectory in group if trajectory.reward is not None]
        return bool(self._plan.dynamic_filter and scores and not trains(scores, *self._plan.dynamic_filter))


def by_seat(group: list[Trajectory]) -> list[list[Trajectory]]:
    """A group of a game as one group for each seat, whose rewards are compared; a failed game belongs to all."""
    seats = {trajectory.seat: None for trajectory in group if trajectory.failure is None} or {group[0].seat: None}
    return [[trajectory for trajectory in group if trajectory.seat == seat or trajectory.failure is not None]
            for seat in seats]
