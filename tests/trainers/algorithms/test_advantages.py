import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from molt_gym.trainers.algorithms import advantages as module
from molt_gym.trainers.algorithms.advantages import (
    EstimatorOptions,
    TokenBatch,
    estimate_advantages,
    estimate_token_advantages,
)
from molt_gym.trainers.algorithms.registry import ESTIMATORS

ALL = ["grpo", "dr_grpo", "rloo", "reinforce_baseline", "flash_reinforce"]
TOKENS = ["reinforce", "gae", "on_policy_distill"]
finite = st.floats(-10, 10, width=32)


def double(values):
    return tensor(values, dtype=torch.float64)


def advantages_of(name, rewards, groups=None, tokens=None):
    rewards = torch.as_tensor(rewards, dtype=None if isinstance(rewards, torch.Tensor) else torch.float64)
    groups = torch.zeros(len(rewards), dtype=torch.long) if groups is None else tensor(groups)
    tokens = torch.ones(len(rewards), dtype=torch.long) if tokens is None else tensor(tokens)
    return estimate_advantages(name, rewards, groups, tokens)


@pytest.mark.parametrize(("name", "expected"), [
    ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
    ("grpo", [1.5, -0.5, -0.5, -0.5]),
    ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
])
def test_one_winner_of_four(name, expected):
    torch.testing.assert_close(advantages_of(name, [1.0, 0.0, 0.0, 0.0]), double(expected))


@pytest.mark.parametrize(("name", "expected"), [
    ("dr_grpo", [0.5, 1.0, -0.5, -1.0]),
    ("rloo", [1.0, 2.0, -1.0, -2.0]),
])
def test_each_group_has_its_own_baseline_in_any_order(name, expected):
    torch.testing.assert_close(advantages_of(name, [1.0, 5.0, 0.0, 3.0], [7, 3, 7, 3]), double(expected))


@pytest.mark.parametrize(("name", "win", "loss"), [
    ("grpo", 1.2076, -0.7246), ("dr_grpo", 0.625, -0.375), ("rloo", 0.714286, -0.428571),
])
def test_three_winners_of_eight(name, win, loss):
    values = advantages_of(name, [1.0] * 3 + [0.0] * 5)
    torch.testing.assert_close(values, double([win] * 3 + [loss] * 5), atol=5e-5, rtol=0)
    assert abs(values.sum().item()) < 1e-5


def test_whitening_counts_every_token_of_a_rollout():
    values = advantages_of("reinforce_baseline", [1.0, 0.0], tokens=[2, 1])
    torch.testing.assert_close(values, double([0.707107, -1.414214]), atol=1e-6, rtol=0)


def test_a_rollout_without_tokens_does_not_weigh_in_whitening():
    values = advantages_of("reinforce_baseline", [1.0, 0.0, 0.5], tokens=[2, 1, 0])
    torch.testing.assert_close(values[:2], double([0.707107, -1.414214]), atol=1e-6, rtol=0)
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
    assert values.dtype == torch.float64
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
        torch.testing.assert_close(moved, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_by_its_place(reward):
    with pytest.raises(ValueError, match=r"rewards\[1\]: (nan|inf) is not finite"):
        advantages_of("grpo", [1.0, reward])


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"shapes \(2,\), \(1,\)"):
        advantages_of("grpo", [1.0, 0.0], groups=[0])


def test_the_baseline_of_a_batch_counts_a_rollout_once_and_knows_no_groups():
    values = advantages_of("flash_reinforce", [1.0, 0.0, 0.0, 5.0], groups=[0, 0, 1, 1], tokens=[1, 3, 9, 1])
    assert values.tolist() == [-0.5, -1.5, -1.5, 3.5]
    assert advantages_of("flash_reinforce", [1.0, 0.0], groups=[0, 1], tokens=[1, 3]).tolist() == [0.5, -0.5]


def test_before_whitening_the_baseline_estimator_is_the_centred_reward():
    values = module.reinforce_baseline(double([1.0, 0, 0, 0]), torch.zeros(4, dtype=torch.long), double([1.0] * 4))
    assert values.tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize(("rewards", "equal"), [
    ([0.0, 0, 0, 1.9e-6], True), ([0.0, 0, 0, 2.1e-6], False), ([1e4, 1e4, 1e4, 1e4 + 0.019], True),
    ([1e4, 1e4, 1e4, 1e4 + 0.021], False),
])
def test_rewards_are_equal_up_to_a_deviation_of_a_millionth(name, rewards, equal):
    assert (advantages_of(name, rewards).abs().max().item() == 0) is equal


def by_hand(name, rewards, groups, tokens):
    """The same in NumPy, rollout by rollout."""
    values = []
    for i, reward in enumerate(rewards):
        group = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == groups[i] and j != i]
        spread = np.std(group, ddof=1) if others else 0.0
        centred = reward - np.mean(group) if spread >= 1e-6 * max(1, abs(np.mean(group))) else 0.0
        values.append({"grpo": centred / (spread + 1e-8), "dr_grpo": centred, "reinforce_baseline": centred,
                       "rloo": reward - np.mean(others) if centred else 0.0,
                       "flash_reinforce": reward - np.mean(rewards)}[name])
    if name != "reinforce_baseline":
        return np.array(values)
    repeated = np.repeat(values, tokens)
    if repeated.std() < 1e-6 * max(1, abs(repeated.mean())):
        return np.zeros(len(values))
    return (np.array(values) - repeated.mean()) / np.sqrt(max(repeated.var(), 1e-8))


@pytest.mark.parametrize("name", ALL)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_estimators_equal_those_computed_rollout_by_rollout(name, seed, size):
    random = np.random.default_rng(seed)
    rewards = random.choice([random.normal(size=size) * 10, random.integers(0, 2, size).astype(float)])
    groups, tokens = random.integers(0, 3, size), random.integers(1, 9, size)
    result = advantages_of(name, rewards.tolist(), groups.tolist(), tokens.tolist()).numpy()
    assert np.abs(result - by_hand(name, rewards, groups, tokens)).max() < 1e-10


@pytest.mark.parametrize("name", TOKENS)
def test_an_estimator_that_works_on_tokens_is_not_asked_for_rollouts(name):
    with pytest.raises(ValueError, match=f"'{name}' works on tokens; call estimate_token_advantages"):
        advantages_of(name, [1.0, 0.0])


@pytest.mark.parametrize("name", ALL)
def test_asked_for_tokens_an_estimator_of_rollouts_gives_each_token_that_of_its_rollout(name):
    rewards, groups, rollouts = double([1.0, 0.0, 0.5]), tensor([0, 0, 0]), tensor([2, 0, 0, 1, 2, 0])
    advantages, returns = estimate_token_advantages(name, TokenBatch(rewards, groups, rollouts), EstimatorOptions())
    assert advantages.tolist() == estimate_advantages(name, rewards, groups, tensor([3, 1, 2]))[rollouts].tolist()
    assert returns is None


def test_every_built_in_estimator_is_there_and_tested():
    # Other tests may have registered some of their own.
    assert sorted(ALL + TOKENS) == sorted(ESTIMATORS.built_in)
    assert all(callable(ESTIMATORS.function(name)) for name in ALL + TOKENS)


@pytest.mark.parametrize(("spread", "expected"), [(2.0, 1.0), (2e-4, 1.0), (4e-5, 0.2), (2.1e-6, 0.0105), (1.9e-6, 0)])
def test_whitening_neither_blows_up_small_differences_nor_sees_those_of_rounding(spread, expected):
    values = module.whiten(double([0.3, 0.3 + spread]))
    torch.testing.assert_close(values, double([-expected, expected]), atol=1e-9, rtol=0)
