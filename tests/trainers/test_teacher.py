"""A teacher in an engine of its own: what the actor would compute, whatever happens to its process."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import molt_gym
from molt_gym.errors import RunFailed
from molt_gym.images import ImageSpan
from molt_gym.tokens import Renderer
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.config import Config, load_config
from molt_gym.trainers.teacher import TeacherEngine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

WAIT = 300.0
TEMPERATURE = 0.7


def command(process: psutil.Process) -> str:
    """Of a process; nothing of one that has ended and that nobody has looked after yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""



@pytest.fixture(scope="module")
def folders(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Student and teacher, with heads of 32, the least that vLLM takes on CPUs."""
    tokenizer, paths = AutoTokenizer.from_pretrained(tiny_path), []
    for seed in range(2):
        paths.append(tmp_path_factory.mktemp("model"))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            Qwen3ForCausalLM(Qwen3Config(
                vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=1024,
                initializer_range=0.15, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0, bos_token_id=None,
            )).float().save_pretrained(paths[-1])
        tokenizer.save_pretrained(paths[-1])
    return paths[0], paths[1]


def settings(teacher: Path, engine: str) -> Config:
    return load_config("Any-v0", overrides={
        "algorithm": {"estimator": "on_policy_distill", "teacher": str(teacher), "teacher_engine": engine,
                      "kl": {"coefficient": 1.0, "use": "reward"}},
        "rollout": {"temperature": TEMPERATURE, "max_context": 64, "max_tokens": 32, "max_concurrency": 4},
        "actor": {"dtype": "float32", "lr": 1e-3, "eps": 1e-2}, "failures__engine_restarts": 1})


def made_rows() -> list[TrainRow]:
    """Rows of up to the whole context, with tool output between what was sampled; one has nothing to train."""
    random, rows = torch.Generator().manual_seed(0), []
    for number, length in enumerate([2, 17, 40, 64, 64, 5]):
        ids = torch.randint(3, 250, (length,), generator=random).tolist()
        mask = [0] + [int(place % 5 != 2 and number != 5) for place in range(1, length)]
        rows.append(TrainRow(ids, mask, [-1.0 * bit for bit in mask], 0.0, 1 / 160, number, number // 2, number))
    return rows


@torch.no_grad()
def by_hand(folder: Path, row: TrainRow, temperature: float) -> list[float]:
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([row.ids])).logits[0]
    logs = (logits / temperature).log_softmax(-1)
    return [logs[position - 1, row.ids[position]].item() for position in row.trained]


def kill(teacher: TeacherEngine) -> None:
    os.killpg(teacher._engine._host.pid, signal.SIGKILL)


def engines_left() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "vllm" in command(child)]


@pytest.fixture(scope="module")
def scored(folders: tuple[Path, Path], tiny_path: Path) -> Iterator[list[TrainRow]]:
    """Rows with what an engine that died in between, and was replaced once, said of them."""
    rows = made_rows()

    async def ask() -> None:
        renderer = Renderer(AutoTokenizer.from_pretrained(tiny_path))
        teacher = TeacherEngine(settings(folders[1], "vllm"), str(folders[1]), renderer)
        try:
            assert (await asyncio.wait_for(teacher.score(rows[:2]), WAIT)).keys() == {"time/teacher"}
            seen = replace(rows[1], images=[ImageSpan(0, 1, "data:,")])
            with pytest.raises(RunFailed, match="has images, .* write algorithm.teacher_engine = 'actor'"):
                await teacher.score([seen])
            kill(teacher)
            await asyncio.wait_for(teacher.score(rows[2:]), WAIT)
            kill(teacher)
            with pytest.raises(RunFailed, match="the teacher's engine: the vLLM engine's process ended"):
                await asyncio.wait_for(teacher.score(made_rows()), WAIT)
        finally:
            await teacher.close()

    asyncio.run(ask())
    assert not engines_left()
    yield rows


def test_it_says_what_plain_transformers_does_under_the_temperature_of_sampling(
    folders: tuple[Path, Path], scored: list[TrainRow]
) -> None:
    for row in scored:
        assert row.ref_logprobs == pytest.approx(by_hand(folders[1], row, TEMPERATURE), abs=1e-4)
    assert scored[1].ref_logprobs != pytest.approx(by_hand(folders[1], scored[1], 1.0), abs=0.1)
    assert scored[5].ref_logprobs == []


def test_an_update_is_that_of_a_teacher_in_the_actor(folders: tuple[Path, Path], scored: list[TrainRow]) -> None:
    student, teacher = map(str, folders)
    results: dict[str, tuple[dict[str, float], dict[str, torch.Tensor], list[list[float]]]] = {}
    for engine, rows in (("actor", made_rows()), ("vllm", scored)):
        actor = LocalActor(ActorSpec(student, settings(folders[1], engine), torch.float32, 1, teacher))
        try:
            assert (actor._first._reference is None) == (engine == "vllm")
            metrics = actor.train([rows])
            weights = {name: tensor.clone() for name, tensor in actor.weights()}
        finally:
            actor.close()
        results[engine] = metrics, weights, [row.ref_logprobs or [] for row in rows]
    (metrics, weights, values), (more, others, found) = results["actor"], results["vllm"]
    assert sum(found, []) == pytest.approx(sum(values, []), abs=1e-3)
    assert more["policy/kl_ref"] == pytest.approx(metrics["policy/kl_ref"], abs=1e-4)
    assert abs(metrics["policy/kl_ref"]) > 0.01
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, atol=1e-5, rtol=0)


def test_a_run_learns_from_a_teacher_in_an_engine(
    toys: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    student, teacher = folders
    small: dict[str, Any] = {"rollout": {"groups_per_step": 4, "group_size": 4, "max_tokens": 16, "max_context": 128},
                             "actor": {"lr": 3e-3, "dtype": "float32"}, "eval__before": False, "eval__after": False}
    run: Callable[..., Any] = molt_gym.distill
    result = run("toy_envs:Letters-v0", student, teacher, out=tmp_path / "run", steps=12, seed=1,
                 algorithm__teacher_engine="vllm", **small)
    lines = [line for line in result.metrics if "policy/kl_ref" in line]
    assert len(lines) == 12 and all(line["time/teacher"] > 0 for line in lines)
    assert sum(line["policy/kl_ref"] for line in lines[-3:]) < 0.8 * sum(line["policy/kl_ref"] for line in lines[:3])
    assert not engines_left()
