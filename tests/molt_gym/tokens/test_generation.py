import math

import numpy as np
import pytest

from molt_gym.tokens import Generation, Sampling
from molt_gym.tokens.generation import TOP


def test_a_generation_that_holds_together_comes_back_in_plain_numbers():
    checked = Generation(np.array([3, 4]), np.array([-0.5, 0.0], np.float32), [np.int64(1), 1], "stop").checked()
    assert checked == Generation([3, 4], [-0.5, 0.0], [1, 1], "stop")
    assert [type(v) for v in (*checked.ids, *checked.logprobs, *checked.versions)] == [int] * 2 + [float] * 2 + [
        int
    ] * 2


def test_a_log_probability_above_zero_by_rounding_counts_as_zero():
    assert Generation([1, 2], [7.6e-6, -1.0], [0, 0], "stop").checked().logprobs == [0.0, -1.0]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("logprobs", {"logprobs": [-0.5]}),
        ("logprobs", {"logprobs": None}),
        ("logprobs[1]", {"logprobs": [-0.5, None]}),
        ("logprobs[1]", {"logprobs": [-0.5, math.nan]}),
        ("logprobs[0]", {"logprobs": [-math.inf, -0.5]}),
        ("logprobs[0]", {"logprobs": [0.5, -0.5]}),
        ("versions", {"versions": [0]}),
        ("versions", {"versions": [0, -1]}),
        ("versions[0]", {"versions": [0.5, 1]}),
        ("ids", {"ids": [-1, 2]}),
        ("ids[1]", {"ids": [1, "x"]}),
        ("finish_reason", {"finish_reason": "done"}),
    ],
)
def test_a_generation_that_does_not_hold_together_is_refused_by_field(field, change):
    fields = {"ids": [1, 2], "logprobs": [-0.5, -0.5], "versions": [0, 0], "finish_reason": "stop"} | change
    with pytest.raises(ValueError, match=rf"generation\.{field}".replace("[", r"\[").replace("]", r"\]")):
        Generation(**fields).checked()


def test_a_generation_that_ended_earlier_has_of_everything_what_belongs_to_its_ids():
    routed, top = np.zeros((3 + 4 - 1, 2, 1), np.int16), np.zeros((4, 5), TOP)
    whole = Generation([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0], [0, 0, 1, 1], "length", routed, top)
    cut = whole.ended_at(2)
    assert (cut.ids, cut.logprobs, cut.versions, cut.finish_reason) == ([1, 2], [-1.0, -2.0], [0, 0], "stop")
    assert (len(cut.routed_experts), len(cut.top)) == (3 + 2 - 1, 2)
    with pytest.raises(ValueError, match="generation.logprobs"):
        Generation([1, 2, 3], [-2.0, -3.0], [0, 0, 0], "stop").ended_at(2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
    ],
)
def test_sampling_out_of_range_is_refused_by_field(field, value):
    with pytest.raises(ValueError, match=f"sampling.{field}"):
        Sampling(**{field: value})
