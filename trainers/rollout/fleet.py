"""Several engines behind the contract of one.

Invariants: a request is answered once, whichever engines end in between, by one engine from its first token to its
last; whoever samples has the newest weights, so that an engine which was started again waits for the next update; all
engines take the same buckets of one pass over the weights.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from molt_gym.errors import RunFailed
from molt_gym.tokens import Generation

from .busy_clock import BusyClock
from .engine import Request, RolloutEngine

T = TypeVar("T")

MAX_RESTARTS = 8
"""Starts of engines in place of others, in a run. With the next one that ends, the run does."""
MAX_SENDS = 3
"""Engines that may end with one request in flight, before it fails: it may be the reason."""
OVERLOAD = 2
"""A rollout leaves the engine that holds its prefix if that would have, with it, more than this many times the tokens
that the least loaded one would have with it: those of prompts and replies in flight, at their longest."""
MAX_SESSIONS = 1 << 16
"""Rollouts whose engines are remembered, those that asked last."""


class Member(RolloutEngine, Protocol):
    """An engine that can be one of several. Its weights change in parts; after an error in one it is closed."""

    @property
    def ended(self) -> Exception | None:
        """Why there is no engine any more."""
        ...

    async def begin_update(self) -> None:
        """Expect new weights, while paused."""
        ...

    def pack(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Any]:
        """Buckets that each of the engines takes; they are made off the event loop."""
        ...

    async def take(self, bucket: Any) -> None:
        """Take one bucket."""
        ...

    async def end_update(self, version: int) -> None:
        """Use the new weights."""
        ...

    async def score(self, ids: list[int]) -> list[float]:
        """Log-probability of each id but the first, at temperature 1."""
        ...


@dataclass(eq=False)
class _Place:
    engine: Member
    load: int = 0
    ready: bool = False


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


class EngineFleet:
    """A `RolloutEngine` made of `engines` that `make` makes, which is also called, in a thread, to replace one.

    The requests of a rollout, which the first three numbers of their keys name, go to the engine that has their prefix
    (see `OVERLOAD`), the first of them and the first after an update to the least loaded one. An engine ends when its
    process does, or when it fails a pause, an update or anything else but a request.

    Raises:
        ConfigError: as `make` does.
    """

    def __init__(self, make: Callable[[], Member], engines: int) -> None:
        self._make, self._places, self._newcomers = make, list[_Place](), list[_Place]()
        self._homes: dict[tuple[int, ...], _Place] = {}
        self._replacing: set[asyncio.Task[None]] = set()
        self._causes: list[BaseException] = []
        self._faults = {"engine_restarts": 0, "requeued": 0}
        self._restarts = 0
        self._paused = self._updated = self._closed = False
        self._clock = BusyClock()
        self.version = 0
        try:
            for _ in range(engines):
                self._places.append(_Place(make()))
        except BaseException:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, self.close()).result()
            raise
        self.max_context = self._places[0].engine.max_context

    @property
    def busy_seconds(self) -> float:
        """Time in which requests were in flight in any engine and not paused."""
        return self._clock.read()

    def take_faults(self) -> dict[str, int]:
        """Engines started again and requests sent again, since the last call."""
        faults, self._faults = self._faults, dict.fromkeys(self._faults, 0)
        return faults

    def submit(self, requests: Sequence[Request]) -> list["asyncio.Future[Generation]"]:
        """Queue requests. If no engine is left before the next update, they fail with RunFailed."""
        loop = asyncio.get_running_loop()
        flights = [_Flight(request, loop.create_future()) for request in requests]
        for flight in flights:
            self._clock.enter()
            flight.reply.add_done_callback(partial(self._landed, flight))
        self._send(flights)
        return [flight.reply for flight in flights]

    def _landed(self, flight: _Flight, reply: "asyncio.Future[Generation]") -> None:
        self._clock.leave()
        if reply.cancelled() and flight.answer is not None:
            flight.answer.cancel()

    def _send(self, flights: Iterable[_Flight]) -> None:
        self._bury()
        parts: dict[_Place, list[_Flight]] = {}
        for flight in flights:
            if not self._places or self._over:
                flight.reply.set_exception(self._failure())
                continue
            place = self._choose(flight)
            place.load += flight.tokens
            parts.setdefault(place, []).append(flight)
        for place, part in parts.items():
            for flight, answer in zip(part, place.engine.submit([flight.request for flight in part]), strict=True):
                flight.sends += 1
                flight.answer = answer
                answer.add_done_callback(partial(self._answered, flight, place))

    def _choose(self, flight: _Flight) -> _Place:
        least = min(self._places, key=lambda place: place.load)
        home = self._homes.get(flight.session, least)
        if home not in self._places or home.load + flight.tokens > OVERLOAD * (least.load + flight.tokens):
            home = least
        self._remember(flight, home)
        return home

    def _remember(self, flight: _Flight, home: _Place) -> None:
        if not flight.session:
            return
        # Taken out and put in again, so that the first is the one that was not asked for longest.
        self._homes.pop(flight.session, None)
        self._homes[flight.session] = home
        if len(self._homes) > MAX_SESSIONS:
            del self._homes[next(iter(self._homes))]

    def _answered(self, flight: _Flight, place: _Place, answer: "asyncio.Future[Generation]") -> None:
        place.load -= flight.tokens
        error = RunFailed("the engine took a request back") if answer.cancelled() else answer.exception()
        if flight.reply.done():
            return
        if error is None:
            if flight.session not in self._homes:
                # The weights have changed since it was sent, and it was computed anew.
                self._remember(flight, place)
            flight.reply.set_result(answer.result())
            return
        self._bury()
        # What is wrong with the request itself, as a prompt that is too long, is a ValueError.
        lost = place not in self._places and not isinstance(error, ValueError)
        if lost and flight.sends < MAX_SENDS and not self._closed:
            self._faults["requeued"] += 1
            self._send([flight])
        else:
            flight.reply.set_exception(error)

    async def pause(self) -> None:
        """Stop all between two tokens.

        Raises:
            RunFailed: engines ended more often than `MAX_RESTARTS`, or one did not start at all.
        """
        self._paused = True
        await self._each(lambda engine: engine.pause())
        if self._over:
            raise self._failure()
        if self._causes and not self._updated:
            # Most likely a setting is wrong, which starting again does not mend.
            raise self._causes[0]
        self._clock.pause()

    async def resume(self) -> None:
        """Go on."""
        await self._each(lambda engine: engine.resume())
        self._paused = False
        self._clock.resume()

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Send new weights to all, and to those that were started again; whoever fails is replaced.

        If no engine is left, waits for one that is starting.

        Raises:
            RuntimeError: the engines run.
            RunFailed: none is left that has the weights, or none to begin with.
        """
        if not self._paused:
            raise RuntimeError("update_weights needs paused engines; call pause() first")
        await self._admit()
        self._updated = True
        try:
            await self._each(lambda engine: engine.begin_update())
            self._require()
            packed = self._places[0].engine.pack(weights)
            # The iterator may gather from other ranks, so it is not advanced on the event loop.
            while self._places and (bucket := await asyncio.to_thread(next, packed, None)) is not None:
                await self._each(lambda engine, bucket=bucket: engine.take(bucket))
            await self._each(lambda engine: engine.end_update(version))
            self._require()
        except BaseException as error:
            # Their weights are a mixture.
            for place in list(self._places):
                self._drop(place, error)
            raise
        self.version = version
        # There is nothing left that old weights computed.
        self._homes.clear()

    async def _admit(self) -> None:
        while True:
            self._places += [place for place in self._newcomers if place.ready]
            self._newcomers = [place for place in self._newcomers if not place.ready]
            self._bury()
            starting = [task for task in self._replacing if not task.done()]
            if self._places or not starting:
                break
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        self._require()

    async def scores(self, ids: list[int]) -> list[list[float]]:
        """Of each engine, the log-probability of each id but the first, at temperature 1.

        Raises:
            RunFailed: no engine is left.
        """
        scores = await self._each(lambda engine: engine.score(ids))
        self._require()
        return scores

    async def reset_prefix_cache(self) -> None:
        """Forget what earlier requests left."""
        await self._each(lambda engine: engine.reset_prefix_cache())
        self._homes.clear()

    async def close(self) -> None:
        """Fail what is in flight and end all engines."""
        self._closed = True
        places = self._places + self._newcomers
        await asyncio.gather(*(place.engine.close() for place in places), return_exceptions=True)
        # Their engines were closed above, or will be as soon as they are made.
        await asyncio.gather(*self._replacing, return_exceptions=True)

    async def _each(self, call: Callable[[Member], Awaitable[T]]) -> list[T]:
        """The results of those that do not fail; the others are dropped."""
        self._bury()
        return await self._of(list(self._places), call)

    async def _of(self, places: list[_Place], call: Callable[[Member], Awaitable[T]]) -> list[T]:
        results = await asyncio.gather(*(call(place.engine) for place in places), return_exceptions=True)
        for place, result in zip(places, results, strict=True):
            if isinstance(result, BaseException):
                self._drop(place, result)
        return [result for result in results if not isinstance(result, BaseException)]

    @property
    def _over(self) -> bool:
        return self._restarts > MAX_RESTARTS

    def _require(self) -> None:
        if not self._places:
            raise self._failure()

    def _failure(self) -> RunFailed:
        what = f"engines ended again after {MAX_RESTARTS} restarts" if self._over else "no engine is left"
        causes = "\n".join(dict.fromkeys(str(cause) or type(cause).__name__ for cause in self._causes[-4:]))
        return RunFailed(f"{what}; the last causes:\n{causes}")

    def _bury(self) -> None:
        for place in list(self._places):
            if (cause := place.engine.ended) is not None:
                self._drop(place, cause)

    def _drop(self, place: _Place, cause: BaseException) -> None:
        if self._closed or place not in self._places:
            return
        self._places.remove(place)
        self._causes.append(cause)
        task = asyncio.get_running_loop().create_task(self._replace(place.engine))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, old: Member) -> None:
        """Start engines until one does, or too many were started."""
        await asyncio.gather(old.close(), return_exceptions=True)
        while not self._closed:
            self._restarts += 1
            if self._over:
                return
            self._faults["engine_restarts"] += 1
            try:
                await self._start()
            except Exception as error:  # noqa: BLE001  tried again, and told when it was tried too often
                self._causes.append(error)
            else:
                return

    async def _start(self) -> None:
        place = _Place(await asyncio.to_thread(self._make))
        self._newcomers.append(place)
        try:
            if not self._closed:
                # Answered once it has started.
                await place.engine.pause()
            if self._closed:
                raise RuntimeError("closed while an engine started")
        except BaseException:
            self._newcomers.remove(place)
            await asyncio.shield(place.engine.close())
            raise
        place.ready = True
        if not self._updated:
            # All have the weights of their folder.
            self._newcomers.remove(place)
            self._places.append(place)
            if not self._paused:
                await self._of([place], lambda engine: engine.resume())
