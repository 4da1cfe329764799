"""Which transformers models both the sampler and the trainer compute rightly.

Both run the decoder and the output head themselves: with masks of their own, and without what a model's `forward` does
to its logits. What they would get silently wrong is refused.
"""

import threading
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from molt_gym.errors import ConfigError
from molt_gym.tokens.vision import MODELS as VISION_MODELS

LOADING = threading.Lock()
"""Held while transformers makes a model, in which it changes torch for all threads; two at a time leave it broken."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How configurations name the number of experts."""
_ATTENTION_CHANGES = ("attention_mask", "sliding_window", "softcap", "s_aux", "position_bias", "indices",
                      "block_indices")
"""What layers ask of an attention that is another one than each token's to all before it."""
_LOGIT_CHANGES = {"final_logit_softcapping": None, "logits_scaling": 1, "logit_scale": 1}


def check_architecture(config: PreTrainedConfig, max_context: int) -> None:
    """Raise ConfigError for layers that do not attend to everything, changed logits, or a context that is too short.

    Of a model that sees, its text part is looked at; and whether its images are understood.
    """
    if sees(config) and config.model_type not in VISION_MODELS:
        raise ConfigError(f"model: the images of {config.model_type} are not supported; choose a text model, or one of "
                          f"type {', '.join(VISION_MODELS)}")
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        kinds.add("sliding_attention")
    if kinds != {"full_attention"}:
        raise ConfigError(f"model: {config.model_type} has layers of kind {sorted(kinds - {'full_attention'})}, which "
                          "are not supported; choose a model whose layers are all full attention")
    for name, neutral in _LOGIT_CHANGES.items():
        if getattr(config, name, neutral) not in (neutral, None):
            raise ConfigError(f"model: {config.model_type} changes its logits ({name} = {getattr(config, name)}), "
                              "which is not supported; choose another model")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        raise ConfigError(f"model: {config.model_type} has no number of positions (max_position_embeddings), so its "
                          "attention is another one than is supported; choose another model")
    if max_context > positions:
        raise ConfigError(f"rollout.max_context: {max_context} is more than the model's {positions} positions; write "
                          "at most that")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and max_context > (short := rope["original_max_position_embeddings"]):
        raise ConfigError(f"rollout.max_context: {max_context} is more than {short} positions, beyond which "
                          f"{config.model_type} turns whole rows by other angles (longrope), and rows in one batch "
                          "share theirs; write at most that")


def check_attention(layer: nn.Module | None, asked: Mapping[str, Any]) -> None:
    """Raise ConfigError if a layer asks for an attention that would be another one than it gets."""
    for name in _ATTENTION_CHANGES:
        if asked.get(name) is not None:
            raise ConfigError(f"model: {type(layer).__name__} asks for attention with {name}, which is not supported; "
                              "choose another model")


def sees(config: PreTrainedConfig) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def model_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads it."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def attention_of(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """`attn_implementation` in which the text part has the attention of that name."""
    return {"text_config": name, "vision_config": "sdpa"} if sees(config) else name


def decoder_of(model: nn.Module) -> nn.Module:
    """The layers that make hidden states of ids, and of images if they see any."""
    return getattr(model.base_model, "language_model", model.base_model)
