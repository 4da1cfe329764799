"""Adapters: updates as by hand, a base model that stays, states and exports that come back, and what is refused."""

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from molt_gym.errors import ConfigError
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.lora import PREFIX, base_hash, write_adapter
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.config import load_config

Rows = Callable[..., list[TrainRow]]
Build = Callable[..., ActorSpec]
LORA = {"actor__lora__rank": 3, "actor__lora__alpha": 6.0}
SCALE = 2.0


@pytest.fixture
def start() -> Iterator[Callable[[ActorSpec], LocalActor]]:
    """Starts an actor, after the one before has ended."""
    running: list[LocalActor] = []

    def start(spec: ActorSpec) -> LocalActor:
        for actor in running:
            actor.close()
        running.append(LocalActor(spec))
        return running[-1]

    yield start
    for actor in running:
        actor.close()


Start = Callable[[ActorSpec], LocalActor]


def adapters_of(actor: LocalActor) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in actor._first._learner.adapters()}


def plain(path: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


class Merged(torch.nn.Module):
    """A model whose weights are W + scale·B·A, by hand."""

    def __init__(self, path: str, adapters: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = plain(path).requires_grad_(False)
        self.adapters = {name: tensor.clone().requires_grad_() for name, tensor in adapters.items()}

    def weights(self) -> dict[str, Tensor]:
        found = dict(self.model.named_parameters())
        for name, a in self.adapters.items():
            if ".lora_A." in name:
                layer = name.removeprefix(PREFIX).replace("lora_A.", "")
                found[layer] = found[layer] + SCALE * self.adapters[name.replace("lora_A", "lora_B")] @ a
        return found

    def forward(self, **inputs: Any) -> Any:
        return functional_call(self.model, self.weights(), (), inputs)


def test_updates_equal_those_of_weights_that_are_merged_by_hand_and_leave_the_base_alone(
    start: Start, spec: Build, random_rows: Rows, plain_logprobs: Callable[..., list[Tensor]]
) -> None:
    options = spec(**LORA)
    actor = start(options)
    before = adapters_of(actor)
    layers = {name for name in before if name.endswith("layers.1.mlp.down_proj.lora_B.weight")}
    assert len(before) == 2 * 2 * 7 and layers == {f"{PREFIX}model.layers.1.mlp.down_proj.lora_B.weight"}
    for name, tensor in before.items():
        assert (tensor == 0).all() if ".lora_B." in name else 0 < tensor.abs().max() <= tensor.shape[1] ** -0.5
    hand = Merged(options.path, before)
    optimizer = torch.optim.AdamW(hand.adapters.values(), lr=1e-2, betas=options.config.actor.betas, eps=0.1,
                                  weight_decay=0.1)
    for seed in range(3):
        rows = random_rows(3, 4, seed=seed)
        metrics = actor.train([rows])
        loss = torch.zeros(())
        for row, logp in zip(rows, plain_logprobs(hand, rows), strict=True):
            loss = loss - row.weight * row.advantage * logp.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(hand.adapters.values(), options.config.actor.max_grad_norm)
        assert metrics["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in adapters_of(actor).items():
        torch.testing.assert_close(tensor, hand.adapters[name].detach(), rtol=0, atol=1e-6, msg=name)
    whole, wanted = dict(actor.weights()), hand.weights()
    assert whole.keys() == wanted.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, wanted[name].detach(), rtol=0, atol=1e-6, msg=name)
    ids = [3, 1, 4, 1, 5, 9]
    row = TrainRow(ids, [0] + [1] * 5, [0.0] * 6, 0.0, 0.0, 0, 0)
    assert actor.logprobs(ids) == pytest.approx(plain_logprobs(hand, [row])[0].tolist(), abs=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_state_that_is_read_goes_on_to_the_bit_and_holds_no_base(
    start: Start, spec: Build, random_rows: Rows, tmp_path: Path, optimizer: str
) -> None:
    options = spec(**LORA, actor__optimizer=optimizer)
    actor = start(options)
    actor.train([random_rows(2, 3)])
    actor.save(tmp_path / "state")
    actor.train([random_rows(2, 3, seed=1)])
    expected = adapters_of(actor)
    actor = start(options)
    actor.load(tmp_path / "state")
    assert actor.updates == 1
    actor.train([random_rows(2, 3, seed=1)])
    found = adapters_of(actor)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    names = torch.distributed.checkpoint.FileSystemReader(tmp_path / "state").read_metadata().state_dict_metadata
    assert not [name for name in names if name.startswith("model.") and ".lora_" not in name]


def test_adapters_of_another_base_model_or_of_none_are_refused(
    start: Start, spec: Build, model_path: Callable[..., Path], tmp_path: Path
) -> None:
    start(spec(**LORA)).save(tmp_path / "state")
    other = plain(model_path())
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="trained on other weights than those in .*other"):
        start(spec(tmp_path / "other", **LORA)).load(tmp_path / "state")
    with pytest.raises(ConfigError, match="was saved from another one"):
        start(spec()).load(tmp_path / "state")
    with pytest.raises(ConfigError, match="actor.lora.alpha: 12 for the adapters in .*trained with 6; write that"):
        start(spec(**LORA | {"actor__lora__alpha": 12.0})).load(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"another actor.lora.*it has model\..*\.lora_A\.weight as well"):
        start(spec(**LORA, actor__lora__target_modules=("q_proj",))).load(tmp_path / "state")
    assert torch.equal(base_hash(model_path()), base_hash(model_path()))


def test_without_its_adapters_the_policy_is_the_reference_that_a_second_copy_would_be(
    start: Start, spec: Build, random_rows: Rows, model_path: Callable[..., Path], tmp_path: Path
) -> None:
    plain(model_path()).save_pretrained(tmp_path / "copy")
    found = []
    for reference in (None, str(tmp_path / "copy")):
        options = spec(**LORA, algorithm__kl__coefficient=0.3)
        actor = start(ActorSpec(options.path, options.config, options.dtype, 10, reference))
        assert (actor._first._reference is actor._first._policy) == (reference is None)
        metrics = [actor.train([random_rows(2, 3, seed=seed)]) for seed in range(2)]
        found.append(([line["policy/kl_ref"] for line in metrics], adapters_of(actor)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    assert found[0][0][1] > 1e-6
    for name, tensor in found[0][1].items():
        torch.testing.assert_close(tensor, found[1][1][name], rtol=0, atol=1e-6)


def test_the_base_computes_in_bfloat16_and_adapters_learn_in_float32(
    start: Start, spec: Build, random_rows: Rows
) -> None:
    options = spec(**LORA, actor__lr=1e-3)
    actor = start(ActorSpec(options.path, options.config, torch.bfloat16, 10))
    actor.train([random_rows(2, 3)])
    named = actor._first._learner.named
    assert {parameter.dtype for name, parameter in named.items() if ".lora_" in name} == {torch.float32}
    assert {parameter.dtype for name, parameter in named.items() if ".lora_" not in name} == {torch.bfloat16}
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in named.items())


def test_a_gradient_that_is_not_finite_leaves_adapters_alone(start: Start, spec: Build, random_rows: Rows) -> None:
    actor = start(spec(**LORA, actor__optimizer="muon"))
    before, bad = adapters_of(actor), random_rows(2, 3)
    bad[1].weight = float("inf")
    assert actor.train([bad])["optim/skipped_nonfinite"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapters_of(actor).items())
    assert actor.train([random_rows(2, 3, seed=3)])["optim/skipped_nonfinite"] == 0


@pytest.mark.parametrize(("target", "words"), [
    ("k_prj", "'k_prj' is no layer of this model; write 'all-linear' or some of .*k_proj"),
    ("experts", "'experts' is no linear layer .*model.layers.0.mlp.experts.*, a stack of matrices"),
    ("embed_tokens", "'embed_tokens' is no linear layer .*an embedding")])
def test_targets_that_cannot_have_an_adapter_are_refused_by_name(
    spec: Build, tmp_path: Path, target: str, words: str
) -> None:
    with torch.random.fork_rng():
        Qwen3MoeForCausalLM(Qwen3MoeConfig(
            vocab_size=24, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1,
            num_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words), pytest.warns(UserWarning, match="experts.* get no adapter"):
        LocalActor(spec(tmp_path, **LORA, actor__lora__target_modules=["q_proj", target]))


@pytest.mark.parametrize(("options", "words"), [
    ({"actor__lora__rank": 4, "actor__lora__dropout": 0.1}, "dropout: 0.1 would make the trainer compute other"),
    ({"actor__lora__alpha": 4}, "actor.lora.rank = 0 trains all weights"),
    ({"actor__lora__rank": 4, "actor__lora__transfer": "adapter"}, "'transformers', which takes whole weights"),
    ({"actor__lora__rank": 4, "actor__tp": 2, "actor__world_size": 2}, "actor.tp: 2 with adapters"),
    ({"actor__lora__rank": 4, "actor__backend": "automodel"}, "adapters are for those of transformers"),
    ({"actor__lora__rank": 4, "engine": "vllm", "rollout__engine_args": {"enable_lora": True}},
     "enable_lora: is set by the run itself; write actor.lora.rank")])
def test_options_that_contradict_adapters_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config("Any-v0", overrides=options)


def test_engines_take_adapters_alone_where_they_can() -> None:
    def alone(**options: Any) -> bool:
        return load_config("Any-v0", overrides={"actor__lora__rank": 4, "engine": "vllm"} | options).adapter_updates

    assert alone() and alone(actor__lora__transfer="adapter")
    assert not alone(actor__lora__transfer="merged") and not alone(actor__lora__rank=513)
    assert not alone(engine="transformers") and not alone(rollout__release_memory=True)
    assert not alone(actor__lora__rank=0)


def test_an_adapter_folder_is_one_that_peft_loads(
    spec: Build, model_path: Callable[..., Path], tmp_path: Path, plain_logprobs: Callable[..., list[Tensor]],
    random_rows: Rows
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        weight = plain(model_path()).get_parameter(f"{layer}.weight")
        for part, shape in (("A", (3, weight.shape[1])), ("B", (weight.shape[0], 3))):
            tensors[f"{PREFIX}{layer}.lora_{part}.weight"] = torch.randn(shape, generator=generator)
    write_adapter(tmp_path, tensors, rank=3, alpha=6.0, base=str(model_path()))
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == tensors.keys()
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["peft_type"]) == (3, 6.0, "LORA")
    if find_spec("peft") is None:
        return
    from peft import PeftModel

    rows = random_rows(2, 2)
    loaded = PeftModel.from_pretrained(plain(model_path()), tmp_path)
    with torch.no_grad():
        found, expected = plain_logprobs(loaded, rows), plain_logprobs(Merged(str(model_path()), tensors), rows)
    for ours, theirs in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one_and_leave_a_state_for_one(
    start: Start, spec: Build, random_rows: Rows, tmp_path: Path
) -> None:
    found: list[dict[str, Tensor]] = []
    for ranks in (1, 2):
        actor = start(spec(**LORA, actor__optimizer="muon", actor__world_size=ranks, actor__lr=1e-3))
        for seed in range(2):
            actor.train([random_rows(4, 3, seed=seed)])
        found.append(dict(actor.weights()))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=0, atol=1e-5, msg=name)
    actor.save(tmp_path / "state")
    actor = start(spec(**LORA, actor__optimizer="muon"))
    actor.load(tmp_path / "state")
    for name, tensor in actor.weights():
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=1e-6, msg=name)
