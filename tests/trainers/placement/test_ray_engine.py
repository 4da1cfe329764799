"""vLLM behind Ray: weights from ranks to engines, requests from other processes, and what is left when one dies."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from molt_gym.errors import PromptTooLong, RunFailed
from molt_gym.tokens import Renderer, Sampling
from molt_gym.trainers.actor.actor import ActorLost
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.config import load_config
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.fleet import EngineFleet

ray = pytest.importorskip("ray")
ray_actor = pytest.importorskip("molt_gym.trainers.placement.ray_actor")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"),
              pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

# Other processes cannot import this module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLACE = {"num_cpus": 1}
PROMPTS = [[5, 7, 9], [1, 40, 290, 17, 200], list(range(20, 60))]
PROBE = list(range(5, 60))
WAIT = 120.0


async def within(*futures: Any) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*futures), WAIT)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def make(cluster: Any, wide_path: Path, renderer: Renderer) -> Iterator[Callable[..., Any]]:
    """Makes engines that are closed after the module."""
    from molt_gym.trainers.placement.ray_engine import RayVllmEngine

    made = []

    def engine(place: dict[str, Any] = PLACE) -> Any:
        made.append(RayVllmEngine(wide_path, renderer, place, dtype=torch.float32, max_context=256, max_sequences=8))
        return made[-1]

    yield engine
    for one in made:
        asyncio.run(one.close())


@pytest.fixture(scope="module")
def engines(make: Callable[..., Any]) -> list[Any]:
    return [make(), make()]


@pytest.fixture(scope="module")
def actors(cluster: Any, wide_path: Path) -> Iterator[Callable[[int], Any]]:
    made = []

    def actor(ranks: int) -> Any:
        sizes = {"rollout__max_tokens": 64, "rollout__max_context": 256, "actor__world_size": ranks}
        config = load_config("Any-v0", overrides={"actor__lr": 0.02, **sizes})
        made.append(ray_actor.RayActor(ActorSpec(str(wide_path), config, torch.float32, 10), [PLACE] * ranks))
        return made[-1]

    yield actor
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def single(actors: Callable[[int], Any]) -> Any:
    return actors(1)


async def update(engines: list[Any], actor: Any, version: int) -> None:
    await within(*(engine.pause() for engine in engines))
    await within(*(engine.begin_update() for engine in engines))
    async for bucket in engines[0].pack(actor.weights()):
        await within(*(engine.take(bucket) for engine in engines))
    await within(*(engine.end_update(version) for engine in engines))
    await within(*(engine.resume() for engine in engines))


def host(engine: Any) -> int:
    """The number of vLLM's process."""
    return ray.get(engine._host.handle.__ray_call__.remote(lambda actor: actor._host.pid))


def pending(engine: Any) -> int:
    return ray.get(engine._host.handle.__ray_call__.remote(lambda actor: len(actor._host._calls)))


def alive(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


async def test_engines_take_the_weights_of_an_actors_ranks_and_of_the_one_after_it(
    engines: list[Any], actors: Callable[[int], Any], single: Any, tmp_path: Path
) -> None:
    actor = actors(2)
    for version in (1, 2, 3):
        await update(engines, actor, version)
        expected = actor.logprobs(PROBE)
        for engine in engines:
            assert engine.version == version
            assert await engine.score(PROBE) == pytest.approx(expected, abs=1e-4)
        if version == 2:
            # The ranks are replaced by fewer.
            actor.save(tmp_path / "state")
            actor.close()
            actor = single
            actor.load(tmp_path / "state")
            assert actor.logprobs(PROBE) == pytest.approx(expected, abs=1e-5)
        row = TrainRow(PROBE, [0, *[1] * (len(PROBE) - 1)], [-1.0] * len(PROBE), 1.0, 0.01, 0, 0)
        actor.train([[row]])
        assert max(abs(a - b) for a, b in zip(actor.logprobs(PROBE), expected, strict=True)) > 0.01


def asked(proxy: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    """What an engine answers a process that has no event loop of its own for it."""
    async def ask() -> list[Any]:
        requests = [Request(prompt, Sampling(**sampling)) for prompt in prompts]
        return await asyncio.wait_for(asyncio.gather(*proxy.submit(requests), return_exceptions=True), WAIT)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, ask()).result()


def test_the_process_that_holds_vllms_does_not_load_torch(engines: list[Any]) -> None:
    assert not ray.get(engines[0]._host.handle.__ray_call__.remote(lambda _: "torch" in sys.modules))


async def test_a_proxy_in_another_process_asks_the_engine_and_refuses_what_leaves_no_room(
    engines: list[Any], single: Any
) -> None:
    engine = engines[0]
    await within(engine.pause())
    await within(engine.resume())
    busy = engine.busy_seconds
    proxy, prompts = engine.proxy(), [*PROMPTS, [5] * 256, [5] * 250]
    *replies, refused, capped = await single._ranks[0].__ray_call__.remote(
        lambda _: asked(proxy, prompts, temperature=1.0, max_tokens=20, seed=3))
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        assert set(reply.versions) == {engine.version}
        scores = await engine.score(prompt + reply.ids)
        assert reply.logprobs == pytest.approx(scores[len(prompt) - 1 :], abs=1e-4)
    assert isinstance(refused, PromptTooLong)
    assert len(capped.ids) <= 6
    await within(engine.pause())
    assert engine.busy_seconds > busy
    await engine.resume()
    assert engine.proxy() == engine.proxy() != engines[1].proxy()
    assert len({engine.proxy(), engine.proxy()}) == 1


async def test_a_request_that_is_cancelled_leaves_the_engine(engines: list[Any]) -> None:
    engine = engines[0]
    await within(engine.pause())
    # While paused none of them comes to an end by itself.
    futures = engine.proxy().submit([Request(prompt, Sampling(max_tokens=20)) for prompt in PROMPTS])
    futures += engine.submit([Request([7], Sampling(max_tokens=20))])
    await until(lambda: pending(engine) == 4)
    for future in futures[1:]:
        future.cancel()
    await until(lambda: pending(engine) == 1)
    await engine.resume()
    assert (await within(futures[0]))[0].ids
    assert engine.ended is None


async def test_an_engine_that_is_killed_in_an_update_is_told_everywhere_and_the_other_is_updated(
    engines: list[Any], single: Any
) -> None:
    (other, engine), actor = engines, single
    await update([other, engine], actor, 4)
    proxy, group = engine.proxy(), host(engine)
    await within(other.pause(), engine.pause())
    (future,) = proxy.submit([Request([7], Sampling(max_tokens=20))])
    known = []
    future.add_done_callback(lambda _: known.append(proxy.ended))
    await within(other.begin_update(), engine.begin_update())
    packed = other.pack(actor.weights())
    bucket = await anext(packed)
    os.kill(group, signal.SIGKILL)
    good, bad = await asyncio.wait_for(asyncio.gather(other.take(bucket), engine.take(bucket), return_exceptions=True),
                                       WAIT)
    assert good is None and isinstance(bad, RunFailed) and not isinstance(bad, ActorLost)
    assert await anext(packed, None) is None
    await within(other.end_update(5), until(lambda: engine.ended is not None))
    await other.resume()
    assert "exit code -9" in str(engine.ended) and "engine.log" in str(engine.ended)
    with pytest.raises(RunFailed, match="exit code -9"):
        await asyncio.wait_for(future, WAIT)
    # Whoever routes requests must know by then, or it would take the request for a bad one.
    assert isinstance(known[0], RunFailed)
    with pytest.raises(RunFailed):
        await proxy.submit([Request([7], Sampling(max_tokens=20))])[0]
    assert await other.score(PROBE) == pytest.approx(actor.logprobs(PROBE), abs=1e-4)
    await until(lambda: not alive(group))
    await engine.close()


async def test_a_rank_that_dies_in_an_update_of_engines_is_named_as_the_reason(
    engines: list[Any], single: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines[0]
    fleet = EngineFleet(lambda: engine, 1, 0)
    await fleet.pause()
    await fleet.update_weights(single.weights(), 6)
    call = engine._call

    async def call_and_die(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "receive":
            os.kill(ray.get(single._ranks[0].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
            # The engine is the first to notice.
            raise RunFailed("the vLLM engine failed: connection closed by peer")
        return await call(name, *arguments, **options)

    monkeypatch.setattr(engine, "_call", call_and_die)
    closed = asyncio.Event()

    async def close() -> None:
        """The next test still needs the engine."""
        closed.set()

    monkeypatch.setattr(engine, "close", close)
    with pytest.raises(ActorLost, match="actor rank 0"):
        await asyncio.wait_for(fleet.update_weights(single.weights(), 7), WAIT)
    await fleet.close()
    assert closed.is_set()


async def test_an_actor_that_is_killed_ends_its_engine_and_leaves_no_process(engines: list[Any]) -> None:
    # Ends the last of these engines, whose weights may be a mixture.
    engine = engines[0]
    await within(engine.pause())
    proxy, group = engine.proxy(), host(engine)
    assert alive(group)
    (future,) = proxy.submit([Request([7], Sampling(max_tokens=20))])
    await until(lambda: pending(engine) == 1)
    os.kill(ray.get(engine._host.handle.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    await until(lambda: engine.ended is not None and proxy.ended is not None)
    with pytest.raises(RunFailed, match="actor died"):
        await asyncio.wait_for(future, WAIT)
    await until(lambda: not alive(group))
    await engine.close()


def test_an_engine_that_does_not_start_says_why(make: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so is missing')")
    engine = make(PLACE | {"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}}})
    with pytest.raises(RunFailed, match=r"(?s)exit code.*engine\.log.*libcudart.so is missing"):
        engine.wait()
    assert isinstance(engine.ended, RunFailed)
