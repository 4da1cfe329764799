"""A causal language model on FSDP2, run by its decoder and head.

Invariants: dropout is off, so that trainer and sampler are one distribution; the head runs on the positions that are
scored only; gradients are sums over ranks.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from ..architecture import check_architecture
from .attention import ATTENTION
from .context import Share
from .head import score
from .packing import MicroBatch
from .parallel import Layout, tensor_parallel, tensor_plan
from .recompute import Mode, recompute


class Told(NamedTuple):
    """What a model says of the N trainable tokens of a batch, each [N] and float32; a tuple, as FSDP looks into it.

    logprobs, entropy: under a temperature, entropy where it was asked for. values: of a critic, before each token.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


class Policy(nn.Module):
    """The decoder, and the head on the positions that are scored only.

    layout: of the ranks, if there are several. critic: the head tells values. exact: it computes in float32.
    """

    def __init__(
        self, model: nn.Module, layout: Layout | None = None, *, critic: bool = False, exact: bool = False
    ) -> None:
        super().__init__()
        self.model, self._layout, self._critic, self._exact = model, layout, critic, exact

    def forward(self, batch: MicroBatch, temperature: float = 1.0, *, entropy: bool = False) -> Told:
        """What is said of the batch's trainable tokens."""
        context = self._layout and self._layout.context
        part = batch if context is None else Share.of(batch, context)
        hidden = self.model.base_model(input_ids=part.input_ids, position_ids=part.position_ids, use_cache=False,
                                       visible=batch.visible, context=context).last_hidden_state
        hidden, head = hidden[0, part.sources], self.model.get_output_embeddings()
        if self._critic:
            told = Told(values=head(hidden).float()[part.source_of, 0])
        else:
            told = Told(*score(hidden, head, part, temperature=temperature, entropy=entropy, exact=self._exact))
        return told if context is None else Told(*(value if value is None else part.together(value) for value in told))

    def finish_gradients(self) -> None:
        """Once the backward passes of a step are over: sum what tensor parallelism leaves to be summed."""
        if self._layout and self._layout.tp:
            self._layout.finish(dict(self.model.named_parameters()), tensor_plan(self.model))


def load_policy(
    path: str | Path, layout: Layout, compute: torch.dtype, max_context: int, *,
    frozen: bool = False, critic: bool = False, exact: bool = False, checkpointing: Mode = "none",
) -> Policy:
    """The model of a folder, cut as `layout` says: in float32, or frozen in the precision that it computes in.

    critic: with a head of one output, which is 0 at first, for the value before each token. exact: with a head that
    computes in float32. checkpointing: see `recompute`.

    Raises:
        ConfigError: it is of a kind that is not supported.
    """
    check_architecture(AutoConfig.from_pretrained(path), max_context)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=compute if frozen else torch.float32,
                                                 attn_implementation=ATTENTION)
    if critic:
        head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1, bias=False)
        nn.init.zeros_(head.weight)
        model.set_output_embeddings(head)
    policy = Policy(model.eval(), layout, critic=critic, exact=exact).requires_grad_(not frozen)
    if layout.tp is not None:
        tensor_parallel(model, layout.tp)
    options = {"mesh": layout.shards, "reshard_after_forward": layout.sizes.shards > 1,
               "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)}
    for layer in model.base_model.layers:
        recompute(layer, "none" if frozen else checkpointing)
        # It goes to the device here: one layer after the other, so that the whole model never lies there.
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
