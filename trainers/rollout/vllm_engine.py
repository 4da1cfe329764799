"""vLLM as the engine, in a process of its own.

Invariants: ids in, ids out, nothing is decoded but for stop strings; requests in flight survive an update and carry
both versions; after an update nothing that old weights computed is used, neither the prefix cache nor what requests in
flight had in theirs; once anything went wrong within an update, the engine has ended, as its weights are a mixture.
Unlike with the engine on plain transformers, the requests of one `submit` may enter the batch one after another, so
that equal runs can differ in the last bits; and on GPUs seeds are not used.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, PreTrainedConfig

from molt_gym.errors import ConfigError, RunFailed
from molt_gym.images import ImageSpan
from molt_gym.tokens import Generation, Renderer

from ..architecture import EXPERTS, check_architecture
from ..waiting import threaded
from .busy_clock import BusyClock
from .engine import Request, refusal
from .vllm_process import HostProcess
from .vllm_spec import Backend, HostSpec
from .vllm_transfer import TIMEOUT, Bucket, Sender, buckets

START_TIMEOUT = 900.0
"""Seconds until the engine is ready; large models are read from slow disks."""
CALL_TIMEOUT = 120.0
"""Seconds for a call that transfers nothing; a pause waits for the step in progress."""
LAST_WORDS = 5.0
"""Seconds in which the engine may say why a transfer failed."""


class VllmEngine:
    """A `RolloutEngine`; made at once, while its process starts, unless it shares a GPU.

    Args:
        path: folder of model and tokenizer.
        renderer: knows the stop tokens.
        dtype: of weights and cache.
        backend: how weights travel; without one, "ipc" on a GPU, where trainer and engine share it, else "gloo".
        transfer_timeout: seconds for each part of an update, such as one bucket, after which the engine is given up.
        host: starts the engine's process.
        cuda: whether the engine has GPUs; without it, whether this process does.
        **spec: further fields of `HostSpec`, such as max_context and max_sequences, which it needs.

    Raises:
        ConfigError: the model has layers that the trainer does not support, or a shorter context; the engine is to be
            spread over several GPUs and share one; there are no experts, or no GPU.
    """

    def __init__(
        self, path: str | Path, renderer: Renderer, *, dtype: torch.dtype, backend: Backend | None = None,
        transfer_timeout: float = TIMEOUT, host: Callable[[HostSpec], HostProcess] = HostProcess,
        cuda: bool | None = None, **spec: Any,
    ) -> None:
        cuda = torch.cuda.is_available() if cuda is None else cuda
        backend = backend or ("ipc" if cuda else "gloo")
        self._spec = HostSpec(
            model=str(path), dtype=str(dtype).removeprefix("torch."), stop_token_ids=tuple(renderer.stop_token_ids),
            backend=backend, cpu=not cuda, vision=renderer.vision is not None,
            max_pixels=renderer.vision and renderer.vision.max_pixels, **spec)
        config = AutoConfig.from_pretrained(path)
        check_architecture(config, self._spec.max_context)
        self._dtype, self._vocabulary = dtype, config.get_text_config().vocab_size
        self.max_context, self.version = self._spec.max_context, 0
        self._device = torch.device("cuda" if cuda and backend in ("ipc", "nccl") else "cpu")
        self._transfer_timeout = transfer_timeout
        _check_options(self._spec, config)
        local = host is HostProcess
        if backend == "ipc" and self._spec.workers > 1 and local:
            raise ConfigError(f"rollout.engine_args: {self._spec.workers} GPUs for an engine that shares the trainer's "
                              "one; leave tensor_parallel_size and pipeline_parallel_size out")
        self._host = host(self._spec)
        if backend == "ipc" and local:
            # vLLM measures the GPU's free memory while it starts, and must be alone with it.
            self.wait()
        self._sender: Sender | None = None
        self._paused = False
        self._asleep = set[Literal["weights", "kv_cache"]]()
        self._clock = BusyClock()

    def wait(self) -> None:
        """Until the engine has started.

        Raises:
            RunFailed: it did not.
        """
        try:
            self._host.ready.result(START_TIMEOUT)
        except BaseException as error:
            self._host.close(RunFailed(f"the engine did not start: {error}"))
            raise

    @property
    def busy_seconds(self) -> float:
        """Time in which requests were in flight and not paused."""
        return self._clock.read()

    @property
    def ended(self) -> Exception | None:
        """Why there is no engine any more."""
        return self._host.ended

    def submit(self, requests: Sequence[Request]) -> list["asyncio.Future[Generation]"]:
        """Queue requests."""
        futures = [generated(request, self._vocabulary, self.max_context, self._host.call) for request in requests]
        for future in futures:
            self._clock.enter()
            future.add_done_callback(lambda _: self._clock.leave())
        return [asyncio.wrap_future(future) for future in futures]

    async def pause(self) -> None:
        """Stop between two tokens.

        Raises:
            RunFailed: the engine did not start, has ended, or does not answer.
        """
        await self._call("pause")
        self._paused = True
        self._clock.pause()

    async def resume(self) -> None:
        """Go on; an engine that has ended stays so.

        Raises:
            RuntimeError: `release` forgot the weights, and none came.
        """
        if self._host.ended is None:
            if "weights" in self._asleep:
                raise RuntimeError("resume needs weights after release(); call update_weights()")
            await self._wake("kv_cache")
            await self._call("resume")
            self._paused = False
            self._clock.resume()

    async def release(self) -> None:
        """Give the GPU's memory back, while paused, if `release_memory` was asked for.

        `update_weights` takes back that of the weights, which are forgotten, and `resume` that of the cache.

        Raises:
            RuntimeError: the engine runs.
        """
        if not self._paused:
            raise RuntimeError("release needs a paused engine; call pause() first")
        if self._spec.release_memory and not self._asleep:
            await self._call("sleep")
            self._asleep = {"weights", "kv_cache"}

    async def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        if part in self._asleep:
            await self._call("wake", part)
            self._asleep.remove(part)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Send new weights, bucket by bucket, while paused. After an error the engine has ended.

        Raises:
            RuntimeError: the engine runs.
            RunFailed: the workers refused a name or a shape, missed a parameter, or do not answer.
        """
        if not self._paused:
            raise RuntimeError("update_weights needs a paused engine; call pause() first")
        try:
            await self.begin_update()
            async with aclosing(self.pack(weights)) as packed:
                async for bucket in packed:
                    await self.take(bucket)
            await self.end_update(version)
        except BaseException as error:
            words = RunFailed(f"the engine ended as its weights were not updated: {error}")
            if self._sender is not None:
                self._sender.close()
            await asyncio.shield(asyncio.to_thread(self._host.close, words))
            raise

    async def begin_update(self) -> None:
        """The first part of `update_weights`, for who sends to several engines. After an error in one, close it."""
        await self._wake("weights")
        await self._call("start_update", timeout=self._transfer_timeout)

    def pack(self, weights: Iterable[tuple[str, torch.Tensor]]) -> AsyncGenerator[Bucket, None]:
        """What `take` takes, to be closed; engines of the same dtype on the same device may share it."""
        # Two groups of NCCL at work on a GPU at the same time can wait for each other.
        return threaded(buckets(weights, self._dtype, self._device), ahead=self._spec.backend != "nccl")

    async def take(self, bucket: Bucket) -> None:
        """Send one bucket."""
        if self._sender is None:
            self._sender = await self._connected(bucket)
        sender = self._sender
        announcement = await asyncio.to_thread(sender.announcement, bucket)
        taken = self._call("receive", announcement, timeout=self._transfer_timeout)
        await _both(taken, asyncio.to_thread(sender.send, bucket))
        sender.discard()

    async def end_update(self, version: int) -> None:
        """Put the new weights to use."""
        await self._call("finish_update", version, timeout=self._transfer_timeout)
        self.version = version

    def _make_sender(self, bucket: Bucket) -> Sender:
        """What sends this bucket and those after it."""
        return Sender(self._spec.backend, self._device, self._spec.workers, timeout=self._transfer_timeout)

    async def _connected(self, bucket: Bucket) -> Sender:
        sender = await asyncio.to_thread(self._make_sender, bucket)
        invitation = await asyncio.to_thread(sender.invitation)
        joining = self._call("connect", invitation, timeout=self._transfer_timeout)
        await _both(joining, asyncio.to_thread(sender.join))
        return sender

    async def score(
        self, ids: list[int], timeout: float | None = None, images: Sequence[ImageSpan] = ()
    ) -> list[float]:
        """Log-probability of each id but the first, under `score_temperature`; images: those among the ids."""
        return await self._call("score", ids, tuple(images), timeout=timeout)

    async def scores(self, ids: list[int], images: Sequence[ImageSpan] = ()) -> list[list[float]]:
        """`score` of each engine, which is this one."""
        return [await self.score(ids, images=images)]

    async def reset_prefix_cache(self) -> None:
        """Forget what earlier requests left."""
        await self._call("reset_prefix_cache")

    async def close(self) -> None:
        """Fail what is in flight and end the process."""
        if self._sender is not None:
            self._sender.close()
        await asyncio.to_thread(self._host.close, RuntimeError("the engine was closed"))

    async def _call(self, name: str, *arguments: Any, timeout: float | None = None) -> Any:
        if not self._host.ready.done():
            await self._answer("start", asyncio.shield(asyncio.wrap_future(self._host.ready)), START_TIMEOUT)
        return await self._answer(name, asyncio.wrap_future(self._host.call(name, *arguments)), timeout or CALL_TIMEOUT)

    async def _answer(self, name: str, answer: "asyncio.Future[Any]", timeout: float) -> Any:
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise RunFailed(f"the vLLM engine did not answer within {timeout:g} s ({name}); its log: "
                            f"{self._host.log}") from None


def generated(request: Request, vocabulary: int, max_context: int,
              call: Callable[..., "Future[Generation]"]) -> "Future[Generation]":
    """What becomes of a request. vocabulary: see `refusal`; call: a method of `VllmHost`, by its name."""
    if error := refusal(request.ids, vocabulary, max_context):
        future: Future[Generation] = Future()
        future.set_exception(error)
        return future
    room = min(request.sampling.max_tokens, max_context - len(request.ids))
    return call("generate", request.ids, replace(request.sampling, max_tokens=room), request.images, request.base)


def _check_options(spec: HostSpec, config: PreTrainedConfig) -> None:
    text = config.get_text_config()
    if spec.routed_experts and not any(getattr(text, name, None) for name in EXPERTS):
        raise ConfigError(f"rollout.routed_experts: true for a model without experts ({config.model_type}); write "
                          "false, or choose a mixture-of-experts model")
    if spec.backend in ("ipc", "nccl") and spec.cpu:
        raise ConfigError(f"rollout.weight_transfer: {spec.backend!r} without a GPU; write 'auto', 'gloo' or 'file'")
    if spec.release_memory and spec.cpu:
        raise ConfigError("rollout.release_memory: true without a GPU, where there is no memory to hand over; write "
                          "false")


async def _both(call: Any, work: Any) -> None:
    """The engine's part of a transfer and ours. If its part fails, ours may hang until the engine is closed."""
    ours, theirs = asyncio.ensure_future(work), asyncio.ensure_future(call)
    for part in (ours, theirs):
        # What fails after the other did is of no interest.
        part.add_done_callback(lambda part: part.cancelled() or part.exception())
    await asyncio.wait({ours, theirs}, return_when=asyncio.FIRST_EXCEPTION)
    if not theirs.done():
        # Ours failed, and the engine may know better why.
        await asyncio.wait({theirs}, timeout=LAST_WORDS)
    if theirs.done():
        theirs.result()
    theirs.cancel()
    await ours
