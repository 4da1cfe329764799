"""One rollout's side of the server: its secret, its turns, and who answers them.

Invariants: a turn that failed leaves nothing behind; a retry is answered from the record, or joins the request that is
still under way; a request that nobody waits for any more is taken out of the engine; after `close` nothing is answered.

What counts as a retry: the idempotency key of an earlier request; or the same body, sent with the retry header that the
SDKs set (above 0), or by a client without that header. SDKs mark a first attempt, so that the same messages asked again
through one are a new sample. A client of another kind sends a different `seed` or idempotency key for that.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import PromptTooLong, RunFailed
from .errors import WireError, aborted
from .exchange import Call, Completion, Respondent
from .memory import WireMemory

MAX_PENDING = 1024
"""Requests of one session that may be under way at the same time."""


@dataclass(frozen=True)
class Identity:
    """What tells a retry from a new request.

    body: a hash of path and body. attempt: what the SDK's retry header says; None without one.
    """

    body: bytes
    attempt: int | None = None
    idempotency_key: str | None = None


@dataclass
class _Turn:
    body: bytes
    task: "asyncio.Task[Completion]"
    waiters: int = 0
    delivered: bool = False
    idempotency_key: str | None = None


class Session:
    """Made by `LoopbackServer.open`; belongs to the server's event loop.

    Args:
        key: the secret that requests of this session carry.
        url: of the server.
        max_turns: replies that the session may get; a request for more is refused, and sets `over`.
        timeout: seconds for one answer.
        closed: called when it is closed.
        remember: whether it keeps what was answered, so that retries get it; without, they join what is under way.
    """

    turns: int
    """Replies so far."""
    overflowed: bool
    """Whether the last request did not fit the context of the model."""
    failure: BaseException | None
    """Why the last request was not answered, if the reason lies with the engine."""
    over: asyncio.Event
    """Set when more than `max_turns` replies were asked for."""
    spent: asyncio.Event
    """Set when, besides, none of those is under way any more."""

    def __init__(
        self, key: str, url: str, respondent: Respondent, *, max_turns: int | None = None,
        timeout: float | None = None, closed: Callable[["Session"], None] = lambda _: None, remember: bool = True,
    ) -> None:
        self.key, self.url, self.respondent = key, url, respondent
        self.turns, self.overflowed, self.failure = 0, False, None
        self.over, self.spent = asyncio.Event(), asyncio.Event()
        self._max_turns, self._timeout, self._when_closed = max_turns, timeout, closed
        self._open, self._remember = True, remember
        self._asked = 0
        self._running: set[asyncio.Task[Completion]] = set()
        self._by_body: dict[bytes, list[_Turn]] = {}
        self._by_key: dict[str, _Turn] = {}
        self._failed: Counter[bytes] = Counter()
        self._memories: dict[str, WireMemory] = {}

    def memory(self, wire: str) -> WireMemory:
        """What the session remembers for a wire; each reads equal bytes in its own way."""
        if not self._remember:
            return WireMemory()
        if wire not in self._memories:
            self._memories[wire] = WireMemory()
        return self._memories[wire]

    async def complete(self, call: Call, identity: Identity) -> Completion:
        """The answer to a call; that of the earlier one, if this is its retry.

        Cancelling the last one who waits for a turn cancels the turn.

        Raises:
            WireError: refused or failed; nothing is recorded then.
        """
        turn = self._earlier(identity) or self._begin(call, identity)
        turn.waiters += 1
        try:
            completion = await asyncio.shield(turn.task)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if not turn.task.cancelled() or waiter is not None and waiter.cancelling():
                raise
            raise self._explained(aborted()) if self._open else _closed() from None
        finally:
            turn.waiters -= 1
            if not turn.waiters:
                turn.task.cancel()
        turn.delivered = True
        return completion

    async def count(self, call: Call) -> int:
        """How many tokens the prompt of a call has.

        Raises:
            WireError: the conversation cannot be rendered.
        """
        try:
            return await self.respondent.count(call)
        except Exception as error:  # noqa: BLE001  the client is told
            raise self._explained(error) from error

    def close(self) -> None:
        """End the session: its key opens nothing any more, and what is under way is cancelled. Idempotent."""
        if self._open:
            self._open = False
            for task in self._running:
                task.cancel()
            self._when_closed(self)

    def _earlier(self, identity: Identity) -> _Turn | None:
        if identity.idempotency_key is not None:
            turn = self._by_key.get(identity.idempotency_key)
            if turn is not None and turn.task.cancelling():
                return None
            if turn is not None and turn.body != identity.body:
                raise WireError("invalid_request", f"idempotency key {identity.idempotency_key!r}: came with another "
                                "body before; write a new key", code="idempotency_key_reused")
            return turn
        if identity.attempt == 0:
            return None
        if identity.attempt and self._failed[identity.body]:
            # Of several equal requests, the one that failed is asked again; the others are answered otherwise.
            self._failed[identity.body] -= 1
            return None
        turns = [turn for turn in self._by_body.get(identity.body, []) if not turn.task.cancelling()]
        return next((turn for turn in turns if not turn.delivered), turns[-1] if turns else None)

    def _begin(self, call: Call, identity: Identity) -> _Turn:
        if not self._open:
            raise _closed()
        if len(self._running) >= MAX_PENDING:
            raise WireError("rate_limit", f"{MAX_PENDING} requests of this session are under way; wait for some of "
                            "them", code="too_many_requests", retry=True)
        if self._max_turns is not None and self._asked + call.n > self._max_turns:
            self.over.set()
            self._check_spent()
            raise WireError("closed", f"this rollout may have {self._max_turns} replies, and has had them",
                            code="turn_limit")
        self._asked += call.n
        turn = _Turn(identity.body, asyncio.create_task(self._answer(call)), idempotency_key=identity.idempotency_key)
        self._running.add(turn.task)
        self._by_body.setdefault(turn.body, []).append(turn)
        if turn.idempotency_key is not None:
            self._by_key[turn.idempotency_key] = turn
        turn.task.add_done_callback(lambda task: self._ended(turn, call.n))
        return turn

    async def _answer(self, call: Call) -> Completion:
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                replies = await self.respondent.answer(call)
        except Exception as error:  # noqa: BLE001  the client is told, and `failure` keeps it
            raise self._explained(error, late=deadline.expired()) from error
        self.turns += len(replies)
        self.failure, self.overflowed = None, False
        return Completion(secrets.token_hex(12), int(time.time()), replies)

    def _ended(self, turn: _Turn, n: int) -> None:
        self._running.discard(turn.task)
        self._check_spent()
        failed = turn.task.cancelled() or turn.task.exception() is not None
        if failed and self._remember:
            self._asked -= n
            self._failed[turn.body] += 1
        if failed or not self._remember:
            same = self._by_body[turn.body]
            same.remove(turn)
            if not same:
                del self._by_body[turn.body]
            if self._by_key.get(turn.idempotency_key or "") is turn:
                del self._by_key[turn.idempotency_key or ""]

    def _check_spent(self) -> None:
        if self.over.is_set() and not self._running:
            self.spent.set()

    def _explained(self, error: Exception, *, late: bool = False) -> WireError:
        if isinstance(error, WireError):
            self.failure = error if error.kind == "unavailable" else self.failure
            return error
        if isinstance(error, PromptTooLong):
            self.overflowed = True
            return WireError("invalid_request", f"messages: {error}", param="messages", code="context_length_exceeded")
        self.failure = error
        if late:
            return WireError("unavailable", f"no reply within {self._timeout:g} s", code="deadline_exceeded")
        return WireError("unavailable", f"the policy failed: {type(error).__name__}: {error}", code="engine_failed",
                         # Engines that have ended were asked for again already, and one that is over stays so.
                         retry=not isinstance(error, RunFailed))


def _closed() -> WireError:
    return WireError("closed", "the rollout that this key belongs to is over", code="session_closed")
