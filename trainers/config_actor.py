"""The options of the model that is trained, of its optimizer, adapters and critic."""

from __future__ import annotations

from typing import Literal

from .config_types import Count, Dtype, Moment, Names, Natural, NotNegative, Positive, PositiveShare, Section, Share

MOST_RANK = 512
"""Of adapters, in vLLM."""
Backend = Literal["auto", "transformers", "automodel"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained in the place of the model's weights."""

    rank: Natural = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Positive = 32.0
    """An adapter is weighed by alpha / rank."""
    dropout: NotNegative = 0.0
    """Only 0: with dropout, the trainer would compute other probabilities than the sampler."""
    target_modules: Names = ("all-linear",)
    """Linear layers with an adapter, by the ends of their names, such as q_proj,v_proj; all-linear: all but a head."""
    transfer: Literal["auto", "adapter", "merged"] = "auto"
    """What an update sends to the engines: adapters, or whole weights with the adapters in them; auto: as they can."""


class ActorConfig(Section):
    """The model being trained and its optimizer."""

    dtype: Dtype = "auto"
    """Precision of the forward and backward pass; master weights are float32."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for the matrices of the hidden layers and AdamW for all others."""
    lr: Positive = 1e-6
    """Peak learning rate; with adapters, 10 times as much unless it is set."""
    lr_groups: dict[str, Positive] = {}
    """Factors on lr by patterns of parameter names, such as {"*embed_tokens*" = 0.1}; the last that fits counts."""
    schedule: Schedule = "constant"
    """Course of the learning rate after the warm-up; wsd stays, then falls linearly over the last updates."""
    decay_share: PositiveShare = 0.2
    """Share of all updates over which wsd falls."""
    warmup_steps: Natural = 0
    """Optimizer updates over which the learning rate rises."""
    min_lr_ratio: Share = 0.0
    """Where linear, cosine and wsd end, as a share of lr."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, of matrices; norms and biases have none."""
    betas: tuple[Moment, Moment] = (0.9, 0.95)
    """Decay rates of Adam's moments."""
    momentum: Moment = 0.95
    """Decay rate of Muon's momentum."""
    eps: Positive = 1e-8
    """Adam's epsilon."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm."""
    micro_batch_tokens: Count | None = None
    """Most tokens of a forward pass, or one longer row; without it 2,048, on GPUs what fits, up to 16,384."""
    logprob_micro_batch_tokens: Count | None = None
    """The same for passes without gradients; without it, 4 times micro_batch_tokens."""
    head_dtype: Literal["auto", "float32"] = "auto"
    """Precision of logits: that of the model, or float32, which costs little."""
    backend: Backend = "auto"
    """What builds the model: transformers or nemo_automodel; auto: the latter with ep > 1 or experts on one GPU."""
    world_size: Count = 1
    """Processes that share the update: shares of the rows × cp × tp."""
    tp: Count = 1
    """Processes that share each layer's matrices, by heads and columns."""
    cp: Count = 1
    """Processes that share the tokens of each micro-batch, so that long rows fit."""
    ep: Count = 1
    """Processes that share the experts of each layer, of those that have other rows, with backend automodel."""
    freeze_vision: bool = True
    """Whether the vision tower of a vision-language model, projector included, stays as it is."""
    max_pixels: Count | None = None
    """Larger images are scaled down to so many pixels, for the sampler too; without it, the model's own limit."""
    frozen_router: bool = False
    """Whether the routers of a mixture-of-experts model stay as they are."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again: nothing, all but matrix products and attention, or whole layers."""
    compile: bool = False
    """Whether layers become fewer, larger kernels: faster and smaller on GPUs, after a minute at the start."""
    offload_optimizer: bool = False
    """Whether the optimizer's state of a GPU lies in the CPU's memory between its steps."""
    lora: LoraConfig = LoraConfig()


class CriticConfig(Section):
    """The model of values that estimator gae needs; what is not said here is as in section actor."""

    lr: Positive = 1e-5
    """Peak learning rate."""
    value_clip: Positive = 0.2
    """How far updates of a batch move a value before its loss stops to shrink; a large number is off."""
    warmup_steps: Natural = 0
    """Optimizer updates in which the critic learns alone and the actor stays as it is."""
