"""What must not go together, found before anything starts.

Invariants: takes plain values and loads no torch; every refusal names the option, its value and what to write instead;
all refusals are given at once; what has no effect is refused rather than ignored, so that no model is loaded for
nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .registry import ESTIMATORS, LOSSES, EstimatorTraits, LossTraits, Registry

__all__ = ["Settings", "problems"]


@dataclass(frozen=True)
class Settings:
    """Options that bear on one another, by the last part of their names; the defaults are in accord.

    kl: the coefficient. clip: low and high. importance: the level as written, auto included. critic, teacher,
    reference: whether anything is written about them. teacher_engine: the teacher has an engine of its own.
    in_flight_updates: weights change while rollouts are generated.
    """

    estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 0.95
    loss: str = "ppo"
    clip: tuple[float, float] = (0.2, 0.2)
    dual_clip: float | None = None
    ceiling: float | None = None
    aggregation: str = "token_mean"
    token_sum_divisor: int | None = None
    updates_per_batch: int = 1
    kl: float = 0.0
    kl_kind: Literal["auto", "k1", "k2", "k3"] = "auto"
    kl_use: Literal["loss", "reward"] = "loss"
    kl_ref: Literal["model", "rollout"] = "model"
    kl_target: float | None = None
    reference: bool = False
    teacher: bool = False
    teacher_engine: bool = False
    critic: bool = False
    importance: Literal["auto", "off", "token", "seq", "geo"] = "auto"
    mode: Literal["mask", "clip", "trunc"] = "mask"
    gate: Literal["ratio", "binary_kl", "tv"] = "ratio"
    low: float = 0.5
    high: float = 2.0
    score_centering: int = 0
    dynamic_filter: bool = False
    overlong_buffer: int = 0
    truncation_coefficient: float = 1.0
    group_size: int = 8
    groups_per_step: int = 4
    max_staleness: int = 0
    top_p: float = 1.0
    top_k: int = 0
    routing_replay: bool = False
    in_flight_updates: bool = False
    speculative: bool = False
    prefix_cache: bool = False

    @property
    def level(self) -> Literal["off", "token", "seq", "geo"]:
        """`importance` with auto resolved."""
        return ("geo" if self.max_staleness else "off") if self.importance == "auto" else self.importance


def problems(settings: Settings) -> list[str]:
    """Every refusal, with the fix; none if the options are in accord."""
    found: list[str] = []
    loss = LossTraits()
    try:
        estimator = ESTIMATORS.traits(settings.estimator)
        found += [*_estimator(settings, estimator), *_kl(settings, estimator)]
    except ValueError as error:
        found.append(str(error))
    try:
        loss = LOSSES.traits(settings.loss)
        found += _loss(settings, loss)
    except ValueError as error:
        found.append(str(error))
    return found + [*_importance(settings, loss), *_sampling(settings, loss), *_replay(settings)]


def _having(registry: Registry, trait: str) -> str:
    """The names that have a trait, for a message."""
    return " or ".join(repr(name) for name in registry.names() if getattr(registry.traits(name), trait))


def _estimator(s: Settings, traits: EstimatorTraits) -> Iterator[str]:
    which = f"algorithm.estimator = {s.estimator!r}"
    if s.group_size < traits.needs_group:
        yield (f"rollout.group_size: {s.group_size} with {which}, whose baseline is made of the other rollouts of the "
               f"task; write rollout.group_size >= {traits.needs_group}, or algorithm.estimator = 'flash_reinforce'")
    if s.group_size * s.groups_per_step < traits.needs_batch:
        yield (f"rollout.groups_per_step: {s.groups_per_step} of {s.group_size} with {which}, whose baseline is made "
               f"of the other rollouts of the step; write rollout.groups_per_step >= {traits.needs_batch}")
    if s.gamma != 1 and not traits.discounts:
        yield (f"algorithm.gamma: {s.gamma} with {which}, which gives all tokens of a rollout the same; write "
               f"algorithm.gamma = 1 or algorithm.estimator = {_having(ESTIMATORS, 'discounts')}")
    if s.lam != Settings.lam and not traits.needs_critic:
        yield (f"algorithm.lam: {s.lam} with {which}, which has none; leave it out or write algorithm.estimator = "
               f"{_having(ESTIMATORS, 'needs_critic')}")
    if s.critic and not traits.needs_critic:
        yield (f"critic: is configured, and {which} has none; leave it out or write algorithm.estimator = "
               f"{_having(ESTIMATORS, 'needs_critic')}")
    if s.teacher != traits.needs_teacher:
        yield (f"algorithm.teacher: is configured, and {which} has none; leave it out or write algorithm.estimator = "
               f"{_having(ESTIMATORS, 'needs_teacher')}" if s.teacher else
               f"algorithm.teacher: missing, and {which} is made of its log-probabilities; name a model")
    if s.teacher_engine and not traits.needs_teacher:
        yield (f"algorithm.teacher_engine: is configured, and {which} has no teacher; leave it out or write "
               f"algorithm.estimator = {_having(ESTIMATORS, 'needs_teacher')}")
    if not traits.ignores_reward:
        return
    for option, value, off in (("rollout.dynamic_filter", s.dynamic_filter, False),
                               ("algorithm.overlong_buffer", s.overlong_buffer, 0),
                               ("algorithm.truncation_coefficient", s.truncation_coefficient, 1.0)):
        if value != off:
            yield f"{option}: {value} with {which}, which ignores rewards; leave {option.rpartition('.')[2]} out"


def _kl(s: Settings, traits: EstimatorTraits) -> Iterator[str]:
    which = f"algorithm.estimator = {s.estimator!r}"
    if traits.needs_teacher and (s.kl <= 0 or s.kl_use == "loss"):
        yield (f"algorithm.kl.coefficient: {s.kl} with algorithm.kl.use = {s.kl_use!r} and {which}, whose only signal "
               "is the KL to the teacher in the place of a reward; write kl.coefficient > 0 and kl.use = 'reward'")
    elif s.kl and s.kl_use == "reward" and not traits.kl_in_reward:
        yield (f"algorithm.kl.use: 'reward' with {which}, whose reward is one a rollout; write algorithm.kl.use = "
               f"'loss' or algorithm.estimator = {_having(ESTIMATORS, 'kl_in_reward')}")
    if traits.needs_teacher and s.kl_ref == "rollout":
        yield (f"algorithm.kl.ref: 'rollout' with {which}, whose reference is the teacher; write algorithm.kl.ref = "
               "'model'")
    if traits.needs_teacher and s.kl_kind in ("k2", "k3"):
        yield (f"algorithm.kl.kind: {s.kl_kind!r} with {which}, which is the difference itself; write kl.kind = 'k1' "
               "or leave it out")
    if s.kl and s.kl_use == "loss" and s.kl_kind == "k1" and not traits.needs_teacher:
        yield ("algorithm.kl.kind: 'k1' with algorithm.kl.use = 'loss', whose gradient is that of log π, whatever the "
               "reference; write kl.kind = 'k2' or 'k3' or leave it out")
    if s.kl_target is not None and not s.kl:
        yield (f"algorithm.kl.target: {s.kl_target} with algorithm.kl.coefficient = 0, which stays 0 whatever it is "
               "multiplied by; write kl.coefficient > 0 to start from, or leave the target out")
    if s.reference and (not s.kl or s.kl_ref == "rollout" or traits.needs_teacher):
        why = (f"{which}, whose reference is the teacher" if traits.needs_teacher else
               "algorithm.kl.coefficient = 0" if not s.kl else "algorithm.kl.ref = 'rollout'")
        yield (f"algorithm.kl.model: would be loaded for nothing with {why}; leave it out"
               + ("" if traits.needs_teacher else ", or write kl.coefficient > 0 and kl.ref = 'model'"))


def _loss(s: Settings, traits: LossTraits) -> Iterator[str]:
    which = f"algorithm.loss = {s.loss!r}"
    if traits.one_update and s.updates_per_batch > 1:
        yield (f"algorithm.updates_per_batch: {s.updates_per_batch} with {which}, which holds for one update a batch; "
               "write algorithm.updates_per_batch = 1 or algorithm.loss = 'ppo'")
    if s.clip != Settings.clip and not traits.clips:
        yield (f"algorithm.clip_low, algorithm.clip_high: {s.clip[0]}, {s.clip[1]} with {which}, which does not clip "
               f"so; leave them out or write algorithm.loss = {_having(LOSSES, 'clips')}")
    if s.dual_clip is not None and not traits.dual_clip:
        yield (f"algorithm.dual_clip: {s.dual_clip} with {which}, which has no "
               f"{'dual clip' if traits.has_ratio else 'ratio to clip'}; leave it out or write algorithm.loss = "
               f"{_having(LOSSES, 'dual_clip')}")
    if s.ceiling is not None and not traits.ceiling:
        yield (f"algorithm.ceiling: {s.ceiling} with {which}, which has none; leave it out or write algorithm.loss = "
               f"{_having(LOSSES, 'ceiling')}")
    elif s.ceiling is not None and s.ceiling < 1:
        yield f"algorithm.ceiling: {s.ceiling} would shrink tokens whose ratio is 1; write algorithm.ceiling >= 1"
    if s.token_sum_divisor is not None and s.aggregation != "rollout_mean_token_sum":
        yield (f"algorithm.token_sum_divisor: {s.token_sum_divisor} is not used by algorithm.aggregation = "
               f"{s.aggregation!r}; leave it out or write aggregation = 'rollout_mean_token_sum'")


def _importance(s: Settings, loss: LossTraits) -> Iterator[str]:
    if s.importance == "off" and s.max_staleness:
        yield (f"algorithm.importance.level: 'off' with rollout.max_staleness = {s.max_staleness} would train stale "
               "tokens as if they were fresh; write 'auto', 'token', 'seq', 'geo' or rollout.max_staleness = 0")
    if s.mode != "mask" and s.importance != "token":
        yield (f"algorithm.importance.mode: {s.mode!r} works on tokens; write algorithm.importance.level = 'token' or "
               "mode = 'mask'")
    if s.gate != "ratio" and s.importance not in ("token", "seq"):
        yield (f"algorithm.importance.gate: {s.gate!r} with algorithm.importance.level = {s.importance!r}; write level "
               "= 'token' or 'seq', or gate = 'ratio'")
    if s.gate != "ratio" and s.mode != "mask":
        yield (f"algorithm.importance.gate: {s.gate!r} with algorithm.importance.mode = {s.mode!r}: it is no ratio "
               "that could be cut; write mode = 'mask' or gate = 'ratio'")
    if s.gate == "ratio" and s.low > s.high:
        yield (f"algorithm.importance.low: {s.low} is above algorithm.importance.high = {s.high}; write low <= high")
    if not s.score_centering:
        return
    option = f"algorithm.importance.score_centering: {s.score_centering}"
    if not loss.centres:
        yield (f"{option} with algorithm.loss = {s.loss!r}, whose gradient it does not fit; write algorithm.loss = "
               f"{_having(LOSSES, 'centres')}, or leave it out")
    if s.updates_per_batch > 1:
        yield (f"{option} with algorithm.updates_per_batch = {s.updates_per_batch}, but it fits the first update only; "
               "write algorithm.updates_per_batch = 1, or leave it out")
    if s.level in ("seq", "geo") or s.gate != "ratio":
        yield (f"{option} with algorithm.importance.level = {s.importance!r} and gate = {s.gate!r}: it needs a factor "
               "that depends on the token's ratio alone; write level = 'token' and gate = 'ratio', or leave it out")


def _sampling(s: Settings, loss: LossTraits) -> Iterator[str]:
    ratio = f"algorithm.loss = {s.loss!r}" if loss.has_ratio else (
        f"algorithm.importance.level = {s.importance!r}" if s.level != "off" else
        "algorithm.kl.ref = 'rollout'" if s.kl and s.kl_ref == "rollout" else None)
    for name, value, off in (("top_p", s.top_p, 1), ("top_k", s.top_k, 0)):
        if ratio and value != off:
            yield (f"rollout.{name}: {value} with {ratio}: the sampler renormalises over the tokens it kept and the "
                   f"trainer does not, so every ratio would be off; write rollout.{name} = {off}")


def _replay(s: Settings) -> Iterator[str]:
    if s.routing_replay and s.in_flight_updates:
        yield ("rollout.routed_experts: true with weight updates in flight (rollout.max_staleness = "
               f"{s.max_staleness}), after which a reply's experts are of two versions; write rollout.max_staleness = "
               "0 or routed_experts = false")
    if s.routing_replay and s.speculative:
        yield ("rollout.routed_experts: true with speculative decoding in rollout.engine_args, whose drafts have "
               "experts of their own; leave speculative_config (or spec_*) out or write routed_experts = false")
    if s.prefix_cache and s.speculative:
        yield ("rollout.engine_args.enable_prefix_caching: true with speculative decoding, whose heads are not in the "
               "cache; write enable_prefix_caching = false or leave speculative_config (or spec_*) out")
