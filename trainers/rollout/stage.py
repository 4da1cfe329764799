"""How many envs are in play at a time.

Invariants: rollouts get their places in the order in which they come; where one ends and another waits, the other is
live before the first is not any more, so that the waves of a `WaveGate` depend on who plays and not on the time.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager

Live = Callable[[], AbstractContextManager[None]]


class Stage:
    """Has `most` places; None for no end of them."""

    def __init__(self, most: int | None = None) -> None:
        self._free = math.inf if most is None else most
        self._queue: deque[tuple[asyncio.Future[None], ExitStack, Live]] = deque()

    @asynccontextmanager
    async def place(self, live: Live) -> AsyncIterator[None]:
        """Within this block a rollout has a place, and is `live`; waits for one."""
        turn, within = asyncio.get_running_loop().create_future(), ExitStack()
        self._queue.append((turn, within, live))
        self._call()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._call()
            within.close()

    def _call(self) -> None:
        while self._free and self._queue:
            turn, within, live = self._queue.popleft()
            # Whoever was cancelled while it waited needs none.
            if not turn.done():
                self._free -= 1
                within.enter_context(live())
                turn.set_result(None)
