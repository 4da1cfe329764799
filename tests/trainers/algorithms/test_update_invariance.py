"""The gradient of a whole update, from rewards to the loss, by how the same rollouts are stored, ordered and cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_gym.trainers.algorithms.advantages import EstimatorOptions, TokenBatch, estimate_token_advantages
from molt_gym.trainers.algorithms.importance import importance_coefficients
from molt_gym.trainers.algorithms.kl import kl_estimate, kl_loss
from molt_gym.trainers.algorithms.losses import policy_loss, token_weights, value_loss

ESTIMATORS = ["reinforce", "gae", "grpo", "reinforce_baseline", "flash_reinforce", "on_policy_distill"]
MODES = ["token_mean", "rollout_mean_token_mean", "group_mean_token_mean", "rollout_mean_token_sum"]
PARAMETERS = 4


def rollouts_of(seed):
    """Rollouts of features [n, P], old, behaviour and reference log-probabilities and values [n]; rewards, groups."""
    random = np.random.default_rng(seed)
    tokens = [torch.as_tensor(random.normal(size=(random.integers(1, 8), PARAMETERS + 4))) for _ in range(5)]
    return tokens, torch.as_tensor(random.normal(size=5)), torch.as_tensor(random.integers(0, 2, 5))


def update_of(case, estimator, mode, loss, level, *, order, cuts, micro_batches):
    """Gradient of a policy log π = features·θ; each rollout stored in one row for each of `cuts` + 1 parts of it."""
    tokens, rewards, groups = case
    rows = [(place, part) for place, r in enumerate(order)
            for part in np.array_split(np.arange(len(tokens[r])), cuts + 1) if len(part)]
    flat = torch.cat([tokens[order[place]][part] for place, part in rows])
    owners = torch.cat([torch.full((len(part),), place) for place, part in rows])
    numbers = torch.cat([torch.full((len(part),), number) for number, (_, part) in enumerate(rows)])
    features, (old, behaviour, ref, old_values) = flat[:, :PARAMETERS], flat[:, PARAMETERS:].T
    batch = TokenBatch(rewards[order], groups[order], owners, kl_estimate(old, ref, "k1"), old_values)
    estimate = estimate_token_advantages(estimator, batch, EstimatorOptions(0.9, 0.8, 0.3))
    weights = token_weights(mode, owners.bincount(minlength=len(order)), groups[order], 9)[owners]
    theta = torch.linspace(-0.2, 0.2, PARAMETERS, dtype=torch.float64, requires_grad=True)
    total = 0.0
    for piece in np.array_split(np.random.default_rng(1).permutation(len(rows)), micro_batches):
        at = torch.isin(numbers, torch.as_tensor(piece))
        logp = old[at] + features[at] @ theta
        factor, _ = importance_coefficients(old[at], behaviour[at], numbers[at], level=level, low=0.3, high=3.0)
        policy, _ = policy_loss(loss, logp, old[at], estimate.advantages[at], weights[at], numbers[at],
                                coefficients=factor)
        penalty, _ = kl_loss(logp, ref[at], weights[at], "k3")
        value = 0.0
        if estimate.returns is not None:
            value, _ = value_loss(features[at] @ theta, old_values[at], estimate.returns[at], weights[at])
        part = policy + 0.1 * penalty + value
        part.backward()
        total += part.item()
    return torch.cat([theta.grad, torch.tensor([total])])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(MODES), loss=st.sampled_from(["ppo", "cispo", "reinforce"]),
       cuts=st.integers(1, 3), micro_batches=st.integers(2, 6), order=st.permutations(range(5)))
@settings(max_examples=25, deadline=None)
def test_an_update_does_not_depend_on_branches_micro_batches_and_order(estimator, seed, mode, loss, cuts, micro_batches,
                                                                       order):
    case = rollouts_of(seed)
    whole = update_of(case, estimator, mode, loss, "token", order=list(range(5)), cuts=0, micro_batches=1)
    other = update_of(case, estimator, mode, loss, "token", order=order, cuts=cuts, micro_batches=micro_batches)
    torch.testing.assert_close(other, whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("level", ["seq", "geo"])
@given(seed=st.integers(0, 2**32 - 1), micro_batches=st.integers(2, 6), order=st.permutations(range(5)))
@settings(max_examples=25, deadline=None)
def test_what_is_judged_by_row_does_not_depend_on_micro_batches_and_order(level, seed, micro_batches, order):
    case = rollouts_of(seed)
    whole = update_of(case, "grpo", "token_mean", "gspo", level, order=list(range(5)), cuts=1, micro_batches=1)
    other = update_of(case, "grpo", "token_mean", "gspo", level, order=order, cuts=1, micro_batches=micro_batches)
    torch.testing.assert_close(other, whole, atol=1e-12, rtol=1e-12)
