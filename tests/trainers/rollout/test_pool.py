import asyncio
import threading
from collections import Counter

import pytest

from molt_gym import EnvFailure, RunFailed, Turn, as_policy
from molt_gym.trainers.rollout.pool import Plan, Pool, TaskStream
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import PolicySeat


class InOrder:
    """Tasks 0, 1, 2 and so on."""

    def __init__(self, count):
        self.count = count

    def __getitem__(self, position):
        if position >= self.count:
            raise IndexError(position)
        return position


@pytest.fixture
def pool_of(scripted):
    """Makes pools whose rollouts get the reward `score(env)` in one turn."""
    policy, runners = as_policy(lambda observation: "yes"), []

    def make(plan, tasks=10, score=lambda env: 1.0, retries=0):
        make_env = scripted(lambda env, message: Turn(reward=score(env), terminated=True))
        runners.append(Runner("Test-v0", make_env, lambda ticket, attempt: PolicySeat(policy), Limits(retries=retries)))
        return Pool(runners[-1], InOrder(tasks), plan, seed=0)

    yield make
    for runner in runners:
        runner.close()


async def next_batch(pool, step=1):
    return await asyncio.wait_for(pool.next_batch(step), 10)


def groups(batch):
    return [group[0].group for group in batch.groups]


# How many

async def test_a_group_that_comes_in_is_replaced_at_once(pool_of):
    pool = pool_of(Plan(3, 2, max_staleness=1, capacity=5))
    first = await next_batch(pool)
    assert (len(first.groups), first.dispatched, pool.in_flight) == (3, 7, 4)
    second = await next_batch(pool, 2)
    assert (len(second.groups), second.dispatched, pool.in_flight) == (3, 3, 4)
    third, last = await next_batch(pool, 3), await next_batch(pool, 4)
    assert (len(third.groups), third.exhausted) == (3, False)
    assert (len(last.groups), last.exhausted, pool.in_flight) == (1, True, 0)
    assert sorted(groups(first) + groups(second) + groups(third) + groups(last)) == list(range(10))


async def test_on_policy_no_group_is_in_flight_when_the_batch_is_full(pool_of):
    pool = pool_of(Plan(4, 2, capacity=9))
    batch = await next_batch(pool)
    assert (len(batch.groups), batch.dispatched, pool.in_flight) == (4, 4, 0)


async def test_on_policy_groups_come_in_the_order_of_their_tasks(pool_of):
    last_first = threading.Event()

    def score(env):
        last_first.wait(5) if env.index == 0 else last_first.set()
        return 1.0

    pool = pool_of(Plan(4, 1), score=score)
    assert groups(await next_batch(pool)) == [0, 1, 2, 3]


async def test_off_policy_a_slow_group_holds_up_nobody(pool_of):
    release = threading.Event()

    def score(env):
        return float(env.index == 0 and release.wait(20))

    pool = pool_of(Plan(2, 2, max_staleness=1), score=score)
    early = groups(await next_batch(pool)) + groups(await next_batch(pool, 2))
    assert len(set(early) - {0}) == 4
    release.set()
    assert 0 in [group for step in (3, 4, 5) for group in groups(await next_batch(pool, step))]
    await pool.close()


@pytest.mark.parametrize("staleness", [0, 1])
async def test_fewer_tasks_than_a_batch_make_a_short_batch_and_the_end(pool_of, staleness):
    pool = pool_of(Plan(4, 2, max_staleness=staleness), tasks=3)
    batch = await next_batch(pool)
    assert (len(batch.groups), batch.dispatched, batch.exhausted) == (3, 3, True)
    batch = await next_batch(pool, 2)
    assert (batch.groups, batch.played, batch.exhausted) == ([], [], True)


async def test_a_group_is_one_task_played_n_times(pool_of):
    batch = await next_batch(pool_of(Plan(3, 4)), step=6)
    for number, group in enumerate(batch.groups):
        assert [(t.group, t.index, t.rollout, t.step) for t in group] == [(number, number, i, 6) for i in range(4)]
    assert batch.played == [trajectory for group in batch.groups for trajectory in group]


def test_by_default_as_much_flies_as_can_be_trained_in_time():
    assert [Plan(3, 2, max_staleness=k).most_in_flight for k in (0, 1, 2)] == [3, 4, 7]
    assert Plan(3, 2, max_staleness=1, capacity=4).most_in_flight == 4


# Dynamic filter

SCORES = [0.5, 1.0, 0.5]


def by_task(env):
    return SCORES[env.index % 3]


async def test_a_group_that_teaches_nothing_is_replaced_and_counted(pool_of):
    ended, last = [threading.Semaphore(0) for _ in range(4)], threading.Event()

    def score(env):
        # Off-policy, groups come in as they end: here one after the other, and the fourth not at all.
        last.wait(5) if env.index == 3 else env.index and ended[env.index - 1].acquire(timeout=5)
        ended[env.index].release()
        return by_task(env)

    pool = pool_of(Plan(2, 2, max_staleness=1, capacity=2, dynamic_filter=(0.0, 1.0)), score=score)
    batch = await next_batch(pool)
    last.set()
    assert (groups(batch), batch.dispatched, batch.dropped) == ([0, 2], 4, {"filtered": 1})
    assert len(batch.played) == 6
    assert len(batch.groups) / (len(batch.groups) + batch.dropped["filtered"]) == pytest.approx(2 / 3)
    await pool.close()


async def test_on_policy_only_what_is_missing_is_replaced(pool_of):
    pool = pool_of(Plan(2, 2, dynamic_filter=(0.0, 1.0)), score=by_task)
    batch = await next_batch(pool)
    assert (groups(batch), batch.dispatched, batch.dropped, pool.in_flight) == ([0, 2], 3, {"filtered": 1}, 0)


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_filter_that_keeps_nothing_stops_the_run(pool_of, staleness):
    pool = pool_of(Plan(2, 1, max_staleness=staleness, dynamic_filter=(0.0, 1.0)), tasks=1000)
    with pytest.raises(RunFailed, match=r"'filtered'.*rollout\.dynamic_filter"):
        await next_batch(pool)
    assert len(pool.state()["pending"]) <= 2 * 8 + 4
    await pool.close()


async def test_a_filter_on_tasks_that_end_gives_what_there_is(pool_of):
    pool = pool_of(Plan(4, 1, dynamic_filter=(0.0, 1.0)), tasks=6, score=by_task)
    batch = await next_batch(pool)
    assert (groups(batch), batch.exhausted, batch.dropped) == ([0, 2, 3, 5], False, {"filtered": 2})
    batch = await next_batch(pool, 2)
    assert (groups(batch), batch.exhausted) == ([], True)


async def test_a_failed_rollout_has_no_score(pool_of):
    def score(env):
        if env.np_random.random() < 2 and env.index == 0:
            raise EnvFailure("judge")
        return 0.5

    batch = await next_batch(pool_of(Plan(2, 2, dynamic_filter=(0.0, 1.0)), score=score, retries=1))
    assert groups(batch) == [0, 1] and [t.reward for t in batch.groups[0]] == [None, None]
    assert batch.retried == {"judge": 2}


async def test_five_rollouts_that_fail_each_in_its_way_leave_the_other_27_and_their_slots(scripted):
    asked, troubled, release, together = Counter(), {0, 2, 3, 5, 7}, threading.Event(), threading.Barrier(32)

    def first(env) -> bool:
        """Whether this is the first rollout of a group in which one fails."""
        asked[env.index] += 1
        return env.index in troubled and asked[env.index] == 1

    def begin(env, index):
        if index == 0 and first(env):
            raise KeyError("no board")
        return [{"role": "user", "content": "hi"}]

    def answer(env, message):
        if env.index and first(env):
            if env.index == 2:
                raise ZeroDivisionError("in step")
            if env.index == 3:
                raise EnvFailure("judge", "scoring")
            if env.index == 5:
                release.wait(60)
            return Turn(reward={"oh": "no"}, terminated=True)
        if env.index > 7:
            together.wait(10)
        return Turn(reward=1.0, terminated=True)

    policy = as_policy(lambda observation: "yes")
    runner = Runner("Test-v0", scripted(answer, begin=begin), lambda ticket, attempt: PolicySeat(policy),
                    Limits(step_timeout=1.0, retries=0))
    pool = Pool(runner, InOrder(16), Plan(8, 4), seed=0)
    batch = await next_batch(pool)
    failures = {t.index: t.failure for t in batch.played if t.failure is not None}
    assert {index: failure.reason for index, failure in failures.items()} == {
        0: "reset_error", 2: "step_error", 3: "judge", 5: "step_timeout", 7: "reward"}
    for index, words in {0: "no board", 2: "in step", 3: "scoring", 5: "rollout.step_timeout", 7: "'oh'"}.items():
        assert words in failures[index].message and "Traceback" in failures[index].traceback
    assert [t.reward for t in batch.played if t.failure is None] == [1.0] * 27
    assert all(t.reward is None for t in batch.played if t.failure is not None)
    # All 32 must be in step at the same time to get out of it.
    runner.limits = Limits()
    batch = await next_batch(pool, 2)
    assert [t.reward for t in batch.played] == [1.0] * 32
    release.set()
    runner.close()


async def test_retries_are_counted_in_their_step_alone(pool_of):
    tries = set()

    def score(env):
        if env.index == 0 and 0 not in tries:
            tries.add(0)
            raise EnvFailure("judge")
        return 1.0

    pool = pool_of(Plan(1, 1), score=score, retries=1)
    assert ((await next_batch(pool)).retried, (await next_batch(pool)).retried) == ({"judge": 1}, {})


# Stop and resume

@pytest.mark.parametrize("stop_after", range(5))
@pytest.mark.parametrize("staleness", [0, 1])
async def test_every_task_is_trained_exactly_once_over_stop_and_resume(pool_of, stop_after, staleness):
    plan = Plan(3, 2, max_staleness=staleness)
    pool, trained = pool_of(plan, tasks=13), []

    async def train(pool, steps):
        for step in range(steps):
            batch = await next_batch(pool, step)
            trained.extend(groups(batch))
            pool.confirm(batch)
            if batch.exhausted:
                break

    await train(pool, stop_after)
    state = pool.state()
    unfinished = asyncio.create_task(pool.next_batch(stop_after + 1))
    await asyncio.sleep(0.01)
    unfinished.cancel()
    await asyncio.gather(unfinished, return_exceptions=True)
    await pool.close()
    assert pool.in_flight == 0
    pool = pool_of(plan, tasks=13)
    pool.load_state(state)
    assert pool.state() == state
    await train(pool, 10)
    assert sorted(trained) == list(range(13))
    assert pool.state() == {"cursor": 13, "pending": []}


async def test_a_batch_that_is_not_confirmed_is_played_again_and_first(pool_of):
    pool = pool_of(Plan(2, 1), tasks=6)
    pool.confirm(await next_batch(pool))
    await next_batch(pool, 2)
    resumed = pool_of(Plan(2, 1), tasks=6)
    resumed.load_state(pool.state())
    assert [groups(await next_batch(resumed, step)) for step in (2, 3)] == [[2, 3], [4, 5]]


async def test_what_the_filter_dropped_is_not_played_again(pool_of):
    pool = pool_of(Plan(2, 1, dynamic_filter=(0.0, 1.0)), score=by_task)
    pool.confirm(await next_batch(pool))
    assert pool.state() == {"cursor": 3, "pending": []}


async def test_a_resumed_group_has_the_seeds_of_the_first_time(pool_of):
    pool = pool_of(Plan(2, 2), score=lambda env: env.np_random.random())
    batch = await next_batch(pool)
    resumed = pool_of(Plan(2, 2), score=lambda env: env.np_random.random())
    resumed.load_state(pool.state())
    again = await next_batch(resumed)
    assert [t.reward for t in again.played] == [t.reward for t in batch.played]


async def test_closing_cancels_what_is_in_flight(pool_of):
    release = threading.Event()
    pool = pool_of(Plan(2, 2), score=lambda env: float(release.wait(30)))
    batch = asyncio.create_task(pool.next_batch(1))
    await asyncio.sleep(0.05)
    assert pool.in_flight == 2
    batch.cancel()
    await asyncio.wait_for(pool.close(), 2)
    assert pool.in_flight == 0 and pool.state() == {"cursor": 2, "pending": [0, 1]}
    release.set()


# Tasks

def test_an_epoch_holds_every_task_once_and_epochs_differ():
    tasks = TaskStream(50, seed=1)
    epochs = [[tasks[epoch * 50 + i] for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_seed_fixes_the_order_of_tasks():
    def order(seed, count):
        return [TaskStream(count, seed)[i] for i in range(40)]

    for count in (50, None):
        assert order(1, count) == order(1, count) != order(2, count)


def test_an_unbounded_set_never_ends_and_hardly_repeats():
    tasks = TaskStream(None, seed=0)
    drawn = {tasks[i] for i in range(1000)}
    assert len(drawn) > 990 and all(0 <= index < 2**31 for index in drawn)


@pytest.mark.parametrize(("count", "epochs", "end"), [(3, 1, 3), (3, 2, 6), (0, 1, 0), (0, None, 0)])
def test_tasks_end_after_their_epochs(count, epochs, end):
    tasks = TaskStream(count, 0, epochs=epochs)
    assert all(tasks[i] in range(count) for i in range(end))
    with pytest.raises(IndexError):
        tasks[end]
