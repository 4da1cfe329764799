"""Metrics that add up: each is a tensor [2] of numerator and denominator.

Invariant: a mean is divided out once, at the end, so it does not depend on how the batch was cut into micro-batches or
spread over ranks. Add over micro-batches with `add`, over ranks by summing the tensors, then take `means`.
"""

import torch
from torch import Tensor

__all__ = ["Metrics", "add", "mean_of", "means"]

Metrics = dict[str, Tensor]


def mean_of(values: Tensor) -> Tensor:
    """The [2] tensor that stands for the mean of `values`, detached and in float64 where the device has it."""
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    total = values.detach().to(dtype).sum()
    return torch.stack([total, torch.full_like(total, values.numel())])


def add(total: Metrics, new: Metrics) -> None:
    """Add `new` into `total`."""
    for name, value in new.items():
        total[name] = total[name] + value if name in total else value


def means(metrics: Metrics) -> dict[str, float]:
    """Numerator over denominator; metrics of which nothing was counted are left out."""
    return {name: (value[0] / value[1]).item() for name, value in sorted(metrics.items()) if value[1] > 0}
