"""A causal language model on FSDP2, run by its decoder and head.

Invariants: dropout is off, so that trainer and sampler are one distribution; the head runs on the positions that are
scored only; gradients are sums over ranks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast

from molt_gym.errors import ConfigError

from ..architecture import LOADING, attention_of, check_architecture, decoder_of, model_class, sees
from ..config import ActorConfig
from . import automodel
from .attention import ATTENTION
from .context import Share
from .fused import compiled
from .head import score
from .images import inputs_of
from .lora import add_adapters
from .packing import MicroBatch
from .parallel import Layout, tensor_parallel, tensor_plan
from .recompute import Mode, recompute
from .routing import Routing

_OWN_ATTENTION = "model: {} computes attention in its own way, so rows cannot be packed; choose another model"


class Told(NamedTuple):
    """What a model says of the N trainable tokens of a batch, each [N] and float32; a tuple, as FSDP looks into it.

    logprobs, entropy: under a temperature, entropy where it was asked for. values: of a critic, before each token. top:
    [N, k] log-probabilities of the batch's likeliest tokens, if it has any.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    top: Tensor | None = None

    def parted(self, count: int) -> "Told":
        """With the likeliest tokens, which follow the others, for themselves."""
        # FSDP wants no views.
        parts = [value if value is None else value[:count].clone() for value in self[:3]]
        return Told(*parts, None if self.logprobs is None else self.logprobs[count:].unflatten(0, (count, -1)).clone())


class Policy(nn.Module):
    """The decoder, and the head on the positions that are scored only.

    layout: of the ranks, if there are several. critic: the head tells values. exact: it computes in float32. Its
    `routing` replays the experts that a batch has, until the next forward pass.
    """

    def __init__(
        self, model: nn.Module, layout: Layout | None = None, *, critic: bool = False, exact: bool = False
    ) -> None:
        super().__init__()
        if not getattr(model, "_supports_attention_backend", True) or not hasattr(decoder_of(model), "layers"):
            raise ConfigError(_OWN_ATTENTION.format(type(model).__name__))
        self.model, self._layout, self._critic, self._exact = model, layout, critic, exact
        self.routing, self._sees = Routing(decoder_of(model).layers), sees(model.config)

    def forward(self, batch: MicroBatch, temperature: float = 1.0, *, entropy: bool = False) -> Told:
        """What is said of the batch's trainable tokens."""
        context = self._layout and self._layout.context
        part = batch if context is None else Share.of(batch, context)
        self.routing.follow(part.experts)
        inputs = inputs_of(self.model, batch) if self._sees else {
            "input_ids": part.input_ids, "position_ids": part.position_ids}
        hidden = decoder_of(self.model)(**inputs, use_cache=False, visible=batch.visible,
                                        context=context).last_hidden_state
        hidden, head = hidden[0].index_select(0, part.sources), self.model.get_output_embeddings()
        if self._critic:
            told = Told(values=head(hidden).float()[part.source_of, 0])
        else:
            scored = getattr(head, "score", score)
            told = Told(*scored(hidden, head, part, temperature=temperature, entropy=entropy, exact=self._exact))
        if context is not None:
            told = Told(*(value if value is None else part.together(value) for value in told))
        return told if batch.top is None else told.parted(len(batch.weights))

    def exported(self, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A whole parameter by the names, and in the parts, in which transformers and vLLM take it."""
        adapter = getattr(self.model, "state_dict_adapter", None)
        yield from [(name, whole)] if adapter is None else adapter.convert_single_tensor_to_hf(name, whole)

    def finish_gradients(self) -> None:
        """Once the backward passes of a step are over: sum what tensor parallelism leaves to be summed."""
        if self._layout and self._layout.tp:
            self._layout.finish(dict(self.model.named_parameters()), tensor_plan(self.model))


def load_policy(
    path: str | Path, layout: Layout, compute: torch.dtype, max_context: int, options: ActorConfig, *,
    frozen: bool = False, critic: bool = False, seed: int = 0,
) -> Policy:
    """The model of a folder, cut as `layout` says: in float32, or frozen in the precision that it computes in.

    options: how it is built, and of a policy also what of it is trained. critic: with a head of one output, which is 0
    at first, for the value before each token; transformers builds it. seed: fixes new adapters.

    Raises:
        ConfigError: it is of a kind that is not supported.
    """
    config = AutoConfig.from_pretrained(path)
    check_architecture(config, max_context)
    learns = not frozen and not critic
    lora = options.lora if learns and options.lora.rank else None
    checkpointing: Mode = "none" if frozen else options.activation_checkpointing
    storage, ep = compute if frozen or lora else torch.float32, 1 if critic else layout.sizes.ep
    native = not critic and lora is None and automodel.chosen(options.backend, config, layout)
    with LOADING:
        model = (automodel.build(path, layout.shards.device_type, storage, compute, ep) if native
                 else _built(path, config, storage))
    if critic:
        head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1, bias=False)
        nn.init.zeros_(head.weight)
        model.set_output_embeddings(head)
    policy = Policy(model.eval(), layout, critic=critic, exact=options.head_dtype == "float32")
    policy.requires_grad_(not frozen)
    if not (critic or native or sees(config)):
        _check_head(model)
    if sees(config):
        for name in ("tp", "cp", "ep"):
            if (size := getattr(layout.sizes, name)) > 1:
                raise ConfigError(f"actor.{name}: {size} for a model that sees ({config.model_type}); write 1")
        model.base_model.visual.requires_grad_(learns and not options.freeze_vision)
    if lora is not None:
        add_adapters(model, lora, seed)
    if learns and options.frozen_router:
        if not policy.routing.routers:
            raise ConfigError(f"actor.frozen_router: true for a model without routers ({config.model_type}); write "
                              "false")
        policy.routing.freeze()
    if layout.tp is not None:
        tensor_parallel(model, layout.tp)
    # Layers of nemo_automodel get angles in float32, which must stay so.
    sharding = {"mesh": layout.shards, "reshard_after_forward": layout.sizes.shards > 1,
                "mp_policy": MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=not native)}
    for number, layer in enumerate(decoder_of(model).layers):
        recompute(layer, checkpointing)
        if ep > 1:
            # It is sharded.
            continue
        # What goes to an expert has another size each time.
        if options.compile and number not in policy.routing.routers:
            layer.forward = compiled(layer.forward)
        # It goes to the device here: one layer after the other, so that the whole model never lies there.
        fully_shard(layer, **sharding)
    fully_shard(policy, **sharding)
    for module in sharded_parts(policy):
        # Losses are sums over all ranks, so gradients are too; FSDP would average, and gloo cannot scale.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return policy


def _built(path: str | Path, config: PreTrainedConfig, storage: torch.dtype) -> nn.Module:
    """The model of a folder by transformers. Raises ConfigError if it knows no other attention than its own."""
    attention = attention_of(config, ATTENTION)
    try:
        return model_class(config).from_pretrained(path, dtype=storage, attn_implementation=attention)
    except KeyError as error:
        # Some look their own classes up by the name of the attention.
        if error.args != (ATTENTION,):
            raise
        raise ConfigError(_OWN_ATTENTION.format(", ".join(config.architectures or ()))) from error


@torch.no_grad()
def _check_head(model: nn.Module) -> None:
    """Raise ConfigError if a model makes its logits of hidden states in another way than by its output embedding."""
    decoder, head = model.base_model, model.get_output_embeddings()
    # Large, so that what bends logits shows.
    like = {"device": head.weight.device, "dtype": head.weight.dtype}
    hidden = torch.linspace(-1e3, 1e3, 2 * head.weight.shape[1], **like).view(1, 2, -1)
    decoder.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden)
    try:
        found = model(input_ids=torch.zeros_like(hidden[..., 0], dtype=torch.long), use_cache=False).logits.float()
    finally:
        del decoder.forward
    expected = head(hidden).float()
    if not torch.allclose(found, expected, rtol=0.01, atol=0.01 * expected.abs().max().item()):
        raise ConfigError(f"model: {type(model).__name__} makes its logits in another way than by its output embedding "
                          "alone, which is not supported; choose another model")


def sharded_parts(policy: nn.Module) -> list[FSDPModule]:
    """What is gathered and given back as a whole."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def reshard(policy: nn.Module) -> None:
    """Give back weights that a forward pass gathered, and that no backward pass followed."""
    for module in sharded_parts(policy):
        module.reshard()
