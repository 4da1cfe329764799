import pytest

import molt_gym


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tiny_policy_learns_easy_mathematics(monkeypatch, tmp_path):
    monkeypatch.setenv("MOLT_GYM_CACHE", str(tmp_path / "cache"))
    result = molt_gym.train("Math-v0", "tiny", out=tmp_path / "run", steps=40)
    scores = [line["eval/Math-v0/pass_at_1"] for line in result.metrics if "eval/Math-v0/pass_at_1" in line]
    assert scores[-1] >= scores[0] + 0.3
