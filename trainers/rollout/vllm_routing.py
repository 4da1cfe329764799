"""Which experts a worker on CPUs sends each position to; on GPUs vLLM itself can tell.

Invariant: row p of a request is of the computation after which its id p + 1 was drawn, or, within the prompt, the
first id of the reply; what is computed again later, as after an update, changes no row.
"""

from functools import partial
from typing import Any

import numpy as np
import torch


class RoutingRecorder:
    """Records what the model of `runner`, one of vLLM's, does with requests that start from now on."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._execute = runner, runner.execute_model
        self._records: dict[str, _Record] = {}
        self._chosen: dict[int, np.ndarray] = {}
        self._layers = runner.model_config.hf_text_config.num_hidden_layers
        for module in runner.model.modules():
            if hasattr(router := getattr(module, "router", None), "set_capture_fn"):
                router.set_capture_fn(partial(self._capture, module.layer_id))
        runner.execute_model = self._execute_model

    def take(self, name: str) -> tuple[bytes, list[int]] | None:
        """The rows of the request that vLLM made of `name`, [positions, layers, top_k] int16, and their shape.

        A position that was not computed, as its prefix was cached, holds -1, and so does a layer without experts.
        """
        found = next((key for key in self._records if key.startswith(f"{name}-")), None)
        if found is None:
            return None
        rows = self._records.pop(found).rows()
        return rows.tobytes(), list(rows.shape)

    def _capture(self, layer: int, chosen: torch.Tensor) -> None:
        self._chosen[layer] = chosen.to(torch.int16).numpy()

    def _execute_model(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self._chosen.clear()
        result = self._execute(scheduled, *arguments, **options)
        if self._chosen:
            self._keep(scheduled)
        return result

    def _keep(self, scheduled: Any) -> None:
        # Only new requests get a record, so that a step which was under way when one was taken makes none.
        for new in scheduled.scheduled_new_reqs:
            self._records[new.req_id] = _Record(len(new.prompt_token_ids))
        counts, batch = scheduled.num_scheduled_tokens, self._runner.input_batch
        top_k = next(iter(self._chosen.values())).shape[1]
        step = np.full((scheduled.total_num_scheduled_tokens, self._layers, top_k), -1, np.int16)
        for layer, chosen in self._chosen.items():
            step[:, layer] = chosen[: len(step)]
        offset = 0
        for index, name in enumerate(batch.req_ids):
            if (record := self._records.get(name)) is not None:
                record.add(int(batch.num_computed_tokens_cpu[index]), step[offset : offset + counts[name]])
            offset += counts[name]


class _Record:
    def __init__(self, prompt: int) -> None:
        self._prompt, self._end = prompt, 0
        self._parts: list[np.ndarray] = []

    def rows(self) -> np.ndarray:
        return np.concatenate(self._parts)

    def add(self, start: int, rows: np.ndarray) -> None:
        """Rows from position `start` on, of a step that draws the id after the last one, unless the prompt goes on."""
        stop = start + len(rows)
        # Of what was computed before, all that ids were drawn after stays; the last one may be drawn anew, as vLLM
        # drops the draw of a step that a reset interrupts.
        kept = min(self._end, stop - 1) if self._end >= self._prompt else min(self._end, start)
        if kept < self._end:
            self._parts = [self.rows()[:kept]]
        if kept < start:
            self._parts.append(np.full((start - kept, *rows.shape[1:]), -1, np.int16))
        # A copy, as a view would keep the rows of the whole batch.
        self._parts.append(rows[max(0, kept - start) :].copy())
        self._end = stop
