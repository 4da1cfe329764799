"""Whole runs with a steered KL, a teacher, and algorithms of one's own."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt_gym.errors import ConfigError
from molt_gym.trainers.config import load_config

Train = Callable[..., Any]
STEERED = {"algorithm__kl": {"coefficient": 0.1, "target": 0.05, "horizon": 16}}
DISTILL = {"algorithm__estimator": "on_policy_distill", "algorithm__kl": {"coefficient": 1.0, "use": "reward"}}


def steps_of(result: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))}
            for line in result.metrics if "eval/when" not in line]


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


def test_a_steered_coefficient_follows_the_kl_and_a_resumed_run_goes_on_with_it(train: Train, tmp_path: Path) -> None:
    straight = steps_of(train(steps=4, **STEERED))
    train(tmp_path / "run", steps=2, **STEERED)
    assert steps_of(train(tmp_path / "run", steps=4, **STEERED)) == straight
    expected = 0.1
    for line in straight:
        assert line["policy/kl_coefficient"] == pytest.approx(expected, rel=1e-12)
        expected *= 1 + min(max(line["policy/kl_ref"] / 0.05 - 1, -0.2), 0.2) * 8 / 16
    assert len({line["policy/kl_coefficient"] for line in straight}) == 4


def test_without_a_target_the_coefficient_is_that_of_the_options_also_after_a_resume(
    train: Train, tmp_path: Path
) -> None:
    train(tmp_path / "run", steps=2, **STEERED)
    config = (tmp_path / "run" / "config.toml")
    config.write_text("\n".join(line for line in config.read_text().splitlines() if not line.startswith("target = ")))
    lines = steps_of(train(tmp_path / "run", steps=3))
    assert [line["policy/kl_coefficient"] for line in lines] == pytest.approx([0.1, 0.09, 0.1])


def test_without_a_kl_nothing_is_told_of_one(train: Train) -> None:
    assert not any("kl_ref" in name or "kl_coefficient" in name for line in train().metrics for name in line)


@pytest.mark.parametrize("option", ["algorithm__teacher", "algorithm__kl__model"])
def test_a_model_with_other_tokens_is_refused_before_anything_is_written(
    train: Train, teacher: Path, tmp_path: Path, option: str
) -> None:
    other, name = tmp_path / "other", option.replace("__", ".")
    shutil.copytree(teacher, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<odd>"])
    tokenizer.save_pretrained(other)
    options = DISTILL if option == "algorithm__teacher" else {"algorithm__kl__coefficient": 0.1}
    with pytest.raises(ConfigError, match=rf"{name}: .*other has another tokenizer than .* \('<odd>' is \d+ there"):
        train(tmp_path / "run", **{option: str(other)}, **options)
    with pytest.raises(ConfigError, match=rf"^{name}: there is no folder /no/such/folder"):
        train(tmp_path / "run", **{option: "/no/such/folder"}, **options)
    assert not (tmp_path / "run").exists()


def test_the_reference_can_be_another_model_with_the_same_tokens(train: Train, teacher: Path) -> None:
    first, _ = steps_of(train(algorithm__kl={"coefficient": 0.1, "model": str(teacher)}))
    assert first["policy/kl_ref"] > 0.01


def test_score_centering_changes_an_update_as_far_as_sampler_and_trainer_differ(train: Train) -> None:
    def first_step(dtype: str, top: int) -> tuple[float, float]:
        importance = {"level": "token", "mode": "clip", "low": 0.99, "high": 1.01, "score_centering": top}
        result = train(steps=1, rollout__dtype=dtype, algorithm__importance=importance, eval__before=False,
                       eval__after=False)
        return result.metrics[0]["optim/grad_norm"], result.metrics[0]["policy/loss"]

    norm, loss = first_step("float32", 0)
    assert first_step("float32", 400) == (pytest.approx(norm, rel=2e-5), pytest.approx(loss, abs=1e-5))
    norm, loss = first_step("bfloat16", 0)
    assert first_step("bfloat16", 8) != (pytest.approx(norm, rel=2e-4), pytest.approx(loss, abs=1e-4))


@pytest.mark.slow
def test_algorithms_of_ones_own_are_found_by_all_ranks(train: Train) -> None:
    options = {"algorithm__estimator": "toy_algorithms:longest", "algorithm__loss": "toy_algorithms:plain"}
    one, two = (train(actor__world_size=ranks, **options) for ranks in (1, 2))
    assert load_config(file=two.run_dir / "config.toml").algorithm.estimator == "toy_algorithms:longest"
    assert two.metrics[1]["policy/loss"] == pytest.approx(one.metrics[1]["policy/loss"], abs=1e-6)
    assert one.metrics[1]["optim/grad_norm"] > 0
