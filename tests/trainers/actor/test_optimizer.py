"""The course of the rate, which optimizer takes which parameters, and sharded matrices, which step as whole ones."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from molt_gym.errors import ConfigError
from molt_gym.trainers.actor.optimizer import learning_rate, make_optimizers, optimizer_state
from molt_gym.trainers.config import ActorConfig


@pytest.mark.parametrize(("update", "rate"), [(39, 7.649596e-4), (40, 7.5e-4), (41, 7.347358e-4), (10, 1e-3)])
def test_cosine_after_warm_up_has_the_rates_computed_by_hand(update: int, rate: float) -> None:
    config = ActorConfig(lr=1e-3, warmup_steps=10, schedule="cosine")
    assert learning_rate(config, update, 100) == pytest.approx(rate, abs=5e-11)


def test_warm_up_rises_to_the_peak_in_equal_steps_and_its_first_update_moves() -> None:
    config = ActorConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, update, 10) for update in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_decay_ends_at_its_floor_after_the_last_update_and_stays_there(schedule: str) -> None:
    config = ActorConfig(lr=2.0, schedule=schedule, min_lr_ratio=0.1)
    rates = [learning_rate(config, update, 8) for update in range(12)]
    assert rates[0] == 2.0
    assert rates[7] > 0.2
    assert rates[8:] == pytest.approx([0.2] * 4)
    assert rates == sorted(rates, reverse=True)


def test_wsd_stays_at_the_peak_until_its_last_share_and_then_falls_linearly() -> None:
    config = ActorConfig(lr=1.0, schedule="wsd", warmup_steps=2, decay_share=0.4)
    rates = [learning_rate(config, update, 10) for update in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


class Model(nn.Module):
    """One parameter of each kind; the matrices' sizes are no multiples of ranks."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 33)
            self.up, self.down = nn.Linear(33, 48), nn.Linear(48, 33, bias=False)
            self.experts = nn.Parameter(torch.randn(2, 3, 4))
            self.experts_bias = nn.Parameter(torch.randn(2, 4))
            self.q_norm = nn.LayerNorm((2, 4), bias=False)
            self.head = nn.Linear(33, 5, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None) if (
            isinstance(parameter, DTensor)) else whole


def trained(model: nn.Module, config: ActorConfig, steps: int = 3) -> dict[str, torch.Tensor]:
    """The parameters after steps with random gradients; the state of the optimizers is forgotten and put back once."""
    named = dict(model.named_parameters())
    optimizers = make_optimizers(model, named, config)
    for step in range(steps):
        gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:
            kept = {name: {key: value.clone() for key, value in state.items()}
                    for name, state in optimizer_state(optimizers, named).items()}
            optimizers = make_optimizers(model, named, config)
            for name, state in optimizer_state(optimizers, named).items():
                for key, value in state.items():
                    value.copy_(kept[name][key])
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in named.items()}


def test_matrices_decay_and_vectors_and_stacks_of_them_do_not() -> None:
    for optimizer in ("adamw", "muon"):
        model = Model()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        config = ActorConfig(lr=0.1, weight_decay=0.5, optimizer=optimizer)
        for made in make_optimizers(model, dict(model.named_parameters()), config):
            made.step()
        for name, parameter in model.named_parameters():
            still = name in ("up.bias", "experts_bias", "q_norm.weight")
            torch.testing.assert_close(parameter.detach(), before[name] * (1 if still else 0.95))


def test_muon_takes_the_matrices_of_hidden_layers_and_makes_the_steps_of_torchs_own() -> None:
    config = ActorConfig(lr=1e-2, weight_decay=0.1, optimizer="muon", momentum=0.9)
    model, plain = Model(), Model()
    found = trained(model, config)
    hidden = ["up.weight", "down.weight"]
    muon = torch.optim.Muon([plain.get_parameter(name) for name in hidden], lr=1e-2, weight_decay=0.1, momentum=0.9,
                            adjust_lr_fn="match_rms_adamw")
    others = [parameter for name, parameter in plain.named_parameters() if name not in hidden]
    decayed = [plain.embed.weight, plain.experts, plain.head.weight]
    adamw = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1},
                               {"params": list(set(others) - set(decayed)), "weight_decay": 0.0}],
                              lr=1e-2, betas=config.betas, eps=config.eps)
    for step in range(3):
        gradients(plain, step)
        muon.step()
        adamw.step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-6, msg=name)


def test_groups_have_rates_of_their_own_and_the_last_pattern_that_fits_counts() -> None:
    config = ActorConfig(lr=1e-2, optimizer="muon", lr_groups={"*": 3.0, "embed*": 0.5})
    model = Model()
    factors = {id(parameter): group["factor"] for optimizer in make_optimizers(
        model, dict(model.named_parameters()), config) for group in optimizer.param_groups
        for parameter in group["params"]}
    assert {name: factors[id(parameter)] for name, parameter in model.named_parameters()} == {
        "embed.weight": 0.5, "up.weight": 3.0, "up.bias": 3.0, "down.weight": 3.0, "experts": 3.0, "experts_bias": 3.0,
        "q_norm.weight": 3.0, "head.weight": 3.0}


def test_a_pattern_that_fits_no_parameter_is_refused() -> None:
    model = Model()
    with pytest.raises(ConfigError, match=r"actor.lr_groups: '\*router\*' fits no parameter .* 'experts' is"):
        make_optimizers(model, dict(model.named_parameters()), ActorConfig(lr_groups={"*": 2.0, "*router*": 0.1}))


def _rank(rank: int, port: int, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=4)
    for optimizer, wanted in expected.items():
        model = Model()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        found = trained(model, ActorConfig(lr=1e-2, weight_decay=0.1, optimizer=optimizer))
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6, msg=f"{optimizer} {name}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_matrices_make_the_steps_of_whole_ones_also_where_they_are_cut_twice() -> None:
    expected = {optimizer: trained(Model(), ActorConfig(lr=1e-2, weight_decay=0.1, optimizer=optimizer))
                for optimizer in ("adamw", "muon")}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_rank, (store.port, expected), nprocs=4)
