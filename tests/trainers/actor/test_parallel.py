"""However ranks are arranged, and whatever is computed again, the update is that of one rank."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.export import export_checkpoint

pytestmark = pytest.mark.slow

Rows = Callable[..., list[TrainRow]]
Build = Callable[..., ActorSpec]
Found = dict[str, tuple[list[Any], dict[str, Tensor]]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"world_size": 2},
    "dp4": {"world_size": 4},
    "tp2": {"world_size": 2, "tp": 2},
    "cp2": {"world_size": 2, "cp": 2},
    "cp4": {"world_size": 4, "cp": 4},
    "tp2 dp2": {"world_size": 4, "tp": 2},
    "cp2 dp2": {"world_size": 4, "cp": 2},
    "tp2 cp2": {"world_size": 4, "tp": 2, "cp": 2},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "offload": {"offload_optimizer": True},
    "tp2 selective": {"world_size": 2, "tp": 2, "activation_checkpointing": "selective"},
    "tp2 cp2 full offload": {"world_size": 4, "tp": 2, "cp": 2, "activation_checkpointing": "full",
                             "offload_optimizer": True},
}
UNTIED = ["tp2 dp2", "cp2 dp2"]
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "a loss of sequences": ("tp2 cp2", {"algorithm__loss": "gspo", "algorithm__importance__level": "token"}),
    "a critic": ("tp2 cp2", {"algorithm__estimator": "gae"}),
    "muon": ("tp2 cp2", {"actor__optimizer": "muon", "actor__lr": 1e-4}),
    "adapters": ("cp2 dp2", {"actor__lora__rank": 4}),
}
EXPERTS = ["tp2", "cp2 dp2", "full", "tp2 cp2 full offload"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def experts_path(folder: Path) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1],
        initializer_range=0.3, max_position_embeddings=2048)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(folder / "experts")
    return folder / "experts"


@pytest.fixture(scope="module")
def found(
    folder: Path, spec: Build, random_rows: Rows, model_path: Callable[..., Path], experts_path: Path
) -> Found:
    """What each job's calls returned, and its weights; made anew for each are the rows, which keep old log-probs."""

    def actor(layout: dict[str, Any], *, tied: bool = True, **more: Any) -> ActorSpec:
        settings = {"actor__lr": 0.05, "actor__micro_batch_tokens": 40} | more
        return spec(model_path(tied=tied), **settings | {f"actor__{name}": value for name, value in layout.items()})

    def first() -> tuple[Any, ...]:
        return "train", [random_rows(3, 3), random_rows(1, 3, seed=1, start=9)]

    def second() -> tuple[Any, ...]:
        return "train", [random_rows(3, 2, seed=2)]

    def poisoned() -> tuple[Any, ...]:
        rows = random_rows(2, 3, seed=5)
        rows[4].weight = float("nan")
        return "train", [rows]

    (folder / "saved").mkdir()
    def replayed() -> tuple[Any, ...]:
        rows, draw = random_rows(3, 3), np.random.default_rng(0)
        for row in rows[::2]:
            row.experts = np.full((len(row.ids), 2, 2), -1, dtype=np.int16)
            row.experts[:, 0] = [draw.permutation(4)[:2] for _ in row.ids]
        return "train", [rows]

    load = "load", folder / "saved" / "actor"
    text = "logprobs", [3, 1, 4, 1, 5, 9, 2, 6, 5]
    layouts = {"alone": {}, **LAYOUTS}
    jobs = [(name, actor(layout), [text, first(), second(), poisoned()]) for name, layout in layouts.items()]
    jobs += [(f"untied {name}", actor(layouts[name], tied=False), [text, first(), second(), poisoned()])
             for name in ("alone", *UNTIED)]
    for what, (layout, options) in OPTIONS.items():
        jobs += [(f"{what} {name}", actor(layouts[name], **options), [first()]) for name in ("alone", layout)]
    # As where a whole gradient would not fit.
    jobs += [("dp2 in turn", actor(LAYOUTS["dp2"]), [("__setattr__", "_sums_first", False), first(), second(),
                                                     poisoned()])]
    for name in ("alone", *EXPERTS):
        options = spec(experts_path, actor__lr=0.05, actor__micro_batch_tokens=40, **{
            f"actor__{option}": value for option, value in layouts[name].items()})
        jobs += [(f"experts {name}", options, [text, first()]), (f"replayed {name}", options, [replayed()])]
    jobs += [("saved", actor(LAYOUTS["tp2 dp2"]), [first(), ("save", folder / "saved" / "actor")]),
             ("loaded alone", actor({}), [load, second()]), ("loaded cp2", actor(LAYOUTS["cp2"]), [load, second()]),
             ("loaded tp2 cp2", actor(LAYOUTS["tp2 cp2"]), [second(), load, second()])]
    (folder / "jobs.pickle").write_bytes(pickle.dumps(jobs))
    done = subprocess.run([sys.executable, Path(__file__).with_name("layouts.py"), folder], capture_output=True,
                          text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-6000:]
    return {name: torch.load(folder / f"{name}.pt", weights_only=False) for name, _, _ in jobs}


def assert_same(found: Found, name: str, expected: str) -> None:
    (told, weights), (expected_told, expected_weights) = found[name], found[expected]
    assert weights.keys() == expected_weights.keys()
    for key, tensor in expected_weights.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-5)
    for metrics, others in zip(told, expected_told, strict=True):
        if isinstance(metrics, dict):
            compared = {key for key in metrics.keys() | others.keys() if not key.startswith(("time/", "perf/"))}
            assert {key: metrics[key] for key in compared} == pytest.approx(
                {key: others[key] for key in compared}, abs=2e-5, nan_ok=True)
        else:
            assert metrics == pytest.approx(others, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_makes_the_updates_of_one_rank(found: Found, layout: str) -> None:
    assert_same(found, layout, "alone")


@pytest.mark.parametrize("layout", UNTIED)
def test_so_it_does_with_a_head_of_its_own(found: Found, layout: str) -> None:
    assert_same(found, f"untied {layout}", "untied alone")


@pytest.mark.parametrize("what", OPTIONS)
def test_so_it_does_with(found: Found, what: str) -> None:
    assert_same(found, f"{what} {OPTIONS[what][0]}", f"{what} alone")


@pytest.mark.parametrize("layout", EXPERTS)
def test_so_it_does_with_experts_in_a_layer_and_where_their_choice_is_replayed(found: Found, layout: str) -> None:
    assert_same(found, f"experts {layout}", "experts alone")
    assert_same(found, f"replayed {layout}", "replayed alone")


def test_a_choice_that_is_replayed_makes_another_update(found: Found) -> None:
    name = "model.layers.0.mlp.gate.weight"
    assert (found["replayed alone"][1][name] - found["experts alone"][1][name]).abs().max() > 1e-3


def test_gradients_may_be_exchanged_after_each_micro_batch(found: Found) -> None:
    for key, tensor in found["alone"][1].items():
        torch.testing.assert_close(found["dp2 in turn"][1][key], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["alone", "cp2", "tp2 cp2"])
def test_what_one_layout_saves_another_loads_and_trains_on(found: Found, layout: str) -> None:
    weights, expected = found[f"loaded {layout}"][1], found["alone"][1]
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-5)


def test_what_tensor_parallel_ranks_save_is_exported_as_the_model_that_they_have(
    found: Found, folder: Path, model_path: Callable[..., Path]
) -> None:
    (folder / "saved" / "trainer.json").write_text("{}")
    export_checkpoint(folder / "saved", folder / "model", model_path())
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, found["saved"][1][name])
