"""Several engines of vLLM as one."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3ForCausalLM

from molt_gym.tokens import Sampling
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.fleet import EngineFleet
from molt_gym.trainers.rollout.vllm_engine import VllmEngine
from molt_gym.trainers.rollout.vllm_process import HostProcess

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

PROBE = list(range(5, 60))


def command(process: psutil.Process) -> str:
    """Of a process; nothing of one that has ended and that nobody has looked after yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_asynchronous_training_goes_on_when_its_engine_is_killed(train, wide_path, tmp_path):
    out = tmp_path / "run"

    def kill() -> None:
        metrics = out / "metrics.jsonl"
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and not (metrics.exists() and "time/step" in metrics.read_text()):
            time.sleep(0.05)
        host, = (child.pid for child in psutil.Process().children() if "vllm_host" in command(child))
        os.kill(host, signal.SIGKILL)

    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill)
        result = train(out, model=wide_path, steps=6, engine="vllm", rollout__max_staleness=1, rollout__max_tokens=30)
        killing.result()
    steps = [line for line in result.metrics if "time/step" in line]
    assert [line["step"] for line in steps] == list(range(1, 7))
    assert sum(line["rollout/engine_restarts"] for line in steps) >= 1
    assert not any("failed" in name for line in steps for name in line)
    assert all(line["rollout/count"] == 8 for line in steps)
    # The first test of this module, as the others have engines of their own.
    assert not [child for child in psutil.Process().children() if "vllm_host" in command(child)]


async def new_engine(fleet: EngineFleet) -> None:
    """Wait until one that was started again wants weights; or tell what keeps it from that."""
    try:
        await asyncio.wait_for(fleet.wants_weights.wait(), 240)
    except TimeoutError:
        logs = [member._host.log.read_text(errors="replace")[-3000:] for member in fleet._newcomers]
        pytest.fail(f"no engine has started again; {fleet._causes}; {logs}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(wide_path, renderer) -> AsyncIterator[EngineFleet]:
    """Two engines, which are given up when a part of an update takes ten seconds."""
    made = EngineFleet(partial(VllmEngine, wide_path, renderer, dtype=torch.float32, max_context=256, max_sequences=16,
                               transfer_timeout=10.0), 2)
    yield made
    await made.close()


@pytest.fixture
def update(fleet, wide_path, expected):
    """`await update(version)` sends weights that depend on the version, sees that all have them, and returns them."""

    async def send(version: int) -> Qwen3ForCausalLM:
        model = moved(wide_path, version)
        await fleet.pause()
        await fleet.update_weights(model.named_parameters(), version)
        await fleet.resume()
        for theirs in await fleet.scores(PROBE):
            assert theirs == pytest.approx(expected(model, PROBE[:1], PROBE[1:]), abs=1e-4)
        return model

    return send


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_freezes_within_an_update_is_replaced_while_the_other_goes_on(
        fleet, update, expected, monkeypatch):
    models = {1: await update(1)}
    replies = fleet.submit([Request([5 + n, 9], Sampling(max_tokens=250, temperature=0), (n, 0, 0))
                            for n in range(16)])
    frozen, other = fleet.members
    call = HostProcess.call

    def freezing(host: HostProcess, name: str, *arguments):
        if name == "receive" and host is frozen._host:
            os.killpg(host.pid, signal.SIGSTOP)
        return call(host, name, *arguments)

    monkeypatch.setattr(HostProcess, "call", freezing)
    models[2] = await asyncio.wait_for(update(2), 180)
    assert fleet.members == [other]
    for number, reply in enumerate(await asyncio.wait_for(asyncio.gather(*replies), 180)):
        for version in set(reply.versions):
            theirs = expected(models[version], [5 + number, 9], reply.ids)
            places = [place for place, stamp in enumerate(reply.versions) if stamp == version]
            assert [reply.logprobs[p] for p in places] == pytest.approx([theirs[p] for p in places], abs=1e-4)
    await new_engine(fleet)
    assert frozen.ended is not None and not psutil.pid_exists(frozen._host.pid)
    await update(3)
    assert len(fleet.members) == 2
    assert fleet.take_faults()["engine_restarts"] == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_updates_reach_all_of_vllms_engines_and_one_that_is_killed_loses_no_request(fleet, update, expected):
    async def answers(model: Qwen3ForCausalLM, replies: list[asyncio.Future]) -> None:
        for number, reply in enumerate(await asyncio.wait_for(asyncio.gather(*replies), 120)):
            assert set(reply.versions) == {fleet.version}
            assert reply.logprobs == pytest.approx(expected(model, [5 + number, 9], reply.ids), abs=1e-4)

    def ask(length: int) -> list[asyncio.Future]:
        return fleet.submit([Request([5 + n, 9], Sampling(max_tokens=length, seed=n), (n, 0, 0)) for n in range(16)])

    for version in (4, 5):
        model = await update(version)
        replies = ask(20)
        assert list(fleet._router._loads.values()) == [8 * 22] * 2
        await answers(model, replies)
    assert fleet.take_faults() == {"engine_restarts": 0, "requeued": 0}
    # Frozen before, so that it has answered nothing: an engine that dies with nothing in flight is not missed at once.
    os.kill(fleet.members[0]._host.pid, signal.SIGSTOP)
    replies = ask(200)
    await asyncio.sleep(0.1)
    os.kill(fleet.members[0]._host.pid, signal.SIGKILL)
    await answers(model, replies)
    assert fleet.take_faults() == {"engine_restarts": 1, "requeued": 8}
    assert len(fleet.members) == 1


@torch.no_grad()
def moved(path: Path, seed: int) -> Qwen3ForCausalLM:
    """The model of a folder with other weights."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model
