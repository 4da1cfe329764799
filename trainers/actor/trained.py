"""A sharded model and the optimizers that train it: the policy, and its critic.

Invariants: a gradient that is not finite, on any rank, changes nothing on all; what is frozen has no optimizer state.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from molt_gym.errors import ConfigError

from ..config import ActorConfig
from .flops import Cost
from .lora import PREFIX, base_hash, gathered, merged
from .model import Policy
from .offload import move_state, step_in_parts
from .optimizer import learning_rate, make_optimizers, optimizer_state


class Trained:
    """Parameters by name, their optimizers, and the course of the rate over `total` updates.

    base: folder of the model, if the policy has adapters, which alone are trained and kept then.

    Raises:
        ConfigError: a pattern of `actor.lr_groups` fits no parameter.
    """

    def __init__(self, policy: Policy, config: ActorConfig, total: int, base: str | None = None) -> None:
        self.policy, self._config, self._total = policy, config, total
        self.cost = Cost.of(policy.model)
        self.named = dict(policy.model.named_parameters())
        self.trainable = {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}
        self._optimizers = make_optimizers(policy.model, self.trainable, config)
        self._folder, self._base, self._alpha = base, base_hash(base) if base else None, torch.tensor(config.lora.alpha)

    def step(self, updates: int) -> dict[str, float]:
        """Apply the gradient, if it is finite, after so many updates; lr, grad_norm and skipped_nonfinite."""
        norm = self._clip()
        rate = learning_rate(self._config, updates, self._total)
        if finite := math.isfinite(norm):
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["factor"]
                step_in_parts(optimizer) if self._config.offload_optimizer else optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        return {"lr": rate, "skipped_nonfinite": float(not finite)} | ({"grad_norm": norm} if finite else {})

    def _clip(self) -> float:
        """Clip the gradient; its norm before, which is the same on all ranks."""
        gradients: dict[Any, list[Tensor]] = {}
        for parameter in self.trainable.values():
            if parameter.grad is not None:
                # Operations on many tensors take those of one mesh.
                gradients.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
        squares = 0.0
        for group in gradients.values():
            norm = torch.nn.utils.get_total_norm(group)
            squares += float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        # Ranks that hold the same part of the model may differ in the last bits, and must not in what they do.
        shared = torch.tensor([math.inf if math.isnan(squares) else squares], dtype=torch.float64,
                              device=next(iter(self.trainable.values())).device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        norm = math.sqrt(shared.item())
        if math.isfinite(norm) and (factor := self._config.max_grad_norm / (norm + 1e-6)) < 1:
            for group in gradients.values():
                torch._foreach_mul_(group, factor)
        return norm

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by their names in the checkpoint, adapters merged into them; all ranks must iterate."""
        for name, tensor in merged(self.policy.model, self.named):
            yield from self.policy.exported(name, tensor)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole adapters by the names that peft gives them; all ranks must iterate."""
        for name, parameter in self.trainable.items():
            yield PREFIX + name, gathered(parameter)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, to be written, or read into; `reshard` the policy after that."""
        kept = self.named if self._base is None else self.trainable
        device = torch.device("cpu") if self._config.offload_optimizer else None
        return {"model": {name: parameter.detach() for name, parameter in kept.items()},
                "optimizer": optimizer_state(self._optimizers, self.trainable, device)} | (
                {} if self._base is None else {"base": self._base.clone(), "alpha": self._alpha.clone()})

    def check(self, state: dict[str, Any], folder: Path) -> None:
        """After a checkpoint was read into `state`: raise ConfigError if its adapters are of another sum."""
        if self._base is None:
            return
        if not torch.equal(state["base"], self._base):
            raise ConfigError(f"model: the adapters in {folder} were trained on other weights than those in "
                              f"{self._folder}; name the model with which the run began")
        if state["alpha"] != self._alpha:
            raise ConfigError(f"actor.lora.alpha: {self._alpha:g} for the adapters in {folder}, which were trained "
                              f"with {state['alpha']:g}; write that")

    def move(self, device: torch.device) -> None:
        """Parameters and optimizer state to another device."""
        # FSDP gives gathered parameters back first, and each parameter stays the object that the optimizer knows.
        self.policy.to(device)
        for optimizer in self._optimizers if not self._config.offload_optimizer else ():
            for parameter in optimizer.state:
                move_state(optimizer, parameter, device)
