"""One request being decoded by the engine on plain transformers."""

from collections.abc import Iterable
from concurrent.futures import Future
from functools import cached_property

import numpy as np
import torch

from molt_gym.images import keyed
from molt_gym.tokens import Generation, Renderer
from molt_gym.tokens.vision import Vision

from ..vision_inputs import rope_positions
from .engine import Request


class Decoding:
    """A request being decoded; `reusable` until the weights change or the prefix cache is reset."""

    def __init__(
        self, request: Request, future: Future, stop_ids: Iterable[int], max_context: int, vision: Vision | None
    ) -> None:
        self.request, self.future, self._vision = request, future, vision
        self.ids = list(request.ids)
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.tops: list[np.ndarray] = []
        self.reusable = True
        self.stop_ids = frozenset(stop_ids) | frozenset(request.sampling.stop_token_ids)
        self.room = min(request.sampling.max_tokens, max_context - len(request.ids))
        self._random = np.random.default_rng(request.sampling.seed)

    @property
    def keys(self) -> list[int]:
        """The ids, in which images are told apart."""
        prompt = len(self.request.ids)
        return keyed(self.request.ids, self.request.images) + self.ids[prompt:] if self.request.images else self.ids

    @cached_property
    def _positions(self) -> torch.Tensor:
        return rope_positions(len(self.request.ids), self.request.images, self._vision)

    def positions(self, start: int, end: int) -> torch.Tensor:
        """[3, end - start] of the tokens from `start` on, in a model that sees."""
        prompt = self._positions
        behind = torch.arange(max(start, prompt.shape[1]), end) + int(prompt.max()) + 1 - prompt.shape[1]
        return torch.cat([prompt[:, start:end], behind.expand(3, -1)], 1)

    def uniform(self) -> float:
        """What the next token is drawn with."""
        return self._random.random()

    def add(self, token: int, logprob: float, top: np.ndarray | None, version: int) -> None:
        """Take a sampled token."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if top is not None:
            self.tops.append(top)

    def finish_reason(self, renderer: Renderer) -> str | None:
        """Why it is over; None if it goes on."""
        if self.ids[-1] in self.stop_ids:
            return "stop"
        stops = self.request.sampling.stop
        if stops:
            text = renderer.decode(self.ids[len(self.request.ids) :])
            if any(stop in text for stop in stops):
                return "stop"
        return "length" if len(self.logprobs) >= self.room else None

    def generation(self, reason: str) -> Generation:
        """The reply."""
        return Generation(self.ids[len(self.request.ids) :], self.logprobs, self.versions, reason,
                          top=np.stack(self.tops) if self.tops else None)
