"""Rollouts that are played in Ray actors, of which this process learns how they went.

Invariants: a rollout is returned once, whichever runners die meanwhile; its tokens stay in the object store of the node
that played it until the last reference is gone; a runner that died is replaced by a new one, within a budget.
"""

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from molt_gym.errors import RunFailed
from molt_gym.tokens import Failure, RowRef, Trajectory

from ..config import Config
from ..rollout.env_maker import EnvMaker
from ..rollout.router import Target
from ..rollout.runner import described
from ..rollout.ticket import Ticket
from .ray_player import PlayActor, Played

MAX_PLAYS = 3
"""Runners that may die with one rollout in play, before it has failed: it may be the reason."""
REST = 1.0
"""Seconds before a rollout is played again, in which it shows which other runners died with its own."""
ANSWER_TIMEOUT = 60.0
"""Seconds for what a runner answers at once, and for a record to come from its node."""
CLOSE_TIMEOUT = 15.0
"""Seconds in which all runners close their envs."""
CALLS = 1 << 16
"""Calls at once, of which each rollout is one."""

_numbers = itertools.count()


@dataclass(eq=False)
class _Player:
    options: dict[str, Any]
    handle: Any
    load: int = 0
    ready: bool = False


class RayPlayers:
    """The runners' actors, one for each dict of `options` of Ray actors. To be made where an event loop runs.

    Args:
        path: model folder, on a file system that all nodes share.
    """

    def __init__(self, path: Path, config: Config, options: Sequence[dict[str, Any]]) -> None:
        self._arguments = str(path.absolute()), config, list(sys.path)
        self._budget, self._start_timeout = config.failures.runner_restarts, config.ray.start_timeout
        self._engines: list[Target] = []
        self._players: list[_Player] = []
        self._watching: set[asyncio.Task[None]] = set()
        self._over: RunFailed | None = None
        self._restarts = self._told_restarts = self.requeued = 0
        for chosen in options:
            self._start(chosen)

    async def set_engines(self, engines: Sequence[Target]) -> None:
        """Send requests to these, which have the newest weights; returns when all runners know."""
        same, self._engines = list(engines) == self._engines, list(engines)
        await asyncio.gather(*(self._tell(player, None if same else self._engines) for player in self._players))

    def take_faults(self) -> dict[str, int]:
        """Runners started again and requests sent again, since the last call."""
        faults = {"runner_restarts": self._restarts - self._told_restarts, "requeued": self.requeued}
        self._told_restarts, self.requeued = self._restarts, 0
        return faults

    def least_loaded(self) -> _Player:
        """The one to play the next rollout.

        Raises:
            RunFailed: runners died more often than `failures.runner_restarts` allows.
        """
        if self._over is not None:
            raise self._over
        return min(self._players, key=lambda player: player.load)

    def replace(self, player: _Player, cause: BaseException) -> None:
        """End a runner and start another in its place; without effect if that was done."""
        if player not in self._players:
            return
        self._players.remove(player)
        ray.kill(player.handle)
        if self._restarts >= self._budget:
            self._over = self._over or RunFailed(f"runners died {self._restarts + 1} times, more than "
                                                 f"failures.runner_restarts = {self._budget} allows; the last: {cause}")
            return
        self._restarts += 1
        self._start(player.options)

    async def broadcast(self, name: str, *arguments: Any) -> None:
        """Call a method of all runners that live, and wait `CLOSE_TIMEOUT` seconds for it."""
        calls = [getattr(player.handle, name).remote(*arguments) for player in self._players if player.ready]
        if calls:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CLOSE_TIMEOUT)

    async def aclose(self) -> None:
        """Close all envs and end the runners."""
        self._over = self._over or RunFailed("the runners were closed")
        for task in self._watching:
            task.cancel()
        if ray.is_initialized():
            await self.broadcast("close")
            for player in self._players:
                ray.kill(player.handle)
        self._players.clear()

    def _start(self, options: dict[str, Any]) -> None:
        ours = {"max_concurrency": CALLS, "max_restarts": 0, "max_task_retries": 0}
        player = _Player(options, ray.remote(PlayActor).options(**ours | options).remote(*self._arguments))
        told = player.handle.set_engines.remote(next(_numbers), self._engines)
        self._players.append(player)
        task = asyncio.create_task(self._watch(player, told))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(self, player: _Player, told: Any) -> None:
        player.ready = await self._answered(player, told, self._start_timeout)

    async def _tell(self, player: _Player, engines: list[Target] | None) -> None:
        ref = player.handle.set_engines.remote(next(_numbers), engines)
        # One that is still starting has sent no requests.
        if player.ready:
            await self._answered(player, ref, ANSWER_TIMEOUT)

    async def _answered(self, player: _Player, ref: Any, timeout: float) -> bool:
        try:
            await asyncio.wait_for(ref, timeout)
        except TimeoutError:
            self.replace(player, TimeoutError(f"no answer within {timeout:g} s"))
        except RayError as error:
            self.replace(player, error)
        else:
            return True
        return False


@dataclass(eq=False)
class RayRunner:
    """A `Runner` whose rollouts are played in the actors of `players`; `done` is called with each trajectory."""

    players: RayPlayers
    maker: EnvMaker
    temperature: float
    done: Callable[[Trajectory], None] = lambda _: None
    retried: Counter[str] = field(default_factory=Counter)
    """Failures by reason that a new attempt followed; for the reader to clear."""

    def __post_init__(self) -> None:
        self.env_id, self._number = self.maker.env_id, next(_numbers)
        self._setup = ray.put((self.maker, self.temperature))
        self._flights: dict[_Player, dict[int, tuple[str, float]]] = {}
        self._told: dict[_Player, tuple[float, list[tuple[str, float]]]] = {}
        self._asking: dict[_Player, asyncio.Task[None]] = {}

    async def play(self, ticket: Ticket) -> Trajectory:
        """The rollout, without messages, its rows as references; failed as "runner_died" if `MAX_PLAYS` runners died.

        Raises:
            RunFailed: there is no runner any more.
        """
        for _ in range(MAX_PLAYS):
            player = self.players.least_loaded()
            try:
                trajectory = await self._played(player, ticket)
                break
            except RayTaskError as error:
                raise error.cause from error
            except RayError as error:
                self.players.replace(player, error)
                failure = Failure("runner_died", f"{MAX_PLAYS} runners died with it in play; the last: {error}", "")
                trajectory = Trajectory(self.env_id, ticket.index, ticket.group, ticket.rollout, failure=failure,
                                        step=ticket.step)
                await asyncio.sleep(REST)
        self.done(trajectory)
        return trajectory

    def pending(self) -> list[tuple[str, float]]:
        """See `Runner.pending`; the runners are asked, and what they answer is told at the next call."""
        now, found = time.monotonic(), []
        for player, flights in self._flights.items():
            if player not in self._asking:
                self._asking[player] = asyncio.create_task(self._ask(player))
            when, told = self._told.get(player, (now, []))
            found += [(what, seconds + now - when) for what, seconds in told] or [
                (what, now - since) for what, since in flights.values()]
        return found

    async def aclose(self) -> None:
        """Close the envs."""
        for task in self._asking.values():
            task.cancel()
        if ray.is_initialized():
            await self.players.broadcast("forget", self._number)

    async def _played(self, player: _Player, ticket: Ticket) -> Trajectory:
        flights, flight = self._flights.setdefault(player, {}), next(_numbers)
        flights[flight] = described("runner", self.env_id, ticket), time.monotonic()
        player.load += 1
        told, rows, record = player.handle.play.options(num_returns=3).remote(self._number, self._setup, ticket)
        try:
            played: Played = await told
        except asyncio.CancelledError:
            ray.cancel(told)
            raise
        finally:
            player.load -= 1
            del flights[flight]
            if not flights:
                self._flights.pop(player, None)
                self._told.pop(player, None)
        self.retried += played.retried
        self.players.requeued += played.requeued
        numbers = itertools.count()
        for line, (seat, stats) in enumerate(zip(played.trajectories, played.stats, strict=True)):
            seat.rows = [RowRef(rows, next(numbers), row) for row in stats]
            seat.record = partial(_fetch, record, line)
        trajectory, *trajectory.others = played.trajectories
        return trajectory

    async def _ask(self, player: _Player) -> None:
        try:
            told = await asyncio.wait_for(player.handle.pending.remote(self._number), ANSWER_TIMEOUT)
            if player in self._flights:
                self._told[player] = time.monotonic(), told
        except (RayError, TimeoutError):
            self._told.pop(player, None)
        finally:
            del self._asking[player]


def _fetch(record: Any, line: int) -> bytes | None:
    try:
        return ray.get(record, timeout=ANSWER_TIMEOUT).split(b"\n")[line] + b"\n"
    except RayError:
        return None
