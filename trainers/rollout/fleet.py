"""Several engines behind the contract of one, or one that is started again when it ends.

Invariants: whoever samples has the newest weights, so that an engine which was started again waits for them; all
engines take the same buckets of one pass over the weights.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import torch

from molt_gym.errors import RunFailed
from molt_gym.images import ImageSpan
from molt_gym.tokens import Generation

from ..actor.actor import ActorLost
from .busy_clock import BusyClock
from .engine import Request, RolloutEngine
from .router import Router

T = TypeVar("T")

class Member(RolloutEngine, Protocol):
    """An engine that can be one of several. Its weights change in parts; after an error in one it is closed."""

    @property
    def ended(self) -> Exception | None:
        """Why there is no engine any more."""
        ...

    async def release(self) -> None:
        """Give the GPU's memory back, while paused, if that was asked for; until the next update."""
        ...

    async def begin_update(self) -> None:
        """Expect new weights, while paused."""
        ...

    def pack(self, weights: Iterable[tuple[str, torch.Tensor]]) -> AsyncGenerator[Any, None]:
        """Buckets that each of the engines takes, made off the event loop; to be closed."""
        ...

    async def take(self, bucket: Any) -> None:
        """Take one bucket."""
        ...

    async def end_update(self, version: int) -> None:
        """Use the new weights."""
        ...

    async def score(self, ids: list[int], *, images: Sequence[ImageSpan] = ()) -> list[float]:
        """Log-probability of each id but the first, at temperature 1."""
        ...


class EngineFleet:
    """A `RolloutEngine` made of `engines` that `make` makes, which is also called, in a thread, to replace one.

    How requests find an engine is `Router`'s business. An engine ends when its process does, or when it fails a pause,
    an update or anything else but a request.

    Args:
        restarts: starts of engines in place of others, in a run, but for those that a lost actor leaves with half of
            its weights. With the next one that ends, the run does.

    Raises:
        ConfigError: as `make` does.
    """

    def __init__(self, make: Callable[[], Member], engines: int, restarts: int = 8) -> None:
        self._make, self._most_restarts = make, restarts
        self._members, self._newcomers = list[Member](), dict[Member, bool]()
        self._router = Router(self._drop)
        self._replacing: set[asyncio.Task[None]] = set()
        self._causes: list[BaseException] = []
        self._restarts = self._told_restarts = 0
        self._paused = self._updated = self._closed = False
        self._clock, self._busy = BusyClock(), 0.0
        self.version = 0
        self.wants_weights = asyncio.Event()
        """Set while an engine that was started again waits for weights."""
        self.joined: Callable[[Sequence[Member]], Awaitable[None]] = _nobody
        """Told of all engines that have the newest weights, before they go on."""
        try:
            for _ in range(engines):
                self._members.append(make())
        except BaseException:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, self.close()).result()
            raise
        self._router.set_targets(self._members)
        self.max_context = self._members[0].max_context

    @property
    def members(self) -> list[Member]:
        """The engines that have the newest weights."""
        return list(self._members)

    @property
    def busy_seconds(self) -> float:
        """Time in which requests were in flight in any engine and not paused."""
        # Where others than this process ask them, the engines alone know.
        self._busy = max(self._busy, self._clock.read(), *(member.busy_seconds for member in self._members), 0.0)
        return self._busy

    def take_faults(self) -> dict[str, int]:
        """Engines started again and requests sent again, since the last call."""
        faults = {"engine_restarts": self._restarts - self._told_restarts, "requeued": self._router.requeued}
        self._told_restarts, self._router.requeued = self._restarts, 0
        return faults

    def submit(self, requests: Sequence[Request]) -> list["asyncio.Future[Generation]"]:
        """Queue requests. Without an engine they wait for one; if none may be started any more, they fail."""
        replies = self._router.submit(requests)
        for reply in replies:
            self._clock.enter()
            reply.add_done_callback(lambda _: self._clock.leave())
        return replies

    async def pause(self) -> None:
        """Stop all between two tokens.

        Raises:
            RunFailed: engines ended more often than `restarts`, or one did not start at all.
        """
        self._paused = True
        await self._each(lambda engine: engine.pause())
        if self._over:
            raise self._failure()
        if self._causes and not self._updated:
            # Most likely a setting is wrong, which starting again does not mend.
            raise self._causes[0]
        self._clock.pause()

    async def release(self) -> None:
        """Give the GPU's memory back, while paused, if that was asked for; until the next update."""
        await self._each(lambda engine: engine.release())

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
        self.wants_weights.clear()
        try:
            await self._each(lambda engine: engine.begin_update())
            self._require()
            async with aclosing(self._members[0].pack(weights)) as packed:
                async for bucket in packed:
                    await self._each(lambda engine, bucket=bucket: engine.take(bucket))
                    self._require()
            await self._each(lambda engine: engine.end_update(version))
            self._require()
        except BaseException as error:
            # Their weights are a mixture.
            for member in self.members:
                self._drop(member, error)
            raise
        self.version = version
        await self._announce()

    async def _announce(self) -> None:
        await self.joined(self.members)
        self._router.set_targets(self._members)

    async def _admit(self) -> None:
        while True:
            self._members += [member for member, ready in self._newcomers.items() if ready]
            self._newcomers = {member: ready for member, ready in self._newcomers.items() if not ready}
            self._bury()
            starting = [task for task in self._replacing if not task.done()]
            if self._members or not starting:
                break
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        self._require()

    async def scores(self, ids: list[int], images: Sequence[ImageSpan] = ()) -> list[list[float]]:
        """Of each engine, the log-probability of each id but the first, at temperature 1.

        Raises:
            RunFailed: no engine is left.
        """
        scores = await self._each(lambda engine: engine.score(ids, images=images))
        self._require()
        return scores

    async def reset_prefix_cache(self) -> None:
        """Forget what earlier requests left."""
        await self._each(lambda engine: engine.reset_prefix_cache())
        self._router.forget()

    async def close(self) -> None:
        """Fail what is in flight and end all engines."""
        self._closed = True
        members = [*self._members, *self._newcomers]
        self._router.fail(RunFailed("the engine was closed"))
        await asyncio.gather(*(member.close() for member in members), return_exceptions=True)
        # Their engines were closed above, or will be as soon as they are made.
        await asyncio.gather(*self._replacing, return_exceptions=True)

    async def _each(self, call: Callable[[Member], Awaitable[T]]) -> list[T]:
        """The results of those that do not fail; the others are dropped."""
        self._bury()
        return await self._of(self.members, call)

    async def _of(self, members: list[Member], call: Callable[[Member], Awaitable[T]]) -> list[T]:
        results = await asyncio.gather(*map(call, members), return_exceptions=True)
        for member, result in zip(members, results, strict=True):
            if isinstance(result, BaseException):
                self._drop(member, result)
        if lost := next((result for result in results if isinstance(result, ActorLost)), None):
            raise lost
        return [result for result in results if not isinstance(result, BaseException)]

    @property
    def _over(self) -> bool:
        return self._restarts > self._most_restarts

    def _require(self) -> None:
        if not self._members:
            raise self._failure()

    def _failure(self) -> RunFailed:
        what = f"engines ended again after {self._most_restarts} restarts" if self._over else "no engine is left"
        causes = "\n".join(dict.fromkeys(str(cause) or type(cause).__name__ for cause in self._causes[-4:]))
        return RunFailed(f"{what}; the last causes:\n{causes}")

    def _bury(self) -> None:
        for member in self.members:
            if member.ended is not None:
                self._drop(member)

    def _drop(self, member: Member, cause: BaseException | None = None) -> None:
        if self._closed or member not in self._members:
            return
        self._members.remove(member)
        self._router.drop(member)
        self._causes.append(cause or member.ended or RunFailed("an engine ended"))
        # An actor that is lost within an update takes all engines with it, which is no fault of theirs.
        self._most_restarts += isinstance(cause, ActorLost)
        task = asyncio.get_running_loop().create_task(self._replace(member))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, old: Member) -> None:
        """Start engines until one does, or too many were started."""
        await asyncio.gather(old.close(), return_exceptions=True)
        while not self._closed:
            self._restarts += 1
            if self._over:
                self._router.fail(self._failure())
                return
            try:
                await self._start()
            except Exception as error:  # noqa: BLE001  tried again, and told when it was tried too often
                self._causes.append(error)
            else:
                return

    async def _start(self) -> None:
        member = await asyncio.to_thread(self._make)
        self._newcomers[member] = False
        try:
            if not self._closed:
                # Answered once it has started.
                await member.pause()
            if self._closed:
                raise RuntimeError("closed while an engine started")
        except BaseException:
            del self._newcomers[member]
            await asyncio.shield(member.close())
            raise
        if self._updated:
            self._newcomers[member] = True
            self.wants_weights.set()
            return
        # All have the weights of their folder.
        del self._newcomers[member]
        self._members.append(member)
        if not self._paused:
            await self._of([member], lambda engine: engine.resume())
        await self._announce()


async def _nobody(_: Sequence[Member]) -> None:
    pass
