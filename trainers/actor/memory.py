"""What a rank of the actor needs of its device's memory, worked out before anything is allocated.

An estimate from shapes alone: fragmentation and what libraries keep for themselves come on top, so what does not fit
here does not fit at all. Importable without torch.
"""

from dataclasses import dataclass, replace

from molt_gym.errors import ConfigError

from .sizes import Shape, Sizes

GIB = 1 << 30
MASTER = 4
"""Bytes of a parameter and of its gradient in float32."""
HEAD_CHUNK = 2048
"""Positions whose logits exist at the same time."""

TOKENS = (16_384, 8192, 4096, 2048)
"""Of a micro-batch, if it is not told how many: the first that fits, on a CPU the last."""
PASSING, FILLED = 0.25, 0.7
"""Shares of a device's memory that such a micro-batch may take, and the actor with it: beside vLLM it took 1.3 times
the estimate (benchmarks/results/h200-peer-step-4b.md)."""
_OF_TOKENS = ("activations", "logits, or a layer again", "tokens of the ep group")


@dataclass(frozen=True)
class Plan:
    """How an actor is to train.

    compute: bytes of a number in forward and backward passes. tokens: of a micro-batch, over all context ranks.
    optimizer: bytes of optimizer state for each parameter. frozen: models beside the policy that only compute. trained:
    models with an optimizer. share: of the parameters that is trained.
    """

    sizes: Sizes
    tokens: int
    checkpointing: str = "none"
    offload: bool = False
    compute: int = 2
    optimizer: int = 8
    frozen: int = 0
    trained: int = 1
    share: float = 1.0


def needs(shape: Shape, plan: Plan, whole_gradient: bool = False) -> dict[str, float]:
    """Bytes on a rank by what they are for; their sum is needed in the backward pass.

    whole_gradient: whether gradients of the micro-batches of a step are summed on each rank before they are exchanged.
    """
    sizes, compute = plan.sizes, plan.compute
    outer, own = shape.embeddings + shape.hidden, shape.parameters(sizes.tp) / sizes.shards
    used = shape.parameters(sizes.tp, sizes.ep)
    layer = max(shape.layer(sparse, sizes.tp, sizes.ep) for sparse in (False, True)
                if (shape.layers > shape.dense if sparse else shape.dense))
    gathered = outer + 2 * layer if sizes.shards > 1 else used
    tokens, again = plan.tokens / sizes.cp, max(_kept(shape, plan, "none").values())
    again *= plan.checkpointing != "none"
    logits = (min(HEAD_CHUNK, tokens) * (MASTER + 2 * compute) + shape.hidden * MASTER * plan.share) * shape.vocab
    needed = {
        "parameters": MASTER * own * plan.trained,
        "gathered weights": compute * gathered,
        "gradients": plan.share * (MASTER * own * plan.trained + compute * 2 * layer
                                   + (MASTER * used if whole_gradient and sizes.shards > 1 else 0)),
        "optimizer": 0.0 if plan.offload else plan.share * plan.optimizer * own * plan.trained,
        "frozen models": compute * own * plan.frozen,
        "activations": tokens * activations(shape, plan),
        "logits, or a layer again": max(logits, tokens * again),
        # nemo_automodel has all tokens of an ep group on each of its ranks: what goes in, comes out, and a gradient.
        "tokens of the ep group": 3 * sizes.ep * tokens * shape.hidden * compute if sizes.ep > 1 else 0,
    }
    return {name: amount for name, amount in needed.items() if amount}


def micro_batch_tokens(shape: Shape, plan: Plan, memory: float | None) -> int:
    """How many a device with so many bytes (None: a CPU) is to train at once, whatever the plan says."""
    for tokens in () if memory is None else TOKENS[:-1]:
        needed = needs(shape, replace(plan, tokens=tokens))
        passing = sum(needed.get(name, 0) for name in _OF_TOKENS)
        if passing <= PASSING * memory and sum(needed.values()) <= FILLED * memory:
            return tokens
    return TOKENS[-1]


def activations(shape: Shape, plan: Plan) -> float:
    """Bytes that a token leaves behind for the backward pass, in all layers."""
    counts = {False: shape.dense, True: shape.layers - shape.dense}
    return sum(bytes_ * counts[sparse] for sparse, bytes_ in _kept(shape, plan, plan.checkpointing).items())


def _kept(shape: Shape, plan: Plan, checkpointing: str) -> dict[bool, float]:
    """Of a token in a layer, by whether that has experts."""
    tp, compute, hidden = plan.sizes.tp, plan.compute, shape.hidden
    heads, groups = shape.heads * shape.head_dim / tp, shape.kv_heads * shape.head_dim / tp
    width = {False: shape.ffn / tp, True: shape.shared / tp + shape.top_k * shape.expert}
    kept = {}
    for sparse in (False, True):
        if not (shape.layers - shape.dense if sparse else shape.dense):
            continue
        moved = shape.top_k * hidden if sparse else 0
        # Two norms keep their input in float32 and its normalised form; so do those of queries and keys.
        norms = 2 * hidden * (MASTER + compute) + (heads + groups) * (MASTER + compute)
        kept[sparse] = {
            "none": norms + compute * (2 * hidden + 2 * heads + 2 * groups + 4 * width[sparse] + 2 * moved),
            "selective": compute * (3 * hidden + 2 * heads + 2 * groups + 2 * width[sparse] + moved),
            "full": compute * hidden,
        }[checkpointing]
    return kept


def describe(shape: Shape, plan: Plan, whole_gradient: bool = False) -> str:
    """One line of arithmetic: what a rank needs, in GiB."""
    needed, sizes = needs(shape, plan, whole_gradient), plan.sizes
    parts = " + ".join(f"{name} {amount / GIB:.2f}" for name, amount in needed.items())
    experts = f", ep {sizes.ep}" if sizes.ep > 1 else ""
    return (f"{shape.parameters() / 1e9:.2f}B parameters on {sizes.world} ranks (dp {sizes.dp} × cp {sizes.cp} × tp "
            f"{sizes.tp}{experts}), {plan.tokens:,} tokens a micro-batch, checkpointing {plan.checkpointing}; GiB a "
            f"rank: {parts} = {sum(needed.values()) / GIB:.2f}")


def fit(shape: Shape, plan: Plan, memory: float | None) -> bool:
    """Whether gradients of a step may be summed before they are exchanged, on a device with so many bytes (None: any).

    Raises:
        ConfigError: it does not fit even if they are not; with the arithmetic, and what would.
    """
    if memory is None or sum(needs(shape, plan, whole_gradient=True).values()) <= memory:
        return True
    if sum(needs(shape, plan).values()) <= memory:
        return False
    sizes, full = plan.sizes, "actor.activation_checkpointing = 'full'"
    changes = {
        "actor.activation_checkpointing = 'selective'": replace(plan, checkpointing="selective"),
        full: replace(plan, checkpointing="full"),
        "actor.offload_optimizer = true": replace(plan, offload=True),
        f"{full} with actor.offload_optimizer = true": replace(plan, checkpointing="full", offload=True),
        f"actor.micro_batch_tokens = {plan.tokens // 4}": replace(plan, tokens=plan.tokens // 4),
    }
    for world in (sizes.world << power for power in range(1, 8)):
        larger = replace(plan, checkpointing="full", sizes=replace(sizes, world=world))
        changes[f"{full} with actor.world_size = {world}"] = larger
    better = [change for change, other in changes.items() if sum(needs(shape, other).values()) <= memory]
    raise ConfigError(f"actor: does not fit into the {memory / GIB:.1f} GiB of a device. {describe(shape, plan)}\n"
                      f"Write {' or '.join(better[:2]) or 'a smaller model, or larger actor.tp and actor.world_size'}")
