"""A mixture on a real Ray with real vLLM, two of each part, of which one dies: every runner plays every env, nothing is
lost or stale, every rank finds the user's own algorithms.
"""

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

import molt_gym
from molt_gym.tokens.trajectory import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900),
              pytest.mark.skipif(not (find_spec("ray") and find_spec("vllm")), reason="Ray or vLLM is not installed")]


OWN = """
import torch
from molt_gym.trainers.algorithms.registry import EstimatorTraits, LossTraits, register_estimator, register_loss

@register_estimator("seven", EstimatorTraits(per_token=True))
def seven(batch, options):
    return torch.full((len(batch.rollouts),), 7.0, dtype=torch.float64)

@register_loss("all_clipped", LossTraits(has_ratio=False))
def all_clipped(logp, old_logp, advantages, rows, options):
    return -advantages * logp, torch.ones_like(logp, dtype=torch.bool)
"""
MIXTURE = {"toy_envs:Letters-v0": {"weight": 1, "max_turns": 1}, "toy_envs:Coin-v0": 1}
VICTIMS = {1: "ray::PlayActor", 2: "molt_gym.trainers.rollout.vllm_host", 4: "ray::Rank"}
"""After how many steps one of these processes is killed."""


def processes(mark: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            # A Ray actor's title ends where its class does.
            if mark in " ".join(child.cmdline()):
                found.append(child)
    return found


@contextmanager
def killing(metrics: Path) -> Iterator[None]:
    """Meanwhile each of the victims is killed when it is time."""
    over = threading.Event()

    def watch() -> None:
        for step, mark in VICTIMS.items():
            while not over.is_set() and not (metrics.exists() and metrics.read_text().count('"time/step"') >= step):
                over.wait(0.05)
            if not over.is_set():
                processes(mark)[0].send_signal(signal.SIGKILL)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)


@pytest.fixture(scope="module")
def run(toys: Path, cluster: Any, wide_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Six steps in both envs, with an estimator and a loss of a file of the user's own."""
    settings = {
        "placement": "ray", "rollout.engine": "vllm", "rollout.engines": 2, "actor.world_size": 2, "rollout.runners": 2,
        "rollout.groups_per_step": 6, "rollout.group_size": 4, "rollout.max_tokens": 8, "rollout.max_context": 256,
        "rollout.dtype": "float32", "actor.dtype": "float32", "eval.before": False, "eval.episodes": 4,
        "checkpoint.every": 1, "algorithm.estimator": "own_algorithms:seven",
        "algorithm.loss": "own_algorithms:all_clipped"}
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "own_algorithms.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch, killing(folder / "run" / "metrics.jsonl"):
        patch.syspath_prepend(folder)
        return molt_gym.train(MIXTURE, wide_path, out=folder / "run", steps=6, **settings)


def steps_of(run: Any) -> list[dict[str, Any]]:
    return [line for line in run.metrics if "eval/when" not in line]


def test_it_goes_on_when_a_runner_an_engine_and_a_rank_are_killed(run: Any) -> None:
    lines = steps_of(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert sum(line["rollout/runner_restarts"] for line in lines) >= 1
    assert sum(line["rollout/engine_restarts"] for line in lines) >= 1
    assert lines[-1]["actor/restarts"] >= 1


def test_two_ranks_train_once_on_all_that_two_runners_played_with_the_newest_weights_in_two_engines(run: Any) -> None:
    lines = steps_of(run)
    assert all(line["rollout/count"] == 24 and line["staleness/max"] == 0 for line in lines)
    assert all(line["mismatch/abs_diff_mean"] < 1e-4 for line in lines)
    played = Counter((t.group, t.rollout) for file in (run.run_dir / "rollouts").iterdir() for t in read_jsonl(file))
    assert played == Counter((group, rollout) for group in range(36) for rollout in range(4))
    assert [line["step"] for line in run.metrics if "eval/when" in line] == [6]
    assert (run.run_dir / "model" / "model.safetensors").is_file()


def test_a_run_leaves_no_engine_and_no_rank_behind(run: Any) -> None:
    _, left = psutil.wait_procs(processes("vllm_host") + processes("ray::Rank"), timeout=60)
    assert not left


def test_runners_play_all_envs_of_a_mixture_each_rollout_in_its_own(run: Any) -> None:
    for line in steps_of(run):
        counts = [line[f"rollout/count/{env}"] for env in MIXTURE]
        assert sum(counts) == 24 and all(count % 4 == 0 for count in counts)
    assert all(sum(line[f"rollout/count/{env}"] for line in steps_of(run)) for env in MIXTURE)
    played = [t for file in (run.run_dir / "rollouts").iterdir() for t in read_jsonl(file)]
    assert len(played) == 144
    for trajectory in played:
        task = {"toy_envs:Letters-v0": "task", "toy_envs:Coin-v0": "toss"}[trajectory.env]
        assert trajectory.messages[0]["content"] == f"{task} {trajectory.index}" and trajectory.turns == 1
    assert all(f"eval/{env}/pass_at_1" in run.metrics[-1] for env in MIXTURE)


def test_ranks_find_the_estimator_and_the_loss_of_a_users_own_file(run: Any) -> None:
    for line in steps_of(run):
        assert line["advantage/mean"] == pytest.approx(7)
        assert line["policy/clip_fraction"] == 1 and line["optim/grad_norm"] > 0
