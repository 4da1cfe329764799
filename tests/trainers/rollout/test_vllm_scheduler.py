"""Replies leave vLLM's scheduler whole; in the place of vLLM's own, one that samples what it is told."""

from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


class Inner:
    """What vLLM's scheduler does at the end of a step, for requests of one client each."""

    def __init__(self) -> None:
        self.requests: dict[str, SimpleNamespace] = {}
        self.pause_state = unpaused()

    def add_request(self, request):
        self.requests[request.request_id] = request

    def has_requests(self):
        return False

    def finish_requests(self, request_ids, status):
        for name in request_ids:
            del self.requests[name]

    def update_from_output(self, step, output):
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

        answers = {}
        for index, (name, ids, reason) in enumerate(step):
            request = self.requests[name]
            asked = request.sampling_params.logprobs is not None
            rows = output.logprobs.slice_request(index, len(ids)) if asked else None
            answers[request.client_index] = EngineCoreOutputs(
                outputs=[EngineCoreOutput(name, ids, rows, finish_reason=reason)])
            if reason is not None:
                del self.requests[name]
        return answers


def unpaused():
    from vllm.v1.core.sched.interface import PauseState

    return PauseState.UNPAUSED


def make():
    from molt_gym.trainers.rollout.vllm_scheduler import Whole

    class Scheduler(Whole, Inner):
        pass

    return Scheduler()


def add(scheduler, name: str, **sampling) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(**{"logprobs": 0, "detokenize": False,
                                   "output_kind": RequestOutputKind.FINAL_ONLY} | sampling)
    scheduler.add_request(SimpleNamespace(request_id=name, client_index=len(scheduler.requests),
                                          sampling_params=parameters))


def logprob(token: int) -> float:
    return -token / 8


def step(scheduler, *sampled: tuple[str, list[int], object]):
    """What the scheduler sends after a step: (name, ids, the log-probabilities, how it ended)."""
    from vllm.v1.outputs import LogprobsLists

    ids = [token for _, tokens, _ in sampled for token in tokens]
    starts = np.cumsum([0, *(len(tokens) for _, tokens, _ in sampled)]).tolist()
    table = np.array([[logprob(token), -9.0] for token in ids], np.float32).reshape(-1, 2)
    rows = LogprobsLists(np.array([[token, 7] for token in ids], np.int32).reshape(-1, 2), table,
                         np.arange(len(ids), dtype=np.int32), starts if len(ids) != len(sampled) else None)
    answers = scheduler.update_from_output(sampled, SimpleNamespace(logprobs=rows if sampled else None))
    return [(output.request_id, output.new_token_ids,
             None if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist(), output.finish_reason)
            for answer in answers.values() for output in answer.outputs]


def pause(scheduler, paused: bool = True) -> None:
    from vllm.v1.core.sched.interface import PauseState

    scheduler.pause_state = PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED


STOP = 0
"""vLLM's number of that reason."""


def test_nothing_is_sent_before_a_reply_ends_and_then_all_of_it():
    scheduler = make()
    add(scheduler, "a")
    add(scheduler, "b")
    assert step(scheduler, ("a", [1], None), ("b", [5], None)) == []
    assert step(scheduler, ("b", [6], STOP), ("a", [2], None)) == [("b", [5, 6], [-5 / 8, -6 / 8], STOP)]
    assert step(scheduler, ("a", [3], STOP)) == [("a", [1, 2, 3], [-1 / 8, -2 / 8, -3 / 8], STOP)]


@pytest.mark.parametrize("sampling", [{"logprobs": None}, {"logprobs": 1}, {"detokenize": True}, {"output_kind": 0}])
def test_requests_that_are_looked_at_earlier_or_closer_are_served_as_ever(sampling):
    from vllm.sampling_params import RequestOutputKind

    if "output_kind" in sampling:
        sampling = {"output_kind": RequestOutputKind.CUMULATIVE}
    scheduler = make()
    add(scheduler, "a")
    add(scheduler, "b", **sampling)
    expected = None if sampling.get("logprobs", 0) is None else [-5 / 8]
    assert step(scheduler, ("a", [1], None), ("b", [5], None)) == [("b", [5], expected, None)]


def test_a_pause_sends_what_waits_even_if_no_step_was_on_its_way():
    scheduler = make()
    add(scheduler, "a")
    add(scheduler, "b")
    step(scheduler, ("a", [1], None))
    assert not scheduler.has_requests()
    pause(scheduler)
    assert scheduler.has_requests()
    assert step(scheduler) == [("a", [1], None, None)]
    assert not scheduler.has_requests()
    pause(scheduler, False)
    assert step(scheduler, ("a", [2], STOP)) == [("a", [2], [-1 / 8, -2 / 8], STOP)]


def test_a_reply_that_ends_without_another_token_is_sent_with_those_that_it_had():
    scheduler = make()
    add(scheduler, "a")
    step(scheduler, ("a", [1], None))
    assert step(scheduler, ("a", [], STOP)) == [("a", [1], [-1 / 8], STOP)]


def test_of_a_request_that_is_taken_back_nothing_stays():
    scheduler = make()
    add(scheduler, "a")
    step(scheduler, ("a", [1], None))
    scheduler.finish_requests(["a"], None)
    pause(scheduler)
    assert not scheduler.has_requests()
    assert step(scheduler) == []


@settings(deadline=None)
@given(st.data())
def test_whatever_the_steps_and_pauses_each_reply_arrives_in_order_and_complete(data):
    scheduler, sent, got = make(), {}, {}
    for number in range(3):
        add(scheduler, str(number))
    for _ in range(data.draw(st.integers(1, 12))):
        pause(scheduler, data.draw(st.booleans()))
        names = data.draw(st.permutations(sorted(scheduler.requests)))
        names = names[: data.draw(st.integers(0, len(names)))]
        sampled = [(name, data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=3)),
                    data.draw(st.sampled_from([None, None, STOP]))) for name in names]
        for name, ids, _ in sampled:
            sent.setdefault(name, []).extend(ids)
        for name, ids, values, reason in step(scheduler, *sampled):
            got.setdefault(name, []).extend(ids)
            assert values == (None if reason is None else [logprob(token) for token in got[name]])
        assert not scheduler.has_requests()
        for name, _, reason in sampled:
            assert reason is None or got[name] == sent[name]
    pause(scheduler)
    for name, ids, _, _ in step(scheduler):
        got.setdefault(name, []).extend(ids)
    assert got == sent
