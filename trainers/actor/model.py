"""A causal language model on FSDP2, run by its decoder and head.

Invariants: dropout is off, so that trainer and sampler are one distribution; the head runs on the positions that are
scored only; gradients are sums over ranks.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from ..architecture import check_architecture
from .packing import MicroBatch


class Policy(nn.Module):
    """The decoder, and the head on the positions that are scored only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch) -> Tensor:
        """[S, V] logits at the positions that are scored."""
        hidden = self.model.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids,
                                       attention_mask=batch.attention_mask, use_cache=False).last_hidden_state
        return self.model.get_output_embeddings()(hidden.flatten(0, 1)[batch.sources])


def load_policy(
    path: str | Path, device: torch.device, ranks: int, compute: torch.dtype, max_context: int, *,
    frozen: bool = False, critic: bool = False,
) -> Policy:
    """The model of a folder, sharded over all ranks: in float32, or frozen in the precision that it computes in.

    critic: with a head of one output, which is 0 at first, for the value before each token.

    Raises:
        ConfigError: it is of a kind that is not supported.
    """
    check_architecture(AutoConfig.from_pretrained(path), max_context)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=compute if frozen else torch.float32,
                                                 attn_implementation="sdpa")
    if critic:
        head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1, bias=False)
        nn.init.zeros_(head.weight)
        model.set_output_embeddings(head)
    policy = Policy(model.to(device).eval()).requires_grad_(not frozen)
    options = {"mesh": init_device_mesh(device.type, (ranks,)), "reshard_after_forward": ranks > 1,
               "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)}
    for layer in model.base_model.layers:
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    for module in sharded_parts(policy):
        # Losses are sums over all ranks, so gradients are too; FSDP would average, and gloo cannot scale.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return policy


def sharded_parts(policy: nn.Module) -> list[FSDPModule]:
    """What is gathered and given back as a whole."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def reshard(policy: nn.Module) -> None:
    """Give back weights that a forward pass gathered, and that no backward pass followed."""
    for module in sharded_parts(policy):
        module.reshard()
