"""vLLM's scheduler, with replies that leave the engine's process whole.

vLLM sends each token with its log-probability through three Python objects from one process to the other, which takes
longer than computing it: of a model of 0.6 billion parameters half of the time. Here what is sampled waits with the
scheduler until its reply ends. Invariant: while the engine is paused nothing waits, so that who counts the tokens of
the requests in flight then knows which weights sampled what.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists


class _Places:
    """In the place of a step's log-probabilities, for vLLM to ask: where they are, as most are not sent now."""

    def slice_request(self, index: int, count: int) -> tuple[int, int]:
        return index, count


class Whole:
    """Over a scheduler of vLLM, whose methods these are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting_tokens: dict[str, tuple[list[int], list[float]]] = {}

    def add_request(self, request: Any) -> None:
        """Take a request on."""
        if _sent_whole(request.sampling_params):
            self._waiting_tokens[request.request_id] = ([], [])
        super().add_request(request)

    def has_requests(self) -> bool:
        """Whether there is a reason to step, here also to send what waits."""
        waiting = self._must_send() and any(ids for ids, _ in self._waiting_tokens.values())
        return waiting or super().has_requests()

    def finish_requests(self, request_ids: str | Iterable[str] | None, *args: Any, **kwargs: Any) -> Any:
        """Let go of requests that were taken back, all of them for None, and of what they sampled."""
        result = super().finish_requests(request_ids, *args, **kwargs)
        self._waiting_tokens = {name: waiting for name, waiting in self._waiting_tokens.items()
                                if name in self.requests}
        return result

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """What to send after a step, by client."""
        logprobs = model_runner_output.logprobs
        if logprobs is not None:
            model_runner_output.logprobs = _Places()
        answers = super().update_from_output(scheduler_output, model_runner_output)
        # Lists, as a view would keep the step's own page-locked memory, and each step would have to take new one.
        sampled = [] if logprobs is None else logprobs.logprobs[:, 0].tolist()
        for client, answer in list(answers.items()):
            answer.outputs = [output for output in answer.outputs if self._passes(output, logprobs, sampled)]
            if not (answer.outputs or answer.finished_requests or answer.scheduler_stats):
                del answers[client]
        if self._must_send():
            for name, (ids, waiting) in self._waiting_tokens.items():
                if ids:
                    answer = answers.setdefault(self.requests[name].client_index, EngineCoreOutputs())
                    answer.outputs.append(EngineCoreOutput(name, ids, _rows(ids, waiting)))
                    self._waiting_tokens[name] = ([], [])
        return answers

    def _must_send(self) -> bool:
        return self.pause_state == PauseState.PAUSED_ALL

    def _passes(self, output: EngineCoreOutput, logprobs: LogprobsLists | None, sampled: list[float]) -> bool:
        """Whether to send it now, as it is left then."""
        place, waiting = output.new_logprobs, self._waiting_tokens.get(output.request_id)
        if waiting is None:
            output.new_logprobs = logprobs.slice_request(*place) if logprobs is not None and place else None
            return True
        ids, values = waiting
        if output.new_token_ids:
            index, count = place
            start = index if logprobs.cu_num_generated_tokens is None else logprobs.cu_num_generated_tokens[index]
            ids += output.new_token_ids
            values += sampled[start : start + count]
        if output.finish_reason is None:
            return False
        del self._waiting_tokens[output.request_id]
        output.new_token_ids, output.new_logprobs = ids, _rows(ids, values)
        return True


class WholeReplies(Whole, Scheduler):
    """One step after the other."""


class AsyncWholeReplies(Whole, AsyncScheduler):
    """The next step is prepared while one is computed."""


def _sent_whole(sampling: Any) -> bool:
    """Whether nobody looks at a reply before its end, and of log-probabilities at those of sampled tokens alone."""
    return (sampling is not None and sampling.output_kind == RequestOutputKind.FINAL_ONLY and not sampling.detokenize
            and sampling.num_logprobs == 0)


def _rows(ids: list[int], logprobs: list[float]) -> LogprobsLists | None:
    if not ids:
        return None
    column = np.asarray(ids, np.int32)[:, None]
    return LogprobsLists(column, np.asarray(logprobs, np.float32)[:, None], np.zeros(len(ids), np.int32))
