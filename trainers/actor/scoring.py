"""What must be known of rows before the first update of a batch, and the advantages that are made of it.

Invariant: advantages of tokens are a function of all rows of the step in the order of their rollouts, so every rank
computes the same ones, and the cut into windows, micro-batches and ranks does not matter.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..algorithms.advantages import EstimatorOptions, TokenBatch, estimate_token_advantages
from ..algorithms.kl import Kind, kl_estimate
from ..algorithms.metrics import Metrics, mean_of
from ..algorithms.registry import ESTIMATORS
from ..config import Config
from .packing import TrainRow

Scores = dict[int, list[float]]
"""Something of each trained token, by row."""


@dataclass(frozen=True)
class Scoring:
    """What an update is made of besides rewards.

    per_token: the estimator works on tokens. kl_reward, kl_loss: where there is a KL. frozen: its reference is a model,
    the teacher included, that the actor computes. kind: of the estimate. entropy: there is an entropy bonus. critic:
    there are values.
    """

    per_token: bool
    kl_reward: bool
    kl_loss: bool
    frozen: bool
    kind: Kind
    entropy: bool
    critic: bool

    @classmethod
    def of(cls, config: Config) -> "Scoring":
        """That of a run."""
        algorithm = config.algorithm
        kl, traits = algorithm.kl, ESTIMATORS.traits(algorithm.estimator)
        used = kl.coefficient > 0
        kind = ("k1" if kl.use == "reward" else "k3") if kl.kind == "auto" else kl.kind
        frozen = (traits.needs_teacher or kl.ref == "model") and algorithm.teacher_engine == "actor"
        return cls(traits.per_token, used and kl.use == "reward", used and kl.use == "loss", used and frozen, kind,
                   algorithm.entropy_coefficient > 0, traits.needs_critic)

    @property
    def all_rows(self) -> bool:
        """Whether a row has a gradient even where its advantage is 0."""
        return self.kl_loss or self.entropy


def by_row(told: Iterable[tuple[Iterable[TrainRow], Mapping[str, Tensor]]], name: str) -> Scores:
    """What micro-batches of rows were told under a name, [N] each, by row."""
    return {row.row: part.tolist() for rows, values in told
            for row, part in zip(rows, values[name].cpu().split([len(row.trained) for row in rows]), strict=True)}


def token_advantages(
    rows: Sequence[TrainRow], old: Scores, values: Scores, config: Config, coefficient: float
) -> Metrics:
    """Give the rows of a step their advantages, and with a critic their returns.

    Args:
        rows: all of the step.
        old: log π_old; not looked at without a KL in the reward.
        values: of the critic before each token; not looked at without one.
        config: of the run.
        coefficient: β.

    Returns:
        advantage/mean and advantage/zero over tokens, and policy/kl_ref.
    """
    algorithm, scoring = config.algorithm, Scoring.of(config)
    ordered = sorted(rows, key=lambda row: (row.rollout, row.row))
    rollouts = {row.rollout: row for row in ordered}
    places = {rollout: place for place, rollout in enumerate(rollouts)}
    lengths = [len(row.trained) for row in ordered]
    kl, metrics = None, {}
    if scoring.kl_reward:
        kl = kl_estimate(_flat(old[row.row] for row in ordered), _flat(
            row.behaviour if row.ref_logprobs is None else row.ref_logprobs for row in ordered),
            scoring.kind, algorithm.kl.ref)
        metrics["policy/kl_ref"] = mean_of(kl)
    batch = TokenBatch(torch.tensor([row.reward for row in rollouts.values()], dtype=torch.float64),
                       torch.tensor([row.group for row in rollouts.values()]),
                       torch.tensor([places[row.rollout] for row in ordered]).repeat_interleave(torch.tensor(lengths)),
                       kl, _flat(values[row.row] for row in ordered) if scoring.critic else None)
    options = EstimatorOptions(algorithm.gamma, algorithm.lam, coefficient if scoring.kl_reward else 0.0)
    advantages, returns = estimate_token_advantages(algorithm.estimator, batch, options)
    for row, part in zip(ordered, advantages.split(lengths), strict=True):
        row.advantages = part.tolist()
    for row, part in zip(ordered, returns.split(lengths), strict=True) if scoring.critic else ():
        row.values, row.returns = values[row.row], part.tolist()
    return metrics | {"advantage/mean": mean_of(advantages), "advantage/zero": mean_of(advantages == 0)}


def _flat(parts: Iterable[list[float]]) -> Tensor:
    return torch.tensor([value for part in parts for value in part], dtype=torch.float64)
