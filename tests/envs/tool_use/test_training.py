import pytest

import molt_gym
from molt_gym.trainers.models import tiny


@pytest.mark.slow
def test_a_tiny_policy_learns_to_use_the_tools(monkeypatch, tmp_path):
    monkeypatch.setenv("MOLT_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny, "_STEPS", 150)
    result = molt_gym.train(
        "ToolUse-v0", "tiny", out=tmp_path / "run", steps=10, env_kwargs={"families": ["square", "stock"]},
        rollout={"groups_per_step": 8}, eval={"episodes": 32},
    )
    before, after = (line["eval/ToolUse-v0/pass_at_1"] for line in (result.metrics[0], result.metrics[-1]))
    assert after > before + 0.3
    steps = [line for line in result.metrics if "reward/mean" in line]
    assert all(line["rollout/fork_rate"] == 0 and line["rollout/tool_calls_mean"] > 0.5 for line in steps)
