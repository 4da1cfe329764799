"""How the ranks of the actor are arranged, and what a model's configuration says about its size.

World = data parallel × context parallel × tensor parallel, the last one innermost. Parameters are sharded over data and
context ranks; rows are dealt to data ranks alone. Importable without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from molt_gym.errors import ConfigError

if TYPE_CHECKING:
    from ..config_actor import ActorConfig


@dataclass(frozen=True)
class Sizes:
    """Ranks in all, and of each kind; experts (ep) are spread over those that shard parameters."""

    world: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, actor: "ActorConfig") -> "Sizes":
        """Those of a run."""
        return cls(actor.world_size, actor.tp, actor.cp, actor.ep)

    @property
    def dp(self) -> int:
        """Shares that rows are dealt to."""
        return self.world // (self.tp * self.cp)

    @property
    def shards(self) -> int:
        """Ranks that each parameter is sharded over, besides tp."""
        return self.world // self.tp


@dataclass(frozen=True)
class Shape:
    """A causal language model in numbers.

    ffn: width of a dense layer, of which there are `dense`; an expert is `expert` wide, and a layer of them has
    `experts` and, always on, `shared` columns more. latent: weights of attention in a layer, where keys and values
    come from a latent vector; else 0.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    ffn: int
    dense: int
    experts: int = 0
    top_k: int = 0
    expert: int = 0
    shared: int = 0
    latent: int = 0
    small: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """Of a transformers configuration as a dict (`config.json`, or `to_dict()`).

        Raises:
            ConfigError: it does not say what a decoder with attention is made of.
        """
        config = config.get("text_config") or config
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if not config.get(name):
                raise ConfigError(f"model: the configuration of {config.get('model_type', 'it')} has no {name}, so its "
                                  "size is not known; choose a transformer whose config.json does")
        layers, hidden, heads = (config[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
        experts = next((config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts")
                        if config.get(name)), 0)
        ffn = config.get("intermediate_size") or 4 * hidden
        expert = config.get("moe_intermediate_size") or ffn
        first, step = config.get("first_k_dense_replace") or 0, config.get("decoder_sparse_step") or 1
        plain = set(config.get("mlp_only_layers") or ())
        sparse = sum(layer >= first and layer not in plain and (layer + 1) % step == 0 for layer in range(layers))
        shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * expert
        biases = ((heads + 2 * kv_heads) * head_dim
                  if config.get("attention_bias") or config.get("model_type", "").startswith("qwen2") else 0)
        return cls(layers, hidden, heads, kv_heads, head_dim, config["vocab_size"],
                   bool(config.get("tie_word_embeddings")), ffn, layers - sparse if experts else layers, experts,
                   config.get("num_experts_per_tok") or 0, expert, shared if experts else 0, _latent(config),
                   2 * hidden + biases)

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding and the head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def attention(self) -> int:
        """Matrices of attention in a layer."""
        return self.latent or 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @property
    def routed(self) -> int:
        """Routed experts of a layer that has them."""
        return 3 * self.hidden * self.expert * self.experts

    def layer(self, sparse: bool, tp: int = 1, ep: int = 1) -> float:
        """Parameters of a layer on one rank of tp and ep ranks, dense or of experts."""
        beside = 3 * self.hidden * self.shared / tp + self.hidden * self.experts
        block = self.routed / ep + beside if sparse else 3 * self.hidden * self.ffn / tp
        return self.attention / (1 if self.latent else tp) + block + self.small

    def parameters(self, tp: int = 1, ep: int = 1) -> float:
        """All parameters; with tp and ep, those of which one rank computes with a part."""
        sparse = self.layers - self.dense
        return self.embeddings + self.hidden + self.dense * self.layer(False, tp) + sparse * self.layer(True, tp, ep)


def check_sizes(shape: Shape, sizes: Sizes) -> None:
    """Raise ConfigError where the model cannot be cut like that; `world` is a multiple of tp × cp."""
    tp, cp = sizes.tp, sizes.cp
    if sizes.shards % sizes.ep:
        raise ConfigError(f"actor.ep: {sizes.ep} does not divide the {sizes.shards} ranks that shard parameters "
                          f"(actor.world_size / actor.tp); write a divisor of {sizes.shards}")
    divided = [("actor.ep", sizes.ep, "experts of a layer", shape.experts),
               ("actor.tp × actor.cp", tp * cp, "attention heads", shape.heads),
               ("actor.tp", tp, "key-value heads", shape.kv_heads)]
    divided += [("actor.tp", tp, "columns of a feed-forward layer", shape.ffn)] if shape.dense else []
    divided += [("actor.tp", tp, "columns of the shared experts", shape.shared)]
    for name, value, what, count in divided:
        if value > 1 and (count % value or not count) and (count or name == "actor.ep"):
            raise ConfigError(f"{name}: {value} does not divide the model's {count} {what}; write a divisor of {count}"
                              if count else f"{name}: {value} for a model without {what}; write 1")
    left = shape.kv_heads // tp
    if cp > 1 and left % cp and cp % left:
        raise ConfigError(f"actor.cp: {cp} neither divides nor is a multiple of the {left} key-value heads "
                          f"{'of a tp rank' if tp > 1 else 'of the model'}; write a divisor of {left}, or 1")


def _latent(config: Mapping[str, Any]) -> int:
    if not config.get("kv_lora_rank"):
        return 0
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rotary, plain, value = (config[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    queries, width = heads * (plain + rotary), config.get("q_lora_rank")
    query = width * (hidden + queries) if width else hidden * queries
    return query + hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
