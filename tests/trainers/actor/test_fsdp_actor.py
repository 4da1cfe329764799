"""An update of one rank is that of plain PyTorch, however it is cut; state, weights and exports are whole."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import AutoModelForCausalLM

from molt_gym.errors import ConfigError
from molt_gym.trainers.actor.attention import Visible
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.model import sharded_parts
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.export import export_checkpoint

VOCAB = 24
Rows = Callable[..., list[TrainRow]]
Build = Callable[..., ActorSpec]
Weights = Callable[..., dict[str, Tensor]]


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


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.cpu(), expected[name].cpu(), rtol=0, atol=atol,
                                   msg=lambda text, name=name: name + text)


def test_an_actor_that_left_its_device_and_came_back_goes_on_as_if_it_had_not(
    start: Start, spec: Build, random_rows: Rows, plain_training: Weights, weights_of: Weights,
    model_path: Callable[..., Path],
) -> None:
    options = spec(model_path())
    batches = [[random_rows(3, 4, seed=seed)] for seed in range(3)]
    actor = start(options)
    for windows in batches:
        actor.train(windows)
        held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        actor.offload()
        assert not held or torch.cuda.memory_allocated() < held / 10
        actor.onload()
    assert_same(weights_of(actor), plain_training(options.path, options.config, batches), 1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_grad_norm", [1e9, 0.05])
def test_updates_equal_plain_adamw_on_separate_rows(
    start: Start, spec: Build, random_rows: Rows, plain_training: Weights, weights_of: Weights,
    model_path: Callable[..., Path], tied: bool, max_grad_norm: float,
) -> None:
    options = spec(model_path(tied=tied), actor__max_grad_norm=max_grad_norm, rollout__temperature=0.7)
    batches = [[random_rows(3, 4, seed=seed, idle=[1, 6])] for seed in range(3)]
    actor = start(options)
    metrics = [actor.train(windows) for windows in batches]
    assert_same(weights_of(actor), plain_training(options.path, options.config, batches), 1e-6)
    assert all((line["optim/grad_norm"] > max_grad_norm) == (max_grad_norm < 1) for line in metrics)
    assert actor.updates == 3


def test_two_updates_a_batch_clip_the_ratio_to_the_policy_before_the_first(
    start: Start, spec: Build, random_rows: Rows, plain_training: Weights, weights_of: Weights
) -> None:
    options = spec(actor__lr=0.05, algorithm__updates_per_batch=2)
    windows = [random_rows(2, 3, seed=1), random_rows(2, 3, seed=2, start=6)]
    actor = start(options)
    metrics = actor.train(windows)
    assert_same(weights_of(actor), plain_training(options.path, options.config, [windows]), 1e-6)
    assert metrics["policy/clip_fraction"] > 0.05
    assert abs(metrics["policy/kl_old"]) > 1e-3


def test_the_update_and_its_loss_do_not_depend_on_the_size_of_micro_batches(
    start: Start, spec: Build, random_rows: Rows, weights_of: Weights
) -> None:
    rows = random_rows(4, 3)
    outcomes = []
    for tokens in (1, 25, 4096):
        actor = start(spec(actor__micro_batch_tokens=tokens))
        metrics = actor.train([rows])
        outcomes.append((weights_of(actor), metrics["policy/loss"], metrics["policy/entropy"]))
    for weights, loss, entropy in outcomes[1:]:
        assert_same(weights, outcomes[0][0], 1e-6)
        assert (loss, entropy) == pytest.approx(outcomes[0][1:], abs=1e-6)


def shuffled(rows: list[TrainRow]) -> list[TrainRow]:
    return random.Random(1).sample(rows, len(rows))


def branched(rows: list[TrainRow]) -> list[TrainRow]:
    """Each row as two: the second half of its trained tokens is trained in a row of its own, behind the first."""
    found = []
    for row in rows:
        cut = row.trained[len(row.trained) // 2]
        first = TrainRow(row.ids[:cut], row.mask[:cut], row.logprobs[:cut], row.advantage, row.weight, 2 * row.row,
                         row.group)
        second = replace(row, mask=[0] * cut + row.mask[cut:], row=2 * row.row + 1)
        found += [second, first]
    return found


def observed(rows: list[TrainRow]) -> list[TrainRow]:
    """With tokens behind the last that is trained, which were not sampled."""
    return [replace(row, ids=[*row.ids, *[row.row % VOCAB] * 3], mask=[*row.mask, 0, 0, 0],
                    logprobs=[*row.logprobs, 0.0, 0.0, 0.0]) for row in rows]


def regrouped(rows: list[TrainRow]) -> list[TrainRow]:
    """With nothing that is computed together."""
    return [replace(row, group=100 + row.row) for row in rows]


@pytest.mark.parametrize("change", [shuffled, branched, observed, regrouped])
def test_the_update_does_not_depend_on_how_the_rows_come(
    start: Start, spec: Build, random_rows: Rows, weights_of: Weights, change: Callable[..., list[TrainRow]]
) -> None:
    outcomes = []
    for alter in (list, change):
        actor = start(spec(actor__micro_batch_tokens=60))
        actor.train([alter(random_rows(3, 3, seed=6))])
        outcomes.append(weights_of(actor))
    assert_same(outcomes[1], outcomes[0], 1e-6)


def test_passes_without_gradients_have_a_budget_of_their_own_and_what_they_tell_does_not_depend_on_it(
    start: Start, spec: Build, random_rows: Rows
) -> None:
    rows, outcomes = random_rows(4, 3), []
    for tokens in (1, 4096):
        actor = start(spec(actor__micro_batch_tokens=1, actor__logprob_micro_batch_tokens=tokens))
        passes: list[None] = []
        actor._first._policy.register_forward_hook(lambda *_, passes=passes: passes.append(None))
        outcomes.append((actor.score(rows), len(passes)))
    (scores, many), (others, one) = outcomes
    assert one == 1 and many > 1
    assert [value for row in scores for value in row] == pytest.approx([v for row in others for v in row], abs=1e-5)


def test_what_layers_share_is_worked_out_once_a_pass_and_weights_are_gathered_once_an_update(
    start: Start, spec: Build, random_rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: dict[str, int] = Counter()

    def counted(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: object, **options: object) -> object:
            done[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    counted(Visible, "__init__")
    counted(FSDPParamGroup, "_to_unsharded")
    counted(_fsdp_param_group, "foreach_reduce")
    actor = start(spec(actor__micro_batch_tokens=1))
    policy = actor._first._policy
    policy.register_forward_hook(lambda *_: done.update(["pass"]))
    for _ in range(2):
        actor.train([random_rows(4, 3)])
    assert done["pass"] > 4
    assert done["__init__"] == done["pass"]
    assert done["_to_unsharded"] == done["foreach_reduce"] == 2 * len(sharded_parts(policy))


@pytest.mark.slow
def test_compiled_layers_make_the_same_update(
    start: Start, spec: Build, random_rows: Rows, weights_of: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[None] = []
    real = torch.compile

    def only_traced(function: Callable[..., object], **_: object) -> Callable[..., object]:
        compiled.append(None)
        return real(function, backend="eager")

    monkeypatch.setattr(torch, "compile", only_traced)
    outcomes = []
    for options in ({}, {"actor__compile": True}):
        actor = start(spec(**options))
        for seed in range(2):
            actor.train([random_rows(2, 3, seed=seed)])
        outcomes.append(weights_of(actor))
    assert_same(outcomes[1], outcomes[0], 1e-6)
    assert len(compiled) == 2


def test_the_logged_loss_and_entropy_are_those_of_the_window(
    start: Start, spec: Build, random_rows: Rows, model_path: Callable[..., Path]
) -> None:
    rows = random_rows(2, 2)
    metrics = start(spec(actor__micro_batch_tokens=1, rollout__temperature=0.7)).train([rows])
    # The ratio is 1 before the first update, so the loss is -Σ w·A.
    expected = -sum(row.weight * row.advantage * len(row.trained) for row in rows)
    assert metrics["policy/loss"] == pytest.approx(expected, abs=1e-6)
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    entropies = []
    for row in rows:
        logits = model(torch.tensor([row.ids])).logits[0].detach() / 0.7
        entropies += [torch.distributions.Categorical(logits=logits[p - 1]).entropy().item() for p in row.trained]
    assert metrics["policy/entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-5)


def test_a_window_without_any_advantage_changes_nothing_but_is_measured(
    start: Start, spec: Build, random_rows: Rows, weights_of: Weights
) -> None:
    actor = start(spec())
    before = weights_of(actor)
    metrics = actor.train([random_rows(2, 2, idle=range(4))])
    assert_same(weights_of(actor), before)
    assert actor.updates == 1
    assert metrics["mismatch/abs_diff_mean"] > 0
    assert "optim/lr" not in metrics


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    start: Start, spec: Build, random_rows: Rows, weights_of: Weights, plain_training: Weights
) -> None:
    options = spec()
    actor = start(options)
    before = weights_of(actor)
    bad = random_rows(2, 3)
    bad[1].weight = float("inf")
    metrics = actor.train([bad])
    assert metrics["optim/skipped_nonfinite"] == 1
    assert "optim/grad_norm" not in metrics
    assert_same(weights_of(actor), before)
    assert actor.updates == 1
    good = random_rows(2, 3, seed=3)
    assert actor.train([good])["optim/skipped_nonfinite"] == 0
    assert_same(weights_of(actor), plain_training(options.path, options.config, [[good]]), 1e-6)


def test_sampler_and_trainer_are_compared_on_every_trained_token(
    start: Start, spec: Build, random_rows: Rows, plain_logprobs: Callable[..., list[Tensor]],
    model_path: Callable[..., Path],
) -> None:
    rows = random_rows(2, 3)
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    with torch.no_grad():
        for row, logp in zip(rows, plain_logprobs(model, rows), strict=True):
            for position, value in zip(row.trained, logp.tolist(), strict=True):
                row.logprobs[position] = value + 0.25
    metrics = start(spec()).train([rows])
    assert metrics["mismatch/abs_diff_mean"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["mismatch/kl"] == pytest.approx(0.25, abs=1e-5)


def test_tokens_far_from_the_sampler_are_masked_by_the_importance_band(
    start: Start, spec: Build, random_rows: Rows, weights_of: Weights, plain_training: Weights,
    plain_logprobs: Callable[..., list[Tensor]], model_path: Callable[..., Path],
) -> None:
    rows = random_rows(2, 3)
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    with torch.no_grad():
        for row, logp in zip(rows, plain_logprobs(model, rows), strict=True):
            for position, value in zip(row.trained, logp.tolist(), strict=True):
                row.logprobs[position] = value - (3.0 if row.row == 2 else 0.0)
    options = spec(algorithm__importance__level="geo")
    actor = start(options)
    metrics = actor.train([rows])
    assert metrics["is/filtered"] == pytest.approx(1 / 6)
    rows[2].advantage = 0.0
    assert_same(weights_of(actor), plain_training(options.path, options.config, [[rows]]), 1e-6)


def test_a_run_that_stops_and_goes_on_has_the_learning_rates_and_the_bits_of_one_that_does_not(
    start: Start, spec: Build, random_rows: Rows, weights_of: Weights, tmp_path: Path
) -> None:
    options = spec(actor__schedule="cosine", actor__warmup_steps=2, total_updates=6)
    batches = [[random_rows(2, 3, seed=seed)] for seed in range(5)]
    straight = start(options)
    rates = [straight.train(windows)["optim/lr"] for windows in batches]
    expected = weights_of(straight)
    first = start(options)
    resumed = [first.train(windows)["optim/lr"] for windows in batches[:3]]
    first.save(tmp_path / "state")
    second = start(options)
    second.train(batches[4])  # What was there before must not show.
    second.train([random_rows(1, 2, idle=range(2))])
    second.load(tmp_path / "state")
    assert second.updates == 3
    resumed += [second.train(windows)["optim/lr"] for windows in batches[3:]]
    assert resumed == rates
    assert rates[:3] == pytest.approx([0.005, 0.01, 0.01])
    assert_same(weights_of(second), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_have_the_names_of_the_checkpoint_and_tied_ones_come_once(
    start: Start, spec: Build, model_path: Callable[..., Path], tied: bool
) -> None:
    path = model_path(tied=tied)
    with safe_open(path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        embedding = file.get_tensor("model.embed_tokens.weight")
    weights = list(start(spec(path)).weights())
    assert sorted(name for name, _ in weights) == sorted(names)
    assert ("lm_head.weight" in names) is not tied
    torch.testing.assert_close(dict(weights)["model.embed_tokens.weight"], embedding, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_a_transformers_folder_in_the_dtype_that_came_in(
    start: Start, spec: Build, random_rows: Rows, weights_of: Weights, model_path: Callable[..., Path], tmp_path: Path,
    tied: bool, dtype: torch.dtype,
) -> None:
    actor = start(spec(model_path(tied=tied, dtype=dtype)))
    actor.train([random_rows(2, 3)])
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "trainer.json").write_text("{}")
    actor.save(tmp_path / "saved" / "actor")
    export_checkpoint(tmp_path / "saved", tmp_path / "model", model_path(tied=tied, dtype=dtype))
    trained = weights_of(actor)
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    assert settings["architectures"] == ["Qwen3ForCausalLM"]
    assert settings["dtype"] == str(dtype).removeprefix("torch.")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.dtype == dtype
    assert_same(dict(loaded.named_parameters()), {name: tensor.to(dtype) for name, tensor in trained.items()})
    head = loaded.get_output_embeddings().weight
    assert (head is loaded.get_input_embeddings().weight) is tied
    expected = AutoModelForCausalLM.from_pretrained(model_path(tied=tied, dtype=dtype), dtype=dtype)
    expected.load_state_dict({name: tensor.to(dtype) for name, tensor in trained.items()}, strict=not tied)
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, expected(ids).logits)


def test_a_checkpoint_of_another_model_is_refused_by_name(
    start: Start, spec: Build, model_path: Callable[..., Path], tmp_path: Path
) -> None:
    for tied in (True, False):
        start(spec(model_path(tied=tied))).save(tmp_path / f"{tied}")
        with pytest.raises(ConfigError, match="was saved from another one.*lm_head"):
            start(spec(model_path(tied=not tied))).load(tmp_path / f"{tied}")


@pytest.mark.parametrize("rank", [0, 4])
def test_a_model_of_quantised_weights_is_refused(
    spec: Build, model_path: Callable[..., Path], tmp_path: Path, rank: int
) -> None:
    settings = json.loads((model_path() / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"is quantised \(fp8\).*choose the same model in bfloat16"):
        LocalActor(spec(tmp_path, actor__lora__rank=rank))


def test_an_actor_that_cannot_start_leaves_room_for_the_next(start: Start, spec: Build, tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        LocalActor(spec(tmp_path))
    assert start(spec()).updates == 0


def test_a_second_actor_of_a_process_syncs_generators_as_its_fresh_ranks_do(
    start: Start, spec: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch does so where there are GPUs alone.
    made: list[object] = []

    class Tracker:
        distribute_region_enabled = False

        def __init__(self, *_: object) -> None:
            made.append(self)

    monkeypatch.setattr("torch.distributed.tensor._random.OffsetBasedRNGTracker", Tracker)
    monkeypatch.setattr("torch.distributed.tensor._random._rng_tracker", None)
    monkeypatch.setattr("torch.distributed.tensor._dispatch.is_rng_supported_mesh", lambda _: True)
    for number in (1, 2):
        parameter = next(start(spec())._first._policy.parameters())
        for _ in range(2):
            torch.nn.init.normal_(torch.empty_like(parameter))
        assert len(made) == number
