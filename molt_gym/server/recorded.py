"""A session that was opened over HTTP, and who answers it."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from ..tokens.trajectory import Trajectory
from .exchange import Call, Reply, Respondent
from .session import Session

T = TypeVar("T")


class Seat(Protocol):
    """Answers one session, and writes down what happened in it."""

    respondent: Respondent

    def record(self, trajectory: Trajectory) -> None:
        """Fills in messages, rows and turns."""
        ...


@dataclass
class RecordedSession:
    """An open session. It answers the session's calls through the seat, and knows when somebody last wanted something.

    trajectory: what is known of it from the start.
    """

    id: str
    seat: Seat
    trajectory: Trajectory
    session: Session = field(init=False)
    began: float = field(default_factory=time.monotonic)
    seen: float = field(default_factory=time.monotonic)
    busy: int = 0
    timer: asyncio.TimerHandle | None = None

    async def answer(self, call: Call) -> list[Reply]:
        """See `Respondent.answer`."""
        return await self._during(self.seat.respondent.answer(call))

    async def count(self, call: Call) -> int:
        """See `Respondent.count`."""
        return await self._during(self.seat.respondent.count(call))

    def so_far(self, **outcome: Any) -> Trajectory:
        """What is recorded; `outcome` are fields of the trajectory."""
        trajectory = replace(self.trajectory, seconds=time.monotonic() - self.began, **outcome)
        self.seat.record(trajectory)
        return trajectory

    def quiet(self) -> float:
        """Seconds since somebody last wanted something."""
        return 0.0 if self.busy else time.monotonic() - self.seen

    async def _during(self, work: Awaitable[T]) -> T:
        self.busy += 1
        try:
            return await work
        finally:
            self.busy -= 1
            self.seen = time.monotonic()
