import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from molt_gym.trainers.algorithms.kl import AdaptiveKl, kl_estimate, kl_loss
from molt_gym.trainers.algorithms.losses import token_weights
from molt_gym.trainers.algorithms.metrics import add, means

KINDS = ["k1", "k2", "k3"]


@pytest.mark.parametrize(("kind", "expected"), [
    ("k1", [0.5, -1, -19]), ("k2", [0.125, 0.5, 10]), ("k3", [0.106531, 0.718282, 10]),
])
def test_the_three_estimators(kind, expected):
    values = kl_estimate(tensor([-1.0, -2, -20]), tensor([-1.5, -1, -1]), kind)
    torch.testing.assert_close(values, tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kind", "expected"), [
    ("k1", [0.2, -0.2, -2]), ("k2", [0.02, 0.02, 2]), ("k3", [0.018731, 0.021403, 4.389056]),
])
def test_estimators_are_exact_below_the_cap(kind, expected):
    values = kl_estimate(tensor([-1.0, -1.2, -3]), tensor([-1.2, -1, -1]), kind)
    torch.testing.assert_close(values, tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("ref", ["model", "rollout"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logp", [-3.0, -20.0, -200.0, -6e4, float("-inf"), float("nan"), 200.0])
def test_value_and_gradient_stay_finite_and_never_push_away(logp, dtype, kind, ref):
    leaf = tensor([logp], dtype=dtype, requires_grad=True)
    values = kl_estimate(leaf, tensor([-1.0], dtype=dtype), kind, ref)
    values.sum().backward()
    assert values.dtype == torch.float32 and values.isfinite().all() and leaf.grad.isfinite().all()
    if kind != "k1":
        assert 0 <= values.item() <= 10
        # Descent moves by -gradient: up where the policy is below its reference.
        assert not -leaf.grad.item() * (-1 - logp) < 0


def test_against_the_sampling_policy_k3_changes_sides():
    logp, behaviour = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    x = logp - behaviour
    torch.testing.assert_close(kl_estimate(logp, behaviour, "k3", "rollout"), (x.exp() - 1 - x).clamp(max=10))
    for kind in ("k1", "k2"):
        assert torch.equal(kl_estimate(logp, behaviour, kind, "rollout"), kl_estimate(logp, behaviour, kind))


@given(seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_on_average_k1_and_k3_are_the_divergence_and_k2_has_its_gradient(seed):
    random = torch.Generator().manual_seed(seed)
    logits, other = (torch.randn(6, generator=random, dtype=torch.float64) / 2 for _ in range(2))
    logits.requires_grad_()
    logp, ref = logits.log_softmax(-1), other.log_softmax(-1)
    p = logp.detach().exp()
    true = (logp.exp() * (logp - ref)).sum()
    slope = torch.autograd.grad(true, logits, retain_graph=True)[0]
    for kind in ("k1", "k3"):
        assert (p * kl_estimate(logp, ref, kind)).sum().item() == pytest.approx(true.item(), abs=1e-12)
    k2 = torch.autograd.grad((p * kl_estimate(logp, ref, "k2")).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(k2, slope, atol=1e-12, rtol=0)
    # Sampled by the reference, the flipped k3 is KL(reference‖policy), gradient included.
    flipped = (ref.exp() * kl_estimate(logp, ref, "k3", "rollout")).sum()
    backward = (ref.exp() * (ref - logp)).sum()
    assert flipped.item() == pytest.approx(backward.item(), abs=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (flipped, backward)),
                               atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_estimates_and_gradients_equal_those_of_numpy(kind, seed):
    random = np.random.default_rng(seed)
    logp, ref = random.normal(size=(2, 7)) * 2
    x = logp - ref
    expected = {"k1": x, "k2": np.minimum(x**2 / 2, 10), "k3": np.minimum(np.exp(-x) - 1 + x, 10)}[kind]
    leaf = torch.tensor(logp, requires_grad=True)
    assert np.abs(kl_estimate(leaf, torch.tensor(ref), kind).detach().numpy() - expected).max() < 1e-12
    assert torch.autograd.gradcheck(lambda v: kl_estimate(v, torch.tensor(ref), kind), leaf)


@pytest.mark.parametrize(("mode", "expected"), [
    ("token_mean", 7 / 3), ("rollout_mean_token_mean", 2.75), ("rollout_mean_token_sum", 3.5),
])
def test_the_loss_has_the_aggregation_of_the_policy_however_it_is_cut(mode, expected):
    logp, counts = tensor([1.0, 2.0, 4.0]), tensor([2, 1])
    weights = token_weights(mode, counts, tensor([0, 0])).repeat_interleave(counts)
    whole, metrics = kl_loss(logp, torch.zeros(3), weights, "k1")
    parts = [kl_loss(logp[part], torch.zeros(3)[part], weights[part], "k1") for part in (slice(0, 2), slice(2, 3))]
    assert whole.item() == pytest.approx(expected) == pytest.approx(sum(loss.item() for loss, _ in parts))
    total = {}
    for _, part in parts:
        add(total, part)
    assert means(total) == means(metrics) == pytest.approx({"policy/kl_ref": 7 / 3})


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="kl.kind: got 'k4'; write one of"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize(("kl", "rollouts", "expected"), [
    (0.011, 100, 0.11), (0.0, 100, 0.08), (1.0, 100, 0.12), (0.02, 10, 0.102), (1.0, 10_000, 0.12),
    (float("nan"), 100, 0.1), (float("inf"), 100, 0.1), (-5.0, 100, 0.08),
])
def test_the_coefficient_follows_the_target_by_a_fifth_a_horizon_at_most(kl, rollouts, expected):
    controller = AdaptiveKl(0.1, target=0.01, horizon=100)
    assert controller.update(kl, rollouts) == pytest.approx(expected) == controller.coefficient


def test_without_a_target_the_coefficient_stays():
    assert AdaptiveKl(0.1).update(5.0, 100) == 0.1


def test_over_many_steps_the_coefficient_stays_positive_and_finite():
    low, high = AdaptiveKl(0.1, 0.01, 8), AdaptiveKl(0.1, 0.01, 8)
    for _ in range(1000):
        low.update(0.0, 32)
        high.update(9.0, 32)
    assert low.coefficient > 0 and math.isfinite(high.coefficient)
