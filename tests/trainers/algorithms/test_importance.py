import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from molt_gym.trainers.algorithms.importance import MODES, importance_coefficients, mismatch, score_centering
from molt_gym.trainers.algorithms.losses import policy_loss
from molt_gym.trainers.algorithms.metrics import add, means

BEHAVIOUR = tensor([-0.1, -0.2, 0.05, 0.7, -1.2])
ROWS = tensor([0, 0, 0, 1, 1])


def corrected_loss(behaviour=BEHAVIOUR, rows=ROWS, **options):
    old_logp = torch.zeros(len(rows))
    coefficients, metrics = importance_coefficients(old_logp, behaviour, rows, **options)
    value, _ = policy_loss("ppo", old_logp, old_logp, torch.ones(len(rows)), torch.full((len(rows),), 1 / len(rows)),
                           rows, coefficients=coefficients)
    return value.item(), means(metrics)


@pytest.mark.parametrize(("level", "mode", "band", "loss", "filtered"), [
    ("token", "mask", (0.5, 2), -0.655561, 0.4), ("token", "mask", (0.9, 1.1), -0.190246, 0.8),
    ("token", "clip", (0.5, 2), -1.155561, 0.4), ("token", "clip", (0.9, 1.1), -1.030246, 0.8),
    ("token", "trunc", (0.5, 2), -1.154878, 0.2), ("token", "trunc", (0.9, 1.1), -0.949563, 0.6),
    ("seq", "mask", (0.5, 2), -1.418901, 0.0), ("seq", "mask", (0.9, 1.1), 0.0, 1.0),
    ("geo", "mask", (0.5, 2), -1.418901, 0.0), ("geo", "mask", (0.9, 1.1), -0.655561, 0.5),
])
def test_what_the_band_gates_and_what_happens_outside(level, mode, band, loss, filtered):
    value, metrics = corrected_loss(level=level, mode=mode, low=band[0], high=band[1])
    assert value == pytest.approx(loss, abs=1e-6)
    assert metrics["is/filtered"] == pytest.approx(filtered)
    assert metrics["mismatch/kl"] == pytest.approx(-0.15, abs=1e-6)


def test_off_measures_but_does_not_correct():
    value, metrics = corrected_loss(level="off")
    assert value == pytest.approx(-1)
    assert metrics["mismatch/kl"] == pytest.approx(-0.15, abs=1e-6)
    assert metrics["mismatch/abs_diff_mean"] == pytest.approx(0.45)
    assert "is/filtered" not in metrics


def test_the_same_policy_is_not_corrected():
    logp = -torch.rand(5)
    for level in ("token", "seq", "geo"):
        coefficients, metrics = importance_coefficients(logp, logp, ROWS, level=level, low=0.999, high=1.001)
        assert coefficients.tolist() == [1] * 5
        assert means(metrics) == {"is/filtered": 0, "mismatch/abs_diff_mean": 0, "mismatch/bitwise_fraction": 1,
                                  "mismatch/kl": 0}


def test_row_numbers_are_only_names_and_rows_may_interleave():
    order = tensor([3, 0, 4, 1, 2])
    kept, _ = importance_coefficients(torch.zeros(5), BEHAVIOUR, ROWS, level="geo", low=0.9, high=1.1)
    moved, _ = importance_coefficients(torch.zeros(5), BEHAVIOUR[order], tensor([9, -4])[ROWS][order], level="geo",
                                       low=0.9, high=1.1)
    torch.testing.assert_close(moved, kept[order])


def test_metrics_of_micro_batches_add_up():
    total = {}
    for row in (0, 1):
        here = row == ROWS
        add(total, importance_coefficients(torch.zeros(5)[here], BEHAVIOUR[here], ROWS[here], level="geo", low=0.9,
                                           high=1.1)[1])
    assert means(total) == pytest.approx(corrected_loss(level="geo", low=0.9, high=1.1)[1])


def test_coefficients_carry_no_gradient_and_stay_finite():
    old_logp = tensor([-200.0, 0.0, float("nan")], requires_grad=True)
    coefficients, metrics = importance_coefficients(old_logp, tensor([0.0, -200.0, 0.0]), tensor([0, 0, 1]),
                                                    level="token", mode="trunc", low=0, high=5)
    assert not coefficients.requires_grad and coefficients.isfinite().all()
    assert coefficients[1:].tolist() == [5, 1]
    assert all(value == value for value in means(metrics).values())


@pytest.mark.parametrize(("level", "mode"), [("seq", "clip"), ("geo", "trunc"), ("token", "drop"), ("word", "mask")])
def test_a_mode_that_the_level_cannot_have_is_refused(level, mode):
    with pytest.raises(ValueError, match=f"level '{level}', mode '{mode}', gate 'ratio': write token with mask"):
        corrected_loss(level=level, mode=mode)


def test_equal_bits_are_counted():
    assert means(mismatch(tensor([-1.0, -2.0]), tensor([-1.0, -2.0000002])))["mismatch/bitwise_fraction"] == 0.5


# Against NumPy, unit by unit

def by_hand(old, behaviour, rows, level, mode, gate, low, high):
    """Coefficients, and the share of units outside of the band."""
    w, p, q = np.exp(np.clip(old - behaviour, -30, 30)), np.exp(behaviour), np.exp(old)
    clamped = [np.clip(x, 1e-6, 1 - 1e-6) for x in (p, q)]
    distance = {"ratio": np.log(w), "tv": np.abs(p - q),
                "binary_kl": clamped[0] * np.log(clamped[0] / clamped[1])
                + (1 - clamped[0]) * np.log((1 - clamped[0]) / (1 - clamped[1]))}[gate]
    result, outside, units = w.copy(), 0, 0
    for unit in ([[t] for t in range(len(w))] if level == "token" else [rows == row for row in np.unique(rows)]):
        values = distance[unit]
        u = values.sum() if (level, gate) == ("seq", "ratio") else values.mean()
        u = np.exp(np.clip(u, -30, 30)) if gate == "ratio" else u
        bad = u > high or (u < low and gate == "ratio" and mode != "trunc")
        outside, units = outside + bad, units + 1
        if mode == "mask":
            result[unit] *= not bad
        elif mode == "clip":
            result[unit] = min(max(u, low), high)
        else:
            result[unit] = min(u, high)
    return result, outside / units


@pytest.mark.parametrize(("level", "mode", "gate"), [
    (level, mode, gate) for (level, gate), modes in MODES.items() for mode in modes])
@given(seed=st.integers(0, 2**32 - 1), low=st.floats(0, 1), high=st.floats(0.01, 3))
@settings(max_examples=40, deadline=None)
def test_coefficients_equal_those_computed_unit_by_unit(level, mode, gate, seed, low, high):
    random = np.random.default_rng(seed)
    size = random.integers(1, 12)
    old, behaviour, rows = -random.exponential(size=size), -random.exponential(size=size), random.integers(0, 3, size)
    low = min(low, high)
    expected, filtered = by_hand(old, behaviour, rows, level, mode, gate, low, high)
    kept, metrics = importance_coefficients(*map(torch.as_tensor, (old, behaviour, rows)), level=level, mode=mode,
                                            gate=gate, low=low, high=high)
    assert np.abs(kept.numpy() - expected).max() < 1e-12
    assert means(metrics)["is/filtered"] == pytest.approx(filtered)


def test_gates_of_probabilities_keep_certain_and_impossible_tokens_finite():
    old, behaviour = tensor([0.0, -200.0, float("nan")]), tensor([-200.0, 0.0, -1.0])
    for gate, kept in (("binary_kl", [False, False]), ("tv", [False, False])):
        values, metrics = importance_coefficients(old, behaviour, tensor([0, 1, 2]), level="token", gate=gate, high=0.5)
        assert values.isfinite().all() and (values[:2] > 0).tolist() == kept
        assert 0 < means(metrics)["is/filtered"] <= 1


@pytest.mark.parametrize(("level", "mode", "gate"), [
    ("geo", "mask", "tv"), ("token", "clip", "binary_kl"), ("token", "trunc", "tv"), ("seq", "mask", "js")])
def test_a_gate_that_level_and_mode_cannot_have_is_refused(level, mode, gate):
    with pytest.raises(ValueError, match=f"gate '{gate}': write .*binary_kl or tv for token or seq with mask"):
        corrected_loss(level=level, mode=mode, gate=gate)


# Score centering

CORRECTIONS = [("off", "mask"), ("token", "mask"), ("token", "clip"), ("token", "trunc")]


def distributions(seed, vocabulary=7):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocabulary, generator=random, dtype=torch.float64, requires_grad=True)
    return logits, torch.randn(vocabulary, generator=random, dtype=torch.float64).log_softmax(-1)


def expected_gradient(logits, behaviour, top, level, mode, centred=True):
    """Gradient of the corrected loss of A = 1, averaged over all tokens that the behaviour policy may sample."""
    logp = logits.log_softmax(-1)
    rows = torch.arange(len(logp))
    factor, _ = importance_coefficients(logp.detach(), behaviour, rows, level=level, mode=mode, low=0.8, high=1.5)
    loss, _ = policy_loss("ppo", logp, logp.detach(), torch.ones_like(factor), behaviour.exp(), rows,
                          coefficients=factor)
    if centred:
        loss = loss + score_centering(logp[None, top], behaviour[None, top], torch.ones(1), level=level, mode=mode,
                                      low=0.8, high=1.5).sum()
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize(("level", "mode"), CORRECTIONS)
@given(seed=st.integers(0, 9999))
@settings(max_examples=30, deadline=None)
def test_with_the_whole_vocabulary_a_constant_advantage_has_no_expected_gradient(level, mode, seed):
    logits, behaviour = distributions(seed)
    assert expected_gradient(logits, behaviour, torch.arange(7), level, mode).abs().max() < 1e-12


@pytest.mark.parametrize(("level", "mode"), CORRECTIONS)
def test_with_the_top_k_it_is_exact_if_the_rest_has_one_ratio(level, mode):
    logits, _ = distributions(3)
    p = logits.detach().softmax(-1)
    # Outside of the first three, μ is proportional to π.
    q = torch.cat([tensor([0.1, 0.5, 0.01], dtype=torch.float64), 0.39 * p[3:] / p[3:].sum()])
    top = torch.arange(3)
    assert expected_gradient(logits, q.log(), top, level, mode).abs().max() < 1e-12
    assert expected_gradient(logits, q.log(), top, level, mode, centred=False).abs().max() > 1e-3


def test_equal_policies_need_no_centering_and_entries_that_are_not_there_add_nothing():
    logits, behaviour = distributions(1)
    logp = logits.log_softmax(-1)[None]
    same = score_centering(logp, logp.detach(), torch.ones(1), level="token")
    assert torch.autograd.grad(same.sum(), logits)[0].abs().max() < 1e-12
    padded = torch.cat([logp[:, :3], tensor([[float("-inf"), -1.0]])], 1)
    fewer = torch.cat([behaviour[None, :3], tensor([[-2.0, float("-inf")]])], 1)
    torch.testing.assert_close(score_centering(padded, fewer, torch.ones(1), level="token", mode="trunc"),
                               score_centering(logp[:, :3], behaviour[None, :3], torch.ones(1), level="token",
                                               mode="trunc"))


def test_the_centering_of_a_token_is_proportional_to_its_advantage():
    logits, behaviour = distributions(2)
    logp = logits.log_softmax(-1).detach().expand(2, -1)
    one, two = score_centering(logp, behaviour.expand(2, -1), tensor([1.0, -2.0]), level="token").tolist()
    assert one and two == pytest.approx(-2 * one)


@pytest.mark.parametrize(("level", "mode"), CORRECTIONS)
@pytest.mark.parametrize("p", [[1.0, 0.0], [0.99999994, 1e-7], [0.6, 0.5]])
def test_where_rounding_leaves_nothing_for_the_rest_its_ratio_is_one(level, mode, p):
    logp = tensor([p]).log().requires_grad_()
    value = score_centering(logp, logp.detach(), torch.ones(1), level=level, mode=mode)
    value.sum().backward()
    assert value.abs().max() < 1e-6 and logp.grad.abs().max() < 1e-6
