"""Whether a run's actor can be cut as its options say, and fits: known before a process is started or memory taken."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from molt_gym.errors import ConfigError

from ..config import Config
from ..rollout.vllm_spec import SHARED_GPU, memory_share
from . import memory
from .memory import Plan, fit
from .scoring import Scoring
from .sizes import Shape, Sizes, check_sizes

if TYPE_CHECKING:
    from .fsdp_actor import ActorSpec

_STATE = {"adamw": 8, "muon": 4}
"""Bytes of optimizer state for each parameter, or nearly so."""
_ADAPTERS = 0.01
"""Share of the parameters that adapters have, at most."""


def admitted(spec: "ActorSpec") -> tuple[int, bool]:
    """Tokens of a micro-batch, and whether a step's gradients may be summed on each rank before they are exchanged.

    Raises:
        ConfigError: the model cannot be cut so, or the GPU of this process is too small; with the arithmetic.
    """
    known = device_memory()
    shape, plan = planned(spec, known)
    return plan.tokens, fit(shape, plan, known)


def describe(spec: "ActorSpec") -> str:
    """What a rank needs, in one line."""
    known = device_memory()
    unsettled = known is None and spec.config.actor.micro_batch_tokens is None
    return f"actor: {memory.describe(*planned(spec, known))}{'; more tokens if the GPUs allow' * unsettled}"


def device_memory() -> int | None:
    """Bytes of the GPU of this process, if it has one."""
    return torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else None


def planned(spec: "ActorSpec", known: float | None) -> tuple[Shape, Plan]:
    """The model in numbers, and how it is to be trained on devices with so many bytes, if that is known.

    Raises:
        ConfigError: it cannot be, or be cut so.
    """
    actor, scoring = spec.config.actor, Scoring.of(spec.config)
    whole = AutoConfig.from_pretrained(spec.path)
    if scheme := getattr(whole, "quantization_config", None):
        raise ConfigError(f"model: {spec.path} is quantised ({scheme.get('quant_method')}), and its weights cannot be "
                          "trained, nor have adapters; choose the same model in bfloat16")
    config = whole.get_text_config()
    named = {name: getattr(config, name) for name in config.attribute_map}
    # A compiler keeps about as much by itself.
    kept = "selective" if actor.compile and actor.activation_checkpointing == "none" else actor.activation_checkpointing
    plan = Plan(Sizes.of(actor), actor.micro_batch_tokens or 1, kept, actor.offload_optimizer,
                spec.dtype.itemsize, _STATE[actor.optimizer], int(scoring.frozen), 1 + scoring.critic)
    if actor.lora.rank:
        # The model itself is frozen, and its own reference.
        plan = replace(plan, frozen=1, trained=int(scoring.critic), share=_ADAPTERS)
    shape = Shape.of(config.to_dict() | named)
    check_sizes(shape, plan.sizes)
    if actor.micro_batch_tokens is None:
        plan = replace(plan, tokens=memory.micro_batch_tokens(shape, plan, known and known * _left(spec.config)))
    return shape, plan


def _left(config: Config) -> float:
    """The share of a GPU's memory that an engine leaves which may be beside the actor."""
    rollout, elsewhere = config.rollout, config.placement == "ray" and config.ray.layout == "disaggregate"
    if rollout.engine != "vllm" or rollout.release_memory or elsewhere:
        return 1.0
    return 1 - memory_share(rollout.engine_args, SHARED_GPU)
