import pytest

import molt_gym


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tiny_policy_learns_easy_mathematics(tmp_path):
    result = molt_gym.train("Math-v0", "tiny", out=tmp_path / "run", steps=24)
    scores = [line["eval/Math-v0/pass_at_1"] for line in result.metrics if "eval/Math-v0/pass_at_1" in line]
    assert scores[-1] >= scores[0] + 0.2
