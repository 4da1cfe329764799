from statistics import fmean

import pytest

import molt_gym


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_a_tiny_policy_learns_not_to_lose_tic_tac_toe_to_a_random_player(seed: int, tmp_path) -> None:
    result = molt_gym.train("TicTacToe-v0", "tiny", out=tmp_path / "run", seed=seed, steps=60,
                            env_kwargs={"opponent": "random"})
    name = "game/TicTacToe-v0/against/random/loss"
    losses = [line[name] for line in result.metrics if name in line]
    assert fmean(losses[:3]) > 0.1
    assert fmean(losses[-10:]) <= 0.03
    assert result.metrics[-1]["eval/TicTacToe-v0/loss"] <= 0.03
