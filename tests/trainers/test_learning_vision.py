"""The tiny model that sees learns from pictures; `make test-slow` trains, then runs all of this."""

import importlib.util
import os
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vision.py"
TRAINED = "MOLT_GYM_LEARNING"
"""Environment variable with the folder of runs that the script left."""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vision", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load()


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(script.SEEDS))
def test_the_reward_rises_with_every_seed_and_only_for_who_looks(seed: int, tmp_path: Path) -> None:
    folder = Path(os.environ.get(TRAINED, tmp_path)).absolute() / f"vision-{seed}"
    lines, blank = script.one(seed, folder)
    (_, first), *_, (step, last) = script.scores(lines)
    rewards = script.rewards(lines)
    assert step == script.STEPS and last >= max(script.GOAL, first + 0.3)
    assert fmean(rewards[-5:]) > rewards[0] + 0.2
    assert blank < 0.5


def test_the_table_has_a_line_for_each_seed() -> None:
    def metrics(gain: float) -> list[dict[str, float]]:
        held_out = [{"step": step, f"eval/{script.ENV}/pass_at_1": gain * step} for step in (0, 10)]
        return held_out + [{"step": step, "reward/mean": gain * step, "time/step": 2.0} for step in range(1, 11)]

    text = script.report([(metrics(0.1), 0.25), (metrics(0.05), 0.125)])
    assert "| 0 | 0.100 → 0.800 | 0.000 → 1.000 | 0.250 | 2.0 |\n| 1 | 0.050 → 0.400 | 0.000 → 0.500 | 0.125 |" in text


def test_its_blank_figures_have_the_questions_of_the_others() -> None:
    env, blank = script.Geo3kEnv(split="test"), script.BlankGeo3kEnv(split="test")
    for index in range(4):
        shown, hidden = (e.reset(options={"index": index})[0]["messages"][1]["content"] for e in (env, blank))
        assert shown[1] == hidden[1] and shown[0] != hidden[0]
