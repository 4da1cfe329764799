from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from molt_gym.trainers.algorithms.losses import LossOptions, aggregate, policy_loss, token_weights, value_loss
from molt_gym.trainers.algorithms.metrics import add, means
from molt_gym.trainers.algorithms.registry import LOSSES
from molt_gym.trainers.config import AlgorithmConfig

NAMES = ["ppo", "gspo", "cispo", "reinforce"]
MODES = ["token_mean", "rollout_mean_token_mean", "group_mean_token_mean", "rollout_mean_token_sum"]
RATIOS = tensor([1.5, 0.5, 1.5, 0.5, 6.0])
SIGNS = tensor([1.0, 1.0, -1.0, -1.0, -1.0])


def token_mean_loss(name, logp, old_logp, advantages, **options):
    n = len(logp)
    weights = torch.full((n,), 1 / n, dtype=torch.float64 if logp.dtype == torch.float64 else torch.float32)
    return policy_loss(name, logp, old_logp, advantages, weights, torch.zeros(n, dtype=torch.long),
                       options=LossOptions(**options))


@pytest.mark.parametrize(("options", "expected"), [
    ({}, 1.32), ({"dual_clip": 3.0}, 0.72), ({"clip_high": 0.28}, 1.304),
])
def test_ppo_on_ratios_inside_and_outside_the_band(options, expected):
    value, metrics = token_mean_loss("ppo", RATIOS.log(), torch.zeros(5), SIGNS, **options)
    assert value.item() == pytest.approx(expected, abs=1e-6)
    assert means(metrics)["policy/clip_fraction"] == pytest.approx(0.4)
    assert means(metrics)["policy/kl_old"] == pytest.approx(-0.243279, abs=1e-6)


def test_ppo_takes_each_token_by_itself():
    value, metrics = token_mean_loss("ppo", tensor([1.0, -1.0]), torch.zeros(2), torch.ones(2))
    assert value.item() == pytest.approx(-(1.2 + torch.e**-1) / 2)
    assert means(metrics)["policy/clip_fraction"] == 0.5


def test_reinforce_is_minus_advantage_times_log_probability():
    value, _ = token_mean_loss("reinforce", tensor([-1.0, -2.0]), torch.zeros(2), tensor([1.0, -0.5]))
    assert value.item() == pytest.approx((1.0 - 1.0) / 2)


@pytest.mark.parametrize("value", [float("nan"), 1e4, -1e4, float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_absurd_log_ratio_leaves_loss_and_gradient_finite(value, dtype):
    logp = tensor([value, -1.0], dtype=dtype, requires_grad=True)
    result, metrics = token_mean_loss("ppo", logp, tensor([-1.0, -1.0], dtype=dtype), tensor([-1.0, 1.0]))
    result.backward()
    assert result.isfinite() and logp.grad.isfinite().all()
    assert means(metrics)["policy/nan_logprobs"] == (0.5 if value != value else 0)


def test_importance_coefficients_scale_token_losses():
    logp = torch.zeros(2)
    value, _ = policy_loss("ppo", logp, logp, torch.ones(2), torch.full((2,), 0.5), torch.zeros(2, dtype=torch.long),
                           coefficients=tensor([0.0, 3.0]))
    assert value.item() == pytest.approx(-1.5)


def test_no_tokens_give_a_loss_of_zero():
    empty = torch.zeros(0)
    value, metrics = policy_loss("ppo", empty, empty, empty, empty, empty.long())
    assert value.item() == 0 and means(metrics) == {}


@pytest.mark.parametrize(("mode", "divisor", "expected"), [
    ("token_mean", None, 7 / 3), ("rollout_mean_token_sum", None, 3.5), ("rollout_mean_token_sum", 7, 0.5),
    ("rollout_mean_token_mean", None, 2.75),
])
def test_aggregation_of_two_rollouts(mode, divisor, expected):
    weights = token_weights(mode, tensor([2, 1]), tensor([0, 0]), divisor)
    assert (weights[tensor([0, 0, 1])] * tensor([1.0, 2.0, 4.0])).sum().item() == pytest.approx(expected)


def test_group_aggregation_takes_the_token_mean_of_each_group():
    weights = token_weights("group_mean_token_mean", tensor([2, 1, 1]), tensor([4, 4, 9]))
    assert (weights * tensor([2.0 + 4.0, 3.0, 7.0])).sum().item() == pytest.approx((9 / 3 + 7) / 2)


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_without_tokens_are_not_in_the_mean(mode):
    weights = token_weights(mode, tensor([2, 0, 1, 0]), tensor([0, 0, 0, 1]))
    torch.testing.assert_close(weights[[0, 2]], token_weights(mode, tensor([2, 1]), tensor([0, 0])))
    assert weights[[1, 3]].tolist() == [0, 0]
    assert token_weights(mode, tensor([0]), tensor([0])).tolist() == [0]


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="got 'mean'; write one of .*token_mean"):
        token_weights("mean", tensor([1]), tensor([0]))


def summed_over(cut, mode, parts):
    """Loss and gradient of a linear parameter when `parts` (token losses of each rollout) are processed as `cut`."""
    weights = token_weights(mode, tensor([len(part) for part in parts]), torch.arange(len(parts)) // 2)
    parameter = torch.ones((), requires_grad=True)
    total = 0.0
    for piece in cut:
        tokens = tensor([value for r in piece for value in parts[r]])
        spread = torch.cat([weights[r].expand(len(parts[r])) for r in piece])
        value, _ = policy_loss("reinforce", parameter * tokens, tokens, -torch.ones_like(tokens), spread, tokens.long())
        value.backward()
        total += value.item()
    return total, parameter.grad.item()


@pytest.mark.parametrize(("mode", "expected"), [("token_mean", 1.2), ("rollout_mean_token_mean", 1.5)])
@pytest.mark.parametrize("cut", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_the_cut_into_micro_batches_does_not_matter(mode, expected, cut):
    assert summed_over(cut, mode, [[2.0] * 2, [1.0] * 8]) == pytest.approx((expected, expected))


def test_a_window_of_two_micro_batches_is_not_a_mean_of_means():
    assert summed_over([[0], [1]], "token_mean", [[2.0, 2.0, 2.0], [10.0]])[0] == pytest.approx(4.0)


@given(data=st.data(), mode=st.sampled_from(MODES), name=st.sampled_from(NAMES))
@settings(max_examples=60, deadline=None)
def test_loss_gradient_and_metrics_are_the_same_for_every_cut_and_order(data, mode, name):
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rollouts = torch.repeat_interleave(torch.arange(len(counts)), tensor(counts))
    logp, old_logp = (torch.randn(len(rollouts), generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(len(counts), generator=generator, dtype=torch.float64)
    weights = token_weights(mode, tensor(counts), torch.arange(len(counts)) // 2)

    def run(cut):
        leaf, total, metrics = logp.clone().requires_grad_(), 0.0, {}
        for piece in cut:
            here = torch.cat([(rollouts == r).nonzero().flatten() for r in piece])
            value, new = policy_loss(name, leaf[here], old_logp[here], advantages[rollouts][here],
                                     weights[rollouts][here], rollouts[here])
            value.backward()
            total += value.item()
            add(metrics, new)
        return tensor(total, dtype=torch.float64), leaf.grad, means(metrics)

    order = data.draw(st.permutations(range(len(counts))))
    split = data.draw(st.integers(0, len(counts)))
    whole, recut = run([range(len(counts))]), run([piece for piece in (order[:split], order[split:]) if piece])
    torch.testing.assert_close(recut[0], whole[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(recut[1], whole[1], atol=1e-12, rtol=1e-12)
    assert recut[2] == pytest.approx(whole[2])


def test_the_configuration_offers_the_aggregations_that_there_are():
    assert list(get_args(AlgorithmConfig.model_fields["aggregation"].annotation)) == MODES


def test_every_built_in_loss_is_there_and_tested():
    assert sorted(NAMES) == sorted(LOSSES.built_in)


# gspo and cispo

def test_gspo_and_cispo_on_ratios_inside_and_outside_the_band():
    value, metrics = token_mean_loss("gspo", RATIOS.log(), torch.zeros(5), SIGNS)
    assert value.item() == pytest.approx(0.285255, abs=1e-6)
    assert means(metrics)["policy/clip_fraction"] == pytest.approx(0.4)
    value, metrics = token_mean_loss("cispo", RATIOS.log(), torch.zeros(5), SIGNS, ceiling=1.2)
    assert value.item() == pytest.approx(0.430022, abs=1e-6)
    assert means(metrics)["policy/clip_fraction"] == pytest.approx(0.6)


def test_gspo_takes_the_geometric_mean_of_a_row():
    value, _ = token_mean_loss("gspo", tensor([0.3, -0.1]), torch.zeros(2), torch.ones(2))
    assert value.item() == pytest.approx(-(torch.e**0.1))
    value, metrics = token_mean_loss("gspo", tensor([1.0, -1.0]), torch.zeros(2), torch.ones(2))
    assert value.item() == pytest.approx(-1) and means(metrics)["policy/clip_fraction"] == 0


def test_a_token_of_another_row_is_not_in_the_geometric_mean():
    value, _ = policy_loss("gspo", tensor([0.1, 5.0]), torch.zeros(2), torch.ones(2), tensor([1.0, 0.0]),
                           tensor([0, 1]))
    assert value.item() == pytest.approx(-(torch.e**0.1))


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logp = tensor([0.5, -0.5], requires_grad=True)
    value, _ = token_mean_loss("cispo", logp, torch.zeros(2), torch.ones(2), ceiling=1.2)
    value.backward()
    assert value.item() == pytest.approx(-(1.2 * 0.5 + torch.e**-0.5 * -0.5) / 2)
    torch.testing.assert_close(logp.grad, -tensor([1.2, torch.e**-0.5]) / 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_has_ratio_one_and_nothing_clipped(name):
    logp = torch.randn(6, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(6, dtype=torch.float64)
    value, metrics = token_mean_loss(name, logp, logp.detach(), advantages)
    value.backward()
    torch.testing.assert_close(logp.grad, -advantages / 6, atol=1e-12, rtol=0)
    assert means(metrics)["policy/clip_fraction"] == 0 and means(metrics)["policy/kl_old"] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), -1e4, 1e4])
def test_an_absurd_log_probability_gives_no_loss_an_absurd_gradient(name, value):
    logp = tensor([value, -1.0], requires_grad=True)
    result, _ = token_mean_loss(name, logp, tensor([-1.0, -1.0]), tensor([-1.0, 1.0]))
    result.backward()
    assert result.isfinite() and logp.grad.isfinite().all()


# Against NumPy, and against finite differences of it

def by_hand(name, logp, frozen, old, advantages, rows, options):
    """Token losses of log π `logp`, where what a loss holds fixed (sg) is made of `frozen`."""
    def geometric(t):
        return np.mean((frozen - old)[rows == rows[t]])

    low, high, losses = 1 - options.clip_low, 1 + options.clip_high, []
    for t, advantage in enumerate(advantages):
        if name == "reinforce":
            losses.append(-advantage * logp[t])
        elif name == "cispo":
            losses.append(-min(np.exp(frozen[t] - old[t]), options.ceiling) * advantage * logp[t])
        else:
            change = geometric(t) + logp[t] - frozen[t] if name == "gspo" else logp[t] - old[t]
            ratio = np.exp(change)
            objective = min(ratio * advantage, min(max(ratio, low), high) * advantage)
            if name == "ppo" and options.dual_clip and advantage < 0:
                objective = max(objective, options.dual_clip * advantage)
            losses.append(-objective)
    return np.array(losses)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_losses_and_gradients_equal_those_computed_token_by_token(name, dual_clip, seed, size):
    random = np.random.default_rng(seed)
    logp, old = (-random.exponential(size=size) for _ in range(2))
    advantages, weights, coefficients = random.normal(size=size), random.random(size), random.random(size)
    rows, options = random.integers(0, 3, size), LossOptions(0.2, 0.28, dual_clip, 1.3)

    def summed(values):
        return (weights * coefficients * by_hand(name, values, logp, old, advantages, rows, options)).sum()

    leaf = torch.tensor(logp, requires_grad=True)
    value, _ = policy_loss(name, leaf, *map(torch.as_tensor, (old, advantages, weights, rows)),
                           coefficients=torch.as_tensor(coefficients), options=options)
    value.backward()
    assert value.item() == pytest.approx(summed(logp), abs=1e-10)
    step = 1e-6 * np.eye(size)
    slopes = [(summed(logp + e) - summed(logp - e)) / 2e-6 for e in step]
    assert np.abs(leaf.grad.numpy() - slopes).max() < 1e-5


# The value loss

def value_mean(values, old_values, returns, clip=0.2):
    n = len(values)
    return value_loss(tensor(values), tensor(old_values), tensor(returns), torch.full((n,), 1 / n), clip)


def test_the_value_loss_takes_the_larger_of_clipped_and_unclipped_errors():
    loss, metrics = value_mean([1.0, 2.0], [0.5, 1.9], [0.0, 3.0])
    assert loss.item() == pytest.approx(0.5)
    assert means(metrics) == pytest.approx({"value/clip_fraction": 0.5, "value/mean": 1.5, "value/error": 1.0})
    # The value ran past its return: unclipped 0.01, clipped (0.5 + 0.2 - 1.1)².
    assert value_mean([1.0], [0.5], [1.1])[0].item() == pytest.approx(0.08)


def test_without_a_clip_the_value_loss_is_half_the_squared_error():
    loss, metrics = value_mean([1.0, 2.0], [0.5, 1.9], [0.0, 4.0], clip=None)
    assert loss.item() == pytest.approx((1 + 4) / 4) and "value/clip_fraction" not in means(metrics)


def test_the_gradient_of_the_value_loss_is_that_of_finite_differences():
    values = torch.randn(9, dtype=torch.float64, requires_grad=True)
    rest = [torch.randn(9, dtype=torch.float64) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda v: value_loss(v, *rest)[0], values)


def test_what_has_no_weight_adds_nothing_even_if_it_is_not_a_number():
    terms = tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    total = aggregate(terms, tensor([0.5, 0.0, 0.0]))
    total.backward()
    assert total.item() == 0.5 and terms.grad.tolist() == [0.5, 0, 0]
