"""Optimizer state that visits the device in parts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from molt_gym.trainers.actor import trained
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.offload import step_in_parts
from molt_gym.trainers.actor.packing import TrainRow


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


def test_an_actor_whose_state_is_elsewhere_makes_the_same_updates(
    spec: Callable[..., ActorSpec], random_rows: Callable[..., list[TrainRow]],
    weights_of: Callable[..., dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, parts = [], []

    def by_parameter(optimizer: torch.optim.Optimizer) -> None:
        parts.append(sum(len(group["params"]) for group in optimizer.param_groups))
        step_in_parts(optimizer, most=1)

    monkeypatch.setattr(trained, "step_in_parts", by_parameter)
    for offload in (False, True):
        actor = LocalActor(spec(actor__offload_optimizer=offload))
        try:
            for seed in range(2):
                actor.train([random_rows(2, 3, seed=seed)])
            found.append(weights_of(actor))
        finally:
            actor.close()
    assert parts == [len(found[0])] * 2
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
