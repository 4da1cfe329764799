"""Models that nemo_automodel builds, against those of transformers: one rank, and experts over two."""

import multiprocessing
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from molt_gym.errors import ConfigError
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="is not installed")]

VOCAB, LAYERS, EXPERTS = 24, 3, 8
WAIT = 180.0
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, initializer_range=0.3,
        moe_intermediate_size=16, num_experts=EXPERTS, num_experts_per_tok=2, mlp_only_layers=[1], norm_topk_prob=True,
        tie_word_embeddings=False, eos_token_id=2, pad_token_id=0, bos_token_id=None)
    path = tmp_path_factory.mktemp("moe")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rows(random_rows: Callable[..., list[TrainRow]]) -> list[TrainRow]:
    """Some of which tell the experts that they were sampled with."""
    made, rng = random_rows(4, 3), np.random.default_rng(0)
    for row in made[::2]:
        experts = np.tile(np.arange(EXPERTS, dtype=np.int16), (len(row.ids), LAYERS, 1))
        row.experts = rng.permuted(experts, axis=-1)[..., :2]
    return made


class Ranks:
    """Ranks of an actor, each in a process in which nemo_automodel finds its GPU."""

    def __init__(self, spec: ActorSpec) -> None:
        import nemo_on_cpu

        context, ranks = multiprocessing.get_context("spawn"), spec.config.actor.world_size
        store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        self._store, self._jobs, self._answers = store, [], []
        for number in range(ranks):
            self._jobs.append(context.Queue())
            self._answers.append(context.Queue())
            context.Process(target=nemo_on_cpu.rank, daemon=True, args=(
                number, ranks, store.port, spec, self._jobs[-1], self._answers[-1])).start()

    def call(self, *job: Any) -> Any:
        for jobs in self._jobs:
            jobs.put(job)
        return [answers.get(timeout=WAIT) for answers in self._answers][0]

    def close(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {"actor__micro_batch_tokens": 60, "algorithm__updates_per_batch": 2, "algorithm__kl__coefficient": 0.1}


@pytest.fixture(scope="module")
def pair(toys: Path, spec: Callable[..., ActorSpec], moe_path: Path, options: dict[str, Any]) -> Iterator[Ranks]:
    ranks = Ranks(spec(moe_path, actor__ep=2, actor__world_size=2, actor__activation_checkpointing="full", **options))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def plain(spec: Callable[..., ActorSpec], moe_path: Path, rows: list[TrainRow], options: dict[str, Any]) -> Any:
    """What transformers makes of the rows: log-probabilities before, metrics, and the weights after."""
    actor = LocalActor(spec(moe_path, actor__backend="transformers", **options))
    try:
        before = actor.score(rows)
        metrics = actor.train([rows[:6], rows[6:]])
        return before, metrics, {name: tensor.numpy().copy() for name, tensor in actor.weights()}
    finally:
        actor.close()


def fused(weights: Weights) -> Weights:
    """By the names of transformers' models, which stack experts."""
    found = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (np.stack([weights[f"{prefix}.{expert}.{part}_proj.weight"] for expert in range(EXPERTS)])
                          for part in ("gate", "up", "down"))
        found |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], 1), f"{prefix}.down_proj": down}
    return found


def check(call: Callable[..., Any], plain: Any, rows: list[TrainRow]) -> None:
    before, metrics, after = plain
    for found, right in zip(call("score", rows), before, strict=True):
        assert found == pytest.approx(right, abs=1e-4)
    told = call("train", [rows[:6], rows[6:]])
    for name in ("policy/loss", "optim/grad_norm", "mismatch/abs_diff_mean", "policy/kl_ref"):
        assert told[name] == pytest.approx(metrics[name], abs=1e-4), name
    weights = fused(call("weights"))
    assert weights.keys() == after.keys()
    for name, value in after.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("again", ["none", "selective"])
def test_one_rank_makes_the_update_of_transformers(toys, monkeypatch, spec, moe_path, rows, options, plain, again):
    import nemo_on_cpu

    nemo_on_cpu.patch(monkeypatch.setattr)
    actor = LocalActor(spec(moe_path, actor__backend="automodel", actor__activation_checkpointing=again, **options))

    def call(name: str, *arguments: Any) -> Any:
        result = getattr(actor, name)(*arguments)
        return {key: tensor.numpy() for key, tensor in result} if name == "weights" else result

    try:
        check(call, plain, rows)
        with safe_open(moe_path / "model.safetensors", "pt") as file:
            assert set(call("weights")) == set(file.keys())
    finally:
        actor.close()


def test_experts_over_two_ranks_make_the_same_update(pair, plain, rows, tmp_path):
    pair.call("save", tmp_path / "state")
    check(pair.call, plain, rows)
    pair.call("load", tmp_path / "state")
    check(pair.call, plain, rows)


def test_without_a_gpu_it_is_said(spec, moe_path):
    with pytest.raises(ConfigError, match="actor.backend: 'automodel' needs a GPU; write 'transformers'"):
        LocalActor(spec(moe_path, actor__backend="automodel"))


def test_a_model_that_it_does_not_know_is_refused(spec, tmp_path, moe_path):
    import json

    config = json.loads((moe_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ConfigError, match="'automodel' has no class for OtherForCausalLM"):
        LocalActor(spec(tmp_path, actor__ep=1, actor__backend="automodel"))
