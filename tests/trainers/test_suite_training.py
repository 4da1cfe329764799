"""Runs of a tiny policy in envs of suites, each in a process of its own; what is not installed is said."""

import dataclasses
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest

import molt_gym
from molt_gym.adapters.suites import SUITES
from molt_gym.tokens.trajectory import read_jsonl

PLAYED = {
    "textarena": ("textarena/GuessTheNumber-v0", {}),
    "gem": ("gem/GuessTheNumber-easy-v0", {}),
    "verifiers": ("verifiers/Taskset-v0", {"taskset": "toy_taskset"}),
}


@pytest.mark.slow
def test_suites_train_by_their_ids(train: Callable[..., Any]) -> None:
    for suite in PLAYED:
        pytest.importorskip(SUITES[suite].package)
    mixture = {env_id: {"weight": 1.0, "env_kwargs": kwargs} for env_id, kwargs in PLAYED.values()}
    result = train(env=mixture, rollout__max_context=1024, rollout__groups_per_step=3, rollout__group_size=2,
                   rollout__max_concurrency=2, eval__before=False, eval__after=False)
    seen = []
    for step in (1, 2):
        played = read_jsonl(result.run_dir / "rollouts" / f"step-{step:06d}.jsonl")
        assert len(played) == 6 and all(t.failure is None and t.reward is not None for t in played)
        assert {version for t in played for row in t.rows for version in row.versions} == {-1, step - 1}
        assert all(len(t.rows) == 1 for t in played)
        seen += [t.env for t in played]
    assert set(seen) == set(mixture)


@pytest.mark.parametrize("suite", PLAYED)
def test_training_says_what_to_install(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for env_id in [env_id for env_id in gym.registry if env_id.startswith(f"{suite}/")]:
        monkeypatch.delitem(gym.registry, env_id)
    monkeypatch.setitem(SUITES, suite, dataclasses.replace(SUITES[suite], package="not_there"))
    with pytest.raises(molt_gym.UnknownEnv, match=rf"not_there is not installed: pip install 'molt-gym\[{suite}\]'"):
        molt_gym.train(PLAYED[suite][0], "tiny")
