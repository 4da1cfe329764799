"""What a plan says about sampling and steps: cache, sequences and tokens in flight, seconds, staleness."""

from dataclasses import dataclass

from molt_gym.errors import ConfigError

from .actor.memory import GIB
from .actor.memory import Plan as Training
from .actor.sizes import Shape
from .config import Config
from .plan_rates import Engine, EngineRates, EpisodeRates, Rates, operations, update
from .rollout.vllm_spec import engine_workers


@dataclass(frozen=True)
class Fleet:
    """The engines of a run; weights and cache in bytes on a GPU, `room` the cache's, `token` of one token there."""

    engines: int
    engine: Engine
    weights: float
    room: float
    token: float

    @classmethod
    def of(cls, config: Config, shape: Shape, cached: tuple[int, int], memory: float, rates: EngineRates) -> "Fleet":
        """That of a run.

        Args:
            config: the run's.
            shape: its model, of whose text part alone weights are counted.
            cached: numbers that a token leaves in a layer, and over how many GPUs they can be spread.
            memory: bytes of a GPU that an engine may take.
            rates: of an engine.

        Raises:
            ConfigError: there is no room for a single rollout.
        """
        arguments, bytes_ = config.rollout.engine_args, 4 if config.rollout.dtype == "float32" else 2
        gpus, pipeline = engine_workers(arguments), int(arguments.get("pipeline_parallel_size", 1))
        weights, numbers = shape.parameters() * bytes_ / gpus, shape.layers * cached[0] * bytes_
        token = numbers / pipeline / min(gpus // pipeline, cached[1])
        room = memory - weights - rates.reserve * GIB
        if room < (needed := config.rollout.max_context * token):
            raise ConfigError(
                f"rollout.engine_args: an engine does not fit. GiB a GPU: weights {weights / GIB:.1f} + activations "
                f"{rates.reserve:g} + cache of one rollout {needed / GIB:.1f} = "
                f"{(weights + needed) / GIB + rates.reserve:.1f} of {memory / GIB:.1f}\nWrite a larger "
                "tensor_parallel_size or gpu_memory_utilization, or a smaller rollout.max_context")
        return cls(config.rollout.engines, Engine(shape, gpus, shape.parameters() * bytes_, numbers, rates), weights,
                   room, token)


def tokens_of(config: Config, episode: EpisodeRates) -> tuple[float, float]:
    """Sampled tokens of a rollout, and its length while it is played, on average."""
    sampled = episode.turns * episode.reply * config.rollout.max_tokens
    return sampled, min(config.rollout.max_context, episode.prompt + sampled / 2)


def in_flight(config: Config, fleet: Fleet, episode: EpisodeRates) -> tuple[float, float]:
    """Rollouts that the pool has dispatched, and sequences that an engine decodes of them."""
    groups, stale = config.rollout.groups_per_step, config.rollout.max_staleness
    dispatched = max(groups, groups * stale + 1) * config.rollout.group_size
    fits = fleet.room / fleet.token / tokens_of(config, episode)[1]
    playing = min(dispatched, (config.rollout.max_envs or dispatched) * config.rollout.runners)
    return dispatched, min(config.rollout.max_concurrency, fits, playing / fleet.engines)


def rollout_lines(config: Config, fleet: Fleet, episode: EpisodeRates) -> list[str]:
    """What an engine keeps, and what is in flight."""
    dispatched, sequences = in_flight(config, fleet, episode)
    length, context = tokens_of(config, episode)[1], config.rollout.max_context
    total = fleet.room / fleet.token
    return [f"engine    GiB a GPU: weights {fleet.weights / GIB:.1f} + cache {fleet.room / GIB:.1f} + activations "
            f"{fleet.engine.rates.reserve:g}; the cache holds {total:,.0f} tokens of {fleet.token / 1024:.0f} KiB, "
            f"{total / context:,.0f} rollouts of {context:,}",
            f"in flight {dispatched:,} rollouts, {sequences * fleet.engines:,.0f} decoded at once ({sequences:,.0f} an "
            f"engine), {sequences * fleet.engines * length:,.0f} tokens"]


@dataclass(frozen=True)
class Steps:
    """Seconds of the parts of a step, and whether sampling goes on beside the others."""

    sampling: float
    training: float
    weights: float
    apart: bool

    @classmethod
    def of(cls, config: Config, training: Training, fleet: Fleet, rates: Rates, layout: tuple[bool, bool]) -> "Steps":
        """Those of a run; layout: whether engines share GPUs with ranks, and whether these are all on one node."""
        episode, rollouts, shape = rates.episode, config.rollouts_per_step, fleet.engine.shape
        sampled, length = tokens_of(config, episode)
        speed = fleet.engines * fleet.engine.rate(in_flight(config, fleet, episode)[1], length)
        longest = episode.turns * config.rollout.max_tokens * fleet.engine.step(1, length)
        groups = config.rollout.groups_per_step
        passes = training.frozen + (config.algorithm.updates_per_batch > 1)
        work = (operations(shape, episode.prompt, sampled, rollouts, groups, passes),
                groups * episode.prompt + rollouts * sampled)
        return cls(max(rollouts * sampled / speed, longest) + episode.env,
                   update(shape, training.sizes, training.tokens, work, rates.train, layout[1]),
                   rates.weights.fixed + fleet.engine.weights / rates.weights.bytes_per_s,
                   config.rollout.max_staleness > 0 and not layout[0])

    @property
    def step(self) -> float:
        """Seconds of a step."""
        after = self.training + self.weights
        return max(self.sampling, after) if self.apart else self.sampling + after


def step_lines(config: Config, training: Training, fleet: Fleet, rates: Rates, layout: tuple[bool, bool]) -> list[str]:
    """Seconds of a step and staleness, and by which rates; layout as for `Steps.of`."""
    steps, episode, rollouts = Steps.of(config, training, fleet, rates, layout), rates.episode, config.rollouts_per_step
    tokens, stale = rollouts * tokens_of(config, episode)[0], config.rollout.max_staleness
    dispatched, sequences = in_flight(config, fleet, episode)
    speed = fleet.engine.rate(sequences, tokens_of(config, episode)[1])
    return [f"step      {steps.step:.1f} s: sampling {steps.sampling:.1f} {'beside' if steps.apart else '+'} training "
            f"{steps.training:.1f} + weights {steps.weights:.1f}; {rollouts:,} rollouts, {tokens:,.0f} sampled tokens, "
            f"{tokens / steps.step:,.0f} a second",
            f"staleness at most {stale}, some {min(stale, dispatched / rollouts):.1f} on average" if stale else
            "staleness 0, on-policy",
            f"by        training at {rates.train.mfu:g} of {rates.train.peak / 1e12:,.0f} TFLOP/s a GPU, an engine at "
            f"{speed:,.0f} tokens/s, weights at {rates.weights.bytes_per_s / 1e9:g} GB/s, replies of {episode.reply:g} "
            f"× max_tokens, prompts of {episode.prompt:g}, environments {episode.env:g} s (change them with --rates)"]
