"""When requests go to the engine.

A batch's composition changes the last bits of every logit in it, and bits change samples. `WaveGate` makes the
composition a function of the seed: it waits until every live rollout has asked or ended, then submits all requests at
once, in the order of their keys. `OpenGate` submits at once, which is faster where replies and steps vary in length.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from molt_gym.tokens import Generation

from .engine import Request, RolloutEngine


class Gate(Protocol):
    """Between rollouts and the engine."""

    def rollout(self) -> AbstractContextManager[None]:
        """A rollout is live within this block."""
        ...

    async def generate(self, request: Request) -> Generation:
        """The engine's reply."""
        ...

    def beside(self, engine: RolloutEngine) -> "Gate":
        """A gate to another engine, for the same rollouts."""
        ...


class OpenGate:
    """Requests pass as they come."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """A rollout is live within this block."""
        yield

    async def generate(self, request: Request) -> Generation:
        """The engine's reply."""
        return await self._engine.submit([request])[0]

    def beside(self, engine: RolloutEngine) -> "OpenGate":
        """A gate to another engine."""
        return OpenGate(engine)


class WaveGate:
    """Requests pass together, once every live rollout has asked or ended.

    Args:
        first: the gate whose waves these requests join, by default none.
    """

    def __init__(self, engine: RolloutEngine, first: "WaveGate | None" = None) -> None:
        self._engine, self._first = engine, first or self
        self._live = 0
        self._waiting: dict[tuple[int, ...], tuple[Request, asyncio.Future, RolloutEngine]] = {}

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """A rollout is live within this block. Enter those that belong together before the first of them asks; a gate
        beside another one is not entered."""
        self._live += 1
        try:
            yield
        finally:
            self._live -= 1
            self._release()

    async def generate(self, request: Request) -> Generation:
        """The engine's reply."""
        turn = asyncio.get_running_loop().create_future()
        self._first._waiting[request.key] = (request, turn, self._engine)
        self._first._release()
        try:
            return await (await turn)
        except asyncio.CancelledError:
            self._first._waiting.pop(request.key, None)
            # Cancelled after the wave had left, before this task got to run.
            if turn.done() and not turn.cancelled():
                turn.result().cancel()
            raise

    def _release(self) -> None:
        if not self._waiting or len(self._waiting) < self._live:
            return
        waves: dict[int, list[tuple[Request, asyncio.Future, RolloutEngine]]] = {}
        for key in sorted(self._waiting):
            asked = self._waiting.pop(key)
            waves.setdefault(id(asked[2]), []).append(asked)
        for wave in waves.values():
            replies = wave[0][2].submit([request for request, _, _ in wave])
            for (_, turn, _), reply in zip(wave, replies, strict=True):
                if turn.cancelled():
                    reply.cancel()
                else:
                    turn.set_result(reply)

    def beside(self, engine: RolloutEngine) -> "WaveGate":
        """A gate to another engine, whose requests pass in the same waves."""
        return WaveGate(engine, self._first)
