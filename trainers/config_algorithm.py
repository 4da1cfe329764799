"""The options of algorithms: from rewards to a loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field

from .algorithms.registry import ESTIMATORS, LOSSES, Registry
from .config_types import NUMBER, Count, Natural, NotNegative, Positive, Section, Share, Table, Text


def _one_of(registry: Registry, what: str) -> Any:
    return Field(description=f"{what}: {', '.join(registry.names())}, or 'module:name' of a file of your own.")


class ImportanceConfig(Section):
    """Correction for the policy that sampled differing from the policy before the update."""

    level: Literal["auto", "off", "token", "seq", "geo"] = "auto"
    """What the band gates: a token, a sequence's product or its geometric mean; auto is off on-policy, else geo."""
    mode: Literal["mask", "clip", "trunc"] = "mask"
    """Outside the band: weight 0 (mask), clamped to it (clip), or cut at its upper end (trunc)."""
    gate: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """What the band bounds: the probability ratio, or from above a distance of the two policies."""
    low: NotNegative = 0.5
    """Lower end of the band, for gate ratio."""
    high: Positive = 2.0
    """Upper end of the band."""
    score_centering: Natural = 0
    """How many of the sampler's likeliest tokens the bias of a correction is taken out by; 0 is off."""


class KlConfig(Section):
    """Penalty on the distance from a reference."""

    coefficient: NotNegative = 0.0
    """Weight of the penalty; 0 is off, and no reference is loaded."""
    kind: Literal["auto", "k1", "k2", "k3"] = "auto"
    """Estimate of the divergence at a token; auto is k1 in the reward and k3 as a loss."""
    use: Literal["loss", "reward"] = "loss"
    """A term of the loss, or of the reward of each token, for estimators that take it there."""
    ref: Literal["model", "rollout"] = "model"
    """The reference: a frozen model, or the policy that sampled."""
    model: Text | None = None
    """Folder or hub name of the frozen model; without it, the model that the run begins with."""
    target: Positive | None = None
    """Divergence that the coefficient is steered towards; without it, the coefficient stays."""
    horizon: Count = 10_000
    """Rollouts over which the steered coefficient changes by up to a fifth."""


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    estimator: Annotated[Text, _one_of(ESTIMATORS, "Advantage estimator")] = "grpo"
    loss: Annotated[Text, _one_of(LOSSES, "Policy loss")] = "ppo"
    aggregation: Literal["token_mean", "rollout_mean_token_mean", "group_mean_token_mean",
                         "rollout_mean_token_sum"] = "token_mean"
    """How token losses become one number, over the whole optimizer window."""
    token_sum_divisor: Count | None = None
    """Fixed divisor of rollout_mean_token_sum."""
    clip_low: Share = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Gt(1), NUMBER] | None = None
    """Bound on the ratio of tokens with a negative advantage, for loss ppo."""
    ceiling: Annotated[float, Ge(1), NUMBER] | None = None
    """Most that loss cispo weighs a token; without it, 5."""
    gamma: Share = 1.0
    """Discount a sampled token, for estimators that have one."""
    lam: Share = 0.95
    """λ of generalised advantage estimation."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the policy's entropy, which is added to what is maximised."""
    teacher: Text | None = None
    """Folder or hub name of the model that estimator on_policy_distill learns from."""
    teacher_engine: Literal["actor", "vllm"] = "actor"
    """What computes the teacher's log-probabilities: the ranks of the actor, or vLLM in a process of its own."""
    teacher_engine_args: Table = {}
    """Further arguments of vLLM's AsyncEngineArgs for the teacher, such as tensor_parallel_size."""
    reward_clip: Positive = 10.0
    """Rewards are clipped to this size, either sign, before the baseline."""
    updates_per_batch: Count = 1
    """Optimizer updates a step, each on an equal share of its groups."""
    overlong_buffer: Natural = 0
    """Tokens before rollout.max_tokens over which a long reply loses reward; 0 is off."""
    overlong_penalty: NotNegative = 1.0
    """What a reply of full length loses when overlong_buffer is set."""
    truncation_coefficient: Annotated[float, Le(1), NUMBER] = 1.0
    """Factor on the positive reward of a rollout that length cut off; a negative value replaces the reward."""
    importance: ImportanceConfig = ImportanceConfig()
    kl: KlConfig = KlConfig()
