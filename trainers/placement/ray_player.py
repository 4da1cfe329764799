"""A runner that is a Ray actor: it renders, plays, asks the engines and keeps the rows.

Invariant: what is told of a rollout holds none of its messages and tokens, which lie in the object store of its node.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from molt_gym.tokens import Row, Trajectory
from molt_gym.tokens.trajectory import RowStats, json_line

from ..config import Config
from ..rollout.env_maker import EnvMaker
from ..rollout.router import Router, Target
from ..rollout.runner import Runner
from ..rollout.ticket import Ticket
from ..session import Sampler


@dataclass
class Played:
    """Of a rollout, and of those of further seats of a game: what is told without messages and rows, the statistics of
    the rows; and what was counted since the last was told."""

    trajectories: list[Trajectory]
    stats: list[list[RowStats]]
    retried: Counter[str]
    requeued: int


class PlayActor:
    """One runner's process.

    Args:
        path: model folder.
        paths: where the modules of envs are looked for, besides.
    """

    def __init__(self, path: str, config: Config, paths: Sequence[str]) -> None:
        sys.path += [path for path in paths if path not in sys.path]
        self._router, self._newest = Router(), -1
        self._sampler = Sampler(Path(path), config, engine=self._router)
        self._runners: dict[int, Runner] = {}

    async def set_engines(self, number: int, engines: Sequence[Target] | None) -> None:
        """Those that have the newest weights; None for the same as before.

        Args:
            number: rises from call to call; Ray may let later ones overtake others.
        """
        if engines is None:
            self._router.forget()
        elif number > self._newest:
            self._newest = number
            self._router.set_targets(engines)

    async def play(self, number: int, setup: tuple[EnvMaker, float], ticket: Ticket) -> tuple[Played, list[Row], bytes]:
        """What is told of a rollout, its rows, and its line in the transcripts; of a game, those of all seats in turn.

        Args:
            number: of the `RayRunner`.
            setup: its envs and its temperature.
        """
        if number not in self._runners:
            self._runners[number] = self._sampler.runner(*setup, ordered=False)
        runner = self._runners[number]
        trajectory = await runner.play(ticket)
        retried, runner.retried = runner.retried, Counter()
        requeued, self._router.requeued = self._router.requeued, 0
        seats = [trajectory, *trajectory.others]
        told = [replace(seat, messages=[], tools=[], rows=[]) for seat in seats]
        stats = [[row.stats for row in seat.rows] for seat in seats]
        rows = [row for seat in seats for row in seat.rows]
        return Played(told, stats, retried, requeued), rows, b"".join(map(json_line, seats))

    async def pending(self, number: int) -> list[tuple[str, float]]:
        """See `Runner.pending`."""
        return self._runners[number].pending() if number in self._runners else []

    async def forget(self, number: int) -> None:
        """Close the envs of a `RayRunner`."""
        if number in self._runners:
            await self._runners.pop(number).aclose()

    async def close(self) -> None:
        """Close all envs."""
        await asyncio.gather(*map(self.forget, list(self._runners)))
