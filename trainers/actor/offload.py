"""Optimizer state that lies in the CPU's memory, and visits the device a part at a time.

Invariant: a step in parts is, to the bit, the step of the whole.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PART = 1 << 27
"""Numbers of the parameters whose state is on the device at the same time."""


def step_in_parts(optimizer: Optimizer, most: int = PART) -> None:
    """One step, after which all state is in the CPU's memory; where that is the device, it moves nowhere."""
    whole = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []
    try:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            for part in _parts(parameters, most):
                group["params"] = part
                for parameter in part:
                    move_state(optimizer, parameter, parameter.device)
                optimizer.step()
                for parameter in part:
                    move_state(optimizer, parameter, torch.device("cpu"))
            group["params"] = []
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


def move_state(optimizer: Optimizer, parameter: nn.Parameter, device: torch.device) -> None:
    """Take a parameter's state, as far as there is one, to a device."""
    state = optimizer.state.get(parameter, {})
    state.update({name: value.to(device) for name, value in state.items() if isinstance(value, Tensor)})


def _parts(parameters: Iterable[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """At least one parameter in each, and otherwise at most so many numbers."""
    parts: list[list[nn.Parameter]] = []
    size = most
    for parameter in parameters:
        local = parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()
        if not parts or size + local > most:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += local
    return parts
