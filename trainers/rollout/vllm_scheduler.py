"""vLLM's scheduler, with replies that leave the engine's process whole.

vLLM hands each token with its log-probability from one process to the other, in Python, which takes a large part of a
step (`benchmarks/vllm_updates.py --by-token` tells how much). Here what is sampled waits with the scheduler
until its reply ends. Invariant: while the engine is paused no id waits, so that who counts the tokens of the requests
in flight then knows which weights sampled what.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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


@dataclass
class _Reply:
    """What was sampled, of which the first `sent` ids have left; log-probabilities leave at the end, all at once."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sent: int = 0

    def take(self) -> list[int]:
        """The ids that have not left; they do now."""
        start, self.sent = self.sent, len(self.ids)
        return self.ids[start:]

    def rows(self) -> LogprobsLists | None:
        """As vLLM sends log-probabilities."""
        if not self.ids:
            return None
        return LogprobsLists(np.asarray(self.ids, np.int32)[:, None], np.asarray(self.logprobs, np.float32)[:, None],
                             np.zeros(len(self.ids), np.int32))


class Whole:
    """Over a scheduler of vLLM, whose methods these are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replies: dict[str, _Reply] = {}

    def add_request(self, request: Any) -> None:
        """Take a request on."""
        if _sent_whole(request.sampling_params):
            self._replies[request.request_id] = _Reply()
        super().add_request(request)

    def has_requests(self) -> bool:
        """Whether there is a reason to step, here also to send what waits."""
        return any(self._due()) or super().has_requests()

    def finish_requests(self, request_ids: str | Iterable[str] | None, *args: Any, **kwargs: Any) -> Any:
        """Let go of requests that were taken back, all of them for None, and of what they sampled."""
        result = super().finish_requests(request_ids, *args, **kwargs)
        self._replies = {name: reply for name, reply in self._replies.items() if name in self.requests}
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
        for name in list(self._due()):
            answer = answers.setdefault(self.requests[name].client_index, EngineCoreOutputs())
            answer.outputs.append(EngineCoreOutput(name, self._replies[name].take()))
        return answers

    def _due(self) -> Iterator[str]:
        """While paused, the requests of which some ids have not left."""
        if self.pause_state == PauseState.PAUSED_ALL:
            yield from (name for name, reply in self._replies.items() if reply.sent < len(reply.ids))

    def _passes(self, output: EngineCoreOutput, logprobs: LogprobsLists | None, sampled: list[float]) -> bool:
        """Whether to send it now, as it is left then."""
        place, reply = output.new_logprobs, self._replies.get(output.request_id)
        if reply is None:
            output.new_logprobs = logprobs.slice_request(*place) if logprobs is not None and place else None
            return True
        if output.new_token_ids:
            index, count = place
            start = index if logprobs.cu_num_generated_tokens is None else logprobs.cu_num_generated_tokens[index]
            reply.ids += output.new_token_ids
            reply.logprobs += sampled[start : start + count]
        if output.finish_reason is None:
            return False
        del self._replies[output.request_id]
        output.new_token_ids, output.new_logprobs = reply.take(), reply.rows()
        return True


class WholeReplies(Whole, Scheduler):
    """One step after the other."""


class AsyncWholeReplies(Whole, AsyncScheduler):
    """The next step is prepared while one is computed."""


def _sent_whole(sampling: Any) -> bool:
    """Whether nobody looks at a reply before its end, and of log-probabilities at those of sampled tokens alone."""
    return (sampling is not None and sampling.output_kind == RequestOutputKind.FINAL_ONLY and not sampling.detokenize
            and sampling.num_logprobs == 0)
