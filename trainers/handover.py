"""What goes from the actor to the engines and back: weights, and the memory of a GPU on which they take turns."""

import asyncio
import gc
from collections.abc import Callable

from .actor.actor import Actor
from .session import Sampler


class Handover:
    """Between the engines of a sampler and an actor. takes_turns: whether only one of them is on the GPU at a time."""

    def __init__(self, sampler: Sampler, takes_turns: bool) -> None:
        self._sampler, self._takes_turns = sampler, takes_turns
        # What the parity probe is to find, where the actor has left the GPU by then.
        self._expected: list[float] | None = None

    async def to_actor(self, actor: Actor | None) -> None:
        """The memory goes to the actor, or to one that is to be made, if it takes turns with the engines."""
        if self._takes_turns:
            await self._sampler.engine.pause()
            await self._sampler.engine.release()
            self._expected = None
            if actor is not None:
                await asyncio.to_thread(actor.onload)

    async def to_engines(self, actor: Actor, step: int) -> None:
        """They get the weights of this step, and the memory, and are seen to compute what the actor does."""
        engine = self._sampler.engine
        await engine.pause()
        try:
            await engine.update_weights(actor.weights(), step)
            # An engine that was started again gets weights that it is known by now what they compute.
            if self._takes_turns and self._expected is None:
                self._expected = await self._sampler.parity_of(actor)
                await asyncio.to_thread(actor.offload)
        finally:
            await engine.resume()
        await self._sampler.check_parity(actor, self._expected)


def made_to_stay(make: Callable[[], Actor]) -> Actor:
    """What `make` makes, not looked through for garbage again, which would stall everyone by 0.1 s each time."""
    gc.unfreeze()
    gc.collect()
    actor = make()
    gc.collect()
    gc.freeze()
    return actor
