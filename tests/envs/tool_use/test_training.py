import pytest

import molt_gym


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tiny_policy_learns_to_use_the_tools(tmp_path):
    result = molt_gym.train("ToolUse-v0", "tiny", out=tmp_path / "run", steps=10, eval={"before": False})
    steps = [line for line in result.metrics if "reward/mean" in line]
    first, last = (sum(line["reward/mean"] for line in part) / 2 for part in (steps[:2], steps[-2:]))
    assert last > first + 0.2
    assert result.metrics[-1]["eval/ToolUse-v0/pass_at_1"] > 0.5
    assert all(line["rollout/fork_rate"] == 0 and line["rollout/tool_calls_mean"] > 0.5 for line in steps)
    assert not any("failed" in name for line in steps for name in line)
