import pytest
import torch
from torch import tensor

from molt_gym.trainers.algorithms.shaping import overlong_penalty, scale_truncated, trains


def test_the_overlong_ramp():
    assert overlong_penalty(tensor([100, 90, 80, 10, 130]), 100, 20).tolist() == [1, 0.5, 0, 0, 1]
    assert overlong_penalty(tensor([95]), 100, 10, penalty=4.0).tolist() == [2]


def test_a_buffer_of_zero_is_off():
    assert overlong_penalty(tensor([100, 120]), 100, 0).tolist() == [0, 0]


@pytest.mark.parametrize(("coefficient", "expected"), [
    (1.0, [2.0, 2.0, -2.0, 0.0]), (0.5, [2.0, 1.0, -2.0, 0.0]), (0.0, [2.0, 0.0, -2.0, 0.0]),
    (-1.0, [2.0, -1.0, -1.0, -1.0]),
])
def test_truncation_never_pays(coefficient, expected):
    rewards, truncated = tensor([2.0, 2.0, -2.0, 0.0]), tensor([False, True, True, True])
    assert scale_truncated(rewards, truncated, coefficient).tolist() == expected


def test_shaping_keeps_the_shape_of_an_empty_batch():
    empty = torch.zeros(0)
    assert overlong_penalty(empty, 10, 5).shape == scale_truncated(empty, empty.bool(), 0.5).shape == (0,)


def test_the_filter_trains_groups_that_are_neither_solved_nor_hopeless():
    assert [trains(scores, 0, 1) for scores in ([0.0, 1.0], [1.0, 1.0], [0.5], [0.0, 0.0], [])] == [
        True, False, True, False, False]


def test_the_filter_keeps_a_group_whole():
    assert trains([0.0] + [0.95] * 7, 0, 1)


def test_the_filter_knows_equal_scores_for_what_they_are_in_spite_of_rounding():
    assert not trains([0.1] * 3, 0.1, 1) and not trains([0.7] * 7, 0, 0.7)
    assert not trains([0.7 + 0.1 + 0.1 + 0.1] * 4, 0, 1) and trains([1.0] * 999 + [0.999], 0, 1)
