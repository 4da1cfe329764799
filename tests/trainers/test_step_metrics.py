import math

import pytest

from molt_gym.tokens import Failure, Row, Trajectory
from molt_gym.trainers.rollout.pool import Batch
from molt_gym.trainers.step_metrics import passes, rates, rollout_metrics, sampled_tokens


def rollout(reward, tokens=2, version=0, reason=None, **fields):
    row = Row([1, *[5] * tokens], [0, *[1] * tokens], [0.0, *[-1.0] * tokens], [-1, *[version] * tokens])
    failure = Failure(reason, "", "") if reason else None
    return Trajectory("Test-v0", 0, reward=reward, rows=[row], failure=failure, **{"turns": 1} | fields)


PLAYED = [rollout(1.0, 4, 3), rollout(0.5, 2, 2, truncated=True, turns=3, forks=1),
          rollout(0.0, 3, 3, length_limited=True), rollout(None, 9, 0, reason="judge"), rollout(None, reason="judge"),
          rollout(None, reason="step_timeout")]


def test_rollouts_are_averaged_over_those_that_ended():
    metrics = rollout_metrics(Batch(played=PLAYED, dispatched=3), [PLAYED[:2], PLAYED[2:3]], version=3)
    assert metrics == pytest.approx({
        "rollout/count": 6, "rollout/dispatched_groups": 3, "rollout/failed/judge": 2, "rollout/failed/step_timeout": 1,
        "reward/mean": 0.5, "reward/std": math.sqrt(1 / 6), "reward/Test-v0": 0.5, "pass/at_1": 1 / 3,
        "rollout/length_mean": 3, "rollout/turns_mean": 5 / 3, "rollout/truncated": 2 / 3, "rollout/fork_rate": 1 / 5,
        "rollout/tool_calls_mean": 0, "rollout/malformed_calls": 0, "rollout/tools_offered": 0,
        "staleness/mean": 2 / 9, "staleness/max": 1})


def test_rewards_whose_sum_is_too_large_for_a_number_have_a_mean():
    metrics = rollout_metrics(Batch(played=[rollout(-1.5e308, info={"reward/style": 1.5e308})] * 4), [], version=0)
    assert metrics["reward/mean"] == metrics["reward/Test-v0"] == -1.5e308 and metrics["reward/std"] == 0
    assert metrics["reward/style"] == 1.5e308


def test_tool_calls_are_counted_over_those_that_ended():
    played = [Trajectory("Test-v0", 0, reward=1.0, turns=2, tools_offered=2, tool_calls=3),
              Trajectory("Test-v0", 1, reward=0.0, turns=1, tools_offered=1, malformed_calls=1)]
    metrics = rollout_metrics(Batch(played=played), [], version=0)
    assert {name: metrics[f"rollout/{name}"] for name in ("tool_calls_mean", "malformed_calls", "tools_offered")} == {
        "tool_calls_mean": 1.5, "malformed_calls": 1, "tools_offered": 3}


@pytest.mark.parametrize(("reward", "info", "passed"), [
    (1.0, {}, True), (0.9, {}, False), (0.2, {"score": 1.0}, True), (3.0, {"score": 0.5}, False),
    (1.0, {"score": "high"}, True), (None, {"score": 1.0}, False)])
def test_a_score_decides_whether_a_rollout_passed_and_without_one_its_reward(reward, info, passed):
    assert passes(Trajectory("Test-v0", 0, reward=reward, info=info)) == passed


def test_what_is_too_old_to_train_does_not_count_in_the_staleness():
    metrics = rollout_metrics(Batch(played=PLAYED), [PLAYED[:1]], version=4)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1, 1)


def test_what_was_lost_is_counted_by_reason():
    batch = Batch(played=PLAYED[:1])
    batch.dropped.update(filtered=2, stale=1)
    batch.retried.update(sandbox=4)
    metrics = rollout_metrics(batch, [], version=3)
    assert {name: value for name, value in metrics.items() if "dropped" in name or "retried" in name} == {
        "rollout/dropped/filtered": 2, "rollout/dropped/stale": 1, "rollout/retried/sandbox": 4}


def test_a_step_whose_rollouts_all_failed_has_no_means():
    metrics = rollout_metrics(Batch(played=PLAYED[3:]), [], version=0)
    assert metrics == {"rollout/count": 3, "rollout/dispatched_groups": 0, "rollout/failed/judge": 2,
                       "rollout/failed/step_timeout": 1}


def test_rollouts_without_tokens_have_no_age():
    empty = Trajectory("Test-v0", 0, reward=1.0, turns=1)
    metrics = rollout_metrics(Batch(played=[empty]), [[empty]], version=5)
    assert (metrics["staleness/max"], metrics["rollout/length_mean"]) == (0, 0)


def test_a_rollout_with_branches_counts_once():
    branched = rollout(1.0, 4)
    branched.rows *= 3
    metrics = rollout_metrics(Batch(played=[branched, rollout(0.0, 4)]), [], version=0)
    assert metrics["pass/at_1"] == metrics["reward/mean"] == 0.5
    assert metrics["rollout/length_mean"] == 8


def test_the_mean_reward_is_over_rollouts_however_many_rows_each_has():
    played = [rollout(reward, 1) for reward in (1.0, 1.0, 0.0, 0.0)]
    for trajectory, rows in zip(played, (2, 2, 10, 10), strict=True):
        trajectory.rows *= rows
    metrics = rollout_metrics(Batch(played=played), [played], version=0)
    assert (metrics["reward/mean"], metrics["pass/at_1"], metrics["rollout/count"]) == (0.5, 0.5, 4)


@pytest.mark.parametrize(("reward", "passed"), [
    (1.0, True), (1.5, True), (0.7 + 0.1 + 0.1 + 0.1, True), (0.999999, False), (0.0, False), (None, False)])
def test_a_reward_of_one_passes_also_as_a_sum_that_is_rounded(reward, passed):
    assert passes(Trajectory("Test-v0", 0, reward=reward)) is passed


def test_sampled_tokens_are_counted_over_all_rows():
    assert sampled_tokens(PLAYED[:3]) == 9


@pytest.mark.parametrize(("waited", "generated"), [(4.0, 3.0), (0.001, 4.0)])
def test_rollouts_that_were_played_ahead_do_not_make_sampling_look_fast(waited, generated):
    found = rates({"time/rollout": waited, "time/generate": generated, "time/step": 8.0, "time/train": 2.0}, PLAYED)
    assert found["perf/rollout_tokens_per_s"] == pytest.approx(sampled_tokens(PLAYED) / 4)
    assert found["perf/step_over_parts"] == pytest.approx(8 / (generated + 2))
