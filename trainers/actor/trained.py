"""A sharded model and the optimizer that trains it: the policy, and its critic.

Invariant: a gradient that is not finite changes nothing.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import ActorConfig
from .model import Policy, reshard
from .optimizer import adamw, learning_rate, optimizer_state


class Trained:
    """Parameters by name, their AdamW, and the course of its rate over `total` updates."""

    def __init__(self, policy: Policy, config: ActorConfig, total: int) -> None:
        self.policy, self._config, self._total = policy, config, total
        self.named = dict(policy.model.named_parameters())
        self._optimizer = adamw(self.named.values(), config)

    def step(self, updates: int) -> dict[str, float]:
        """Apply the gradient, if it is finite, after so many updates; lr, grad_norm and skipped_nonfinite."""
        norm = nn.utils.clip_grad_norm_(self.named.values(), self._config.max_grad_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        rate = learning_rate(self._config, updates, self._total)
        if finite := math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"lr": rate, "skipped_nonfinite": float(not finite)} | ({"grad_norm": norm} if finite else {})

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, to be written, or read into; call `reshard` after that."""
        return {"model": {name: parameter.detach() for name, parameter in self.named.items()},
                "optimizer": optimizer_state(self._optimizer, self.named)}

    def reshard(self) -> None:
        """Forget weights that were gathered before they changed."""
        reshard(self.policy)

    def move(self, device: torch.device) -> None:
        """Parameters and optimizer state to another device."""
        # FSDP gives gathered parameters back first, and each parameter stays the object that the optimizer knows.
        self.policy.to(device)
        for state in self._optimizer.state.values():
            state.update({name: value.to(device) for name, value in state.items() if isinstance(value, Tensor)})
