"""What vLLM is told around an update, and when; in its place, one whose cache remembers which weights filled it."""

import asyncio
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from molt_gym.tokens import Sampling
from molt_gym.trainers.rollout.vllm_spec import HostSpec

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

PREFIX = list(range(5, 25))


class Fake:
    """Samples the version of its weights; a prefix in the cache is served with the version that computed it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.weights, self.cache, self.resets = 0, {}, True
        self.going = asyncio.Event()
        self.going.set()
        self.output_processor = SimpleNamespace(request_states={})

    async def generate(self, prompt, parameters, name, priority=0, lora_request=None):
        ids, key = [], tuple(prompt["prompt_token_ids"][: len(PREFIX)])
        self.output_processor.request_states[name] = SimpleNamespace(
            external_req_id=name, detokenizer=SimpleNamespace(num_output_tokens=lambda: len(ids)))
        await self.going.wait()
        self.events.append(f"admit {name}")
        for _ in range(parameters.max_tokens):
            await self.going.wait()
            ids.append(100 * self.cache.setdefault(key, self.weights) + self.weights)
            await asyncio.sleep(0.01)
        del self.output_processor.request_states[name]
        logprobs = [{i: SimpleNamespace(logprob=-1.0)} for i in ids]
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="length",
                                                       routed_experts=None, weight_versions=None)])

    async def pause_generation(self, mode, clear_cache):
        self.going.clear()
        self.events.append(f"pause {mode}")

    async def resume_generation(self):
        self.events.append("resume")
        self.going.set()

    async def start_weight_update(self):
        self.events.append("start")

    async def update_weights(self, request):
        self.events.append("load")
        self.weights = request.update_info["version"]

    async def finish_weight_update(self):
        self.events.append("finish")

    async def reset_prefix_cache(self, reset_running_requests=False):
        self.events.append(f"reset {reset_running_requests}")
        if self.resets:
            self.cache.clear()
        return self.resets


def make(monkeypatch, scheduler: str | None = None, ahead: bool = False, **spec):
    from molt_gym.trainers.rollout import vllm_host

    fake = Fake()
    config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 1000),
                             scheduler_config=SimpleNamespace(scheduler_cls=scheduler, async_scheduling=ahead))
    engine_args = SimpleNamespace(create_engine_config=lambda: config)
    monkeypatch.setattr(vllm_host, "AsyncEngineArgs", lambda **_: engine_args)
    monkeypatch.setattr(vllm_host, "AsyncLLM", SimpleNamespace(from_vllm_config=lambda *_, **__: fake))
    monkeypatch.setattr(vllm_host, "engine_arguments", lambda _: {})
    # Versions are then known from what each request had at the update, as in releases whose outputs tell none.
    host = vllm_host.VllmHost(HostSpec("model", "float32", 256, 8, (2,), "gloo", cpu=False, spans=False,
                                       **spec))
    host.fake, host.scheduler = fake, config.scheduler_config.scheduler_cls
    return host


@pytest.fixture
async def host(monkeypatch):
    return make(monkeypatch)


@pytest.mark.parametrize("ahead", [False, True])
async def test_replies_are_sent_whole_by_a_scheduler_like_the_one_that_vllm_would_take(monkeypatch, ahead):
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    chosen = resolve_obj_by_qualname(make(monkeypatch, ahead=ahead).scheduler)
    assert chosen.__mro__[1].__name__ == "Whole"
    assert issubclass(chosen, AsyncScheduler) == ahead


async def test_a_scheduler_that_was_asked_for_stays_and_experts_are_sent_with_their_tokens(monkeypatch):
    assert make(monkeypatch, "their.Scheduler").scheduler == "their.Scheduler"
    assert make(monkeypatch, routed_experts=True).scheduler is None


async def update(host, version: int) -> None:
    await host.pause()
    await host.start_update()
    await host.receive({"version": version})
    await host.finish_update(version)
    await host.resume()


async def test_the_cache_is_reset_after_the_weights_came_and_before_anything_goes_on(host):
    before = await host.generate([*PREFIX, 30], Sampling(2))
    flying = asyncio.create_task(host.generate([*PREFIX, 31], Sampling(30)))
    while "admit reply-1" not in host.fake.events:
        await asyncio.sleep(0.001)
    await host.pause()
    late = asyncio.create_task(host.generate([*PREFIX, 32], Sampling(2)))
    await update(host, 1)
    after = await host.generate([*PREFIX, 33], Sampling(2))
    events = host.fake.events[host.fake.events.index("start"):]
    assert events[:5] == ["start", "load", "finish", "reset True", "resume"]
    assert sorted(events[5:]) == ["admit reply-2", "admit reply-3"]
    assert (before.ids, before.versions) == ([0, 0], [0, 0])
    for reply in (await late, after):
        assert (reply.ids, reply.versions) == ([101, 101], [1, 1])
    reply = await flying
    old = reply.versions.count(0)
    assert 0 < old < 30 and reply.versions == [0] * old + [1] * (30 - old)
    assert reply.ids == [0] * old + [101] * (30 - old)


async def test_a_cache_that_was_not_reset_is_an_error(host):
    host.fake.resets = False
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        await update(host, 1)
    assert "resume" not in host.fake.events
