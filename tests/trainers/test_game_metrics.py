import pytest

from molt_gym.tokens import Trajectory
from molt_gym.trainers.game_metrics import game_metrics, result_rates
from molt_gym.trainers.scores import TaskScore, summary


def game(seat, reward, opponent, result=None):
    info = {"opponent": opponent} | ({"result": result} if result else {})
    return Trajectory("Chess-v0", 1, seat=seat, reward=reward, info=info)


PLAYED = [game("white", 1.0, "random", "win"), game("white", 0.0, "step-000004", "draw"),
          game("black", -1.0, "random", "loss"), game("black", 0.5, "random")]


def test_seats_have_rewards_and_seats_and_opponents_have_results() -> None:
    metrics = game_metrics([*PLAYED, Trajectory("Math-v0", 1, reward=1.0)])
    assert metrics["reward/Chess-v0/white"] == 0.5 and metrics["reward/Chess-v0/black"] == -0.25
    assert metrics["game/Chess-v0/white/win"] == metrics["game/Chess-v0/white/draw"] == 0.5
    assert metrics["game/Chess-v0/black/loss"] == 1.0
    assert metrics["game/Chess-v0/against/random/loss"] == metrics["game/Chess-v0/against/random/win"] == 0.5
    assert metrics["game/Chess-v0/against/step-000004/draw"] == 1.0
    assert not any("Math" in name for name in metrics)


def test_games_that_were_cut_have_no_result() -> None:
    assert result_rates(PLAYED) == pytest.approx({"win": 1 / 3, "draw": 1 / 3, "loss": 1 / 3})
    assert result_rates([PLAYED[3]]) == {} == game_metrics([])


def test_an_evaluation_tells_the_results_too() -> None:
    games = PLAYED[:3]
    metrics = summary("Chess-v0", [TaskScore.of([game]) for game in games], 1, trajectories=games).metrics()
    assert metrics["loss"] == pytest.approx(1 / 3) and metrics["pass_at_1"] == pytest.approx(1 / 3)
    other = Trajectory("Math-v0", 1, reward=1.0)
    assert "loss" not in summary("Math-v0", [TaskScore.of([other])], 1, trajectories=[other]).metrics()
