"""The loopback server of the envs of this process: an event loop in a daemon thread, started when first needed.

Invariants: there is at most one in a process, and a forked child gets its own; every wait for it has a deadline.
"""

import asyncio
import os
import threading
from collections.abc import Callable
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


class Question:
    """One reply that is wanted."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    @property
    def open(self) -> bool:
        """Whether somebody still waits for the reply."""
        return not self.reply.done()

    def answer(self, reply: Reply) -> None:
        """Replies, from any thread; in vain if nobody waits any more."""
        self.reply.get_loop().call_soon_threadsafe(self._answer, reply)

    def _answer(self, reply: Reply) -> None:
        if self.open:
            self.reply.set_result(reply)


class QueueRespondent:
    """Puts what is asked into a queue, one question for each reply."""

    def __init__(self, put: Callable[[Question], None]) -> None:
        self._put = put

    async def answer(self, call: Call) -> list[Reply]:
        """See `Respondent`."""
        ignored = call.options.without_tokens()
        questions = [Question(call) for _ in range(call.n)]
        for question in questions:
            self._put(question)
        replies = await asyncio.gather(*(question.reply for question in questions))
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
