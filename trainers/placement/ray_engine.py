"""vLLM behind Ray: what others reach an engine by, and how the ranks' weights reach it.

Invariant: prompts and replies go from the asking process to the engine's node and back, and nowhere else.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from molt_gym.errors import RunFailed
from molt_gym.tokens import Generation, Renderer

from ..rollout.engine import Request
from ..rollout.vllm_engine import CALL_TIMEOUT, VllmEngine, generated
from ..waiting import threaded
from .ray_actor import RankWeights, RemoteBucket, RemoteSender
from .ray_host import Calls, RayHost


class EngineProxy:
    """What sends requests to an engine from any process of the cluster. Pickled, it begins anew where it arrives."""

    def __init__(self, handle: Any, vocabulary: int, max_context: int) -> None:
        self._arguments = handle, vocabulary, max_context
        self._calls = Calls(handle)

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineProxy, self._arguments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineProxy) and self._arguments[0] == other._arguments[0]

    def __hash__(self) -> int:
        return hash(self._arguments[0])

    @property
    def ended(self) -> Exception | None:
        """Why there is no engine any more."""
        return self._calls.ended

    def submit(self, requests: Sequence[Request]) -> list["asyncio.Future[Generation]"]:
        """Queue requests, as `VllmEngine` does."""
        _, vocabulary, max_context = self._arguments
        call = partial(self._calls.start, "call")
        return [asyncio.wrap_future(generated(request, vocabulary, max_context, call)) for request in requests]


class RayVllmEngine(VllmEngine):
    """A `VllmEngine` in an actor that `options` place; it takes the weights of a `RayActor`.

    With backend "ipc" it may be spread over several GPUs, if a rank of the actor is on each, and `wait` for it must be
    over before the ranks are made.

    Args:
        options: of the Ray actor; num_gpus tells whether the engine runs on GPUs.
        devices: GPUs that it shares with others, as CUDA_VISIBLE_DEVICES has them; those that Ray assigns otherwise.
        settings: those of `VllmEngine`.
    """

    def __init__(self, path: str | Path, renderer: Renderer, options: dict[str, Any], *, devices: str | None = None,
                 **settings: Any) -> None:
        cuda = bool(options.get("num_gpus")) or devices is not None
        self._busy, self._source = 0.0, None
        self._proxy: EngineProxy | None = None
        super().__init__(Path(path).absolute(), renderer, cuda=cuda,
                         host=partial(RayHost, options=options, devices=devices), **settings)

    @property
    def busy_seconds(self) -> float:
        """Time in which requests were in flight and not paused, wherever they came from; as of the last pause."""
        return self._busy

    def proxy(self) -> EngineProxy:
        """What others send requests to; the same at each call."""
        if self._proxy is None:
            self._proxy = EngineProxy(self._host.handle, self._vocabulary, self.max_context)
        return self._proxy

    async def pause(self) -> None:
        """Stop between two tokens."""
        await super().pause()
        self._busy = await self._answer("busy", asyncio.wrap_future(self._host.busy()), CALL_TIMEOUT)

    def pack(self, weights: Iterable[tuple[str, torch.Tensor]]) -> AsyncGenerator[Any, None]:
        """Announcements of buckets, which stay in the ranks.

        Raises:
            TypeError: the weights are not those of a `RayActor`.
        """
        if not isinstance(weights, RankWeights):
            raise TypeError(f"weights: {type(weights).__name__}; an engine behind Ray takes those of a RayActor")
        return threaded(weights.buckets(self._dtype, self._spec.backend), ahead=False)

    async def take(self, bucket: Any) -> None:
        """Have one bucket sent.

        Raises:
            ActorLost: a rank died, and nothing may be wrong with the engine.
        """
        if self._source is not bucket.source:
            # Another actor than before, as it was started again.
            self._sender, self._source = None, bucket.source
        try:
            await super().take(bucket)
        except RunFailed:
            # When a rank dies, the engine's part of the transfer fails too, and may be the first to say so.
            await asyncio.to_thread(bucket.source.check)
            raise

    def _make_sender(self, bucket: RemoteBucket) -> RemoteSender:
        return bucket.source.sender(self._spec.backend, self._spec.workers, self._transfer_timeout)
