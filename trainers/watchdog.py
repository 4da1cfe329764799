"""What a run waits for, told when nothing has moved for a while.

Invariant: it looks and tells, and never ends or changes anything.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Pending = tuple[str, float]
"""What is waited for, and for how many seconds already."""
MOST = 8
"""Rollouts that a message names one by one, those that wait longest."""


class Watchdog:
    """Knows what its user is `doing`, asks for the rollouts that are pending, and looks at both in `watch`.

    Args:
        seconds: without any change, before it is told, and told again; 0 for never.
        rollouts: those that are pending, each as "PHASE of ...".
        say: called with the message.
    """

    def __init__(self, seconds: float, rollouts: Callable[[], list[Pending]], say: Callable[[str], None]) -> None:
        self._seconds, self._rollouts, self._say = seconds, rollouts, say
        self._doing: list[tuple[str, float]] = []

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Within this block `what` is pending."""
        entry = what, time.monotonic()
        self._doing.append(entry)
        try:
            yield
        finally:
            self._doing.remove(entry)

    async def watch(self) -> None:
        """Look until cancelled."""
        seen, moved = self._pending(), time.monotonic()
        while self._seconds:
            await asyncio.sleep(self._seconds / 10)
            last, seen, now = seen, self._pending(), time.monotonic()
            same = [what for what, _ in seen] == [what for what, _ in last]
            if not same or any(age < before for (_, age), (_, before) in zip(seen, last, strict=True)):
                moved = now
            elif now - moved >= self._seconds:
                self._say(f"nothing has moved for {self._seconds:g} s; pending: {self._describe()}")
                moved = now

    def _pending(self) -> list[Pending]:
        now = time.monotonic()
        return sorted([*((what, now - since) for what, since in self._doing), *self._rollouts()])

    def _describe(self) -> str:
        now, rollouts = time.monotonic(), sorted(self._rollouts(), key=lambda rollout: -rollout[1])
        told = [f"{what} for {now - since:.0f} s" for what, since in self._doing]
        phases = Counter(what.partition(" of ")[0] for what, _ in rollouts)
        told += [f"{count} rollouts in {phase}" for phase, count in phases.most_common()]
        told += [f"{what} for {age:.0f} s" for what, age in rollouts[:MOST]]
        return "; ".join(told) or "nothing that is known of"
