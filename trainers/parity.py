"""Whether the engine computes what the actor computes, asked after every weight update.

An update that went wrong shows nowhere else: replies get a little worse, ratios a little noisier. Invariant: the probe
is one fixed prompt of the run's own template, so that both sides see ordinary text.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from molt_gym.errors import RunFailed
from molt_gym.tokens import Renderer

from .actor.actor import Actor

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest mean difference of log-probabilities: ten times what equal weights give, and far below what others give."""
TEXT = "The first eight primes are 2, 3, 5, 7, 11, 13, 17 and 19. Which of them divide 2026? Show how you know it."
TOKENS = 64
"""At most; more of the template tells nothing new."""


class Scorer(Protocol):
    """An engine that scores a prompt."""

    version: int

    async def score(self, ids: list[int]) -> list[float]:
        """Log-probability of each id but the first, at temperature 1."""
        ...


@dataclass(frozen=True)
class ParityProbe:
    """ids: the prompt. tolerance: on the mean difference."""

    ids: list[int]
    tolerance: float

    @classmethod
    def of(cls, renderer: Renderer, max_context: int, *dtypes: torch.dtype) -> "ParityProbe":
        """The probe for an engine and an actor that compute in `dtypes`."""
        ids = renderer.render([{"role": "user", "content": TEXT}])
        return cls(ids[: min(TOKENS, max_context - 1)], max(TOLERANCE[dtype] for dtype in dtypes))

    async def check(self, engine: Scorer, actor: Actor) -> float:
        """The mean difference.

        Raises:
            RunFailed: it is too large.
        """
        theirs, ours = await asyncio.gather(engine.score(self.ids), asyncio.to_thread(actor.logprobs, self.ids))
        differences = [abs(mine - other) for mine, other in zip(ours, theirs, strict=True)]
        mean = sum(differences) / len(differences)
        # Not a number is no parity either.
        if not mean <= self.tolerance:
            raise RunFailed(f"after the update to version {engine.version} the engine computes other log-probabilities "
                            f"than the actor: {_mean(theirs):.4f} and {_mean(ours):.4f} a token on a fixed prompt, "
                            f"{mean:.2g} apart, at most {max(differences):.2g} (tolerance {self.tolerance:g}); "
                            "its weights are not those of the actor, or it computes the model in another way")
        return mean


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
