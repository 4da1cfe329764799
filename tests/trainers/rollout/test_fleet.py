"""Several engines as one: scripted ones, that die where they are told to."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_gym.errors import ConfigError, PromptTooLong, RunFailed
from molt_gym.tokens import Generation, Sampling
from molt_gym.trainers.actor.actor import ActorLost
from molt_gym.trainers.rollout import router as router_module
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.fleet import EngineFleet
from molt_gym.trainers.waiting import threaded

WAIT = 10.0
MAX_RESTARTS = 8


class Scripted:
    """Samples one token a `step`: its own number, with the version of its weights."""

    max_context = 64
    busy_seconds = 0.0

    def __init__(self, number: int = 0, troubles: dict[str, Exception] | None = None) -> None:
        self.number, self.troubles = number, troubles or {}
        self.version, self.had = 0, {0}
        self.ended: Exception | None = None
        self.paused = False
        self.flying: dict[asyncio.Future, tuple[Request, list[int]]] = {}
        self.calls: list[str] = []
        self.submitted: list[list[Request]] = []
        self.taken: list[str] = []

    def submit(self, requests):
        self.submitted.append(list(requests))
        return [self._enter(request) for request in requests]

    def _enter(self, request: Request) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        if len(request.ids) >= self.max_context:
            future.set_exception(PromptTooLong("too long"))
        elif self.ended:
            future.set_exception(self.ended)
        else:
            self.flying[future] = request, []
            future.add_done_callback(lambda done: self.flying.pop(done, None))
        return future

    def step(self) -> None:
        for _, versions in () if self.paused else self.flying.values():
            versions.append(self.version)

    def finish(self, count: int = 1000) -> None:
        for future in list(self.flying)[:count]:
            _, versions = self.flying.pop(future)
            sampled = len(versions)
            if not future.cancelled():
                future.set_result(Generation([self.number] * sampled, [-1.0] * sampled, versions, "stop"))

    def die(self, cause: str = "killed") -> None:
        self.ended = RunFailed(f"engine {self.number} {cause}")
        flying, self.flying = self.flying, {}
        for future in flying:
            if not future.cancelled():
                future.set_exception(self.ended)

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if (error := self.troubles.get(name) or self.ended) is not None:
            raise error

    async def pause(self):
        await self._call("pause")
        self.paused = True

    async def resume(self):
        await self._call("resume")
        self.paused = False

    async def begin_update(self):
        await self._call("begin_update")
        assert self.paused

    def pack(self, weights):
        return threaded((name for name, _ in weights), ahead=False)

    async def take(self, bucket):
        await self._call("take")
        self.taken.append(bucket)

    async def end_update(self, version):
        await self._call("end_update")
        self.version = version
        self.had.add(version)

    async def score(self, ids, *, images=()):
        await self._call("score")
        return [-1.0 * self.number] * (len(ids) - 1)

    async def reset_prefix_cache(self):
        await self._call("reset_prefix_cache")

    async def close(self):
        self.calls.append("close")
        await asyncio.sleep(0)
        if self.ended is None:
            self.die("was closed")


class Shop:
    """Makes the engines; `troubles` are those of the next ones."""

    def __init__(self) -> None:
        self.made: list[Scripted] = []
        self.troubles: list[dict[str, Exception]] = []

    def __call__(self) -> Scripted:
        self.made.append(Scripted(len(self.made), self.troubles.pop(0) if self.troubles else None))
        if (error := self.made[-1].troubles.get("make")) is not None:
            self.made.pop()
            raise error
        return self.made[-1]


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
async def fleet(shop) -> EngineFleet:
    return await updated(EngineFleet(shop, 2), 1)


def request(*key: int, ids: int = 4, reply: int = 4) -> Request:
    return Request([5] * ids, Sampling(max_tokens=reply, seed=7), key)


async def updated(fleet: EngineFleet, version: int, weights=(("a", None), ("b", None))) -> EngineFleet:
    await fleet.pause()
    await fleet.update_weights(iter(weights), version)
    await fleet.resume()
    return fleet


async def settle() -> None:
    """Everything that can go on without a further event has."""
    for _ in range(12):
        await asyncio.sleep(0)


async def started(shop: Shop, count: int) -> None:
    """`count` engines were made, in threads, and have started."""
    async with asyncio.timeout(WAIT):
        while len(shop.made) < count:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)


def whom(shop: Shop) -> list[list[tuple[int, ...]]]:
    return [[request.key for request, _ in engine.flying.values()] for engine in shop.made]


# Who answers

async def test_a_rollout_starts_at_the_least_loaded_engine_and_stays_where_its_prefix_is(fleet, shop):
    fleet.submit([request(0, 0, 0, 0), request(0, 1, 0, 0)])
    assert whom(shop) == [[(0, 0, 0, 0)], [(0, 1, 0, 0)]]
    shop.made[1].finish()
    await settle()
    fleet.submit([request(0, 0, 0, 1)])
    assert whom(shop)[0] == [(0, 0, 0, 0), (0, 0, 0, 1)]
    fleet.submit([request(0, 0, 1, 0)])
    assert whom(shop)[1] == [(0, 0, 1, 0)]


async def test_load_is_counted_in_tokens(fleet, shop):
    fleet.submit([request(0, 0, 0, ids=50), *(request(0, n, 0) for n in range(1, 6))])
    assert [len(keys) for keys in whom(shop)] == [1, 5]


async def test_a_rollout_leaves_an_engine_with_more_than_twice_the_load(fleet, shop):
    first = fleet.submit([request(n, 0, 0, 0) for n in range(4)])
    shop.made[1].finish()
    await settle()
    fleet.submit([request(0, 0, 0, 1)])
    assert whom(shop)[1] == [(0, 0, 0, 1)]
    shop.made[0].finish(1)
    await asyncio.wait_for(first[0], WAIT)
    fleet.submit([request(0, 0, 0, 2)])
    assert whom(shop)[1] == [(0, 0, 0, 1), (0, 0, 0, 2)]


async def test_requests_without_a_rollout_are_spread(fleet, shop):
    fleet.submit([request()] * 2)
    assert [len(keys) for keys in whom(shop)] == [1, 1]


async def test_requests_of_one_submit_enter_together_in_their_order(fleet, shop):
    fleet.submit([request(0, n, 0, 0) for n in range(6)])
    assert [[request.key[1] for request in part] for engine in shop.made for part in engine.submitted] == [
        [0, 2, 4], [1, 3, 5]]


async def test_after_an_update_only_the_rollouts_in_flight_have_an_engine_of_theirs(fleet, shop):
    fleet.submit([request(n, 0, 0, 0) for n in range(4)])
    shop.made[0].finish()
    await settle()
    await updated(fleet, 2)
    shop.made[1].finish()
    await settle()
    fleet.submit([request(n, 0, 0, 1) for n in (1, 3, 0, 2)])
    assert [[key[0] for key in keys] for keys in whom(shop)] == [[0, 2], [1, 3]]
    for engine in shop.made:
        engine.finish()
    await settle()
    await updated(fleet, 3)
    fleet.submit([request(9, 0, 0, 0), request(0, 0, 0, 2)])
    assert whom(shop) == [[(9, 0, 0, 0)], [(0, 0, 0, 2)]]
    await fleet.reset_prefix_cache()
    assert not fleet._router._homes


async def test_only_the_newest_rollouts_are_remembered(fleet, shop, monkeypatch):
    monkeypatch.setattr(router_module, "MAX_SESSIONS", 3)
    for n in (0, 1, 2, 0, 3):
        fleet.submit([request(n, 0, 0)])
    assert list(fleet._router._homes) == [(2, 0, 0), (0, 0, 0), (3, 0, 0)]


async def test_a_cancelled_request_leaves_its_engine_and_its_load(fleet, shop):
    first, _ = fleet.submit([request(0, 0, 0, ids=30), request(0, 1, 0)])
    first.cancel()
    await settle()
    assert whom(shop) == [[], [(0, 1, 0)]]
    fleet.submit([request(0, 2, 0)])
    assert whom(shop)[0] == [(0, 2, 0)]


async def test_what_an_engine_refuses_stays_refused(fleet, shop):
    long, = fleet.submit([request(0, 0, 0, ids=99)])
    with pytest.raises(PromptTooLong):
        await long
    assert sum(len(engine.submitted) for engine in shop.made) == 1
    long, = fleet.submit([request(0, 0, 0, ids=99)])
    shop.made[0].die()
    with pytest.raises(PromptTooLong):
        await long
    assert fleet.take_faults()["requeued"] == 0


async def test_busy_is_the_time_in_which_any_engine_works_once(fleet, shop):
    before, start = fleet.busy_seconds, time.perf_counter()
    replies = fleet.submit([request(0, n, 0) for n in range(4)])
    await asyncio.sleep(0.05)
    await fleet.pause()
    most = time.perf_counter() - start
    await asyncio.sleep(0.05)
    assert 0.05 <= fleet.busy_seconds - before <= most + 0.01
    await fleet.resume()
    for engine in shop.made:
        engine.finish()
    await asyncio.gather(*replies)
    busy = fleet.busy_seconds
    await asyncio.sleep(0.02)
    assert fleet.busy_seconds == busy


# Engines that end

async def test_what_an_engine_that_dies_had_in_flight_is_sent_again_as_it_was(fleet, shop):
    asked = [request(0, n, 0, 0) for n in range(4)]
    replies = fleet.submit(asked)
    for engine in shop.made:
        engine.step()
    shop.made[0].die()
    await settle()
    assert shop.made[1].submitted[1:] == [[asked[0]], [asked[2]]]
    shop.made[1].step()
    shop.made[1].finish()
    sampled = await asyncio.gather(*replies)
    assert [reply.ids for reply in sampled] == [[1], [1, 1], [1], [1, 1]]
    await started(shop, 3)
    assert fleet.take_faults() == {"engine_restarts": 1, "requeued": 2}
    assert fleet.take_faults() == {"engine_restarts": 0, "requeued": 0}


async def test_an_engine_that_died_idle_gets_no_requests(fleet, shop):
    fleet.submit([request(0, 0, 0, 0)])
    shop.made[0].finish()
    await settle()
    shop.made[0].die()
    fleet.submit([request(0, 0, 0, 1), request(0, 1, 0, 0)])
    assert [len(keys) for keys in whom(shop)][:2] == [0, 2]


async def test_a_request_cancelled_as_its_engine_dies_is_not_sent_again(fleet, shop):
    reply, = fleet.submit([request(0, 0, 0)])
    shop.made[0].die()
    reply.cancel()
    await settle()
    assert whom(shop)[1] == [] and fleet.take_faults()["requeued"] == 0


async def test_an_engine_that_was_started_again_joins_at_the_next_update(fleet, shop):
    shop.made[0].die()
    fleet.submit([request()])
    await started(shop, 3)
    assert "close" in shop.made[0].calls
    fleet.submit([request()] * 3)
    assert [len(keys) for keys in whom(shop)] == [0, 4, 0]
    await updated(fleet, 2)
    fleet.submit([request()] * 4)
    assert [len(keys) for keys in whom(shop)] == [0, 4, 4]
    assert [engine.version for engine in shop.made[1:]] == [2, 2]
    assert shop.made[2].taken == ["a", "b"]


async def test_one_that_is_still_starting_joins_later_and_is_not_waited_for(fleet, shop, monkeypatch):
    go = asyncio.Event()

    async def slowly(engine):
        await go.wait()
        engine.paused = True

    monkeypatch.setattr(Scripted, "pause", slowly)
    shop.made[0].die()
    fleet.submit([request()])
    await started(shop, 3)
    shop.made[1].paused = fleet._paused = True
    await asyncio.wait_for(fleet.update_weights([("a", None)], 2), WAIT)
    assert shop.made[2].calls == [] and fleet.version == 2
    go.set()
    await settle()
    await asyncio.wait_for(fleet.update_weights([("a", None)], 3), WAIT)
    assert [engine.version for engine in shop.made] == [1, 3, 3]


async def test_without_an_update_so_far_it_joins_at_once(shop):
    fleet = EngineFleet(shop, 2)
    shop.made[0].die()
    fleet.submit([request()])
    await started(shop, 3)
    fleet.submit([request()] * 3)
    assert [len(keys) for keys in whom(shop)] == [0, 2, 2] and not shop.made[2].paused


async def test_a_start_that_fails_is_tried_again(fleet, shop):
    shop.troubles = [{"make": OSError("no memory")}, {"pause": RunFailed("did not start")}]
    shop.made[0].die()
    fleet.submit([request()])
    await started(shop, 4)
    assert fleet.take_faults()["engine_restarts"] == 3
    assert shop.made[2].calls == ["pause", "close"]
    await updated(fleet, 2)
    assert [engine.version for engine in shop.made] == [1, 2, 0, 2]


async def test_when_all_died_requests_wait_for_a_new_engine_which_asks_for_weights(fleet, shop):
    replies = fleet.submit([request()] * 2)
    for engine in shop.made[:2]:
        engine.die()
    replies += fleet.submit([request()])
    await asyncio.wait_for(fleet.wants_weights.wait(), WAIT)
    assert not any(reply.done() for reply in replies)
    await asyncio.wait_for(updated(fleet, 1), WAIT)
    for engine in shop.made[2:]:
        engine.step()
        engine.finish()
    await settle()
    await asyncio.wait_for(updated(fleet, 2), WAIT)
    assert not fleet.wants_weights.is_set() and fleet.take_faults()["requeued"] == 2
    for engine in shop.made[2:]:
        engine.finish()
    assert all([await asyncio.wait_for(reply, WAIT) for reply in replies])


async def test_who_asks_engines_elsewhere_is_told_which_have_the_newest_weights(fleet, shop):
    told = []

    async def joined(members):
        told.append([member.number for member in members])
        assert all(member.paused for member in members)

    fleet.joined = joined
    await updated(fleet, 2)
    shop.made[0].die()
    await started(shop, 2)
    await updated(fleet, 3)
    await started(shop, 3)
    await updated(fleet, 4)
    assert told == [[0, 1], [1], [1, 2]]


async def test_after_too_many_restarts_the_run_ends(fleet, shop):
    for number in range(MAX_RESTARTS + 1):
        victim = next(engine for engine in shop.made[::-1] if engine.ended is None and engine is not shop.made[1])
        victim.die()
        await updated(fleet, number + 2)
        if number < MAX_RESTARTS:
            await started(shop, number + 3)
            await updated(fleet, number + 2)
    await settle()
    with pytest.raises(RunFailed, match=rf"(?s)ended again after {MAX_RESTARTS} restarts.*engine 9 killed"):
        await fleet.pause()
    with pytest.raises(RunFailed, match="ended again"):
        await fleet.submit([request()])[0]


async def test_a_request_that_ends_every_engine_fails_alone(shop):
    fleet = await updated(EngineFleet(shop, 5), 1)
    poison, other = fleet.submit([request(0, 0, 0), request(0, 1, 0)])
    for _ in range(3):
        shop.made[[(0, 0, 0) in keys for keys in whom(shop)].index(True)].die()
        await settle()
    with pytest.raises(RunFailed, match="killed"):
        await poison
    assert not other.done() or other.exception() is None


async def test_an_engine_that_does_not_start_at_all_ends_the_run_with_its_error(shop):
    shop.troubles = [{}, {"pause": RunFailed("unknown argument")}]
    with pytest.raises(RunFailed, match="unknown argument"):
        await EngineFleet(shop, 2).pause()


async def test_engines_that_were_made_are_closed_if_another_cannot_be(shop):
    shop.troubles = [{}, {"make": ConfigError("no room")}]
    with pytest.raises(ConfigError, match="no room"):
        EngineFleet(shop, 2)
    assert shop.made[0].calls == ["close"]


# Updates

async def test_the_weights_are_gone_through_once_for_all_engines_at_once(shop, monkeypatch):
    fleet = await updated(EngineFleet(shop, 3), 1)
    together = asyncio.Barrier(3)

    async def take(engine, bucket):
        await asyncio.wait_for(together.wait(), WAIT)
        engine.taken.append(bucket)

    monkeypatch.setattr(Scripted, "take", take)
    read = []

    def weights() -> Iterator[tuple[str, None]]:
        for name in "cde":
            read.append(name)
            yield name, None

    await updated(fleet, 2, weights())
    assert read == ["c", "d", "e"]
    assert all(engine.taken[2:] == read and engine.version == 2 for engine in shop.made)


@pytest.mark.parametrize("when", ["pause", "begin_update", "take", "end_update", "resume", "reset_prefix_cache"])
async def test_an_engine_that_fails_in_an_update_is_replaced_and_the_others_go_on(fleet, shop, when):
    replies = fleet.submit([request(0, n, 0) for n in range(4)])
    shop.made[0].troubles[when] = RunFailed("out of memory")
    await updated(fleet, 2)
    await fleet.reset_prefix_cache()
    await started(shop, 3)
    assert len(whom(shop)[1]) == 4 and "close" in shop.made[0].calls
    shop.made[1].step()
    shop.made[1].finish()
    assert all(reply.versions == [2] for reply in await asyncio.gather(*replies))
    await updated(fleet, 3)
    assert fleet.version == 3 and [engine.version for engine in shop.made[1:]] == [3, 3]
    assert fleet.take_faults() == {"engine_restarts": 1, "requeued": 2}


async def test_an_update_that_no_engine_survives_says_why(fleet, shop):
    for number in (0, 1):
        shop.made[number].troubles["take"] = RunFailed(f"shape {number}")
    with pytest.raises(RunFailed, match="(?s)no engine is left.*shape 0.*shape 1"):
        await updated(fleet, 2)
    assert fleet.version == 1


async def test_engines_that_were_left_with_half_of_the_weights_do_not_go_on(fleet, shop):
    def weights() -> Iterator[tuple[str, None]]:
        yield "a", None
        raise OSError("a rank died")

    with pytest.raises(OSError, match="a rank died"):
        await updated(fleet, 2, weights())
    await settle()
    assert all("close" in engine.calls for engine in shop.made[:2])
    await asyncio.wait_for(asyncio.create_task(updated(fleet, 3)), WAIT)
    reply, = fleet.submit([request(0, 0, 0)])
    for engine in shop.made[2:]:
        engine.step()
        engine.finish()
    assert (await asyncio.wait_for(reply, WAIT)).versions == [3]


@pytest.mark.parametrize("where", ["weights", "take"])
async def test_engines_that_a_lost_actor_leaves_with_half_of_its_weights_do_not_count(shop, where):
    fleet = await updated(EngineFleet(shop, 3, restarts=1), 1)

    def weights() -> Iterator[tuple[str, None]]:
        yield "a", None
        if where == "weights":
            raise ActorLost("a rank died")

    for engine in shop.made if where == "take" else ():
        engine.troubles["take"] = ActorLost("a rank died")
    with pytest.raises(ActorLost, match="a rank died"):
        await updated(fleet, 2, weights())
    await started(shop, 6)
    await updated(fleet, 3)
    assert fleet.take_faults()["engine_restarts"] == 3 and len(fleet.members) == 3
    for _ in range(2):
        fleet.members[0].die()
        await updated(fleet, fleet.version + 1)
    with pytest.raises(RunFailed, match="ended again after 4 restarts"):
        await fleet.pause()


async def test_weights_are_refused_while_the_engines_run(fleet):
    with pytest.raises(RuntimeError, match=r"pause\(\)"):
        await fleet.update_weights([], 2)


async def test_all_engines_score_and_one_that_cannot_is_replaced(fleet, shop):
    assert await fleet.scores([5, 6, 7]) == [[0.0, 0.0], [-1.0, -1.0]]
    shop.made[0].troubles["score"] = RunFailed("stalled")
    assert await fleet.scores([5, 6, 7]) == [[-1.0, -1.0]]
    shop.made[1].troubles["score"] = RunFailed("stalled too")
    with pytest.raises(RunFailed, match="stalled too"):
        await fleet.scores([5, 6, 7])


# The end

async def test_closing_fails_what_is_in_flight_and_ends_engines_that_start_too(fleet, shop):
    reply, = fleet.submit([request()])
    shop.made[1].die()
    fleet.submit([request(), request()])
    await asyncio.wait_for(fleet.close(), WAIT)
    with pytest.raises(RunFailed, match="was closed"):
        await reply
    assert all(engine.ended for engine in shop.made) and not fleet._replacing
    await asyncio.wait_for(fleet.close(), WAIT)


async def test_an_engine_that_is_being_made_at_the_end_is_closed(shop):
    go = threading.Event()

    def make() -> Scripted:
        if len(shop.made) == 2:
            assert go.wait(WAIT)
        return shop()

    fleet = await updated(EngineFleet(make, 2), 1)
    shop.made[0].die()
    fleet.submit([request()])[0].cancel()
    await settle()
    closing = asyncio.create_task(fleet.close())
    await settle()
    go.set()
    await asyncio.wait_for(closing, WAIT)
    assert len(shop.made) == 3 and shop.made[2].calls == ["close"]


EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["step", "die", "finish", "cancel"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(["update", "settle"]), st.none()),
    st.tuples(st.just("fail"), st.sampled_from(["pause", "begin_update", "take", "end_update", "resume"])))


@given(st.integers(1, 3), st.lists(EVENTS, max_size=25))
@settings(max_examples=60, deadline=None)
def test_every_request_is_answered_once_by_one_engine_with_weights_it_had_whatever_ends(count, events):
    asyncio.run(asyncio.wait_for(play(count, events), 60))


async def play(count: int, events: list[tuple]) -> None:
    shop, outcomes = Shop(), []
    fleet = await updated(EngineFleet(shop, count), 1)

    def ask(session: int) -> asyncio.Future:
        number = len(outcomes)
        outcomes.append([])
        future, = fleet.submit([request(session, 0, 0, number)])
        future.add_done_callback(outcomes[number].append)
        return future

    futures = []
    for name, value in events:
        alive = [engine for engine in shop.made if engine.ended is None]
        engine = alive[value % len(alive)] if alive and isinstance(value, int) else None
        if name == "submit":
            futures += [ask(session) for session in value]
        elif name == "cancel" and futures:
            futures[value % len(futures)].cancel()
        elif name == "fail" and alive:
            alive[0].troubles[value] = RunFailed(f"{value} failed")
        elif name == "update":
            try:
                await updated(fleet, fleet.version + 1)
            except RunFailed:
                break
            assert {engine.version for engine in alive_in(fleet)} <= {fleet.version}
        elif name == "settle":
            await settle()
        elif engine is not None and name in ("step", "die", "finish"):
            getattr(engine, name)()
    await settle()
    for engine in shop.made:
        engine.finish()
    await settle()
    await fleet.close()
    await settle()
    for outcome in outcomes:
        future, = outcome
        if not future.cancelled() and future.exception() is None:
            reply = future.result()
            assert len(set(reply.ids)) <= 1 and reply.versions == sorted(reply.versions)
            assert not reply.ids or set(reply.versions) <= shop.made[reply.ids[0]].had
        elif not future.cancelled():
            assert isinstance(future.exception(), RunFailed)
    assert all(engine.ended and not engine.flying for engine in shop.made)


def alive_in(fleet: EngineFleet) -> list[Scripted]:
    return fleet.members
