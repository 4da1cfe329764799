"""Optimizer state that visits the device in parts."""

import pytest
import torch
from torch import nn

from molt_gym.trainers.actor.offload import step_in_parts


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size)) for size in (5, 3, 8, 1, 4)]


@pytest.mark.parametrize("most", [1, 8, 1000])
def test_a_step_in_parts_is_that_of_the_whole(most: int) -> None:
    whole, cut = parameters(), parameters()
    groups = [{"params": slice(0, 2), "lr": 0.1}, {"params": slice(2, 5), "lr": 0.01}]
    one, other = (torch.optim.AdamW([group | {"params": some[group["params"]]} for group in groups], fused=True)
                  for some in (whole, cut))
    sizes = [[parameter.numel() for parameter in group["params"]] for group in other.param_groups]
    stepped: list[int] = []
    other.register_step_pre_hook(lambda optimizer, *_: stepped.append(
        sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])))
    for _ in range(3):
        for some in (whole, cut):
            torch.manual_seed(1)
            for parameter in some:
                parameter.grad = torch.randn_like(parameter)
        one.step()
        step_in_parts(other, most)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
    assert [[parameter.numel() for parameter in group["params"]] for group in other.param_groups] == sizes
    assert sum(stepped) == 3 * 21
    assert max(stepped) <= max(most, 8) and (most > 1 or len(stepped) == 15)
