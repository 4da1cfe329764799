"""A mixture on a real Ray with real vLLM: every runner plays every env."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import molt_gym
from molt_gym.tokens.trajectory import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900),
              pytest.mark.skipif(not (find_spec("ray") and find_spec("vllm")), reason="Ray or vLLM is not installed")]


def test_runners_play_all_envs_of_a_mixture_each_rollout_in_its_own(toys, cluster, wide_path: Path, tmp_path) -> None:
    settings = {
        "placement": "ray", "rollout.engine": "vllm", "rollout.runners": 2, "rollout.groups_per_step": 6,
        "rollout.group_size": 4, "rollout.max_tokens": 8, "rollout.max_context": 256, "rollout.dtype": "float32",
        "actor.dtype": "float32", "eval.before": False, "eval.episodes": 4}
    mixture = {"toy_envs:Letters-v0": {"weight": 1, "max_turns": 1}, "toy_envs:Coin-v0": 1}
    result = molt_gym.train(mixture, wide_path, out=tmp_path / "run", steps=3, **settings)
    steps = [line for line in result.metrics if "eval/when" not in line]
    for line in steps:
        counts = [line[f"rollout/count/{env}"] for env in mixture]
        assert sum(counts) == 24 and all(count % 4 == 0 for count in counts)
    assert all(sum(line[f"rollout/count/{env}"] for line in steps) for env in mixture)
    played = [t for file in (result.run_dir / "rollouts").iterdir() for t in read_jsonl(file)]
    assert len(played) == 72
    for trajectory in played:
        task = {"toy_envs:Letters-v0": "task", "toy_envs:Coin-v0": "toss"}[trajectory.env]
        assert trajectory.messages[0]["content"] == f"{task} {trajectory.index}" and trajectory.turns == 1
    assert all(f"eval/{env}/pass_at_1" in result.metrics[-1] for env in mixture)
