"""Every estimator and loss learns the easy tasks of CodeExec-v0; `make test-slow` trains, then runs all of this."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

import molt_gym
from molt_gym.trainers.algorithms.registry import ESTIMATORS, LOSSES
from molt_gym.trainers.config import load_config

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "algorithms.py"
TRAINED = "MOLT_GYM_LEARNING"
"""Environment variable with the folder of runs that the script left."""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("algorithms", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load()


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(script.SEEDS))
@pytest.mark.parametrize("name", script.ALGORITHMS)
def test_an_algorithm_learns_with_every_seed(name: str, seed: int, tmp_path: Path) -> None:
    runs = Path(os.environ.get(TRAINED, tmp_path)).absolute()
    (_, first), *_, (step, last) = script.scores(script.learn(name, seed, runs / f"{name}-{seed}"))
    assert first < 0.2 and step == script.STEPS
    assert last >= script.GOAL


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gae"])
def test_the_algorithm_with_most_parts_learns_in_a_few_steps(name: str, tmp_path: Path) -> None:
    result = molt_gym.train(script.ENV, "tiny", out=tmp_path / "run", steps=12, **script.ALGORITHMS[name])
    scores = [score for _, score in script.scores(result.metrics)]
    assert scores[0] < 0.2 and scores[-1] >= script.GOAL


def test_the_table_has_a_line_for_each_algorithm_and_says_when_the_goal_was_reached() -> None:
    def metrics(gain: float) -> list[dict[str, float]]:
        held_out = [{"step": step, f"eval/{script.ENV}/pass_at_1": gain * step} for step in (0, 10)]
        return held_out + [{"step": step, "reward/mean": gain * step, "time/step": 2.0} for step in range(1, 11)]

    text = script.report({"grpo": [metrics(0.1), metrics(0.05)], "gspo": [metrics(0.1)] * 2})
    assert "| grpo | `--algorithm.estimator grpo` | 0.000 → 1.000 (never) | 0.000 → 0.500 (never) | 2.0 |" in text
    assert script.reached(metrics(0.12)) == 10
    assert "`--algorithm.loss gspo --algorithm.updates-per-batch 2 --actor.lr 0.001`" in text


def test_every_estimator_and_loss_that_rewards_teach_is_among_them() -> None:
    named = {value for options in script.ALGORITHMS.values() for value in options.values()}
    # Other tests of the process may have registered some of their own.
    ours = {name for registry in (ESTIMATORS, LOSSES) for name in registry.names()
            if registry.function(name).__module__.startswith("molt_gym.")}
    assert ours - named == {"reinforce_baseline", "on_policy_distill", "ppo"}
    for options in script.ALGORITHMS.values():
        load_config(script.ENV, overrides=options)
