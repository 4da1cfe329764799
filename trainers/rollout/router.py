"""To which of several engines a request goes, and where to when that one ends.

Invariants: a request is answered once, by one engine from its first token to its last, whichever engines end in
between; while there is no engine it waits for one.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from molt_gym.errors import RunFailed
from molt_gym.tokens import Generation

from .engine import Request

MAX_SENDS = 3
"""Engines that may end with one request in flight, before it fails: it may be the reason."""
OVERLOAD = 2
"""A rollout leaves the engine that holds its prefix if that would have, with it, more than this many times the tokens
that the least loaded one would have with it: those of prompts and replies in flight, at their longest."""
MAX_SESSIONS = 1 << 16
"""Rollouts whose engines are remembered, those that asked last."""


class Target(Protocol):
    """Whom requests are sent to; equal ones are the same engine."""

    @property
    def ended(self) -> Exception | None:
        """Why there is no engine any more."""
        ...

    def submit(self, requests: Sequence[Request]) -> list["asyncio.Future[Generation]"]:
        """Queue requests, as a `RolloutEngine` does."""
        ...


@dataclass(eq=False)
class _Flight:
    request: Request
    reply: "asyncio.Future[Generation]"
    answer: "asyncio.Future[Generation] | None" = None
    sends: int = 0

    @property
    def session(self) -> tuple[int, ...]:
        return self.request.key[:3]

    @property
    def tokens(self) -> int:
        return len(self.request.ids) + self.request.sampling.max_tokens


class Router:
    """Sends the requests of a rollout, which the first three numbers of their keys name, to the engine that has their
    prefix (see `OVERLOAD`), the first of them and the first after `set_targets` to the least loaded one.

    Args:
        ended: called with each engine of which is found that it has ended.
    """

    def __init__(self, ended: Callable[[Target], None] = lambda _: None) -> None:
        self._ended = ended
        self._loads: dict[Target, int] = {}
        self._homes: dict[tuple[int, ...], Target] = {}
        self._waiting: list[_Flight] = []
        self._over: Exception | None = None
        self.requeued = 0
        """Requests sent again as their engine had ended; for the reader to clear."""

    def set_targets(self, targets: Iterable[Target]) -> None:
        """The engines that have the newest weights; what earlier requests left in them is taken for lost."""
        self._loads = {target: self._loads.get(target, 0) for target in targets}
        self._homes.clear()
        waiting, self._waiting = self._waiting, []
        self._send(waiting)

    def forget(self) -> None:
        """No engine holds a prefix any more."""
        self._homes.clear()

    def drop(self, target: Target) -> None:
        """Send nothing more to an engine, and what it has in flight to another one as soon as it fails there."""
        self._loads.pop(target, None)

    def fail(self, error: Exception) -> None:
        """There will be no engine any more: fail what waits for one, and all that is submitted or lost from now on."""
        self._over = error
        waiting, self._waiting = self._waiting, []
        self._send(waiting)

    def submit(self, requests: Sequence[Request]) -> list["asyncio.Future[Generation]"]:
        """Queue requests; without an engine they wait for `set_targets`."""
        loop = asyncio.get_running_loop()
        flights = [_Flight(request, loop.create_future()) for request in requests]
        for flight in flights:
            flight.reply.add_done_callback(partial(self._landed, flight))
        self._send(flights)
        return [flight.reply for flight in flights]

    def _landed(self, flight: _Flight, reply: "asyncio.Future[Generation]") -> None:
        if reply.cancelled() and flight.answer is not None:
            flight.answer.cancel()

    def _send(self, flights: Iterable[_Flight]) -> None:
        self._bury()
        parts: dict[Target, list[_Flight]] = {}
        for flight in flights:
            if flight.reply.done():
                continue
            if self._over is not None:
                flight.reply.set_exception(self._over)
            elif not self._loads:
                self._waiting.append(flight)
            else:
                target = self._choose(flight)
                self._loads[target] += flight.tokens
                parts.setdefault(target, []).append(flight)
        for target, part in parts.items():
            for flight, answer in zip(part, target.submit([flight.request for flight in part]), strict=True):
                flight.sends += 1
                flight.answer = answer
                answer.add_done_callback(partial(self._answered, flight, target))

    def _choose(self, flight: _Flight) -> Target:
        least = min(self._loads, key=self._loads.__getitem__)
        home = self._homes.get(flight.session, least)
        most = OVERLOAD * (self._loads[least] + flight.tokens)
        if home not in self._loads or self._loads[home] + flight.tokens > most:
            home = least
        self._remember(flight, home)
        return home

    def _remember(self, flight: _Flight, home: Target) -> None:
        if not flight.session:
            return
        # Taken out and put in again, so that the first is the one that was not asked for longest.
        self._homes.pop(flight.session, None)
        self._homes[flight.session] = home
        if len(self._homes) > MAX_SESSIONS:
            del self._homes[next(iter(self._homes))]

    def _answered(self, flight: _Flight, target: Target, answer: "asyncio.Future[Generation]") -> None:
        if target in self._loads:
            self._loads[target] -= flight.tokens
        error = RunFailed("the engine took a request back") if answer.cancelled() else answer.exception()
        if flight.reply.done():
            return
        if error is None:
            if flight.session not in self._homes:
                # The weights have changed since it was sent, and it was computed anew.
                self._remember(flight, target)
            flight.reply.set_result(answer.result())
            return
        self._bury()
        # What is wrong with the request itself, as a prompt that is too long, is a ValueError.
        lost = target not in self._loads and not isinstance(error, ValueError)
        if lost and flight.sends < MAX_SENDS and self._over is None:
            self.requeued += 1
            self._send([flight])
        else:
            flight.reply.set_exception(error)

    def _bury(self) -> None:
        for target in [target for target in self._loads if target.ended is not None]:
            self.drop(target)
            self._ended(target)
