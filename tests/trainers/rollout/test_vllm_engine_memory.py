"""The order in which an engine gives a GPU's memory back and takes it again, by what its process is asked for."""

from concurrent.futures import Future

import pytest
import torch
from transformers import Qwen3ForCausalLM

from molt_gym.trainers.rollout.vllm_engine import VllmEngine


class Host:
    """Answers every call at once, and keeps their names."""

    def __init__(self, spec) -> None:
        self.spec, self.ended, self.ready, self.calls = spec, None, answered(1), []

    def call(self, name: str, *arguments) -> Future:
        self.calls.append(" ".join([name, *map(str, arguments)]) if name == "wake" else name)
        return answered(None)

    def close(self, reason: Exception) -> None:
        self.ended = reason


def answered(result) -> Future:
    future = Future()
    future.set_result(result)
    return future


@pytest.fixture
def make(tiny_path, renderer):
    def make(release_memory: bool = True) -> VllmEngine:
        return VllmEngine(tiny_path, renderer, dtype=torch.float32, max_context=64, max_sequences=2, backend="file",
                          cuda=True, host=Host, release_memory=release_memory)

    return make


async def test_weights_wake_before_they_are_sent_and_the_cache_before_requests_go_on(make, tiny_path):
    engine = make()
    weights = list(Qwen3ForCausalLM.from_pretrained(tiny_path).named_parameters())
    with pytest.raises(RuntimeError, match=r"pause\(\)"):
        await engine.release()
    for version in (1, 2):
        await engine.pause()
        await engine.release()
        await engine.release()
        with pytest.raises(RuntimeError, match=r"update_weights\(\)"):
            await engine.resume()
        await engine.update_weights(weights, version)
        await engine.resume()
    once = ["pause", "sleep", "wake weights", "start_update", "receive", "finish_update", "wake kv_cache", "resume"]
    assert [call for call in engine._host.calls if call != "connect"] == once * 2
    await engine.close()


async def test_an_engine_that_keeps_its_memory_does_not_sleep(make):
    engine = make(release_memory=False)
    await engine.pause()
    await engine.release()
    await engine.resume()
    assert engine._host.calls == ["pause", "resume"]
