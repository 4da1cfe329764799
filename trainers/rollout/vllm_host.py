"""vLLM's engine behind a handful of calls, and the program that serves them to another process.

`VllmHost` needs nothing of that program: an actor of any kind can hold one. Invariants: every sampling parameter is
explicit; a token is stamped with the version of the weights that computed it; the process ends, with all that it
started, as soon as the one that started it does.
"""

import asyncio
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import fields
from inspect import signature
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn

import numpy as np
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from molt_gym.images import ImageSpan
from molt_gym.tokens import Generation, Sampling
from molt_gym.tokens.vision import Vision

from .vllm_lifetime import end_with_parent
from .vllm_reply import generation_of
from .vllm_spec import ADAPTER, HostSpec, engine_arguments

WHOLE_REPLIES = {False: "WholeReplies", True: "AsyncWholeReplies"}
"""In vllm_scheduler, by whether vLLM prepares the next step while one is computed."""
PARENT_CHECK = 1.0
"""Seconds between two looks at whether the parent lives."""
SETTLE = 0.05
"""Seconds in which the outputs of the last step before a pause arrive; needed where they carry no version."""
SHUTDOWN = 5.0
"""Seconds that vLLM gets to end its processes."""


class VllmHost:
    """An engine; make it on a running event loop.

    Where outputs do not say which weights sampled what (before vLLM 0.32), it is known from how many tokens each
    request in flight had at an update.
    """

    def __init__(self, spec: HostSpec) -> None:
        arguments = engine_arguments(spec)
        if spec.vision and not any(field.name == "mm_device_do_normalize" for field in fields(AsyncEngineArgs)):
            # Before vLLM 0.32 patches are never normalised by the engine.
            arguments.pop("mm_device_do_normalize", None)
        config = AsyncEngineArgs(**arguments).create_engine_config()
        scheduling = config.scheduler_config
        if scheduling.scheduler_cls is None and not spec.routed_experts:
            # Which experts a token went to must be sent with it.
            scheduling.scheduler_cls = f"{__package__}.vllm_scheduler.{WHOLE_REPLIES[scheduling.async_scheduling]}"
        self._vision = Vision.of(spec.model, max_pixels=spec.max_pixels) if spec.vision else None
        if spec.cpu:
            # vLLM would start its process from scratch and import everything again; this one has used no threads yet.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        self._stop_token_ids, self._seeded = spec.stop_token_ids, spec.cpu
        known = any(field.name == "weight_versions" for field in fields(CompletionOutput))
        self._spans = known and spec.spans
        self._numbers = itertools.count()
        self._version = 0
        self._starts: dict[str, list[tuple[int, int]]] = {}
        self._records = spec.routed_experts and spec.cpu
        self._score_temperature = spec.score_temperature
        self._vocabulary = config.model_config.get_vocab_size()
        self._lora = spec.lora
        # The path, from which vLLM would load it if it were not there, is none.
        self._adapter = LoRARequest("policy", ADAPTER, "/nowhere") if spec.lora else None

    async def start(self) -> None:
        """Make the workers ready; once, before anything else."""
        if self._records:
            await self._llm.collective_rpc("record_routed_experts")
        if self._score_temperature != 1:
            await self._llm.collective_rpc("divide_logits", args=(self._score_temperature,))
        await self._use_adapter()

    async def generate(
        self, ids: list[int], sampling: Sampling, images: Sequence[ImageSpan] = (), base: bool = False
    ) -> Generation:
        """Sample one reply, if `base` without the adapter; cancelling the call takes the request out of the engine."""
        prompt, name = await self._prompt(ids, images), f"reply-{next(self._numbers)}"
        starts = self._starts[name] = [(self._version, 0)]
        try:
            async for answer in self._llm.generate(prompt, self._parameters(sampling), name, priority=0,
                                                   lora_request=None if base else self._adapter):
                output = answer.outputs[0]
        finally:
            del self._starts[name]
            # Also of a request that was cancelled, which nobody waits for.
            taking = asyncio.ensure_future(self._take_routed_experts(name)) if self._records else None
        if self._spans:
            starts = [(0 if span.version == "default" else int(span.version), span.start)
                      for span in output.weight_versions or ()] or starts
        routed = output.routed_experts if taking is None else await taking
        return generation_of(output, starts, len(ids), routed, min(sampling.top_logprobs, self._vocabulary))

    async def _prompt(self, ids: list[int], images: Sequence[ImageSpan]) -> Any:
        if not images:
            return tokens_input(ids)
        if self._vision is None:
            raise ValueError("request.images: this model takes none")
        from .vllm_images import image_input

        return await asyncio.to_thread(image_input, ids, images, self._vision)

    async def _take_routed_experts(self, name: str) -> np.ndarray | None:
        # Of several workers each knows its own layers.
        parts = await self._llm.collective_rpc("take_routed_experts", args=(name,))
        arrays = [np.frombuffer(data, np.int16).reshape(shape) for data, shape in filter(None, parts)]
        return np.maximum.reduce(arrays) if arrays else None

    def _parameters(self, sampling: Sampling) -> SamplingParams:
        # A generator of its own for each request is slow on GPUs, where replies depend on the batch anyway.
        seed = sampling.seed & (2**63 - 1) if self._seeded and sampling.seed is not None else None
        return SamplingParams(
            n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=sampling.temperature,
            top_p=sampling.top_p, top_k=sampling.top_k, min_p=0.0, seed=seed, stop=list(sampling.stop),
            stop_token_ids=sorted({*self._stop_token_ids, *sampling.stop_token_ids}), ignore_eos=True,
            max_tokens=sampling.max_tokens, min_tokens=0,
            logprobs=min(sampling.top_logprobs, self._vocabulary), prompt_logprobs=None, bad_words=None,
            logit_bias=None, allowed_token_ids=None, detokenize=bool(sampling.stop), skip_special_tokens=False,
            spaces_between_special_tokens=False, include_stop_str_in_output=True,
            flat_logprobs=not sampling.top_logprobs, output_kind=RequestOutputKind.FINAL_ONLY)

    async def score(self, ids: list[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        """Log-probability of each id but the first after those before it; before any reply.

        vLLM does not apply a request's temperature to its prompt, hence `WorkerExtension.divide_logits`.
        """
        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False,
                                    output_kind=RequestOutputKind.FINAL_ONLY)
        prompt, name = await self._prompt(ids, images), f"score-{next(self._numbers)}"
        async for answer in self._llm.generate(prompt, parameters, name, priority=-1,
                                               lora_request=self._adapter):
            entries = answer.prompt_logprobs
        return [entry[token].logprob for token, entry in zip(ids[1:], entries[1:], strict=True)]

    async def connect(self, invitation: dict[str, Any]) -> None:
        """Let the workers join the trainer's group."""
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=invitation))

    async def pause(self) -> None:
        """Stop between two tokens and keep what is in flight."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on."""
        await self._llm.resume_generation()

    async def sleep(self) -> None:
        """Give the GPU's memory back, while paused, and forget the weights."""
        await self._llm.sleep(2, mode="keep")

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take memory again; with the last part vLLM goes on by itself."""
        await self._llm.wake_up([part])

    async def start_update(self) -> None:
        """Make the model ready for new weights, while paused."""
        if not self._spans:
            await asyncio.sleep(SETTLE)
        await self._llm.start_weight_update()

    async def receive(self, announcement: dict[str, Any]) -> None:
        """Take one bucket."""
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=announcement))

    async def finish_update(self, version: int) -> None:
        """Put the weights to use, and compute anew what requests in flight had computed with the old ones."""
        if signature(self._llm.finish_weight_update).parameters:
            await self._llm.finish_weight_update(weight_version=str(version))
        else:
            await self._llm.finish_weight_update()
        await self._use_adapter()
        await self.reset_prefix_cache()
        self._version = version
        for state in self._llm.output_processor.request_states.values():
            if (starts := self._starts.get(state.external_req_id)) is not None:
                starts.append((version, state.detokenizer.num_output_tokens()))

    async def _use_adapter(self) -> None:
        # Only now, as vLLM forgets its adapters at the end of an update.
        if self._lora is not None:
            await self._llm.collective_rpc("use_adapter", args=(self._lora.rank, self._lora.alpha))

    async def reset_prefix_cache(self) -> None:
        """Forget what earlier requests left, and what those in flight have computed, which they compute again.

        Raises:
            RuntimeError: vLLM did not.
        """
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache")
        if self._vision is not None:
            # What the vision tower made of images.
            await self._llm.reset_encoder_cache()

    async def close(self) -> None:
        """End vLLM's own processes."""
        if "timeout" in signature(self._llm.shutdown).parameters:
            await asyncio.to_thread(self._llm.shutdown, timeout=SHUTDOWN)
        else:
            await asyncio.to_thread(self._llm.shutdown)


class _Server:
    """Answers (number, method, arguments) with (number, whether it worked, result or error)."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._tasks = connection, dict[int, asyncio.Task[None]]()
        self._inbox: asyncio.Queue[tuple[int, str, tuple[Any, ...]]] = asyncio.Queue()

    async def serve(self, spec: HostSpec) -> None:
        """Until `close` was asked for."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        try:
            host = VllmHost(spec)
            await host.start()
        except Exception:  # noqa: BLE001  it is in the log
            _give_up()
        self._answer(0, True, os.getpid())
        while True:
            number, name, arguments = await self._inbox.get()
            if name == "cancel":
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
                continue
            task = self._tasks[number] = asyncio.create_task(self._call(number, getattr(host, name), arguments))
            if name == "close":
                await task
                return

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            try:
                if self._connection.poll(PARENT_CHECK):
                    loop.call_soon_threadsafe(self._inbox.put_nowait, self._connection.recv())
            except (EOFError, OSError):
                break
        _end_all()

    async def _call(self, number: int, method: Any, arguments: Sequence[Any]) -> None:
        try:
            self._answer(number, True, await method(*arguments))
        except EngineDeadError:
            _give_up()
        except Exception as error:  # noqa: BLE001  the other side reports it
            traceback.print_exc()
            self._answer(number, False, f"{type(error).__name__}: {error}")
        finally:
            self._tasks.pop(number, None)

    def _answer(self, number: int, worked: bool, result: Any) -> None:
        self._connection.send((number, worked, result))


def _give_up() -> NoReturn:
    """Write the error being handled into the log, whose end the other side reports, and let it end the rest."""
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def _end_all() -> None:
    """This process leads a group of its own, in which vLLM's processes are."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _main(descriptor: int) -> None:
    connection = Connection(descriptor)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)

    def after_fork() -> None:
        connection.close()
        end_with_parent()

    os.register_at_fork(after_in_child=after_fork)
    asyncio.run(_Server(connection).serve(connection.recv()))
    _end_all()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
