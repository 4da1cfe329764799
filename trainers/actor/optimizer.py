"""AdamW and its learning rate."""

import math
from collections.abc import Iterable

import torch

from ..config import ActorConfig


def learning_rate(config: ActorConfig, update: int, total: int) -> float:
    """The rate of update `update` (from 0) of `total`: linear warm-up, then constant, linear or cosine decay.

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
    }[config.schedule]
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * shape if config.schedule != "constant" else 1.0)


def adamw(parameters: Iterable[torch.nn.Parameter], config: ActorConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms and biases alone."""
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, betas=config.betas,
                             eps=config.eps, fused=True)


def optimizer_state(optimizer: torch.optim.AdamW, named: dict[str, torch.nn.Parameter]) -> dict[str, dict]:
    """The state by parameter name, made first where there is none yet, so that a checkpoint can be read into it."""
    for parameter in named.values():
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return {name: optimizer.state[parameter] for name, parameter in named.items()}
