"""Advantage estimators: from one reward a rollout to one advantage a rollout.

Invariants: the unit is the rollout, so neither its branches nor its length weigh in a baseline; whether rewards are
equal is decided by their spread, never by a rounded standard deviation; finite rewards give finite advantages for every
group size. Formulas are computed in float64.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["ESTIMATORS", "Estimator", "estimate_advantages", "estimator"]

TOLERANCE = 1e-6
"""Rewards of a group are equal if max - min <= TOLERANCE * max(1, |mean|)."""
EPSILON = 1e-8
"""Added to a standard deviation, and the floor of a variance; equal rewards never get as far."""


class Estimator(Protocol):
    """Advantages [R] from rewards [R] (float64), group ids [R] and trainable tokens per rollout [R] (float64)."""

    def __call__(self, rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor: ...  # noqa: D102


ESTIMATORS: dict[str, Estimator] = {}
"""Estimators by the name that `algorithm.estimator` takes."""


def estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Register a function as the estimator `name`."""

    def register(function: Estimator) -> Estimator:
        ESTIMATORS[name] = function
        return function

    return register


def estimate_advantages(name: str, rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """The advantage of each of R rollouts.

    Args:
        name: estimator, a key of `ESTIMATORS`.
        rewards: [R], one reward a rollout, shaped and clipped.
        groups: [R] integers; rollouts of one task share one.
        tokens: [R], sampled tokens that train; the weights of whitening, which is over tokens.

    Returns:
        [R] float32.

    Raises:
        ValueError: a reward is not finite, or the shapes differ.
    """
    if not rewards.shape == groups.shape == tokens.shape or rewards.dim() != 1:
        raise ValueError(f"rewards, groups and tokens have shapes {tuple(rewards.shape)}, {tuple(groups.shape)} and "
                         f"{tuple(tokens.shape)}; give each one entry a rollout")
    for i, reward in enumerate(rewards.tolist()):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{i}]: {reward} is not finite; leave the rollout out of the batch")
    return ESTIMATORS[name](rewards.double(), groups, tokens.double()).float()


class _Groups(NamedTuple):
    size: Tensor
    centred: Tensor
    square: Tensor


def _by_group(rewards: Tensor, groups: Tensor) -> _Groups:
    """For each rollout: its group's size n, r - mean(group), and the group's sum of squares of that; 0 if all equal."""
    ids, index = groups.unique(return_inverse=True)
    zeros = rewards.new_zeros(len(ids))
    size = zeros.index_add(0, index, torch.ones_like(rewards))
    mean = zeros.index_add(0, index, rewards) / size
    highest = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    equal = highest - lowest <= TOLERANCE * mean.abs().clamp(min=1)
    centred = (rewards - mean[index]).masked_fill(equal[index], 0)
    return _Groups(size[index], centred, zeros.index_add(0, index, centred.square())[index])


@estimator("dr_grpo")
def dr_grpo(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """r - mean(group): GRPO without the division by the deviation (Liu et al. 2025, arXiv:2503.20783)."""
    return _by_group(rewards, groups).centred


@estimator("grpo")
def grpo(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """(r - mean(group)) / (std(group) + 1e-8) with the unbiased std, n - 1 (Shao et al. 2024, arXiv:2402.03300).

    At most (n - 1)/√n in size; 0 for a group of one.
    """
    group = _by_group(rewards, groups)
    return group.centred / ((group.square / (group.size - 1).clamp(min=1)).sqrt() + EPSILON)


@estimator("rloo")
def rloo(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """r - mean of the others of the group (Ahmadian et al. 2024, arXiv:2402.14740).

    Equal to (r - mean(group))·n/(n - 1); 0 for a group of one, which the configuration refuses.
    """
    group = _by_group(rewards, groups)
    return group.centred * group.size / (group.size - 1).clamp(min=1)


@estimator("reinforce_baseline")
def reinforce_baseline(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """r - mean(group), whitened over the tokens of the batch (REINFORCE++-baseline; Hu et al. 2025, arXiv:2501.03262).

    Every token of a rollout carries its rollout's value, so mean and population variance over tokens are those over
    rollouts weighted by `tokens`. A group of equal rewards is therefore only 0 if the batch's token mean is.
    """
    centred = _by_group(rewards, groups).centred
    return _whitened(centred, tokens)


def _whitened(values: Tensor, weights: Tensor) -> Tensor:
    """(x - mean) / sqrt(max(variance, 1e-8)), weighted, population variance; 0 if all with a weight are equal."""
    counted = values[weights > 0]
    if not len(counted) or counted.max() - counted.min() <= TOLERANCE:
        return torch.zeros_like(values)
    share = weights / weights.sum()
    offset = values - (share * values).sum()
    return offset / (share * offset.square()).sum().clamp(min=EPSILON).sqrt()
