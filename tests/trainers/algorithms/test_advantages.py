import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from molt_gym.trainers.algorithms.advantages import ESTIMATORS, estimate_advantages, estimator
from molt_gym.trainers.config import AlgorithmConfig

ALL = ["grpo", "dr_grpo", "rloo", "reinforce_baseline"]
finite = st.floats(-10, 10, width=32)


def advantages_of(name, rewards, groups=None, tokens=None):
    rewards = torch.as_tensor(rewards)
    groups = torch.zeros(len(rewards), dtype=torch.long) if groups is None else tensor(groups)
    tokens = torch.ones(len(rewards), dtype=torch.long) if tokens is None else tensor(tokens)
    return estimate_advantages(name, rewards, groups, tokens)


@pytest.mark.parametrize(("name", "expected"), [
    ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
    ("grpo", [1.5, -0.5, -0.5, -0.5]),
    ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
])
def test_one_winner_of_four(name, expected):
    torch.testing.assert_close(advantages_of(name, [1.0, 0.0, 0.0, 0.0]), tensor(expected))


@pytest.mark.parametrize(("name", "expected"), [
    ("dr_grpo", [0.5, 1.0, -0.5, -1.0]),
    ("rloo", [1.0, 2.0, -1.0, -2.0]),
])
def test_each_group_has_its_own_baseline_in_any_order(name, expected):
    torch.testing.assert_close(advantages_of(name, [1.0, 5.0, 0.0, 3.0], [7, 3, 7, 3]), tensor(expected))


@pytest.mark.parametrize(("name", "win", "loss"), [
    ("grpo", 1.2076, -0.7246), ("dr_grpo", 0.625, -0.375), ("rloo", 0.714286, -0.428571),
])
def test_three_winners_of_eight(name, win, loss):
    values = advantages_of(name, [1.0] * 3 + [0.0] * 5)
    torch.testing.assert_close(values, tensor([win] * 3 + [loss] * 5), atol=5e-5, rtol=0)
    assert abs(values.sum().item()) < 1e-5


def test_whitening_counts_every_token_of_a_rollout():
    values = advantages_of("reinforce_baseline", [1.0, 0.0], tokens=[2, 1])
    torch.testing.assert_close(values, tensor([0.707107, -1.414214]))


def test_a_rollout_without_tokens_does_not_weigh_in_whitening():
    values = advantages_of("reinforce_baseline", [1.0, 0.0, 0.5], tokens=[2, 1, 0])
    torch.testing.assert_close(values[:2], tensor([0.707107, -1.414214]))
    assert values.isfinite().all()
    assert advantages_of("reinforce_baseline", [1.0, 0.0], tokens=[0, 0]).tolist() == [0, 0]


def test_a_reward_counts_once_however_many_rows_and_tokens_a_rollout_has():
    for name in ("grpo", "dr_grpo", "rloo"):
        short = advantages_of(name, [1.0, 0.0], tokens=[5, 5])
        assert torch.equal(short, advantages_of(name, [1.0, 0.0], tokens=[5, 500]))
    assert advantages_of("dr_grpo", [1.0, 0.0]).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(value=finite, size=st.integers(1, 16))
@settings(max_examples=30, deadline=None)
def test_equal_rewards_give_no_advantage(name, dtype, value, size):
    values = advantages_of(name, torch.full((size,), value, dtype=dtype))
    assert values.dtype == torch.float32
    assert values.abs().max() < 1e-6


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("noise", [6e-8, 4e-7])
def test_rewards_that_differ_by_rounding_are_equal(name, noise):
    assert advantages_of(name, torch.tensor([0.7] * 7 + [0.7 + noise])).abs().max() == 0


@pytest.mark.parametrize("name", ALL)
def test_one_loser_among_equal_winners_does_not_explode(name):
    values = advantages_of(name, torch.tensor([0.0] + [0.95] * 7))
    assert values.abs().max() < 10
    assert values[0] < 0 < values[1]


@pytest.mark.parametrize("name", ALL)
def test_a_group_of_one_gives_zero(name):
    assert advantages_of(name, [1.0]).tolist() == [0]
    assert advantages_of(name, [1.0, 1.0, 0.0], groups=[0, 1, 1]).isfinite().all()


@given(rewards=st.lists(finite, min_size=2, max_size=16))
@settings(max_examples=200, deadline=None)
def test_group_norm_is_bounded_and_centred(rewards):
    values, n = advantages_of("grpo", rewards), len(rewards)
    assert values.abs().max() <= (n - 1) / math.sqrt(n) + 1e-5
    assert abs(values.sum().item()) < 1e-4


@given(rewards=st.lists(finite, min_size=1, max_size=12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_order_of_rollouts_does_not_matter(rewards, data):
    n = len(rewards)
    groups = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    tokens = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    order = data.draw(st.permutations(range(n)))
    for name in ALL:
        moved = advantages_of(name, *[[column[i] for i in order] for column in (rewards, groups, tokens)])
        expected = advantages_of(name, rewards, groups, tokens)[list(order)]
        torch.testing.assert_close(moved, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_by_its_place(reward):
    with pytest.raises(ValueError, match=r"rewards\[1\]: (nan|inf) is not finite"):
        advantages_of("grpo", [1.0, reward])


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"shapes \(2,\), \(1,\)"):
        advantages_of("grpo", [1.0, 0.0], groups=[0])


def test_the_configuration_offers_exactly_the_registered_estimators():
    assert set(get_args(AlgorithmConfig.model_fields["estimator"].annotation)) == set(ESTIMATORS)


def test_a_new_estimator_is_called_by_its_name(monkeypatch):
    monkeypatch.setattr("molt_gym.trainers.algorithms.advantages.ESTIMATORS", dict(ESTIMATORS))
    estimator("plain")(lambda rewards, groups, tokens: rewards)
    assert advantages_of("plain", [2.0, 3.0]).tolist() == [2.0, 3.0]
