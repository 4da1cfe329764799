"""What transformers, vLLM and the actor compute with an exported model is the same, however it was trained and cut."""

import asyncio
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import molt_gym
from molt_gym.cli import main
from molt_gym.errors import ConfigError
from molt_gym.tokens import Generation, Renderer, Sampling
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.lora import base_hash
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.actor.state import NAMES, pickled
from molt_gym.trainers.checkpoint import Checkpoints, mark_best
from molt_gym.trainers.config import load_config
from molt_gym.trainers.export import about, export_checkpoint
from molt_gym.trainers.rollout.engine import Request

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]


def checkpoint(
    folder: Path, origin: Path, weights: dict[str, torch.Tensor], lora_scale: float = 0, **more: torch.Tensor
) -> Path:
    """One that holds these weights."""
    folder.mkdir(parents=True)
    dcp.save({"model": weights, "updates": torch.tensor(3), **more}, checkpoint_id=folder / "actor", no_dist=True)
    (folder / "trainer.json").write_text(json.dumps({"step": 3, "model": str(origin), "lora_scale": lora_scale}))
    files = {str(file.relative_to(folder)): [file.stat().st_size, None] for file in folder.rglob("*") if file.is_file()}
    (folder / "manifest.json").write_text(json.dumps(files))
    return folder


def trained(base: Path, **options: Any) -> torch.nn.Module:
    """The model of a folder in float32 with other weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    return model


def loaded(folder: Path) -> torch.nn.Module:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    return model


def assert_same(found: torch.nn.Module, expected: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    assert dict(found.named_parameters()).keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter.to(dtype)), name


@pytest.fixture(scope="module")
def untied_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a head of its own, in bfloat16, whose norms are in float32."""
    folder = tmp_path_factory.mktemp("untied")
    config = AutoConfig.from_pretrained(tiny_path, tie_word_embeddings=False, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()},
              folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_in_several_files_is_the_same_with_what_lay_beside_its_weights(tiny_path: Path, tmp_path: Path) -> None:
    model = trained(tiny_path)
    path = checkpoint(tmp_path / "step-000003", tiny_path, dict(model.named_parameters()))
    export_checkpoint(path, tmp_path / "model", tiny_path, shard_bytes=100_000)
    assert_same(loaded(tmp_path / "model"), model)
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 2 and all(shard.stat().st_size < 110_000 for shard in shards)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())
    assert "lm_head.weight" not in index["weight_map"] and set(index["weight_map"].values()) == {s.name for s in shards}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (tiny_path / name).read_bytes()
    # Also in place of one that is there.
    export_checkpoint(path, tmp_path / "model", tiny_path)
    assert [file.name for file in (tmp_path / "model").glob("*safetensors*")] == ["model.safetensors"]
    assert_same(loaded(tmp_path / "model"), model)


def test_each_weight_keeps_the_dtype_it_came_in_unless_another_is_asked_for(untied_path: Path, tmp_path: Path) -> None:
    model = trained(untied_path)
    path = checkpoint(tmp_path / "step-000003", untied_path, dict(model.named_parameters()))
    kept = load_file(molt_gym.export(path, tmp_path / "kept") / "model.safetensors")
    assert "lm_head.weight" in kept
    for name, tensor in kept.items():
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        assert torch.equal(tensor, model.get_parameter(name).to(tensor.dtype))
    molt_gym.export(path, tmp_path / "other", dtype="float32")
    assert AutoConfig.from_pretrained(tmp_path / "other").dtype == torch.float32
    assert_same(loaded(tmp_path / "other"), model)


def test_a_head_that_is_no_longer_tied_stays_and_one_that_is_tied_is_not_taken_from_the_base(
    tiny_path: Path, tmp_path: Path
) -> None:
    model, base = trained(tiny_path), tmp_path / "base"
    molt_gym.export(checkpoint(tmp_path / "whole", tiny_path, dict(model.named_parameters())), base)
    more = {"lm_head.weight": torch.ones(300, 64), "other.scale": torch.ones(2)}
    stale = load_file(base / "model.safetensors") | more
    save_file(stale, base / "model.safetensors", metadata={"format": "pt"})
    path = checkpoint(tmp_path / "tied", base, dict(model.named_parameters()))
    found = load_file(molt_gym.export(path, tmp_path / "model") / "model.safetensors")
    assert "lm_head.weight" not in found and torch.equal(found["other.scale"], torch.ones(2))
    head = torch.randn_like(model.get_input_embeddings().weight)
    path = checkpoint(tmp_path / "parted", tiny_path, {**dict(model.named_parameters()), "lm_head.weight": head})
    parted = loaded(molt_gym.export(path, tmp_path / "own head"))
    assert torch.equal(parted.get_output_embeddings().weight, head)
    assert torch.equal(parted.get_input_embeddings().weight, model.get_input_embeddings().weight)


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, whose folder has each of them by itself."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(path := tmp_path_factory.mktemp("experts"))
    return path


@pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="nemo_automodel is not installed")
def test_weights_of_nemo_automodel_get_the_names_of_model_folders(experts_path: Path, tmp_path: Path) -> None:
    from nemo_automodel.components.models.qwen3_moe.state_dict_adapter import Qwen3MoeStateDictAdapter

    experts = SimpleNamespace(n_routed_experts=4, moe_inter_dim=16, expert_activation="swiglu", expert_bias=False)
    adapter = Qwen3MoeStateDictAdapter(AutoConfig.from_pretrained(experts_path), experts,
                                       SimpleNamespace(dispatcher="torch", experts="torch"))
    model = trained(experts_path)
    model.save_pretrained(tmp_path / "expected")
    weights = adapter.from_hf(load_file(tmp_path / "expected" / "model.safetensors"))
    assert any("gate_and_up" in name for name in weights)
    path = checkpoint(tmp_path / "step-000003", experts_path, weights, **{NAMES: pickled(adapter)})
    assert_same(loaded(molt_gym.export(path, tmp_path / "model")), model)


def test_experts_get_the_names_of_model_folders(experts_path: Path, tmp_path: Path) -> None:
    model = trained(experts_path)
    path = checkpoint(tmp_path / "step-000003", experts_path, dict(model.named_parameters()))
    export_checkpoint(path, tmp_path / "model", experts_path, shard_bytes=20_000)
    assert_same(loaded(tmp_path / "model"), model)
    names = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names


def test_adapters_are_added_to_the_weights_of_the_base(tiny_path: Path, tmp_path: Path) -> None:
    a, b = torch.randn(4, 64), torch.randn(96, 4)
    name = "model.layers.1.mlp.up_proj"
    path = checkpoint(tmp_path / "step-000003", tiny_path,
                      {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, 0.5, base=base_hash(tiny_path))
    expected = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    with torch.no_grad():
        expected.get_parameter(f"{name}.weight").addmm_(b, a, alpha=0.5)
    assert_same(loaded(molt_gym.export(path, tmp_path / "model")), expected)


@pytest.fixture
def run(tiny_path: Path, tmp_path: Path) -> Path:
    """A folder of a run with checkpoints of steps 1 and 2, of which the first is the best."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        model = trained(tiny_path)
        with torch.no_grad():
            model.model.norm.weight.fill_(step)
        checkpoint(folder / f"step-{step:06d}", tiny_path, dict(model.named_parameters()))
    mark_best(folder, {1: 0.5, 2: 0.1})
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def no_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of checkpoints that were made by hand."""
    monkeypatch.setattr("molt_gym.trainers.checkpoint._checksum", lambda file: None)


def test_folders_may_be_in_the_home_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(run.parent))
    assert molt_gym.export(Path("~") / run.name, "~/exported") == run.parent / "exported"


@pytest.mark.parametrize(("options", "step"), [([], 2), (["--step", "1"], 1), (["--step", "best"], 1)])
def test_the_command_takes_the_newest_checkpoint_or_the_one_named(
    run: Path, tmp_path: Path, options: list[str], step: int, capsys: pytest.CaptureFixture
) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "new" / "model"), *options]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'model'}\n"
    assert loaded(tmp_path / "new" / "model").model.norm.weight.unique().tolist() == [step]


def test_what_cannot_be_exported_is_refused_by_name(run: Path, tiny_path: Path, tmp_path: Path) -> None:
    out, two = tmp_path / "model", run / "checkpoints" / "step-000002"
    with pytest.raises(ConfigError, match="neither a run nor a checkpoint"):
        molt_gym.export(tiny_path, out)
    with pytest.raises(ConfigError, match="no checkpoint of step 7; there are: step-000001, step-000002"):
        molt_gym.export(run, out, step=7)
    with pytest.raises(ConfigError, match="is there already"):
        molt_gym.export(run, run)
    for dtype in ("double precision", "int8", torch.bfloat16):
        with pytest.raises(ConfigError, match=f"dtype: .*{dtype}.* is none that models are exported in; write float32"):
            molt_gym.export(run, out, dtype=dtype)
    with pytest.raises(ConfigError, match="step: 'last' is none of a run; write its number, or 'best'"):
        molt_gym.export(run, out, step="last")
    with pytest.raises(ConfigError, match="step: 1 of .*step-000002, which is one checkpoint; name the run"):
        molt_gym.export(two, out, step=1)
    assert main(["export", str(run), "--out", str(out), "--step", "x"]) == 2
    (two / "actor" / ".metadata").write_bytes(b"")
    with pytest.raises(ConfigError, match="step-000002 is not whole"):
        molt_gym.export(run, out, step=2)
    with pytest.raises(ConfigError, match="step-000002 is not whole"):
        molt_gym.export(two, out)
    moved = checkpoint(tmp_path / "moved", tmp_path / "base", dict(trained(tiny_path).named_parameters()))
    with pytest.raises(ConfigError, match="there is no model folder .*base.* name where it is now"):
        molt_gym.export(moved, out)
    assert not out.exists()
    molt_gym.export(moved, out, model=tiny_path)


FRESH = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

folder, ids = sys.argv[1], json.loads(sys.argv[2])
logits = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")(torch.tensor([ids])).logits[0, :-1].float()
print(json.dumps(logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_fresh_processes_of_vllm_and_transformers_compute_what_the_actor_does(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from molt_gym.trainers.rollout.vllm_engine import VllmEngine

    monkeypatch.undo()
    # vLLM has no smaller heads on a CPU.
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_path, head_dim=32)).save_pretrained(
        base := tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(base)
    config = load_config("Any-v0", overrides={"rollout": {"max_tokens": 8, "max_context": 64}, "actor.lr": 1e-2})
    actor = LocalActor(ActorSpec(str(base), config, torch.float32, 10))

    async def sample(folder: Path) -> Generation:
        renderer = Renderer(AutoTokenizer.from_pretrained(folder))
        engine = VllmEngine(folder, renderer, dtype=torch.float32, max_context=64, max_sequences=2)
        try:
            return await engine.submit([Request(IDS, Sampling(max_tokens=20, temperature=1.0, seed=1))])[0]
        finally:
            await engine.close()

    try:
        actor.train([[TrainRow(IDS, [0, *[1] * 10], [0.0, *[-5.0] * 10], 1.0, 1 / 10, 0, 0)]])
        checkpoints = Checkpoints(tmp_path, 1, about=about(base, config.actor))
        checkpoints.begin(1, actor, {})
        out = molt_gym.export(checkpoints.finish(), tmp_path / "model")
        reply = asyncio.run(asyncio.wait_for(sample(out), 300))
        expected = actor.logprobs([*IDS, *reply.ids])
    finally:
        actor.close()
    assert reply.logprobs == pytest.approx(expected[-len(reply.ids):], abs=1e-4)
    output = subprocess.run([sys.executable, "-c", FRESH, out, json.dumps([*IDS, *reply.ids])], capture_output=True,
                            text=True, check=True, timeout=300)
    assert json.loads(output.stdout) == pytest.approx(expected, abs=1e-4)
