"""An advantage estimator and a policy loss of one's own, in one file, and a model that is trained with them.

    python examples/own_estimator.py

Names are those that the file registers. From elsewhere, such as the command line in this folder, they are written with
the file's:

    molt-gym train CodeExec-v0 --model tiny --algorithm.estimator own_estimator:median_baseline
"""

import torch
from torch import Tensor

import molt_gym
from molt_gym.trainers.algorithms.losses import LossOptions
from molt_gym.trainers.algorithms.registry import EstimatorTraits, LossTraits, register_estimator, register_loss


@register_estimator("median_baseline", EstimatorTraits(needs_group=3))
def median_baseline(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """r - median(group): one lucky rollout does not make all others bad."""
    baseline = torch.zeros_like(rewards)
    for group in groups.unique():
        baseline[groups == group] = rewards[groups == group].quantile(0.5)
    return rewards - baseline


@register_loss("soft_clip", LossTraits(has_ratio=True))
def soft_clip(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, rows: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """-A·tanh(ρ - 1): the gradient fades as the ratio leaves 1, and never breaks off."""
    change = (logp - old_logp).clamp(-30, 30).exp() - 1
    return -advantages * change.tanh(), change.abs() > options.clip_high


if __name__ == "__main__":
    result = molt_gym.train("CodeExec-v0", model="tiny", steps=2, algorithm__estimator="median_baseline",
                            algorithm__loss="soft_clip", algorithm__updates_per_batch=2)
    for line in result.metrics:
        if "advantage/zero" in line:
            print(f"step {line['step']}: {line['advantage/zero']:.0%} of the rollouts are at their group's median")
