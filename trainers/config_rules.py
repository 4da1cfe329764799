"""Rules between the options of a run: what is fine by itself but not together, each with what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .algorithms.validation import Settings, problems

if TYPE_CHECKING:
    from .config_schema import Config


def contradictions(config: Config) -> Iterator[str]:
    """Options that are fine by themselves but not together, each with what to change."""
    yield from _batch_contradictions(config)
    yield from problems(_settings(config))
    yield from _engine_contradictions(config)
    yield from _placement_contradictions(config)
    yield from _mixture_contradictions(config)
    yield from _actor_contradictions(config)
    yield from _without_effect(config)
    rollout, evaluation = config.rollout, config.eval
    if rollout.max_tokens >= rollout.max_context:
        yield (f"rollout.max_tokens: {rollout.max_tokens} leaves no room for a prompt in rollout.max_context = "
               f"{rollout.max_context}; write a smaller max_tokens or a larger max_context")
    if config.algorithm.overlong_buffer > rollout.max_tokens:
        yield (f"algorithm.overlong_buffer: {config.algorithm.overlong_buffer} is more than rollout.max_tokens = "
               f"{rollout.max_tokens}; write at most that")
    if rollout.dynamic_filter and rollout.dynamic_filter[0] >= rollout.dynamic_filter[1]:
        yield (f"rollout.dynamic_filter: {list(rollout.dynamic_filter)} admits no group; write [low, high] with "
               "low < high")
    if evaluation.k > 1 and evaluation.temperature == 0:
        yield (f"eval.k: {evaluation.k} greedy rollouts of a task are all the same; write eval.k = 1 or "
               "eval.temperature > 0")


def _mixture_contradictions(config: Config) -> Iterator[str]:
    mixture = config.mixture
    if mixture and config.env not in ("+".join(mixture), *mixture):
        yield (f"env: {config.env!r} with a mixture of {', '.join(mixture)}; write {'+'.join(mixture)!r}, or one of "
               "them to take its settings alone")
    if mixture and config.env_kwargs:
        yield (f"env_kwargs: {', '.join(config.env_kwargs)} with a mixture, whose environments have arguments of their "
               "own; write mixture.ID.env_kwargs")
    if config.curriculum and not mixture:
        yield f"curriculum: {config.curriculum!r} without a mixture, whose weights it would change; leave it out"


def _batch_contradictions(config: Config) -> Iterator[str]:
    groups, size = config.rollout.groups_per_step, config.rollout.group_size
    updates, parts = config.algorithm.updates_per_batch, config.actor.tp * config.actor.cp
    ranks, left = divmod(config.actor.world_size, parts)
    if left:
        yield (f"actor.world_size: {config.actor.world_size} is no multiple of actor.tp × actor.cp = {config.actor.tp} "
               f"× {config.actor.cp}; write {(ranks + 1) * parts} or smaller parts")
        return
    if groups % updates:
        yield (f"algorithm.updates_per_batch: {updates} does not divide rollout.groups_per_step = {groups}; write a "
               f"divisor of it or rollout.groups_per_step = {-(-groups // updates) * updates}")
    elif (rollouts := groups // updates * size) % ranks:
        by = f" / {parts} (actor.tp × actor.cp)" if parts > 1 else ""
        yield (f"actor.world_size: {config.actor.world_size}{by} does not divide the {rollouts} rollouts of an update "
               f"({groups // updates} groups of {size}); write a divisor of {rollouts}"
               + (f" times {parts}" if parts > 1 else ""))


def _actor_contradictions(config: Config) -> Iterator[str]:
    actor, lora = config.actor, config.actor.lora
    if actor.ep > 1 and actor.backend == "transformers":
        yield (f"actor.ep: {actor.ep} with actor.backend = 'transformers', which has each expert on every rank; write "
               "backend = 'automodel' or ep = 1")
    if lora.rank and (actor.ep > 1 or actor.backend == "automodel"):
        yield (f"actor.lora.rank: {lora.rank} with a model of nemo_automodel (actor.backend, actor.ep); adapters are "
               "for those of transformers: write backend = 'transformers' and ep = 1, or lora.rank = 0")
    if actor.tp > 1 and (actor.backend == "automodel" or actor.ep > 1):
        yield (f"actor.tp: {actor.tp} with a model of nemo_automodel (actor.backend, actor.ep), which is shared by ep "
               "and cp alone; write tp = 1, or backend = 'transformers' and ep = 1")
    if lora.dropout:
        yield (f"actor.lora.dropout: {lora.dropout} would make the trainer compute other probabilities than the "
               "sampler, and every ratio of the two would be off; write 0")
    if not lora.rank and lora != type(lora)():
        yield "actor.lora: is configured, and actor.lora.rank = 0 trains all weights; write a rank, such as 32"
    if not lora.rank:
        return
    if actor.tp > 1:
        yield (f"actor.tp: {actor.tp} with adapters, which it cannot cut; write actor.tp = 1 (adapters need little "
               "memory) or actor.lora.rank = 0")
    if lora.transfer == "adapter" and not config.adapter_updates:
        which = ("rollout.release_memory = true, where the engine forgets the model that adapters belong to"
                 if config.rollout.release_memory else "rollout.engine = 'transformers', which takes whole weights")
        yield f"actor.lora.transfer: 'adapter' with {which}; write 'merged' or 'auto'"


def _without_effect(config: Config) -> Iterator[str]:
    """Options that are not as they would be anyway, and that others keep from doing anything."""
    rollout, actor, algorithm = config.rollout, config.actor, config.algorithm
    kl, importance = algorithm.kl, algorithm.importance
    gate = f"gate = {importance.gate!r}" if importance.gate != "ratio" else f"mode = {importance.mode!r}"
    for name, section, options, idle, which, remedy in (
        ("actor", actor, ["decay_share"], actor.schedule != "wsd", f"actor.schedule = {actor.schedule!r}",
         "schedule = 'wsd'"),
        ("actor", actor, ["min_lr_ratio"], actor.schedule == "constant", "actor.schedule = 'constant'",
         "another schedule"),
        ("actor", actor, ["momentum"], actor.optimizer != "muon", f"actor.optimizer = {actor.optimizer!r}",
         "optimizer = 'muon'"),
        ("algorithm", algorithm, ["overlong_penalty"], not algorithm.overlong_buffer, "algorithm.overlong_buffer = 0",
         "a larger overlong_buffer"),
        ("algorithm.kl", kl, ["kind", "use", "ref"], not kl.coefficient, "algorithm.kl.coefficient = 0",
         "kl.coefficient > 0"),
        ("algorithm.importance", importance, ["low"], importance.gate != "ratio" or importance.mode == "trunc",
         f"algorithm.importance.{gate}, whose band has an upper end alone", "high in its place"),
        ("rollout", rollout, ["weight_transfer"], rollout.engine == "transformers", "rollout.engine = 'transformers'",
         "rollout.engine = 'vllm'"),
    ):
        for option in options if idle else ():
            if (value := getattr(section, option)) != type(section).model_fields[option].default:
                yield f"{name}.{option}: {value!r} does nothing with {which}; write {remedy} or leave it out"


_ENGINE_OPTIONS = {
    "model": "model", "tokenizer": "model", "dtype": "rollout.dtype", "max_model_len": "rollout.max_context",
    "max_num_seqs": "rollout.max_concurrency", "seed": "seed", "generation_config": None,
    "override_generation_config": None, "logprobs_mode": None, "skip_tokenizer_init": None,
    "worker_extension_cls": None, "weight_transfer_config": None, "data_parallel_size": None, "scheduling_policy": None,
    "enable_return_routed_experts": "rollout.routed_experts", "enable_sleep_mode": "rollout.release_memory",
    "watermark_config": None, "enable_lora": "actor.lora.rank", "max_lora_rank": "actor.lora.rank",
    "max_loras": None, "max_cpu_loras": None}
"""Arguments of vLLM that are set for it, and the options that do so."""


def _engine_contradictions(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine == "transformers" and rollout.engine_args:
        yield (f"rollout.engine_args: {', '.join(rollout.engine_args)} with rollout.engine = 'transformers', which "
               "takes none; leave them out or write rollout.engine = 'vllm'")
    if rollout.engine == "transformers" and rollout.engines > 1:
        yield (f"rollout.engines: {rollout.engines} with rollout.engine = 'transformers', which runs in the trainer's "
               "own process; write rollout.engines = 1 or rollout.engine = 'vllm'")
    for name in ("routed_experts", "release_memory"):
        if rollout.engine == "transformers" and getattr(rollout, name):
            yield (f"rollout.{name}: true with rollout.engine = 'transformers', which cannot; write rollout.engine = "
                   f"'vllm' or rollout.{name} = false")
    for name in rollout.engine_args:
        if name in _ENGINE_OPTIONS:
            option = _ENGINE_OPTIONS[name]
            yield (f"rollout.engine_args.{name}: is set by the run itself; "
                   + (f"write {option} instead" if option else "leave it out"))
    algorithm = config.algorithm
    if algorithm.teacher_engine == "actor" and algorithm.teacher_engine_args:
        yield (f"algorithm.teacher_engine_args: {', '.join(algorithm.teacher_engine_args)} with "
               "algorithm.teacher_engine = 'actor', which takes none; leave them out or write teacher_engine = 'vllm'")
    for name in algorithm.teacher_engine_args:
        if name in _ENGINE_OPTIONS:
            yield f"algorithm.teacher_engine_args.{name}: is set by the run itself; leave it out"
    if rollout.engine == "vllm" and rollout.temperature < 0.01:
        yield (f"rollout.temperature: {rollout.temperature} with rollout.engine = 'vllm', which samples at 0.01 or "
               "more; write at least that")


def _placement_contradictions(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if config.placement == "ray" and rollout.engine == "transformers":
        yield ("placement: 'ray' with rollout.engine = 'transformers', which samples in the trainer's own process; "
               "write rollout.engine = 'vllm' or placement = 'local'")
    if config.placement == "ray" and config.algorithm.teacher_engine == "vllm":
        yield ("placement: 'ray' with algorithm.teacher_engine = 'vllm', which has no place in a cluster yet; write "
               "algorithm.teacher_engine = 'actor' or placement = 'local'")
    if config.placement == "local" and rollout.runners > 1:
        yield (f"rollout.runners: {rollout.runners} with placement = 'local', where this process plays; write "
               "placement = 'ray' or rollout.runners = 1")
    if rollout.runners > 1 and rollout.server_port:
        yield (f"rollout.server_port: {rollout.server_port} for {rollout.runners} runners, which cannot all listen "
               "there; write 0 or rollout.runners = 1")
    if rollout.release_memory and rollout.max_staleness:
        yield (f"rollout.release_memory: true with rollout.max_staleness = {rollout.max_staleness}, where engine and "
               "actor work at the same time; write rollout.max_staleness = 0 or release_memory = false")


def speculates(engine_args: Mapping[str, Any]) -> bool:
    """Whether these arguments of vLLM have it draft tokens and check several at a time."""
    return any(engine_args.get(name) for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens"))


def _settings(config: Config) -> Settings:
    rollout, algorithm = config.rollout, config.algorithm
    kl, importance, engine_args = algorithm.kl, algorithm.importance, rollout.engine_args
    return Settings(
        estimator=algorithm.estimator, gamma=algorithm.gamma, lam=algorithm.lam, loss=algorithm.loss,
        clip=(algorithm.clip_low, algorithm.clip_high), dual_clip=algorithm.dual_clip, ceiling=algorithm.ceiling,
        aggregation=algorithm.aggregation, token_sum_divisor=algorithm.token_sum_divisor,
        updates_per_batch=algorithm.updates_per_batch, kl=kl.coefficient, kl_kind=kl.kind, kl_use=kl.use,
        kl_ref=kl.ref, kl_target=kl.target, reference=kl.model is not None, teacher=algorithm.teacher is not None,
        teacher_engine=algorithm.teacher_engine != "actor",
        critic=config.critic != type(config.critic)(),
        importance=importance.level, mode=importance.mode, gate=importance.gate, low=importance.low,
        high=importance.high, score_centering=importance.score_centering,
        dynamic_filter=rollout.dynamic_filter is not None,
        overlong_buffer=algorithm.overlong_buffer, truncation_coefficient=algorithm.truncation_coefficient,
        group_size=rollout.group_size, groups_per_step=rollout.groups_per_step, max_staleness=rollout.max_staleness,
        top_p=rollout.top_p, top_k=rollout.top_k, routing_replay=rollout.routed_experts,
        in_flight_updates=rollout.max_staleness > 0, speculative=speculates(engine_args),
        prefix_cache=bool(engine_args.get("enable_prefix_caching")))
