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
    discounted_sums,
    estimate_token_advantages,
)

NAMES = ["reinforce", "gae", "on_policy_distill"]


def double(values):
    return tensor(values, dtype=torch.float64)


def batch_of(masks, rewards, *, kl=None, values=None, owners=None):
    """A batch of rows [B, L], of which `owners` [B] says whose they are; only what was sampled goes in."""
    mask = tensor(masks).bool()
    owners = tensor(range(len(masks)) if owners is None else owners)
    kl, values = (None if rows is None else double(rows)[mask] for rows in (kl, values))
    return TokenBatch(double(rewards), torch.zeros(len(rewards), dtype=torch.long),
                      owners[:, None].expand_as(mask)[mask], kl, values)


def raw(name, batch, **options):
    """Before whitening."""
    return getattr(module, name)(batch, EstimatorOptions(**options))


@pytest.mark.parametrize(("masks", "values", "advantages", "returns"), [
    ([[1, 1, 1, 0, 0]], [[0.5, -0.3, 0.9, 4, -7]], [0.43025, 1.295, 0.1], [0.93025, 0.995, 1]),
    ([[1, 1, 0, 0, 1, 1]], [[0.5, -0.3, 9, -9, 0.7, 0.2]], [0.38465, 1.247, 0.26, 0.8], [0.88465, 0.947, 0.96, 1]),
    ([[1, 1, 0, 0, 1]], [[0.5, 0.4, 9, -9, 0.6]], [0.451, 0.58, 0.4], [0.951, 0.98, 1]),
])
def test_gae_carries_value_and_advantage_across_tokens_that_were_not_sampled(masks, values, advantages, returns):
    batch = batch_of(masks, [1.0], values=values)
    torch.testing.assert_close(raw("gae", batch, lam=0.95), double(advantages), atol=1e-12, rtol=0)
    estimate = estimate_token_advantages("gae", batch, EstimatorOptions(lam=0.95))
    torch.testing.assert_close(estimate.returns, double(returns), atol=1e-12, rtol=0)


def test_gae_with_a_discount():
    batch = batch_of([[1, 1, 0, 0, 1]], [1.0], values=[[0.5, 0.4, 9, -9, 0.6]])
    result = raw("gae", batch, gamma=0.9, lam=0.8)
    torch.testing.assert_close(result, double([0.16816, 0.428, 0.4]), atol=1e-12, rtol=0)


def test_reinforce_takes_kl_off_the_reward_of_each_sampled_token():
    batch = batch_of([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]], [2.0, -1.0],
                     kl=[[0.5, 9, -0.25, 0.75, -4], [3, -0.5, 0.25, 8, -2]])
    result = raw("reinforce", batch, kl_coefficient=0.2)
    torch.testing.assert_close(result, double([1.8, 1.9, 1.85, -0.95, -1.05]), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [1, 1, 1, 1]), (0.9, [0.729, 0.81, 0.9, 1])])
def test_an_outcome_reaches_the_first_turn_and_only_sampled_tokens_discount_it(gamma, expected):
    result = raw("reinforce", batch_of([[1, 1, 0, 0, 1, 1]], [1.0]), gamma=gamma)
    torch.testing.assert_close(result, double(expected), atol=1e-12, rtol=0)


def test_kl_of_tokens_that_were_not_sampled_does_not_leak():
    batch = batch_of([[1, 0, 0, 1]], [0.0], kl=[[1.0, 1, 1, 1]])
    assert raw("reinforce", batch, gamma=0.9, kl_coefficient=1)[0].item() == pytest.approx(-1.9)


def test_a_reward_reaches_the_last_sampled_token_though_others_follow():
    assert raw("reinforce", batch_of([[1, 1, 0]], [1.0]), gamma=0.9).tolist() == pytest.approx([0.9, 1])


def test_reinforce_is_whitened_over_the_sampled_tokens_of_the_batch():
    advantages, returns = estimate_token_advantages("reinforce", batch_of([[1, 1, 0], [1, 0, 0]], [1.0, 0.0]))
    torch.testing.assert_close(advantages, double([0.707107, 0.707107, -1.414214]), atol=1e-6, rtol=0)
    assert returns is None


def test_distillation_is_minus_the_divergence_from_the_teacher_whatever_the_reward():
    for rewards in ([0.0, 0.0], [5.0, -3.0]):
        batch = batch_of([[1, 1, 0], [1, 0, 0]], rewards, kl=[[0.5, -0.25, 3], [1, 2, 2]])
        result = estimate_token_advantages("on_policy_distill", batch, EstimatorOptions(kl_coefficient=1.0))
        assert result.advantages.tolist() == [-0.5, 0.25, -1]


def test_equal_returns_are_whitened_to_zero():
    assert estimate_token_advantages("reinforce", batch_of([[1, 1, 1]] * 2, [0.7, 0.7])).advantages.abs().max() == 0


# Against a recursion that goes back over all positions, one at a time

def by_hand(name, case, gamma, lam, beta):
    """Advantages (not whitened) and returns of the sampled positions of rows [B, L], in row order."""
    mask, kl, values, owners, rewards = case
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for rollout, reward in enumerate(rewards):
        later_value = later = 0.0
        first = True
        for b in reversed(np.flatnonzero(owners == rollout)):
            for t in reversed(range(mask.shape[1])):
                if not mask[b, t]:
                    continue
                x = -beta * kl[b, t] + (reward if first else 0)
                first = False
                if name == "reinforce":
                    later = x + gamma * later
                elif name == "gae":
                    later = x + gamma * later_value - values[b, t] + gamma * lam * later
                    later_value = values[b, t]
                else:
                    later = -beta * kl[b, t]
                advantages[b, t], returns[b, t] = later, later + values[b, t]
    return advantages[mask], returns[mask]


def whitened(values):
    if values.std() < 1e-6 * max(1, abs(values.mean())):
        return np.zeros_like(values)
    return (values - values.mean()) / np.sqrt(max(values.var(), 1e-8))


def random_case(seed):
    random = np.random.default_rng(seed)
    rows, length = random.integers(1, 8), random.integers(1, 14)
    mask = random.random((rows, length)) < 0.6
    mask[:, 0] = True
    owners = random.integers(0, 3, rows)
    return mask, random.normal(size=mask.shape), random.normal(size=mask.shape), owners, random.normal(size=3)


def estimate_of(name, case, **options):
    mask, kl, values, owners, rewards = case
    batch = batch_of(mask.tolist(), rewards.tolist(), kl=kl.tolist(), values=values.tolist(), owners=owners.tolist())
    return estimate_token_advantages(name, batch, EstimatorOptions(**options))


seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds, gamma=st.floats(0, 1), lam=st.floats(0, 1), beta=st.floats(0, 2))
@settings(max_examples=60, deadline=None)
def test_estimators_equal_a_recursion_over_all_positions(name, seed, gamma, lam, beta):
    case = random_case(seed)
    estimate = estimate_of(name, case, gamma=gamma, lam=lam, kl_coefficient=beta)
    advantages, returns = by_hand(name, case, gamma, lam, beta)
    expected = advantages if name == "on_policy_distill" else whitened(advantages)
    assert np.abs(estimate.advantages.numpy() - expected).max() < 1e-9
    if name == "gae":
        assert np.abs(estimate.returns.numpy() - returns).max() < 1e-11


OPTIONS = {"gamma": 0.9, "lam": 0.8, "kl_coefficient": 0.3}


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_observation_tokens_between_change_nothing(name, seed):
    mask, kl, values, owners, rewards = random_case(seed)
    random = np.random.default_rng(seed)
    places = np.sort(random.integers(0, mask.shape[1] + 1, 5))
    noise = random.normal(size=5) * 100
    wider = (np.insert(mask, places, False, axis=1), np.insert(kl, places, noise, axis=1),
             np.insert(values, places, noise, axis=1), owners, rewards)
    before, after = (estimate_of(name, case, **OPTIONS) for case in ((mask, kl, values, owners, rewards), wider))
    torch.testing.assert_close(after.advantages, before.advantages, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds, cut=st.integers(0, 14))
@settings(max_examples=30, deadline=None)
def test_a_rollout_split_into_branches_has_the_advantages_of_one_row(name, seed, cut):
    mask, kl, values, _, rewards = random_case(seed)
    rows = len(mask)
    owners, rewards = np.arange(rows), np.resize(rewards, rows)
    early = np.arange(mask.shape[1]) < cut
    halves = np.stack([mask & early, mask & ~early], 1).reshape(-1, mask.shape[1])
    split = (halves, kl.repeat(2, 0), values.repeat(2, 0), owners.repeat(2), rewards)
    before, after = (estimate_of(name, case, **OPTIONS) for case in ((mask, kl, values, owners, rewards), split))
    torch.testing.assert_close(after.advantages, before.advantages, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_the_order_of_rollouts_and_the_mixing_of_their_rows_do_not_matter(name, seed):
    mask, kl, values, owners, rewards = random_case(seed)
    random = np.random.default_rng(seed)
    before = estimate_of(name, (mask, kl, values, owners, rewards), **OPTIONS).advantages
    # Rows of one rollout keep their order; everything else moves.
    shuffled = random.permutation(owners)
    order = np.empty(len(owners), dtype=int)
    for owner in range(3):
        order[shuffled == owner] = np.flatnonzero(owners == owner)
    names = random.permutation(3)
    moved = (mask[order], kl[order], values[order], names[owners[order]], rewards[np.argsort(names)])
    after = estimate_of(name, moved, **OPTIONS).advantages
    place = np.zeros(mask.shape, dtype=int)
    place[mask] = np.arange(mask.sum())
    torch.testing.assert_close(after, before[torch.as_tensor(place[order][mask[order]])], atol=1e-12, rtol=0)


def test_sums_of_a_long_rollout_are_those_of_a_plain_loop():
    values, expected, later = torch.randn(5000, dtype=torch.float64), torch.zeros(5000, dtype=torch.float64), 0.0
    for t in reversed(range(5000)):
        expected[t] = later = values[t] + 0.999 * later
    result = discounted_sums(values, torch.zeros(5000, dtype=torch.long), 0.999)
    torch.testing.assert_close(result, expected, atol=1e-10, rtol=0)
    assert discounted_sums(values[:0], torch.zeros(0, dtype=torch.long), 0.9).shape == (0,)


@pytest.mark.parametrize(("name", "missing", "options"), [
    ("gae", "values: missing; 'gae' needs those of a critic", {}),
    ("reinforce", "kl: missing, though the KL coefficient of 'reinforce' is 0.1", {"kl_coefficient": 0.1}),
    ("on_policy_distill", "kl: missing", {}),
])
def test_what_an_estimator_needs_and_does_not_get_is_named(name, missing, options):
    with pytest.raises(ValueError, match=missing):
        estimate_token_advantages(name, batch_of([[1, 1]], [1.0]), EstimatorOptions(**options))


@pytest.mark.parametrize(("field", "given", "message"), [
    ("kl", [[0.1, float("nan")]], r"kl\[1\]: nan is not finite"),
    ("values", [[float("inf"), 0.0]], r"values\[0\]: inf is not finite"),
])
def test_numbers_that_are_not_finite_are_refused_by_their_place(field, given, message):
    inputs = {"kl": [[0.0, 0.0]], "values": [[0.0, 0.0]]} | {field: given}
    with pytest.raises(ValueError, match=message):
        estimate_token_advantages("gae", batch_of([[1, 1]], [1.0], **inputs))
    with pytest.raises(ValueError, match=r"rewards\[0\]: nan is not finite"):
        estimate_token_advantages("gae", batch_of([[1, 1]], [float("nan")], values=[[0.0, 0.0]]))


def test_token_lists_of_another_length_are_refused():
    batch = TokenBatch(double([1.0]), tensor([0]), tensor([0, 0]), values=double([1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match=r"values: shape \(3,\); give one entry for each of 2 tokens"):
        estimate_token_advantages("gae", batch)
