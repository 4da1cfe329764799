"""Several engines of vLLM as one."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from molt_gym.tokens import Sampling
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.fleet import EngineFleet
from molt_gym.trainers.rollout.vllm_engine import VllmEngine
from molt_gym.trainers.rollout.vllm_process import HostProcess

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


def command(process: psutil.Process) -> str:
    """Of a process; nothing of one that has ended and that nobody has looked after yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""



async def test_updates_reach_all_of_vllms_engines_and_one_that_is_killed_loses_no_request(
        tiny_path, renderer, expected, tmp_path):
    path = wide(tiny_path, tmp_path)
    fleet = EngineFleet(partial(VllmEngine, path, renderer, dtype=torch.float32, max_context=256, max_sequences=16), 2)
    probe = list(range(5, 60))

    async def update(version: int) -> Qwen3ForCausalLM:
        model = moved(path, version)
        await fleet.pause()
        await fleet.update_weights(model.named_parameters(), version)
        await fleet.resume()
        ours = expected(model, probe[:1], probe[1:])
        for theirs in await fleet.scores(probe):
            assert theirs == pytest.approx(ours, abs=1e-4)
        return model

    async def answers(model: Qwen3ForCausalLM, replies: list[asyncio.Future]) -> None:
        for number, reply in enumerate(await asyncio.wait_for(asyncio.gather(*replies), 120)):
            assert set(reply.versions) == {fleet.version}
            assert reply.logprobs == pytest.approx(expected(model, [5 + number, 9], reply.ids), abs=1e-4)

    def ask(length: int) -> list[asyncio.Future]:
        return fleet.submit([Request([5 + n, 9], Sampling(max_tokens=length, seed=n), (n, 0, 0)) for n in range(16)])

    try:
        for version in (1, 2):
            model = await update(version)
            await answers(model, ask(20))
        assert fleet.take_faults() == {"engine_restarts": 0, "requeued": 0}
        replies = ask(200)
        await asyncio.sleep(0.1)
        os.kill(fleet.members[0]._host.pid, signal.SIGKILL)
        await answers(model, replies)
        await asyncio.wait_for(fleet.wants_weights.wait(), 300)
        faults = fleet.take_faults()
        assert faults["engine_restarts"] == 1 and 1 <= faults["requeued"] <= 8
        assert len(fleet.members) == 1
        model = await update(3)
        replies = ask(20)
        assert list(fleet._router._loads.values()) == [8 * 22] * 2
        await answers(model, replies)
    finally:
        await fleet.close()


async def test_an_engine_that_freezes_within_an_update_is_replaced_while_the_other_goes_on(
        tiny_path, renderer, expected, tmp_path, monkeypatch):
    path = wide(tiny_path, tmp_path)
    fleet = EngineFleet(partial(VllmEngine, path, renderer, dtype=torch.float32, max_context=256, max_sequences=16,
                                transfer_timeout=10.0), 2)
    folder = Qwen3ForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    models = [folder, moved(path, 1), moved(path, 2)]

    async def update(version: int) -> None:
        await fleet.pause()
        await fleet.update_weights(models[version].named_parameters(), version)
        await fleet.resume()
        for theirs in await fleet.scores(list(range(5, 60))):
            assert theirs == pytest.approx(expected(models[version], [5], list(range(6, 60))), abs=1e-4)

    try:
        await fleet.pause()
        await fleet.resume()
        replies = fleet.submit([Request([5 + n, 9], Sampling(max_tokens=250, temperature=0), (n, 0, 0))
                                for n in range(16)])
        frozen, other = fleet.members
        call = HostProcess.call

        def freezing(host: HostProcess, name: str, *arguments):
            if name == "receive" and host is frozen._host:
                os.killpg(host.pid, signal.SIGSTOP)
            return call(host, name, *arguments)

        monkeypatch.setattr(HostProcess, "call", freezing)
        await asyncio.wait_for(update(1), 180)
        assert fleet.members == [other]
        for number, reply in enumerate(await asyncio.wait_for(asyncio.gather(*replies), 180)):
            for version in set(reply.versions):
                theirs = expected(models[version], [5 + number, 9], reply.ids)
                places = [place for place, stamp in enumerate(reply.versions) if stamp == version]
                assert [reply.logprobs[p] for p in places] == pytest.approx([theirs[p] for p in places], abs=1e-4)
        await asyncio.wait_for(fleet.wants_weights.wait(), 300)
        assert frozen.ended is not None and not psutil.pid_exists(frozen._host.pid)
        await update(2)
        assert len(fleet.members) == 2
        assert fleet.take_faults()["engine_restarts"] == 1
    finally:
        await fleet.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_training_goes_on_when_an_engine_is_killed(train, tiny_path, tmp_path, staleness):
    out = tmp_path / "run"

    def kill() -> None:
        metrics = out / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and "time/step" in metrics.read_text()):
            time.sleep(0.05)
        hosts = [child.pid for child in psutil.Process().children() if "vllm_host" in command(child)]
        assert len(hosts) == 2
        os.kill(hosts[0], signal.SIGKILL)

    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill)
        result = train(out, model=wide(tiny_path, tmp_path), steps=10, engine="vllm", rollout__engines=2,
                       rollout__max_staleness=staleness, rollout__max_tokens=30)
        killing.result()
    steps = [line for line in result.metrics if "time/step" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert sum(line["rollout/engine_restarts"] for line in steps) == 1
    assert not any("failed" in name for line in steps for name in line)
    assert all(line["rollout/count"] == 8 for line in steps)
    assert not [child for child in psutil.Process().children() if "vllm_host" in command(child)]


def wide(tiny_path: Path, path: Path) -> Path:
    """A tiny model whose attention has heads of 32, the least that vLLM takes on CPUs."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, initializer_range=0.3,
        tie_word_embeddings=True, eos_token_id=2, pad_token_id=0, bos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).float().save_pretrained(path)
    return path


@torch.no_grad()
def moved(path: Path, seed: int) -> Qwen3ForCausalLM:
    """The model of a folder with other weights."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model
