"""Distillation as users call it, and what they may not say."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import molt_gym
from molt_gym import ConfigError
from molt_gym.trainers.config import load_config

Distill = Callable[..., Any]
SMALL = {"rollout": {"groups_per_step": 2, "group_size": 2, "max_tokens": 8, "max_context": 256}, "eval__episodes": 2,
         "actor": {"lr": 3e-3, "dtype": "float32"}, "steps": 1, "seed": 1}


@pytest.fixture(scope="module")
def teacher(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same tokenizer that is not far from the tiny one."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(tiny_path, folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def distill(toys: Path, tiny_path: Path, teacher: Path, tmp_path: Path) -> Distill:
    """`molt_gym.distill`, small, of the teacher into the tiny model."""

    def run(env: Any = "toy_envs:Letters-v0", student: Any = tiny_path, named: Any = teacher, **options: Any) -> Any:
        return molt_gym.distill(env, student, named, **({"out": tmp_path / "run"} | SMALL | options))

    return run


def test_it_is_training_with_a_teacher_as_the_only_signal(distill: Distill, teacher: Path) -> None:
    result = distill()
    config = load_config(file=result.run_dir / "config.toml").algorithm
    assert (config.estimator, config.teacher, config.kl.coefficient, config.kl.use) == (
        "on_policy_distill", str(teacher), 1.0, "reward")
    (line,) = [line for line in result.metrics if "policy/kl_ref" in line]
    assert line["policy/kl_ref"] > 0.01
    assert line["advantage/mean"] == pytest.approx(-line["policy/kl_ref"])
    assert (result.run_dir / "model" / "config.json").is_file()


def test_it_goes_on_with_its_run_also_without_being_told_the_teacher_again(distill: Distill, teacher: Path) -> None:
    distill()
    result = distill(student=None, named=None, steps=2)
    assert [line["step"] for line in result.metrics if "policy/kl_ref" in line] == [1, 2]
    assert load_config(file=result.run_dir / "config.toml").algorithm.teacher == str(teacher)


def test_the_file_names_a_teacher_too_and_the_argument_wins(distill: Distill, teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('[algorithm]\nteacher = "no/such"\nkl.coefficient = 0.5\n')
    result = distill(config=tmp_path / "settings.toml")
    config = load_config(file=result.run_dir / "config.toml").algorithm
    assert (config.teacher, config.kl.coefficient) == (str(teacher), 0.5)


@pytest.mark.parametrize(("options", "words"), [
    ({"algorithm__estimator": "grpo"}, "algorithm.teacher: is configured, and algorithm.estimator = 'grpo' has none"),
    ({"config": {"algorithm": {"estimator": "grpo"}}}, "write algorithm.estimator = 'on_policy_distill'"),
    ({"algorithm": {"kl": {"use": "loss"}}}, "algorithm.kl.coefficient: 1.0 with algorithm.kl.use = 'loss'"),
    ({"algorithm__teacher": "other"}, "algorithm.teacher: is named beside teacher = "),
    ({"algorithm": {"teacher": "other"}}, "algorithm.teacher: is named beside teacher = "),
    ({"model": "tiny"}, "model: 'tiny' in distill, .* write student"),
    ({"named": None}, "algorithm.teacher: missing"),
    ({"named": "no/such/folder"}, "algorithm.teacher: .*no/such/folder"),
    ({"rollout__dynamic_filter": True}, "rollout.dynamic_filter: .* ignores rewards"),
    ({"algorithm__teacher_engine": "vllm", "algorithm__teacher_engine_args": {"seed": 1}},
     "algorithm.teacher_engine_args.seed: is set by the run itself"),
    ({"algorithm__teacher_engine_args": {"block_size": 16}}, "write teacher_engine = 'vllm'"),
    ({"algorithm__teacher_engine": "vllm", "placement": "ray", "rollout__engine": "vllm"}, "placement: 'ray' with"),
])
def test_what_contradicts_a_distillation_is_refused_before_anything_is_written(
    distill: Distill, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        distill(**options)
    assert not (tmp_path / "run").exists()


def test_an_engine_without_a_teacher_is_refused(train: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="algorithm.teacher_engine: is configured, .* 'grpo' has no teacher"):
        train(algorithm__teacher_engine="vllm")


def with_more_ids(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(folder)


def with_few_positions(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 1024', '"max_position_embeddings": 255'))


def test_a_teacher_must_know_every_id_and_have_room(
    distill: Distill, tiny_path: Path, teacher: Path, tmp_path: Path
) -> None:
    more, few = tmp_path / "more", tmp_path / "few"
    shutil.copytree(tiny_path, more)
    with_more_ids(more)
    shutil.copytree(teacher, few)
    with_few_positions(few)
    with pytest.raises(ConfigError, match=r"algorithm.teacher: .*model has \d+ ids and the policy \d+"):
        distill(student=more)
    with pytest.raises(ConfigError, match="algorithm.teacher: rollout.max_context: 256 is more than .* 255 positions"):
        distill(named=few)


@pytest.mark.parametrize("env", ["ToolUse-v0", "CodeExec-v0"])
def test_agents_and_steps_of_any_env_are_distilled(distill: Distill, env: str) -> None:
    run = partial(distill, env, "tiny", "tiny", rollout__max_context=1024, rollout__max_tokens=48)
    assert [line["policy/kl_ref"] for line in run().metrics if "policy/kl_ref" in line] == pytest.approx([0], abs=1e-5)


def test_a_run_goes_on_from_another_working_directory_than_its_teacher_was_named_in(
    distill: Distill, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"eval__before": False, "eval__after": False}
    monkeypatch.chdir(teacher.parent)
    distill(named=teacher.name, **few)
    monkeypatch.chdir(tmp_path)
    assert distill(named=None, **few, steps=2).metrics[-1]["step"] == 2
