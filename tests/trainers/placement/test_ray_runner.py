"""Runners that are Ray actors, with a scripted engine in another: what comes back, and what happens when they die."""

import asyncio
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from molt_gym.errors import RunFailed
from molt_gym.tokens import Generation, Trajectory
from molt_gym.tokens.trajectory import read_jsonl
from molt_gym.trainers.batch import usable, windows
from molt_gym.trainers.config import load_config
from molt_gym.trainers.rollout.ticket import Ticket
from molt_gym.trainers.run_dir import RunDir
from molt_gym.trainers.session import env_maker

ray = pytest.importorskip("ray")
ray_runner = pytest.importorskip("molt_gym.trainers.placement.ray_runner")

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

# Other processes cannot import this module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT = 400
END = 2
OPTIONS = [{"num_cpus": 1}]


class ScriptedEngine:
    """Answers with two tokens after a while, or once it is released."""

    def __init__(self, delay):
        self.delay, self.asked, self.running, self.released = delay, 0, 0, asyncio.Event()

    async def generate(self, ids):
        self.asked += 1
        self.running += 1
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.released.wait(), self.delay)
        finally:
            self.running -= 1
        return Generation([5, END], [-0.5, -0.25], [3, 3], "stop")

    async def counts(self):
        return self.asked, self.running

    async def release(self):
        self.released.set()


class Scripted:
    """What sends requests to it."""

    def __init__(self, handle):
        self.handle, self.ended = handle, None

    def __eq__(self, other):
        return isinstance(other, Scripted) and self.handle == other.handle

    def __hash__(self):
        return hash(self.handle)

    def submit(self, requests):
        return [asyncio.ensure_future(self._ask(request)) for request in requests]

    async def _ask(self, request):
        ref = self.handle.generate.remote(request.ids)
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except ray.exceptions.RayError as error:
            self.ended = error
            raise

    async def counts(self):
        return await self.handle.counts.remote()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def players(cluster, toys, tiny_path):
    """Two runners' actors, whose processes take long to start."""
    made = ray_runner.RayPlayers(tiny_path, config(), OPTIONS * 2)
    yield made
    await made.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def engines(players):
    """`await engines(2, delay=1.0)`: so many of them, which the runners ask."""
    made = []

    async def make(count=1, delay=0.05, used_by=players):
        actor = ray.remote(ScriptedEngine).options(num_cpus=0, max_concurrency=1000)
        made.extend(Scripted(actor.remote(delay)) for _ in range(count))
        await used_by.set_engines(made)
        return made

    yield make
    await players.set_engines([])
    players.take_faults()
    for engine in made:
        ray.kill(engine.handle)


@pytest.fixture
def runner(players):
    """Of two turns."""
    return make_runner(players)


def config(env="toy_envs:Letters-v0", **settings):
    return load_config(env, overrides={"rollout.max_context": 256, "rollout.max_tokens": 8, **settings})


def make_runner(players, env="toy_envs:Letters-v0", **settings):
    """A runner with a list of what it told of as done."""
    seen = []
    runner = ray_runner.RayRunner(players, env_maker(config(env, **settings)), 1.0, seen.append)
    runner.seen = seen
    return runner


def wild(players, folder, env="Wild-v0", deeds=None, mode="auto"):
    return make_runner(players, f"wild_envs:{env}", **{
        "env_kwargs": {"folder": str(folder), "deeds": deeds or {}}, "rollout.env_processes": mode})


async def play(runner, tickets):
    return await asyncio.wait_for(asyncio.gather(*map(runner.play, tickets)), WAIT)


def tickets(groups, size=2):
    return [Ticket(group, group, rollout) for group in range(groups) for rollout in range(size)]


async def pids(players):
    return [await player.handle.__ray_call__.remote(lambda _: os.getpid()) for player in players._players]


async def until(condition, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_every_seat_of_a_game_has_its_own_rows_and_record_where_they_are(players, engines):
    await engines()
    runner = make_runner(players, "toy_games:Duel-v0")
    for trajectory in await play(runner, tickets(2)):
        seats = [trajectory, *trajectory.others]
        assert [(seat.failure, seat.seat) for seat in seats] == [(None, "left"), (None, "right")]
        rows = ray.get(trajectory.rows[0].source)
        assert [seat.rows[0].number for seat in seats] == [0, 1] and len(rows) == 2
        for seat in seats:
            whole = Trajectory.from_json(seat.record().decode())
            assert (whole.seat, whole.reward) == (seat.seat, seat.reward)
            assert rows[seat.rows[0].number] == whole.rows[0] and seat.rows[0].stats == whole.rows[0].stats
            assert seat.seat in whole.messages[0]["content"]
    assert len(runner.seen) == 4


async def test_what_is_told_of_a_rollout_has_no_tokens_and_its_rows_and_record_are_got_from_where_they_are(
    runner, engines, tmp_path
):
    await engines()
    played = await play(runner, tickets(4))
    assert [t.failure for t in played] == [None] * 8 and len(runner.seen) == 8
    assert {(t.group, t.rollout, t.turns) for t in played} == {(g, r, 2) for g in range(4) for r in range(2)}
    for trajectory in played:
        whole = Trajectory.from_json(trajectory.record().decode())
        assert not trajectory.messages and len(whole.messages) == 4 and whole.reward == trajectory.reward
        assert ray.get(trajectory.rows[0].source) == whole.rows
        assert [row.stats for row in trajectory.rows] == [row.stats for row in whole.rows]
        assert not hasattr(trajectory.rows[0], "ids")
    with RunDir(tmp_path / "run") as run:
        written = read_jsonl(run.write_rollouts(1, played))
    assert [t.rows for t in written] == [ray.get(t.rows[0].source) for t in played]


async def test_rows_elsewhere_are_chosen_and_weighted_as_those_at_hand(runner, engines):
    await engines()
    played = await play(runner, tickets(2))
    whole = [Trajectory.from_json(t.record().decode()) for t in played]
    options = config(**{"rollout.max_staleness": 1})
    for version in (3, 4, 5):
        lost, lost_here = Counter(), Counter()
        kept, kept_here = (usable([group[:2], group[2:]], options, version, counts)
                           for group, counts in ((played, lost), (whole, lost_here)))
        assert lost == lost_here and [len(group) for group in kept] == [len(group) for group in kept_here]
        assert bool(kept) == (version < 5)
        if kept:
            (remote, metrics), (local, expected) = windows(kept, options), windows(kept_here, options)
            assert metrics == expected
            assert [[(r.advantage, r.weight, r.row, r.group) for r in window] for window in remote] == [
                [(r.advantage, r.weight, r.row, r.group) for r in window] for window in local]
            assert [ray.get(row.source)[row.number].ids for row in remote[0]] == [row.ids for row in local[0]]


async def test_requests_of_an_engine_that_dies_go_to_another_and_are_counted(runner, engines):
    one, other = await engines(2, delay=300)
    playing = asyncio.create_task(play(runner, tickets(4)))

    async def both_asked():
        counts = (await one.counts())[1], (await other.counts())[1]
        return sum(counts) == 8 and all(counts)

    await until(both_asked)
    ray.kill(one.handle)
    await other.handle.release.remote()
    assert [t.failure for t in await playing] == [None] * 8
    assert runner.players.take_faults() == {"runner_restarts": 0, "requeued": 4}


async def test_a_rollout_that_is_cancelled_leaves_runner_and_engine(runner, engines):
    engine, = await engines(delay=300)
    playing = asyncio.create_task(runner.play(Ticket(0, 0)))

    async def asked():
        return (await engine.counts()) == (1, 1)

    async def left():
        told = [await player.handle.pending.remote(runner._number) for player in runner.players._players]
        return (await engine.counts()) == (1, 0) and not any(told)

    await until(asked)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await until(left)
    assert runner.pending() == [] and runner.seen == []


async def test_what_rollouts_wait_for_is_told_before_and_after_their_runner_has_answered(runner, engines):
    await engines(delay=300)
    playing = asyncio.create_task(runner.play(Ticket(4, 5, 6)))
    await asyncio.sleep(0)
    (what, seconds), = runner.pending()
    assert what == "runner of rollout 6 of group 5 (toy_envs:Letters-v0 4)" and seconds < WAIT

    async def told():
        return [what for what, _ in runner.pending()] == ["reply of rollout 6 of group 5 (toy_envs:Letters-v0 4)"]

    await until(told)
    playing.cancel()


async def test_failures_and_new_attempts_are_told(players, engines, tmp_path):
    await engines()
    runner = wild(players, tmp_path, deeds={"1": "judge", "2": "exit"})
    played = await play(runner, [Ticket(i, i) for i in range(3)])
    assert [t.failure and t.failure.reason for t in played] == [None, "judge", "env_died"]
    assert runner.retried == {"judge": 1, "env_died": 1}
    assert "in answer" in played[1].failure.traceback
    last, = await play(runner, [Ticket(5, 5)])
    await runner.aclose()
    assert (tmp_path / f"closed-{last.info['pid']}").exists()


async def test_training_and_evaluation_play_in_the_same_runners(players, engines):
    await engines()
    runner, other = make_runner(players), make_runner(players, "toy_envs:Coin-v0")
    one, two = await asyncio.gather(play(runner, tickets(1)), play(other, tickets(1)))
    assert [t.failure for t in one + two] == [None] * 4
    assert [t.env for t in one + two] == ["toy_envs:Letters-v0"] * 2 + ["toy_envs:Coin-v0"] * 2
    await other.aclose()
    assert [t.failure for t in await play(runner, tickets(1))] == [None] * 2


async def test_rollouts_of_a_runner_that_is_killed_are_played_again_and_returned_once(runner, engines):
    engine, = await engines(delay=300)
    playing = asyncio.create_task(play(runner, tickets(8)))

    async def asked():
        return (await engine.counts())[1] == 16

    await until(asked)
    victims = await pids(runner.players)
    os.kill(victims[0], signal.SIGKILL)
    await engine.handle.release.remote()
    assert [t.failure for t in await playing] == [None] * 16 and len(runner.seen) == 16
    assert Counter((t.group, t.rollout) for t in runner.seen) == {(g, r): 1 for g in range(8) for r in range(2)}
    assert runner.players.take_faults()["runner_restarts"] == 1 and runner.players.take_faults()["runner_restarts"] == 0
    alive = await asyncio.wait_for(pids(runner.players), WAIT)
    assert victims[0] not in alive and victims[1] in alive
    assert [t.failure for t in await play(runner, tickets(4))] == [None] * 8


async def test_a_rollout_that_kills_every_runner_fails_alone_and_the_agents_of_these_end_with_them(
    players, engines, tmp_path, monkeypatch
):
    monkeypatch.setattr(ray_runner, "MAX_PLAYS", 2)
    await engines()
    played = await play(wild(players, tmp_path, "WildAgent-v0"), [Ticket(i, i) for i in range(4)])
    assert [(t.failure, t.reward) for t in played] == [(None, 0.75)] * 4
    agents, ended = {t.info["pid"] for t in played}, await pids(players)
    assert all(Path(f"/proc/{pid}").exists() for pid in agents)
    runner = wild(players, tmp_path, deeds={"3": "exit"}, mode="never")
    poison, = await play(runner, [Ticket(3, 3)])
    assert poison.failure.reason == "runner_died" and poison.rows == [] and poison.record is None
    assert players.take_faults()["runner_restarts"] == 2

    async def gone():
        return not any(Path(f"/proc/{pid}").exists() for pid in (*agents, *ended))

    await until(gone)


async def test_new_runners_and_rollouts_that_wait_get_to_know_the_engines(runner, engines):
    # Those whose place the last test has made empty.
    playing = asyncio.create_task(play(runner, tickets(2)))

    async def wait():
        phases = Counter(what.partition(" of ")[0] for what, _ in runner.pending())
        return phases["reply"] == 4

    await until(wait, WAIT)
    await engines()
    assert [t.failure for t in await playing] == [None] * 4
    # Overtaken by the call that told of the engines.
    await asyncio.gather(*(player.handle.set_engines.remote(0, []) for player in runner.players._players))
    assert [t.failure for t in await play(runner, tickets(2))] == [None] * 4


async def test_a_run_ends_when_more_runners_died_than_it_may_start(cluster, toys, tiny_path):
    players = ray_runner.RayPlayers(tiny_path, config(**{"failures.runner_restarts": 1}), OPTIONS)
    runner = make_runner(players)
    playing = asyncio.create_task(play(runner, tickets(1)))
    for number in (1, 2):
        await asyncio.sleep(0.1)
        ray.kill(players._players[0].handle)

        async def seen(number=number):
            return players._restarts == number or not players._players

        await until(seen)
    with pytest.raises(RunFailed, match="runners died 2 times, more than failures.runner_restarts = 1"):
        await playing
    await players.aclose()


async def test_a_runner_that_does_not_start_in_time_is_given_up(cluster, toys, tiny_path):
    settings = {"failures.runner_restarts": 0, "ray.start_timeout": 3.0}
    players = ray_runner.RayPlayers(tiny_path, config(**settings), [{"num_cpus": 64}])
    with pytest.raises(RunFailed, match="no answer within 3 s"):
        await play(make_runner(players), tickets(1))
    await players.aclose()
