"""The loopback server of the envs of this process: an event loop in a daemon thread, started when first needed.

Invariants: there is at most one in a process, and a forked child gets its own; every wait for it has a deadline.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from ..server.exchange import Call, Reply, Respondent
from ..threads import loop_in_thread

if TYPE_CHECKING:
    from ..server.session import Session

__all__ = ["Background", "Question", "QueueRespondent", "background"]

_SECONDS = 30.0


class Background:
    """A loop in a thread, with a server on it."""

    def __init__(self) -> None:
        from ..server.server import LoopbackServer

        self.loop = loop_in_thread("molt-gym-server")
        # Somebody who plays by hand takes the time that it takes; the deadlines are those of the envs.
        self._server = LoopbackServer(timeout=None)
        asyncio.run_coroutine_threadsafe(self._server.start(), self.loop).result(_SECONDS)

    def open(self, respondent: Respondent) -> "Session":
        """A new session."""

        async def open() -> "Session":
            return self._server.open(respondent)

        return asyncio.run_coroutine_threadsafe(open(), self.loop).result(_SECONDS)

    def close(self, session: "Session") -> None:
        """Ends a session; does not wait."""
        self.loop.call_soon_threadsafe(session.close)


Question = tuple[Call, "Future[Reply]"]
"""What is asked, and the reply that is wanted; done without one if nobody waits for it any more."""


class QueueRespondent:
    """Puts what is asked into a queue, one question for each reply; any thread may answer."""

    def __init__(self, put: Callable[[Question], None]) -> None:
        self._put = put

    async def answer(self, call: Call) -> list[Reply]:
        """See `Respondent`."""
        ignored = call.options.without_tokens()
        wanted: list[Future[Reply]] = [Future() for _ in range(call.n)]
        for reply in wanted:
            self._put((call, reply))
        replies = await asyncio.gather(*map(asyncio.wrap_future, wanted))
        return [replace(reply, ignored=ignored) for reply in replies]

    async def count(self, call: Call) -> int:
        """0: who answers an env's requests need not have tokens."""
        return 0


_lock = threading.Lock()
_background: Background | None = None


def background() -> Background:
    """The one of this process."""
    global _background
    with _lock:
        if _background is None:
            _background = Background()
        return _background


def _forget() -> None:
    global _lock, _background
    _lock, _background = threading.Lock(), None


# A child has a copy of the loop, but not the thread that runs it.
os.register_at_fork(after_in_child=_forget)
