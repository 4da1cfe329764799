"""Continuous batching on a plain transformers model, in a thread of this process.

Invariants: sequence i of the batch occupies slot i, so decoding reads the cache without a copy; requests join whenever
a slot is free and leave as soon as they are done; equal prompts that join together are computed once; a token is
stamped with the version of the weights that computed its logits.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from molt_gym.images import ImageSpan
from molt_gym.tokens import Generation, Renderer

from ..architecture import LOADING, attention_of, check_architecture, decoder_of, model_class
from ..vision_inputs import decoder_inputs, pictures, see
from .decoding import Decoding
from .engine import Request, image_refusal, refusal
from .kv_cache import ATTENTION, SlotCache
from .prefix_cache import PrefixCache
from .sampler import sample

PREFILL_TOKENS = 2048
"""Prompt tokens, padding included, that one forward pass takes."""
PREFIX_TOKENS = 8192
"""Positions of finished sequences that are kept for their next turn."""
PAUSE_TIMEOUT = 600.0
"""Seconds that the step in progress, such as the prefill of many long prompts on a CPU, may take to end."""


class TransformersEngine:
    """A `RolloutEngine` for any causal model of transformers whose layers attend to everything before them.

    Args:
        path: model folder.
        renderer: knows the stop tokens, and decodes for stop strings.
        dtype: of weights and cache.
        max_context: most tokens of prompt and reply.
        max_sequences: most sequences in the batch.

    Raises:
        ConfigError: the model has another kind of layers or cache, or a shorter context.
    """

    def __init__(
        self,
        path: str | Path,
        renderer: Renderer,
        *,
        dtype: torch.dtype,
        max_context: int,
        max_sequences: int,
        device: str | None = None,
    ) -> None:
        config = AutoConfig.from_pretrained(path)
        check_architecture(config, max_context)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._cache = SlotCache(config.get_text_config(), max_sequences, max_context, dtype, self._device)
        with LOADING:
            model = model_class(config).from_pretrained(path, dtype=dtype,
                                                        attn_implementation=attention_of(config, ATTENTION))
        self._model = model.to(self._device).eval()
        self._renderer, self._vision = renderer, renderer.vision
        self._prefixes = PrefixCache(PREFIX_TOKENS)
        self._max_sequences = max_sequences
        self.max_context, self.version, self.busy_seconds = max_context, 0, 0.0
        self._queue: deque[Decoding] = deque()
        self._batch: list[Decoding] = []
        self._state = threading.Condition()
        self._resting, self._paused, self._forget = True, False, False
        self._ended: Exception | None = None
        threading.Thread(target=self._run, name="molt-gym-engine", daemon=True).start()

    def submit(self, requests: Sequence[Request]) -> list["asyncio.Future[Generation]"]:
        """Queue requests, all at once."""
        futures: list[Future] = []
        vocabulary = self._model.get_input_embeddings().num_embeddings
        with self._state:
            for request in requests:
                futures.append(future := Future())
                if error := self._ended or (
                        refusal(request.ids, vocabulary, self.max_context) or image_refusal(request, self._vision)):
                    future.set_exception(error)
                else:
                    self._queue.append(Decoding(request, future, self._renderer.stop_token_ids, self.max_context,
                                                 self._vision))
            self._state.notify_all()
        return [asyncio.wrap_future(future) for future in futures]

    async def pause(self) -> None:
        """Stop between two tokens.

        Raises:
            TimeoutError: the step in progress did not end.
        """
        await asyncio.to_thread(self._rest)

    async def resume(self) -> None:
        """Go on."""
        with self._state:
            self._paused = False
            self._state.notify_all()

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy new weights in, by name, while paused. After an error they are a mixture: send them again.

        Raises:
            RuntimeError: the engine runs.
            ValueError: a name or a shape that the model does not have, or a parameter that was not sent.
        """
        if not (self._paused and self._resting):
            raise RuntimeError("update_weights needs a paused engine; call pause() first")
        await asyncio.to_thread(self._load, weights, version)

    async def reset_prefix_cache(self) -> None:
        """Forget what earlier sequences left, so that what follows does not depend on them."""
        with self._state:
            self._forget = True

    async def close(self) -> None:
        """Fail what is in flight and end the thread."""
        with self._state:
            self._ended = self._ended or RuntimeError("the engine was closed")
        await asyncio.to_thread(self._rest)

    def _rest(self) -> None:
        with self._state:
            self._paused = True
            self._state.notify_all()
            if not self._state.wait_for(lambda: self._resting, PAUSE_TIMEOUT):
                raise TimeoutError(f"the engine did not finish a step within {PAUSE_TIMEOUT:g} s")

    @torch.no_grad()
    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._forget = True
        parameters = dict(self._model.named_parameters())
        missing = set(parameters)
        for name, tensor in weights:
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise ValueError(f"weights: {name} of shape {tuple(tensor.shape)} is no parameter of the model")
            parameters[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise ValueError(f"weights: {len(missing)} parameters were not sent, such as {min(missing)}")
        self.version = version

    def _run(self) -> None:
        while (going := self._next()) is not None:
            started = time.perf_counter()
            try:
                with torch.inference_mode():
                    self._advance(going)
            except Exception as error:  # noqa: BLE001  it belongs to all who wait for a reply
                self._ended = error
            self.busy_seconds += time.perf_counter() - started

    def _next(self) -> int | None:
        """Wait for work and let requests join; how many sequences were there before, or None at the end."""
        with self._state:
            while not self._ended and (self._paused or not (self._queue or self._batch)):
                self._rested()
                self._state.wait()
            if self._ended:
                self._fail(self._ended)
                return None
            self._resting = False
            self._drop_cancelled()
            if self._forget:
                self._prefixes.clear()
                for sequence in self._batch:
                    sequence.reusable = False
                self._forget = False
            going = len(self._batch)
            while self._queue and len(self._batch) < self._max_sequences:
                self._batch.append(self._queue.popleft())
            return going

    def _rested(self) -> None:
        self._resting = True
        self._state.notify_all()

    def _advance(self, going: int) -> None:
        """One token for each sequence of the batch; those behind the first `going` ones get their first."""
        if going:
            batch = self._batch[:going]
            logits = self._forward(torch.arange(going, device=self._device), batch,
                                   [len(sequence.ids) - 1 for sequence in batch], first=True)
            self._sample(batch, logits)
        if going < len(self._batch):
            self._sample(self._batch[going:], self._join(going))
        self._retire()

    def _join(self, start: int) -> torch.Tensor:
        """Logits [J, V] after the prompts in the slots from `start` on; equal ones are computed once."""
        leaders: dict[tuple[int, ...], int] = {}
        joining = [leaders.setdefault(tuple(sequence.keys), slot)
                   for slot, sequence in enumerate(self._batch[start:], start)]
        logits = self._prefill(list(leaders.values()))
        for slot, leader in enumerate(joining, start):
            if leader != slot:
                self._cache.move(leader, slot, len(self._batch[slot].ids))
        return torch.stack([logits[leader] for leader in joining])

    def _prefill(self, slots: list[int]) -> dict[int, torch.Tensor]:
        """Logits after the prompt of each slot."""
        known: dict[int, int] = {}
        for slot in slots:
            known[slot], saved = self._prefixes.longest(self._batch[slot].keys)
            if saved is not None:
                self._cache.load(slot, saved, known[slot])
        logits: dict[int, torch.Tensor] = {}
        for chunk in _chunks({slot: len(self._batch[slot].ids) - known[slot] for slot in slots}):
            # Many long prompts take minutes on a CPU, for which nobody waits at the end.
            if self._ended:
                raise self._ended
            index = torch.tensor(chunk, device=self._device)
            out = self._forward(index, [self._batch[slot] for slot in chunk], [known[slot] for slot in chunk],
                                first=False)
            logits.update(zip(chunk, out, strict=True))
        return logits

    def _forward(
        self, slots: torch.Tensor, sequences: list[Decoding], past: list[int], *, first: bool
    ) -> torch.Tensor:
        """Logits [B, V] after the last token of each sequence, of which `past` tokens are in the cache."""
        new = [sequence.ids[start:] for sequence, start in zip(sequences, past, strict=True)]
        width = max(map(len, new))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in new], device=self._device)
        lengths = torch.tensor([len(row) for row in new], device=self._device)
        positions = torch.tensor(past, device=self._device)[:, None] + torch.arange(width, device=self._device)
        window = max(start + len(row) for start, row in zip(past, new, strict=True))
        padding = torch.arange(width, device=self._device) >= lengths[:, None]
        self._cache.aim(slots, positions.masked_fill(padding, self.max_context), window, first=first)
        mask = torch.arange(window, device=self._device) <= positions[:, :, None]
        inputs = {"input_ids": ids, "position_ids": positions} | self._images(sequences, past, ids)
        hidden = decoder_of(self._model)(
            **inputs, attention_mask=mask[:, None], past_key_values=self._cache, use_cache=True).last_hidden_state
        return self._model.get_output_embeddings()(hidden[torch.arange(len(new), device=self._device), lengths - 1])

    def _images(self, sequences: list[Decoding], past: list[int], ids: torch.Tensor) -> dict[str, Any]:
        """Other arguments of the decoder for ids [B, T], where sequences have images."""
        if not any(sequence.request.images for sequence in sequences):
            return {}
        positions = torch.zeros(3, *ids.shape, dtype=torch.long)
        shown, new = torch.zeros(ids.shape, dtype=torch.bool), list[ImageSpan]()
        for row, (sequence, start) in enumerate(zip(sequences, past, strict=True)):
            positions[:, row, : len(sequence.ids) - start] = sequence.positions(start, len(sequence.ids))
            for image in sequence.request.images:
                # What is in the cache ends before an image or behind it.
                if image.start >= start:
                    shown[row, image.start - start : image.start - start + image.count] = True
                    new.append(image)
        inputs: dict[str, Any] = {"position_ids": positions.to(self._device)}
        if new:
            seen = see(self._model, *pictures(new, self._vision, self._device))
            inputs |= {"input_ids": None} | decoder_inputs(self._model, ids, shown.to(self._device), seen)
        return inputs

    def _sample(self, sequences: list[Decoding], logits: torch.Tensor) -> None:
        samplings = [sequence.request.sampling for sequence in sequences]
        drawn = sample(logits, samplings, [sequence.uniform() for sequence in sequences])
        for sequence, token, logprob, top in zip(sequences, *drawn, strict=True):
            sequence.add(token, logprob, top, self.version)

    def _retire(self) -> None:
        """Hand over what is finished; the last slots move into the gaps."""
        for slot in reversed(range(len(self._batch))):
            sequence = self._batch[slot]
            reason = sequence.finish_reason(self._renderer)
            if reason is None:
                continue
            if sequence.reusable:
                # The last token was never fed to the model, so the cache ends before it.
                self._prefixes.put(sequence.keys[:-1], self._cache.save(slot, len(sequence.ids) - 1))
            self._remove(slot)
            if sequence.future.set_running_or_notify_cancel():
                sequence.future.set_result(sequence.generation(reason))

    def _remove(self, slot: int) -> None:
        last = self._batch.pop()
        if slot < len(self._batch):
            self._cache.move(len(self._batch), slot, len(last.ids))
            self._batch[slot] = last

    def _drop_cancelled(self) -> None:
        for slot in reversed(range(len(self._batch))):
            if self._batch[slot].future.cancelled():
                self._remove(slot)
        self._queue = deque(sequence for sequence in self._queue if not sequence.future.cancelled())

    def _fail(self, error: Exception) -> None:
        for sequence in [*self._batch, *self._queue]:
            if sequence.future.set_running_or_notify_cancel():
                sequence.future.set_exception(error)
        self._batch.clear()
        self._queue.clear()
        self._rested()


def _chunks(tokens: dict[int, int]) -> Iterable[list[int]]:
    """Slots in runs whose padded size stays within `PREFILL_TOKENS`, longest first so that little is padding."""
    slots = sorted(tokens, key=lambda slot: (-tokens[slot], slot))
    while slots:
        size = max(1, PREFILL_TOKENS // tokens[slots[0]])
        yield slots[:size]
        slots = slots[size:]
