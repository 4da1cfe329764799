"""An estimator of tokens and a loss that tests register as a user would."""

from typing import Any

from torch import Tensor

from molt_gym.trainers.algorithms.registry import EstimatorTraits, LossTraits, register_estimator, register_loss


@register_estimator("longest", EstimatorTraits(per_token=True, whitens=True, ignores_reward=True))
def longest(batch: Any, options: Any) -> Tensor:
    """More for the tokens of long rollouts than for those of short ones."""
    lengths = batch.rollouts.bincount(minlength=len(batch.rewards))
    return lengths[batch.rollouts].double() + batch.rollouts.double() / 100


@register_loss("plain", LossTraits(has_ratio=False, one_update=True))
def plain(logp: Tensor, old_logp: Tensor, advantages: Tensor, rows: Tensor, options: Any) -> tuple[Tensor, Tensor]:
    """-A·log π."""
    return -advantages * logp, advantages > 9
