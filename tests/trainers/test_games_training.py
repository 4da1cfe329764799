"""Training in a game, end to end: every seat's rows with its own reward, and a league of earlier checkpoints."""

from collections import Counter, defaultdict
from pathlib import Path

import pytest

import molt_gym
from molt_gym.tokens.trajectory import read_jsonl
from molt_gym.trainers import loop

ENV = "toy_games:Duel-v0"
LEAGUE = {"env_kwargs": {"opponent": "league"}, "league__size": 2, "checkpoint__every": 1, "eval__before": False,
          "eval__env_kwargs": {"opponent": "random"}}


def records(run: Path) -> list:
    return [record for file in sorted(run.glob("rollouts/*.jsonl")) for record in read_jsonl(file)]


def sampled(record) -> list:
    return [[id for id, bit in zip(row.ids, row.mask, strict=True) if bit] for row in record.rows]


def test_self_play_trains_each_seat_on_its_own_reward(train, monkeypatch) -> None:
    trained = []

    def windows(groups, config):
        rows, metrics = original(groups, config)
        trained.append((groups, [row for window in rows for row in window]))
        return rows, metrics

    original = loop.windows
    monkeypatch.setattr(loop, "windows", windows)
    result = train(env=ENV, steps=2)
    played = records(result.run_dir)
    assert Counter((record.step, record.seat) for record in played) == {
        (step, seat): 8 for step in (1, 2) for seat in ("left", "right")}
    games = defaultdict(dict)
    for record in played:
        games[record.step, record.group, record.rollout][record.seat] = record
    assert all(game["left"].reward == -game["right"].reward for game in games.values())
    assert len({record.reward for record in played}) > 1
    for groups, rows in trained:
        assert [len({rollout.seat for rollout in group}) for group in groups] == [1, 1, 1, 1]
        for row, rollout in zip(rows, (rollout for group in groups for rollout in group), strict=True):
            assert row.ids == rollout.rows[0].ids and row.reward == rollout.reward
            baseline = [other for group in groups if rollout in group for other in group]
            mean = sum(other.reward for other in baseline) / len(baseline)
            assert (row.advantage > 0) == (rollout.reward > mean)
    line = result.metrics[1]
    assert line["rollout/count"] == 16 and line["rollout/dispatched_groups"] == 2
    assert line[f"reward/{ENV}/left"] == -line[f"reward/{ENV}/right"]
    assert line[f"game/{ENV}/left/win"] == line[f"game/{ENV}/right/loss"]
    assert sum(line[f"game/{ENV}/against/self/{result}"] for result in ("win", "draw", "loss")) == pytest.approx(1)


@pytest.mark.slow
def test_a_league_of_earlier_checkpoints_plays_and_a_run_that_goes_on_meets_the_same(train, tmp_path) -> None:
    straight = train(tmp_path / "straight", env=ENV, steps=5, **LEAGUE)
    opponents = defaultdict(set)
    for record in records(straight.run_dir):
        opponents[record.step].add(record.info["opponent"])
        assert record.seat in ("left", "right")
    assert opponents[1] == {"start"} and opponents[2] == {"step-000001"}
    assert opponents[5] <= {"step-000003", "step-000004"}
    assert {path.name for path in (straight.run_dir / "league").iterdir()} == {"step-000003", "step-000004"}
    assert any(name.startswith(f"game/{ENV}/against/step-0000") for line in straight.metrics for name in line)

    stopped = train(tmp_path / "stopped", env=ENV, steps=3, **LEAGUE)
    assert {path.name for path in (stopped.run_dir / "league").iterdir()} == {"step-000001", "step-000002"}
    train(tmp_path / "stopped", env=ENV, steps=5, **LEAGUE)
    ours, theirs = ([(r.step, r.group, r.seat, r.reward, r.info["opponent"], sampled(r)) for r in records(run)]
                    for run in (straight.run_dir, tmp_path / "stopped"))
    assert ours == theirs


@pytest.mark.slow
def test_a_model_that_is_not_trained_plays_in_an_evaluation(tiny_path, toys) -> None:
    kwargs = {"opponent": f"model:{tiny_path}"}
    played = molt_gym.rollout(ENV, tiny_path, 6, env_kwargs=kwargs, rollout__max_tokens=8,
                              rollout__max_context=256, rollout__max_concurrency=4)
    assert len(played) == 6 and {record.failure for record in played} == {None}
    assert {record.info["opponent"] for record in played} == {f"model:{tiny_path}"}
    alone = molt_gym.rollout(ENV, tiny_path, 6, env_kwargs={"opponent": "league"}, rollout__retries=0,
                             rollout__max_tokens=8, rollout__max_context=256, rollout__max_concurrency=4)
    assert all("'league' needs a run that trains" in record.failure.message for record in alone)
