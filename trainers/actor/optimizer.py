"""AdamW or Muon, their learning rates, and their state by the names of parameters.

Invariants: the rate of an update is a function of its number alone; a sharded matrix makes the step of a whole one.
"""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from molt_gym.errors import ConfigError

from ..config import ActorConfig
from .offload import move_state


def learning_rate(config: ActorConfig, update: int, total: int) -> float:
    """The rate of update `update` (from 0) of `total`: linear warm-up, then constant, linear, cosine or wsd.

    Decay ends at `lr * min_lr_ratio` after the last update. A function of the count alone, so a resumed run goes on.
    """
    warmup = config.warmup_steps
    if update < warmup:
        return config.lr * (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    shape = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        # Warm-up, stable, decay: linear over the last share of all updates.
        "wsd": min(1.0, max(0.0, total - update) / max(1.0, config.decay_share * total)),
    }[config.schedule]
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * shape if config.schedule != "constant" else 1.0)


class Muon(torch.optim.Muon):
    """torch's Muon for sharded matrices: the momentum stays in shards, and each matrix is gathered for its step.

    Torch's own would multiply the shards in bfloat16 and sum over ranks, 15 times a matrix, with rounding that depends
    on their number.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update; every rank makes that of the whole matrix and keeps its shard."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                change = _step_of(parameter.grad.lerp(momentum, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=group["lr"])


def _step_of(direction: Tensor) -> Tensor:
    """What torch's Muon makes of a direction at rate 1, sharded as it is; its size is that of AdamW's steps."""
    whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
    change = nn.Parameter(torch.zeros_like(whole))
    change.grad = whole
    torch.optim.Muon([change], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False,
                     adjust_lr_fn="match_rms_adamw").step()
    if not isinstance(direction, DTensor):
        return change.detach()
    mesh = direction.device_mesh
    return DTensor.from_local(change.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
        placements=direction.placements)


def make_optimizers(model: nn.Module, named: Mapping[str, nn.Parameter], config: ActorConfig) -> list[Optimizer]:
    """What trains the parameters `named` of `model`; each group's rate is the run's times its `factor`.

    With muon it takes the matrices of the hidden layers; embeddings, head, vectors and stacks are AdamW's. Matrices
    decay; norms and biases do not, those of experts or heads included, which are stacks of vectors.

    Raises:
        ConfigError: a pattern of `actor.lr_groups` fits no parameter.
    """
    factors = _factors(named, config.lr_groups)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    outer = {parameter for module in model.modules() if isinstance(module, nn.Embedding) or module is head
             for parameter in module.parameters()}
    groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        decays = parameter.ndim > 1 and not name.removesuffix(".weight").endswith(("norm", "bias"))
        muon = config.optimizer == "muon" and decays and parameter.ndim == 2 and parameter not in outer
        # Fused kernels take parameters of one mesh.
        key = (muon, factors[name], decays, getattr(parameter, "device_mesh", None))
        groups.setdefault(key, []).append(parameter)
    split: dict[bool, list[dict[str, Any]]] = {}
    for (muon, factor, decays, _), parameters in groups.items():
        split.setdefault(muon, []).append({
            "params": parameters, "factor": factor, "weight_decay": config.weight_decay if decays else 0.0})
    made: list[Optimizer] = []
    if False in split:
        made.append(torch.optim.AdamW(split[False], lr=config.lr, betas=config.betas, eps=config.eps, fused=True))
    if True in split:
        made.append(Muon(split[True], lr=config.lr, momentum=config.momentum))
    return made


def _factors(names: Iterable[str], patterns: Mapping[str, float]) -> dict[str, float]:
    """Of each parameter the factor on its rate; of several patterns that fit, the last counts."""
    factors = dict.fromkeys(names, 1.0)
    for pattern, factor in patterns.items():
        fitting = [name for name in factors if fnmatchcase(name, pattern)]
        if not fitting:
            raise ConfigError(f"actor.lr_groups: {pattern!r} fits no parameter that is trained; they are called as "
                              f"{next(iter(factors))!r} is, so write for instance '*embed_tokens*'")
        factors.update(dict.fromkeys(fitting, factor))
    return factors


def optimizer_state(
    optimizers: Iterable[Optimizer], named: Mapping[str, nn.Parameter], device: torch.device | None = None
) -> dict[str, dict[str, Tensor]]:
    """The state by parameter name, made first where there is none yet, so that a checkpoint can be read into it.

    device: where it lies, if not with the parameters.
    """
    owners = {parameter: optimizer for optimizer in optimizers for group in optimizer.param_groups
              for parameter in group["params"]}
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in named.items():
        state = found[name] = owners[parameter].state[parameter]
        if not state and isinstance(owners[parameter], Muon):
            state["momentum_buffer"] = torch.zeros_like(parameter)
        elif not state:
            state |= {"step": torch.tensor(0.0, device=parameter.device), "exp_avg": torch.zeros_like(parameter),
                      "exp_avg_sq": torch.zeros_like(parameter)}
        if device is not None:
            move_state(owners[parameter], parameter, device)
    return found
