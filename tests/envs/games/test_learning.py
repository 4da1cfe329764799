import pytest

import molt_gym


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_a_tiny_policy_learns_not_to_lose_tic_tac_toe_to_a_random_player(seed, tmp_path):
    result = molt_gym.train("TicTacToe-v0", "tiny", out=tmp_path / "run", seed=seed, steps=60, eval__episodes=256,
                            env_kwargs={"opponent": "random"})
    losses = [line["eval/TicTacToe-v0/loss"] for line in result.metrics if "eval/when" in line]
    assert losses[0] > 0.06
    assert losses[-1] <= 0.04
