"""The learning rate's course, and which parameters decay."""

import pytest
import torch

from molt_gym.trainers.actor.optimizer import adamw, learning_rate
from molt_gym.trainers.config import ActorConfig


@pytest.mark.parametrize(("update", "rate"), [(39, 7.649596e-4), (40, 7.5e-4), (41, 7.347358e-4), (10, 1e-3)])
def test_cosine_after_warm_up_has_the_rates_computed_by_hand(update: int, rate: float) -> None:
    config = ActorConfig(lr=1e-3, warmup_steps=10, schedule="cosine")
    assert learning_rate(config, update, 100) == pytest.approx(rate, abs=5e-11)


def test_warm_up_rises_to_the_peak_in_equal_steps_and_its_first_update_moves() -> None:
    config = ActorConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, update, 10) for update in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_ends_at_its_floor_after_the_last_update_and_stays_there(schedule: str) -> None:
    config = ActorConfig(lr=2.0, schedule=schedule, min_lr_ratio=0.1)
    rates = [learning_rate(config, update, 8) for update in range(12)]
    assert rates[0] == 2.0
    assert rates[7] > 0.2
    assert rates[8:] == pytest.approx([0.2] * 4)
    assert rates == sorted(rates, reverse=True)


def test_matrices_decay_and_vectors_do_not() -> None:
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    optimizer = adamw([matrix, vector], ActorConfig(lr=0.1, weight_decay=0.5))
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(vector.detach(), torch.ones(2))
