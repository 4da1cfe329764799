"""The contract between rollouts and whatever samples for them.

Invariants: token ids go in, token ids with their log-probabilities and weight versions come out; the requests of one
`submit` enter the batch together, so that equal requests in equal order give equal replies; new weights take effect
between two tokens, never within one, and nothing computed with old weights is reused for a later request.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from molt_gym.errors import PromptTooLong
from molt_gym.images import ImageSpan
from molt_gym.tokens import Generation, Sampling
from molt_gym.tokens.vision import Vision


@dataclass(frozen=True)
class Request:
    """One reply to sample.

    ids: the whole prompt. key: names the request and orders the requests of one `submit`. images: those whose tokens
    are among the ids. base: whether an engine that is sent adapters answers without one, as the model was.
    """

    ids: list[int]
    sampling: Sampling
    key: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    base: bool = False


class RolloutEngine(Protocol):
    """Samples replies with the newest weights that it was given."""

    version: int
    """Of the weights in use; every sampled token is stamped with it."""
    busy_seconds: float
    """Time spent computing so far."""
    max_context: int
    """Prompt and reply together may have this many tokens."""

    def submit(self, requests: Sequence[Request]) -> list["asyncio.Future[Generation]"]:
        """Queue requests, all at once. Cancelling a future takes its request out of the batch.

        Raises nothing; a request that is refused fails by its future, with PromptTooLong if it leaves no room to reply.
        """
        ...

    async def pause(self) -> None:
        """Stop between two tokens; what is in flight stays in flight."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take new weights by name while paused; nothing computed with the old ones serves a later request."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget what earlier requests left, so that later ones do not depend on them."""
        ...

    async def close(self) -> None:
        """Fail what is in flight and free the memory. Idempotent."""
        ...


def refusal(ids: Sequence[int], vocabulary: int, max_context: int) -> Exception | None:
    """Why a prompt cannot be answered; None if it can.

    vocabulary: how many ids the model has.
    """
    unknown = [i for i in ids if not 0 <= i < vocabulary]
    if unknown or not ids:
        return ValueError(f"request.ids: {unknown or 'there are none'}; write ids of the model, 0 to {vocabulary - 1} "
                          "(do tokenizer and model belong together?)")
    if len(ids) >= max_context:
        return PromptTooLong(f"the prompt has {len(ids)} tokens; rollout.max_context = {max_context} leaves no room "
                             "for a reply; raise it or shorten the task")
    return None


def image_refusal(request: Request, vision: Vision | None) -> Exception | None:
    """Why the images of a request cannot be shown; None if they can be. vision: how the model sees."""
    if request.images and vision is None:
        return ValueError(f"request.images: {len(request.images)} for a model that sees none; leave them out")
    for start, count, uri in request.images:
        try:
            own = vision.count(uri)
        except ValueError as error:
            return error
        if count != own or not 0 <= start <= len(request.ids) - count:
            return ValueError(f"request.images: {count} tokens from {start} on for an image of {own}, in a prompt of "
                              f"{len(request.ids)}; render it with the engine's processor")
    return None
