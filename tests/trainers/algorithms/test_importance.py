import pytest
import torch
from torch import tensor

from molt_gym.trainers.algorithms.importance import importance_coefficients, mismatch
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
