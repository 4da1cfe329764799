"""How long the parts of a step take, from shapes and from rates that were measured or assumed.

Importable without torch. Every default says where it is from; files in quotes lie in benchmarks/results.
"""

from dataclasses import dataclass

from .actor.sizes import Shape, Sizes
from .config_types import NotNegative, Number, Positive, Section, Share


class TrainRates(Section):
    """Of the actor."""

    peak: Positive = 794.7e12
    """Operations a second of a GPU in products of large matrices, measured on an H200: "h200-actor-throughput"."""
    mfu: Share = 0.30
    """What an update reaches of that, for 4B with full checkpointing (compiled .47): "h200-actor-throughput"."""
    scaling: Share = 0.89
    """What is left of it for several ranks; two were 1.78 times as fast as one: "h200x2-actor-layouts"."""
    within: Positive = 450e9
    """Bytes a second that a GPU sends to others of its node: data sheet of NVLink 4."""
    between: Positive = 50e9
    """The same to other nodes: data sheet of a network of 400 Gb/s a GPU."""


class EngineRates(Section):
    """Of an engine."""

    token: NotNegative = 2.8e-5
    """Seconds of an engine's process a token, 131,058 in 3.63 s at 0.6B: "h200-peer-step-06b"."""
    memory: Positive = 4.8e12
    """Bytes a second that a GPU can read: data sheet of the H200."""
    reads: Share = 0.6
    """What decoding reaches of that; assumed."""
    reserve: NotNegative = 3.0
    """GiB of a GPU that vLLM keeps for activations and graphs; assumed."""


class WeightRates(Section):
    """Of an update of the engines' weights."""

    fixed: NotNegative = 0.23
    """Seconds of one of next to no bytes, from .25 s for 1.19 GB: "h200-peer-step-06b"."""
    bytes_per_s: Positive = 5.0e10
    """Bytes a second beyond that, within a GPU, from .38 s for 8.05 GB: "h200-peer-step-4b"; networks may be slower."""


class EpisodeRates(Section):
    """Of what is played; all assumed."""

    prompt: NotNegative = 512
    """Tokens of a rollout that are not sampled."""
    reply: Share = 0.5
    """Mean length of a reply, of rollout.max_tokens."""
    turns: Positive = 1
    """Replies of a rollout."""
    env: Number = 1.0
    """Seconds that the environment takes for a rollout."""


class Rates(Section):
    """All of them; a file of TOML has a table for each part, and leaves out what is as here."""

    train: TrainRates = TrainRates()
    engine: EngineRates = EngineRates()
    weights: WeightRates = WeightRates()
    episode: EpisodeRates = EpisodeRates()


def active(shape: Shape) -> float:
    """Parameters of the layers that a token goes through."""
    sparse = shape.layers - shape.dense
    idle = shape.routed * (1 - shape.top_k / shape.experts) if shape.experts else 0
    return shape.dense * shape.layer(False) + (sparse and sparse * (shape.layer(True) - idle))


def operations(shape: Shape, shared: float, own: float, rollouts: int, groups: int, frozen: int = 0) -> float:
    """Of an update: 6 for each active parameter and token, those of attention, and 2 more for each frozen model.

    Args:
        shape: the model.
        shared: tokens that a group has in common, computed once.
        own: tokens of each rollout beside them.
        rollouts: of the update.
        groups: they are in.
        frozen: models that only compute.
    """
    tokens = groups * shared + rollouts * own
    pairs = groups * shared**2 / 2 + rollouts * (own * shared + own**2 / 2)
    head = rollouts * own * shape.vocab * shape.hidden
    width = shape.heads * shape.head_dim
    return (6 + 2 * frozen) * (active(shape) * tokens + head) + (12 + 4 * frozen) * shape.layers * width * pairs


def update(shape: Shape, sizes: Sizes, plan_tokens: int, work: tuple[float, float], rates: TrainRates,
           one_node: bool) -> float:
    """Seconds of an update.

    Parameters are gathered and gradients exchanged while others are computed with; tokens on their way to experts are
    waited for.

    Args:
        shape: the model.
        sizes: of the actor.
        plan_tokens: of a micro-batch.
        work: operations and tokens of the update.
        rates: of the actor.
        one_node: whether all ranks are on one.
    """
    operations, tokens = work
    scaling, speed = (rates.scaling, rates.within if one_node else rates.between) if sizes.world > 1 else (1.0, 1e30)
    computing = operations / (sizes.world * rates.peak * rates.mfu * scaling)
    passes = max(1.0, tokens / sizes.dp / plan_tokens)
    others = shape.parameters(sizes.tp, sizes.ep) - (shape.layers - shape.dense) * shape.routed / sizes.ep
    # Twice gathered in 2 bytes, once summed in 4; with ep the experts of a rank are its own.
    exchange = passes * 8 * (others if sizes.ep > 1 else shape.parameters(sizes.tp)) / speed
    # In and out; in the backward pass the same for gradients, and in once more for what is computed again.
    moved = 5 * (shape.layers - shape.dense) * tokens / sizes.dp * sizes.ep * shape.hidden * 2
    return max(computing, exchange) + (moved / speed if sizes.ep > 1 else 0)


@dataclass(frozen=True)
class Engine:
    """An engine that decodes: its model, GPUs, bytes of the weights and of a token in the cache, rates."""

    shape: Shape
    gpus: int
    weights: float
    cache: float
    rates: EngineRates

    def step(self, sequences: float, context: float) -> float:
        """Seconds in which each of so many sequences, of this length on average, gets a token."""
        shape, read = self.shape, self.weights
        if shape.experts:
            routed = (shape.layers - shape.dense) * shape.routed / shape.parameters() * self.weights
            read -= routed * (1 - shape.top_k / shape.experts) ** sequences
        read += sequences * context * self.cache
        return sequences * self.rates.token + read / (self.gpus * self.rates.memory * self.rates.reads)

    def rate(self, sequences: float, context: float) -> float:
        """Tokens a second."""
        return sequences / self.step(sequences, context)
