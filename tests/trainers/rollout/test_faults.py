"""Two thousand rollouts among engines and envs that fail and hang: nothing is lost, nothing is left over."""

import asyncio
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from molt_gym import EnvFailure, Turn
from molt_gym.tokens import Generation, Sampling
from molt_gym.trainers.batch import usable
from molt_gym.trainers.config import Config
from molt_gym.trainers.rollout.fleet import EngineFleet
from molt_gym.trainers.rollout.gate import OpenGate
from molt_gym.trainers.rollout.pool import Plan, Pool
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import TokenSeat
from molt_gym.trainers.step_metrics import rollout_metrics
from molt_gym.trainers.waiting import threaded

GROUPS, SIZE, GROUPS_PER_STEP = 250, 8, 50
DEADLINE = 2.0
END = 2


@dataclass
class Weather:
    """What goes wrong, and how often it did; `quorum` requests must be in flight before any is answered."""

    stormy: bool = True
    quorum: int = 0
    told: Counter = field(default_factory=Counter)
    flying: int = 0
    most: int = 0
    release: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, what: str) -> None:
        with self.lock:
            self.told[what] += 1


class Noisy:
    """An engine whose replies differ in length and take as long; the seed of a request decides over its fate."""

    max_context, ended = 512, None

    def __init__(self, weather: Weather) -> None:
        self.weather, self.version, self.paused = weather, 0, False
        self.held: list[tuple[float, asyncio.Future, Generation | Exception]] = []

    def submit(self, requests):
        return [self._enter(request) for request in requests]

    def _enter(self, request) -> asyncio.Future:
        weather, chance = self.weather, random.Random(request.sampling.seed)
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(self._leave)
        weather.flying += 1
        weather.most = max(weather.most, weather.flying)
        length = min(request.sampling.max_tokens, 1 + int(chance.lognormvariate(2.5, 0.8)))
        seconds, fate = min(0.5, 0.002 * length), chance.random() if weather.stormy else 1.0
        if fate < 0.01:
            weather.tell("generate hangs")
            return future
        ids = [chance.randrange(10, 250) for _ in range(length - 1)] + [END]
        answer = Generation(ids, [-1.0] * length, [self.version] * length, "stop")
        if fate < 0.03:
            weather.tell("generate fails")
            answer = RuntimeError("the engine lost it")
        self.held.append((seconds, future, answer))
        if weather.most >= weather.quorum:
            self.answer()
        return future

    def answer(self) -> None:
        held, self.held = self.held, []
        for seconds, future, answer in held:
            asyncio.get_running_loop().call_later(seconds, self._land, future, answer)

    def _leave(self, _) -> None:
        self.weather.flying -= 1

    def _land(self, future: asyncio.Future, answer: Generation | Exception) -> None:
        if future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    async def pause(self):
        self.paused = True

    async def resume(self):
        self.paused = False

    async def begin_update(self):
        assert self.paused

    def pack(self, weights):
        return threaded(iter(weights), ahead=False)

    async def take(self, bucket):
        pass

    async def end_update(self, version):
        self.version = version

    async def score(self, ids):
        return [-1.0] * (len(ids) - 1)

    async def reset_prefix_cache(self):
        pass

    async def close(self):
        pass


class InOrder:
    """Tasks 0 to `GROUPS` - 1."""

    def __getitem__(self, position):
        if position >= GROUPS:
            raise IndexError(position)
        return position


def env_of(scripted, weather: Weather):
    """One to three turns; of 50 tasks, one each raises or hangs in reset or in step, or fails, whoever plays it."""

    def trouble(what: str) -> None:
        weather.tell(what)
        if what.startswith("hang"):
            weather.release.wait(60)
        if what == "sandbox":
            raise EnvFailure(what, "it died")
        raise KeyError(what)

    def begin(env, index):
        if weather.stormy and index % 50 in (3, 13):
            trouble({3: "raise in reset", 13: "hang in reset"}[index % 50])
        return [{"role": "user", "content": f"What is {index} and {env.np_random.integers(100)}?"}]

    def answer(env, message):
        if weather.stormy and env.index % 50 in (23, 33, 43):
            trouble({23: "raise in step", 33: "hang in step", 43: "sandbox"}[env.index % 50])
        if len(env.messages) > 2 * (env.index % 3):
            return Turn(reward=float(len(message["content"]) % 2), terminated=True)
        return Turn([{"role": "user", "content": "And now?"}], 0.25)

    return scripted(answer, begin=begin)


REASONS = {"reset_error": "raise in reset", "reset_timeout": "hang in reset", "step_error": "raise in step",
           "step_timeout": "hang in step", "policy_error": "generate fails", "generate_timeout": "generate hangs",
           "sandbox": "sandbox"}


async def steps(pool: Pool, fleet: EngineFleet, config: Config) -> tuple[Counter, Counter]:
    """Until the tasks are over: how often each rollout was played, and what became of them."""
    played, fates = Counter(), Counter()
    while (batch := await asyncio.wait_for(pool.next_batch(fleet.version + 1), 60)).groups:
        version, dropped, allowed = fleet.version, Counter(batch.dropped), config.rollout.max_staleness
        groups = usable(batch.groups, config, version, dropped)
        batch.dropped = dropped
        metrics = rollout_metrics(batch, groups, version)
        assert metrics["staleness/max"] <= allowed
        assert all(t.failure is None and t.reward is not None for group in groups for t in group)
        assert all(row.versions[position] >= version - allowed for group in groups for t in group for row in t.rows
                   for position, bit in enumerate(row.mask) if bit)
        fates["trained"] += sum(map(len, groups))
        fates.update({name.removeprefix("rollout/"): value for name, value in metrics.items()
                      if name.startswith(("rollout/failed", "rollout/dropped", "rollout/retried"))})
        played.update((t.group, t.rollout) for t in batch.played)
        pool.confirm(batch)
        await fleet.pause()
        await fleet.update_weights(iter(()), version + 1)
        await fleet.resume()
    assert pool.in_flight == 0 and not pool.state()["pending"]
    return played, fates


def check_fates(fates: Counter, told: Counter) -> None:
    """They add up, and there are as many failures of each kind as there were faults."""
    retried = {name: count for name, count in fates.items() if name.startswith("retried")}
    assert list(retried) == ["retried/sandbox"]
    assert sum(fates.values()) - sum(retried.values()) == GROUPS * SIZE
    failed = {reason: fates[f"failed/{reason}"] + fates[f"retried/{reason}"] for reason in REASONS}
    # On a busy machine more calls than those that hang miss their deadlines, and some of these would have failed.
    for reason, what in REASONS.items():
        assert 0 < told[what] <= failed[reason] if "timeout" in reason else 0 < failed[reason] <= told[what]
    assert sum(failed.values()) >= sum(told.values())
    assert fates["trained"] >= (GROUPS * SIZE) // 3


async def check_nothing_is_left(threads: set[threading.Thread]) -> None:
    """No task but this one, and no thread but those that were there before."""
    await asyncio.get_running_loop().shutdown_default_executor()
    async with asyncio.timeout(20):
        while set(threading.enumerate()) - threads or len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_two_thousand_rollouts_among_faults_are_each_accounted_for_and_leave_nothing_behind(
        scripted, renderer, record_property, max_staleness):
    weather, threads, reported, engines = Weather(), set(threading.enumerate()), Counter(), []
    fleet = EngineFleet(lambda: engines.append(Noisy(weather)) or engines[-1], 2)
    gate, encoders = OpenGate(fleet), ThreadPoolExecutor(2, "test-encode")
    runner = Runner("Test-v0", env_of(scripted, weather), lambda ticket, attempt: TokenSeat(
        renderer, "rerender", Sampling(max_tokens=100), 512, ticket, attempt, gate, encoders),
        Limits(DEADLINE, DEADLINE, DEADLINE, 30.0, retries=1), live=gate.rollout,
        done=lambda trajectory: reported.update([(trajectory.group, trajectory.rollout)]))
    config = Config(env="Test-v0", rollout={"groups_per_step": GROUPS_PER_STEP, "group_size": SIZE,
                                            "max_staleness": max_staleness})
    plan, every = Plan(GROUPS_PER_STEP, SIZE, max_staleness), Counter(
        (group, rollout) for group in range(GROUPS) for rollout in range(SIZE))

    cpu, began = time.thread_time(), time.monotonic()
    played, fates = await steps(Pool(runner, InOrder(), plan, seed=1), fleet, config)
    cpu, seconds = time.thread_time() - cpu, time.monotonic() - began
    assert played == reported == every and weather.flying == 0
    check_fates(fates, weather.told)
    milliseconds = 1e3 * cpu / (GROUPS * SIZE)
    record_property("controller_cpu_ms_per_rollout", milliseconds)
    print(f"\nmax_staleness {max_staleness}: {GROUPS * SIZE} rollouts in {seconds:.1f} s, {milliseconds:.2f} ms of the "
          f"controller's CPU each; {dict(fates)}")

    # No slot is lost: all rollouts that the plan allows ask at once, while none is answered.
    weather.stormy, weather.most, weather.quorum = False, 0, plan.most_in_flight * SIZE
    runner.limits = Limits(60.0, 60.0, 60.0, 90.0)
    reported.clear()
    again = asyncio.create_task(steps(Pool(runner, InOrder(), plan, seed=2), fleet, config))
    async with asyncio.timeout(50):
        while weather.most < weather.quorum and not again.done():
            await asyncio.sleep(0.01)
    for engine in engines:
        engine.answer()
    played, fates = await again
    assert played == reported == every and weather.most == weather.quorum and weather.flying == 0
    assert fates["trained"] + fates["dropped/stale"] == GROUPS * SIZE and set(fates) <= {"trained", "dropped/stale"}

    weather.release.set()
    await runner.aclose()
    await fleet.close()
    encoders.shutdown()
    await check_nothing_is_left(threads)
