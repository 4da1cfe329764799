"""A teacher in a vLLM engine of its own, which scores what the student sampled.

Invariants: ids are scored as they were sampled, under the same temperature; the weights are those of the folder and
never change; an engine that fails is replaced, as often in a run as `failures.engine_restarts` allows.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import torch

from molt_gym.errors import RunFailed
from molt_gym.tokens import Renderer

from .actor.packing import TrainRow
from .config import Config
from .rollout.vllm_engine import VllmEngine
from .rollout.vllm_spec import check_engine_args


class TeacherEngine:
    """Starts at once, in a process of its own.

    Args:
        config: of the run, with precisions that are known.
        path: the teacher's folder.
        renderer: of the student, whose stop tokens are the teacher's.

    Raises:
        ConfigError: vLLM is not installed, does not know one of the arguments, or cannot run the model.
    """

    def __init__(self, config: Config, path: str, renderer: Renderer) -> None:
        rollout, algorithm = config.rollout, config.algorithm
        check_engine_args(algorithm.teacher_engine_args, "algorithm.teacher_engine")
        # vLLM samples a token behind what it scores.
        self._make = partial(
            VllmEngine, path, renderer, dtype=getattr(torch, config.actor.dtype), max_context=rollout.max_context + 1,
            max_sequences=rollout.max_concurrency, engine_args=algorithm.teacher_engine_args,
            score_temperature=rollout.temperature)
        self._timeout, self._restarts_left = rollout.generate_timeout, config.failures.engine_restarts
        # The others wait here, so that a deadline is one for scoring and not for queueing.
        self._seats = asyncio.Semaphore(rollout.max_concurrency)
        self._engine, self._proven = self._make(), False

    async def score(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Give the rows their `ref_logprobs`; returns time/teacher.

        Raises:
            RunFailed: the engine did not start at all, or failed too often.
        """
        started, left = time.perf_counter(), list(rows)
        while left:
            answers = await asyncio.gather(*map(self._score, left), return_exceptions=True)
            failures = [answer for answer in answers if isinstance(answer, BaseException)]
            self._proven |= len(failures) < len(left)
            left = [row for row, answer in zip(left, answers, strict=True) if isinstance(answer, BaseException)]
            if failures:
                await self._replace(failures[0])
        return {"time/teacher": time.perf_counter() - started}

    async def close(self) -> None:
        """End the process."""
        await self._engine.close()

    async def _score(self, row: TrainRow) -> None:
        row.ref_logprobs = []
        if row.images:
            raise ValueError("a rollout has images, which this engine is not shown; write algorithm.teacher_engine = "
                             "'actor'")
        if trained := row.trained:
            async with self._seats:
                scores = await self._engine.score(row.ids[: trained[-1] + 1], self._timeout, row.images)
            row.ref_logprobs = [scores[position - 1] for position in trained]

    async def _replace(self, cause: BaseException) -> None:
        # An engine that never answered has a wrong setting, which starting again does not mend.
        if not isinstance(cause, RunFailed) or not self._proven or not self._restarts_left:
            raise RunFailed(f"the teacher's engine: {cause}") from cause
        self._restarts_left -= 1
        await self._engine.close()
        self._engine = await asyncio.to_thread(self._make)
