from collections import Counter

import pytest

from molt_gym.tokens import Failure, Row, RowRef, Trajectory
from molt_gym.trainers.batch import longest_reply, shaped_rewards, usable, windows
from molt_gym.trainers.config import Config


def row(*sampled, version=0, prompt=2):
    """A row: a prompt, then sampled runs of the given lengths, each with a token of context after it."""
    made = Row([1] * prompt, [0] * prompt, [0.0] * prompt, [-1] * prompt)
    for length in sampled:
        made.ids += [5] * length + [3]
        made.mask += [1] * length + [0]
        made.logprobs += [-0.5] * length + [0.0]
        made.versions += [version] * length + [-1]
    return made


def rollout(reward, *rows, **fields):
    return Trajectory("Test-v0", 0, rows=list(rows) or [row(3)], reward=reward, **fields)


def failed(reason="judge"):
    return rollout(None, failure=Failure(reason, "", ""))


def config(groups_per_step=4, max_staleness=0, incomplete_group="keep", **algorithm):
    return Config(env="Test-v0", algorithm=algorithm, rollout={
        "groups_per_step": groups_per_step, "group_size": 2, "max_staleness": max_staleness,
        "incomplete_group": incomplete_group, "max_tokens": 100})


def usable_of(groups, version=0, **options):
    dropped = Counter()
    return usable(groups, config(**options), version, dropped), dropped


# What trains

def test_a_rollout_that_failed_trains_nothing_and_is_not_counted_twice():
    good = rollout(1.0)
    kept, dropped = usable_of([[good, failed()], [failed(), failed()]])
    assert kept == [[good]] and dropped == {}


def test_a_failed_rollout_is_left_out_though_it_has_a_reward_and_tokens():
    odd = rollout(0.0, failure=Failure("judge", "", ""))
    assert usable_of([[odd, odd]]) == ([], {})


def test_incomplete_groups_can_be_dropped_and_are_counted_by_rollout():
    whole = [rollout(1.0), rollout(0.0)]
    kept, dropped = usable_of([[rollout(1.0), rollout(0.0), failed()], whole], incomplete_group="drop")
    assert kept == [whole] and dropped == {"incomplete_group": 2}


def test_as_many_rows_as_rollouts_do_not_make_a_group_complete():
    group = [rollout(1.0, row(1), row(1)), rollout(1.0, row(1)), rollout(0.0, row(1)), failed()]
    kept, dropped = usable_of([group], incomplete_group="drop")
    assert kept == [] and dropped == {"incomplete_group": 3}


def test_a_rollout_with_a_token_that_is_too_old_is_dropped_and_counted():
    ages = {age: rollout(1.0, row(3, version=9 - age)) for age in range(4)}
    for staleness in range(4):
        kept, dropped = usable_of([list(ages.values())], version=9, max_staleness=staleness)
        assert kept == [[ages[age] for age in range(staleness + 1)]]
        assert dropped == ({"stale": 3 - staleness} if staleness < 3 else {})


def test_the_oldest_token_decides_in_whichever_row_it_is():
    mixed = rollout(1.0, row(2, version=9), Row([1, 5, 5], [0, 1, 1], [0.0, -1, -1], [-1, 8, 9]))
    assert usable_of([[mixed]], version=9)[1] == {"stale": 1}
    assert usable_of([[mixed]], version=9, max_staleness=1)[0] == [[mixed]]


def test_a_rollout_without_sampled_tokens_is_dropped_and_counted():
    kept, dropped = usable_of([[rollout(1.0, row()), rollout(0.0)]])
    assert len(kept[0]) == 1 and dropped == {"empty": 1}


def test_a_stale_rollout_makes_its_group_incomplete():
    kept, dropped = usable_of([[rollout(1.0, row(3, version=0)), rollout(0.0, row(3, version=1))]], version=1,
                              incomplete_group="drop")
    assert kept == [] and dropped == {"stale": 1, "incomplete_group": 1}


# Windows

GROUPS = [[rollout(1.0, row(4)), rollout(0.0, row(2))], [rollout(5.0, row(3)), rollout(3.0, row(1))],
          [rollout(0.0, row(1)), rollout(0.0, row(6))], [rollout(0.5, row(2)), rollout(1.0, row(2))]]
SPLIT = [[rollout(1.0, row(1), row(3)), rollout(0.0, row(1), row(1))],
         [rollout(5.0, row(1), row(1), row(1)), rollout(3.0, row(1))], *GROUPS[2:]]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_baseline"])
@pytest.mark.parametrize("aggregation", [
    "token_mean", "rollout_mean_token_mean", "group_mean_token_mean", "rollout_mean_token_sum"])
def test_how_many_rows_a_rollout_has_changes_neither_advantages_nor_weights(estimator, aggregation):
    options = {"estimator": estimator, "aggregation": aggregation, "updates_per_batch": 2}
    for whole, split in zip(windows(GROUPS, config(**options))[0], windows(SPLIT, config(**options))[0], strict=True):
        def per_token(window):
            rows = [(r.group, round(r.advantage, 6), round(r.weight, 9), sum(r.mask)) for r in window]
            return sorted(row[:3] for row in rows for _ in range(row[3]))

        assert per_token(whole) == per_token(split)
    assert windows(GROUPS, config(**options))[1] == windows(SPLIT, config(**options))[1]


def test_advantages_are_those_of_the_groups():
    window, = windows(GROUPS[:2], config(estimator="dr_grpo"))[0]
    assert [r.advantage for r in window] == [0.5, -0.5, 1, -1]
    window, = windows(GROUPS[:2], config(estimator="rloo"))[0]
    assert [r.advantage for r in window] == [1, -1, 2, -2]


def test_weights_add_up_over_each_window():
    for window in windows(GROUPS, config(updates_per_batch=2))[0]:
        assert sum(r.weight * sum(r.mask) for r in window) == pytest.approx(1)
    window, = windows(SPLIT, config(aggregation="rollout_mean_token_mean"))[0]
    assert sum(r.weight * sum(r.mask) for r in window) == pytest.approx(1)
    assert window[0].weight == pytest.approx(1 / (8 * 4))


@pytest.mark.parametrize(("updates", "sizes"), [(1, [4]), (2, [2, 2]), (4, [1, 1, 1, 1])])
def test_windows_hold_every_row_once_and_whole_groups(updates, sizes):
    made, _ = windows(SPLIT, config(updates_per_batch=updates))
    assert [len({r.group for r in window}) for window in made] == sizes
    rows = [r for window in made for r in window]
    assert [r.row for r in rows] == list(range(len(rows)))
    expected = [made for group in SPLIT for trajectory in group for made in trajectory.rows]
    assert [(r.ids, r.mask, r.logprobs) for r in rows] == [(r.ids, r.mask, r.logprobs) for r in expected]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_with_fewer_groups_than_updates_no_window_is_empty(count):
    made, _ = windows(GROUPS[:count], config(updates_per_batch=4))
    assert [len(window) for window in made] == [2] * count


def test_a_group_that_lost_all_but_one_teaches_nothing():
    for estimator in ("grpo", "dr_grpo", "rloo"):
        made, metrics = windows([[rollout(1.0)], [rollout(1.0), rollout(0.0)]], config(estimator=estimator))
        assert made[0][0].advantage == 0
        assert metrics["advantage/zero"] == pytest.approx(1 / 3)


def test_for_an_estimator_of_tokens_rows_know_their_rollout_and_its_shaped_reward():
    made, metrics = windows(SPLIT, config(estimator="reinforce", reward_clip=2.0, updates_per_batch=2))
    rows = [r for window in made for r in window]
    assert [(r.rollout, r.reward) for r in rows[:7]] == [(0, 1), (0, 1), (1, 0), (1, 0), (2, 2), (2, 2), (2, 2)]
    assert [r.rollout for r in rows[7:]] == [3, 4, 5, 6, 7] and metrics == {}
    refs = [[rollout(1.0, RowRef("node", number, row(3).stats))] for number in range(2)]
    (remote,), _ = windows(refs, config(estimator="reinforce"))
    assert [(r.number, r.rollout, r.reward) for r in remote] == [(0, 0, 1), (1, 1, 1)]
    assert [(r.rollout, r.reward) for r in (remote[1].fetched([row(3), row(2)]),)] == [(1, 1)]


# Shaping

def test_a_reply_near_the_limit_loses_reward_by_its_longest_run():
    rollouts = [rollout(1.0, row(length)) for length in (100, 90, 80)] + [rollout(1.0, row(60, 60), row(90))]
    shaped = shaped_rewards(rollouts, config(overlong_buffer=20))
    assert shaped.tolist() == [0, 0.5, 1, 0.5]
    assert shaped_rewards(rollouts, config(overlong_buffer=20, overlong_penalty=2)).tolist() == [-1, 0, 1, 0]
    assert shaped_rewards(rollouts, config()).tolist() == [1, 1, 1, 1]


def test_a_reply_that_was_cut_never_gains():
    rollouts = [rollout(r, length_limited=cut) for r in (1.0, -1.0) for cut in (False, True)]
    assert shaped_rewards(rollouts, config(truncation_coefficient=0.5)).tolist() == [1, 0.5, -1, -1]
    assert shaped_rewards(rollouts, config(truncation_coefficient=-2.0)).tolist() == [1, -2, -1, -2]


def test_rewards_are_clipped_last():
    rollouts = [rollout(100.0, row(100)), rollout(-100.0)]
    assert shaped_rewards(rollouts, config(overlong_buffer=20)).tolist() == [10, -10]
    assert shaped_rewards(rollouts, config(reward_clip=2)).tolist() == [2, -2]


def test_the_longest_reply_is_the_longest_unbroken_run():
    assert longest_reply(rollout(0.0, row(3, 5, 2), row(4))) == 5
    assert longest_reply(rollout(0.0, row())) == 0
