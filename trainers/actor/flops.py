"""How many operations the passes of an update take, and which share that is of what the device can do.

A product of a matrix and a vector takes two operations an element, and its backward pass as many for the gradient of
the vector, and again for that of the matrix where it is trained. Counted is what the update needs: a shared beginning
once, attention only where something is seen, no padding, and nothing that is computed again to save memory.
"""

import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from ..algorithms.metrics import Metrics
from .packing import MicroBatch

_SECTION = "perf/"


@dataclass(frozen=True)
class Cost:
    """Operations of a forward and a backward pass.

    token: of each token. scored: of each position that goes through the head. pair: of each token that sees another.
    """

    token: float
    scored: float
    pair: float

    @classmethod
    def of(cls, model: nn.Module) -> "Cost":
        """Those of a causal language model of transformers; what computes images is not counted."""
        config = model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        outer = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
        token = 0.0
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or id(weight) in outer or "visual" in name:
                continue
            # Of a stack of experts each token goes through a few.
            share = config.num_experts_per_tok / weight.shape[0] if weight.ndim == 3 else 1.0
            token += _both(weight) * share
        return cls(token, _both(model.get_output_embeddings().weight),
                   12.0 * config.num_hidden_layers * config.num_attention_heads * width)

    @property
    def pairs(self) -> float:
        """Of a token that sees another, in tokens."""
        return self.pair / self.token

    def done(self, batch: MicroBatch, *, tokens: bool) -> Metrics:
        """What a rank did for a micro-batch, to be summed; on the CPU, as a GPU would be waited for.

        tokens: whether these count, or only operations, as another model has the same tokens.
        """
        counts = {"operations": self.token * batch.tokens + self.scored * len(batch.sources) + self.pair * batch.pairs}
        if tokens:
            counts |= {"tokens": batch.tokens, "trained": len(batch.targets)}
        return {_SECTION + name: torch.tensor([count, 0.0], dtype=torch.float64) for name, count in counts.items()}


def _both(weight: torch.Tensor) -> float:
    return (6.0 if weight.requires_grad else 4.0) * weight.numel()


def rates(total: Metrics, seconds: float, peak: float) -> dict[str, float]:
    """Take out of summed metrics what was done, and tell it by the second.

    Args:
        total: of all ranks.
        seconds: that it took.
        peak: operations a second of all devices.
    """
    operations, tokens, trained = (float(total.pop(_SECTION + name, torch.zeros(1))[0]) / seconds
                                   for name in ("operations", "tokens", "trained"))
    found = {"train_tokens_per_s": tokens, "trained_tokens_per_s": trained, "mfu": operations / peak}
    return {_SECTION + name: value for name, value in found.items() if value}


@cache
def peak_operations(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in products of large matrices, measured."""
    size, times = (8192, 8) if device.type == "cuda" else (768, 1)
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        started = time.perf_counter()
        for _ in range(times):
            product = one @ other
        product[0, 0].item()
        best = min(best, (time.perf_counter() - started) / times)
    return 2.0 * size**3 / best
