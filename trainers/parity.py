"""Whether the engine computes what the actor computes, asked after every weight update.

An update that went wrong shows nowhere else: replies get a little worse, ratios a little noisier. Invariant: the probe
is one fixed prompt of the run's own template, so that both sides see ordinary text.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import torch

from molt_gym.errors import RunFailed
from molt_gym.images import ImageSpan, image_part
from molt_gym.tokens import Renderer

from .actor.actor import Actor

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest mean difference of log-probabilities: ten times what equal weights give, and far below what others give."""
GPU_TOLERANCE = 2e-2
"""The same for float32 on GPUs, where vLLM's kernels multiply with 10 bits (TF32)."""
TEXT = "The first eight primes are 2, 3, 5, 7, 11, 13, 17 and 19. Which of them divide 2026? Show how you know it."
TOKENS = 64
"""At most; more of the template tells nothing new."""


class Scorer(Protocol):
    """One or several engines that score a prompt."""

    version: int

    async def scores(self, ids: list[int], images: Sequence[ImageSpan] = ()) -> list[list[float]]:
        """Of each engine, the log-probability of each id but the first, at temperature 1; images: among the ids."""
        ...


@dataclass(frozen=True)
class ParityProbe:
    """ids: the prompt. tolerance: on the mean difference. images: in it, of a model that sees."""

    ids: list[int]
    tolerance: float
    images: tuple[ImageSpan, ...] = ()

    @classmethod
    def of(cls, renderer: Renderer, max_context: int, *dtypes: torch.dtype, gpu: bool) -> "ParityProbe":
        """The probe for an engine and an actor that compute in `dtypes`."""
        tolerance = max(GPU_TOLERANCE if gpu else 0.0, *(TOLERANCE[dtype] for dtype in dtypes))
        if renderer.sees:
            shown = [{"role": "user", "content": [_picture(), {"type": "text", "text": TEXT}]}]
            ids = renderer.render(shown)
            images = renderer.image_spans(ids, shown)
            if (end := images[0].start + images[0].count + TOKENS // 4) < max_context:
                return cls(ids[: max(end, TOKENS)][: max_context - 1], tolerance, images)
        ids = renderer.render([{"role": "user", "content": TEXT}])
        return cls(ids[: min(TOKENS, max_context - 1)], tolerance)

    async def expected(self, actor: Actor) -> list[float]:
        """What the actor computes."""
        return await asyncio.to_thread(actor.logprobs, self.ids, self.images)

    async def check(self, engine: Scorer, actor: Actor, expected: list[float] | None = None) -> float:
        """The mean difference, that of the engine which is farthest off, from the actor or from what was `expected`.

        Raises:
            RunFailed: it is too large.
        """
        asked = None if expected else asyncio.ensure_future(self.expected(actor))
        try:
            scores = await engine.scores(self.ids, self.images)
        finally:
            if asked is not None:
                # A thread asks, which cannot be cancelled, and the actor is not to be used from two.
                await asyncio.wait([asked])
        ours = expected or asked.result()
        names = [f"engine {number} of {len(scores)}" for number in range(1, len(scores) + 1)]
        return max(self._compare(name if len(scores) > 1 else "the engine", engine.version, theirs, ours)
                   for name, theirs in zip(names, scores, strict=True))

    def _compare(self, name: str, version: int, theirs: Sequence[float], ours: Sequence[float]) -> float:
        differences = [abs(mine - other) for mine, other in zip(ours, theirs, strict=True)]
        mean = fmean(differences)
        # Not a number is no parity either.
        if not mean <= self.tolerance:
            raise RunFailed(f"after the update to version {version} {name} computes other log-probabilities than the "
                            f"actor: {fmean(theirs):.4f} and {fmean(ours):.4f} a token on a fixed prompt, "
                            f"{mean:.2g} apart, at most {max(differences):.2g} (tolerance {self.tolerance:g}); "
                            "its weights are not those of the actor, or it computes the model in another way")
        return mean


def _picture() -> dict[str, Any]:
    """A part of a message: colours that change across an image."""
    across = np.linspace(0, 255, 64).astype(np.uint8)
    return image_part(np.stack(np.broadcast_arrays(across[:, None], across, across[::-1, None]), -1))
