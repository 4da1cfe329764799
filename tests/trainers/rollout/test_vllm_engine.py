"""vLLM itself, on tiny models: every engine here is a process, so that most tests share one."""

import asyncio
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from molt_gym.errors import PromptTooLong, RunFailed
from molt_gym.tokens import Renderer, Sampling
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.config import load_config
from molt_gym.trainers.parity import ParityProbe
from molt_gym.trainers.rollout import vllm_engine
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.transformers_engine import TransformersEngine
from molt_gym.trainers.rollout.vllm_engine import VllmEngine
from molt_gym.trainers.rollout.vllm_process import HostProcess
from molt_gym.trainers.rollout.vllm_transfer import buckets

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

STOP = 2
PROMPTS = [[5, 7, 9], [1, 40, 300, 17, 200], [11], list(range(20, 60)), [5, 7, 9, 100]]
WAIT = 180.0


async def within(seconds, *futures):
    return await asyncio.wait_for(asyncio.gather(*futures), seconds)


async def until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def alive(group: int) -> dict[int, str]:
    """The processes of a group that are not mere zombies: their numbers and command lines."""
    found = {}
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
    return found


@pytest.fixture(scope="module")
def model_path(wide_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with a tied head, and recommendations of its own that must not matter."""
    path = tmp_path_factory.mktemp("qwen3")
    model = AutoModelForCausalLM.from_pretrained(wide_path, dtype=torch.float32)
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=1, repetition_penalty=3.0)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(wide_path).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def make(model_path, tiny_path: Path) -> Iterator[Callable[..., VllmEngine]]:
    """Makes engines that are closed after the module."""
    engines = []
    renderer = Renderer(AutoTokenizer.from_pretrained(tiny_path))

    def engine(path: Path | None = None, **options) -> VllmEngine:
        engines.append(VllmEngine(path or model_path, renderer, **{
            "dtype": torch.float32, "max_context": 256, "max_sequences": 8} | options))
        return engines[-1]

    yield engine
    for made in engines:
        asyncio.run(made.close())


@pytest.fixture(scope="module")
def shared(make) -> VllmEngine:
    return make()


@pytest.fixture
def load(model_path):
    """A model as transformers computes it, optionally moved away from its folder's weights."""

    def read(path: Path | None = None, *, seed: int | None = None) -> Qwen3ForCausalLM:
        model = AutoModelForCausalLM.from_pretrained(path or model_path, dtype=torch.float32,
                                                     attn_implementation="eager").eval()
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        return model

    return read


async def update(engine, model, version):
    await within(WAIT, engine.pause())
    await engine.update_weights(model.named_parameters(), version)
    await engine.resume()


@pytest.fixture
async def engine(shared, load) -> VllmEngine:
    """The shared one, with the weights of the folder and nothing cached."""
    await update(shared, load(), 0)
    return shared


def pause_after(attempt: int) -> float:
    """Seconds after which requests are likely under way; a machine that is busy needs some of ever more attempts."""
    if attempt == 12:
        pytest.fail("no request was ever in flight at an update")
    return 0.1 * (1 + attempt)


def check(replies, prompts, model, expected, **sampling):
    for reply, prompt in zip(replies, prompts, strict=True):
        assert reply.logprobs == pytest.approx(expected(model, prompt, reply.ids, **sampling), abs=1e-4)


# Log-probabilities and weights

@pytest.fixture
def actor(model_path) -> Iterator[LocalActor]:
    sizes = {"rollout__max_tokens": 64, "rollout__max_context": 256}
    settings = load_config("Any-v0", overrides={"actor__lr": 0.02, **sizes})
    actor = LocalActor(ActorSpec(str(model_path), settings, torch.float32, 10))
    yield actor
    actor.close()


async def test_both_engines_and_the_actor_agree_before_and_after_updates_of_many_buckets_in_flight(
        engine, actor, model_path, renderer, play, expected, monkeypatch):
    monkeypatch.setattr(vllm_engine, "buckets", functools.partial(buckets, limit=10_000))
    plain = TransformersEngine(model_path, renderer, dtype=torch.float32, max_context=256, max_sequences=8)
    straddling = version = 0
    while version < 3 or straddling < 3:
        replies = await play(engine, PROMPTS, temperature=0, max_tokens=40)
        others = await play(plain, PROMPTS, temperature=0, max_tokens=40)
        for prompt, reply, other in zip(PROMPTS, replies, others, strict=True):
            assert reply.ids == other.ids
            assert reply.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            scores = actor.logprobs(prompt + reply.ids)
            assert reply.logprobs == pytest.approx(scores[len(prompt) - 1 :], abs=1e-4)
            assert await engine.score(prompt + reply.ids) == pytest.approx(scores, abs=1e-4)
            assert set(reply.versions) == {version}
        futures = engine.submit([Request(prompt, Sampling(max_tokens=200, seed=version)) for prompt in PROMPTS])
        await asyncio.sleep(pause_after(version))
        await engine.pause()
        busy = engine.busy_seconds
        before = actor_of(actor, load_plain(model_path))
        actor.train([[row(prompt + reply.ids, len(prompt)) for prompt, reply in zip(PROMPTS, replies, strict=True)]])
        assert engine.busy_seconds == busy > 0
        await engine.update_weights(actor.weights(), version + 1)
        await engine.resume()
        await plain.pause()
        await plain.update_weights(actor.weights(), version + 1)
        await plain.resume()
        after = actor_of(actor, load_plain(model_path))
        for prompt, reply in zip(PROMPTS, await within(WAIT, *futures), strict=True):
            old = reply.versions.count(version)
            assert reply.versions == [version] * old + [version + 1] * (len(reply.ids) - old)
            assert reply.logprobs[:old] == pytest.approx(expected(before, prompt, reply.ids)[:old], abs=1e-4)
            assert reply.logprobs[old:] == pytest.approx(expected(after, prompt, reply.ids)[old:], abs=1e-4)
            straddling += 0 < old < len(reply.ids)
        version += 1
    await plain.close()


async def test_it_tells_the_likeliest_tokens_under_the_temperature(engine, load, play):
    (reply,) = await play(engine, PROMPTS[:1], temperature=0.7, max_tokens=6, top_logprobs=25)
    with torch.no_grad():
        logits = load()(torch.tensor([PROMPTS[0] + reply.ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
    values, ids = (logits / 0.7).log_softmax(-1).topk(25)
    assert reply.top["id"].tolist() == ids.tolist()
    assert reply.top["logprob"] == pytest.approx(values.numpy(), abs=1e-4)


def row(ids: list[int], start: int) -> TrainRow:
    mask = [int(position >= start) for position in range(len(ids))]
    return TrainRow(ids, mask, [-1.0 * bit for bit in mask], 1.0, 0.01, start, 0)


def load_plain(path: Path) -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def actor_of(actor: LocalActor, model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The actor's weights in plain transformers."""
    model.load_state_dict({name: tensor.clone() for name, tensor in actor.weights()}, strict=False)
    return model


@pytest.mark.parametrize("sampling", [
    {"temperature": 0.6}, {"temperature": 1.8}, {"top_k": 5}, {"top_p": 0.7},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9}])
async def test_logprobs_are_of_the_distribution_that_was_sampled(engine, play, load, expected, sampling):
    check(await play(engine, PROMPTS, **sampling), PROMPTS, load(), expected, **sampling)


async def test_seeds_make_samples_and_a_models_own_defaults_do_not(engine, play):
    first, second = await play(engine, PROMPTS * 3), await play(engine, PROMPTS * 3)
    assert [reply.ids for reply in first] == [reply.ids for reply in second]
    assert len({tuple(reply.ids) for reply in first}) == 15


async def test_many_more_requests_than_fit_are_all_answered(engine, load, expected):
    prompts = [PROMPTS[i % 5] + [30 + i] for i in range(64)]
    requests = [Request(prompt, Sampling(max_tokens=1 + i % 30, seed=i)) for i, prompt in enumerate(prompts)]
    replies = await within(WAIT, *(future for i in range(0, 64, 7) for future in engine.submit(requests[i : i + 7])))
    check(replies, prompts, load(), expected)


async def test_the_probe_sees_weights_that_are_not_the_actors(engine, actor, load, renderer):
    probe = ParityProbe.of(renderer, 256, torch.float32, gpu=False)
    assert len(probe.ids) == 64
    assert await probe.check(engine, actor) < 1e-5
    await update(engine, load(seed=9), 1)
    with pytest.raises(RunFailed, match=r"update to version 1.* -\d+\.\d+ and -\d+\.\d+ a token.*tolerance 0.001"):
        await probe.check(engine, actor)


async def test_weights_with_adapters_in_them_arrive_like_others(engine, model_path, renderer):
    sizes = {"rollout__max_tokens": 64, "rollout__max_context": 256}
    config = load_config("Any-v0", overrides={"actor__lr": 0.02, "actor__lora__rank": 4, "engine": "vllm",
                                              "actor__lora__transfer": "merged", **sizes})
    actor = LocalActor(ActorSpec(str(model_path), config, torch.float32, 10))
    try:
        before = actor.logprobs(PROMPTS[1])
        actor.train([[row(PROMPTS[1], 1)]])
        assert actor.logprobs(PROMPTS[1]) != pytest.approx(before, abs=1e-3)
        await engine.pause()
        await engine.update_weights(actor.weights(), 1)
        await engine.resume()
        assert await ParityProbe.of(renderer, 256, torch.float32, gpu=False).check(engine, actor) < 1e-5
    finally:
        actor.close()


async def test_scores_asked_within_an_update_come_before_all_that_wait(engine, load):
    answered = []
    replies = engine.submit([Request([5, 6 + i], Sampling(max_tokens=60, seed=i)) for i in range(40)])
    await asyncio.sleep(0.1)
    await engine.pause()
    await engine.update_weights(load().named_parameters(), 1)
    before = sum(reply.done() for reply in replies)
    replies += engine.submit([Request([6, 6 + i], Sampling(max_tokens=60, seed=i)) for i in range(40)])
    score = asyncio.ensure_future(engine.score([5, 7, 9]))
    for future in (*replies, score):
        future.add_done_callback(answered.append)
    await asyncio.sleep(0.1)
    await engine.resume()
    await within(WAIT, *replies, score)
    # Of all that wait it would be the last but for the eight in the batch.
    assert answered.index(score) <= before + 24


async def test_weights_are_refused_while_the_engine_runs(engine, load):
    with pytest.raises(RuntimeError, match=r"pause\(\)"):
        await engine.update_weights(load().named_parameters(), 1)
    assert engine.version == 0


# Ends of replies

async def test_a_stop_token_ends_a_reply_and_is_part_of_it(engine, play):
    whole, = await play(engine, [PROMPTS[0]], max_tokens=40, seed=5)
    stop = whole.ids[3]
    cut, = await play(engine, [PROMPTS[0]], max_tokens=40, seed=5, stop_token_ids=(stop,))
    assert cut.ids == whole.ids[: whole.ids.index(stop) + 1]
    assert cut.finish_reason == "stop"


async def test_the_end_of_turn_of_the_template_ends_a_reply(engine, play):
    replies = await play(engine, [[5, 7, 9]] * 16, max_tokens=100, temperature=2.0)
    ended = [reply for reply in replies if reply.finish_reason == "stop"]
    assert ended and all(reply.ids[-1] == STOP and STOP not in reply.ids[:-1] for reply in ended)


async def test_a_stop_string_ends_a_reply_with_the_token_that_completes_it(engine, play, renderer):
    whole, = await play(engine, [PROMPTS[0]], max_tokens=40, seed=5)
    stop = max(re.findall("[a-zA-Z ]{2,}", renderer.decode(whole.ids)), key=len)[:4]
    cut, = await play(engine, [PROMPTS[0]], max_tokens=40, seed=5, stop=("never said", stop))
    assert cut.finish_reason == "stop"
    assert cut.ids == whole.ids[: len(cut.ids)] and len(cut.logprobs) == len(cut.ids)
    assert stop in renderer.decode(cut.ids) and stop not in renderer.decode(cut.ids[:-1])


async def test_max_tokens_and_the_context_cut_a_reply(engine, play):
    prompt = [3 + i % 300 for i in range(253)]
    replies = await play(engine, [[5]] + [prompt] * 20, max_tokens=40)
    assert max(len(reply.ids) for reply in replies[1:]) == 3
    assert {reply.finish_reason for reply in replies if reply.ids[-1] != STOP} == {"length"}


async def test_prompts_that_cannot_be_answered_fail_alone(engine, play):
    long, none, odd, good = engine.submit(
        [Request(ids, Sampling(max_tokens=2)) for ids in ([5] * 256, [], [5, 320], [5])])
    with pytest.raises(PromptTooLong, match=r"256 tokens.*rollout.max_context = 256"):
        await long
    with pytest.raises(ValueError, match="there are none"):
        await none
    with pytest.raises(ValueError, match=r"\[320\].*0 to 319"):
        await odd
    assert len((await within(WAIT, good))[0].ids) <= 2


async def test_cancelled_requests_leave_the_batch_at_once(engine):
    endless = engine.submit([Request([5 + i], Sampling(max_tokens=250, temperature=0)) for i in range(8)])
    short = engine.submit([Request([6], Sampling(max_tokens=2))])
    await asyncio.sleep(0.05)
    for future in endless:
        future.cancel()
    started = time.monotonic()
    await within(WAIT, *short)
    assert time.monotonic() - started < 5
    await until(lambda: not engine._host._calls)


async def test_the_prefix_cache_can_be_reset_while_requests_run(engine, load, expected):
    requests = [Request([5, 6 + i % 50], Sampling(max_tokens=20, seed=i)) for i in range(30)]
    futures = engine.submit(requests)
    await asyncio.sleep(0.03)
    await engine.reset_prefix_cache()
    check(await within(WAIT, *futures), [request.ids for request in requests], load(), expected)


# The process

async def test_an_engine_that_cannot_start_says_why_and_leaves_nothing_but_its_log(make):
    engine = make(engine_args={"load_format": "parchment"})
    flying = engine.submit([Request([5], Sampling())])
    with pytest.raises(RunFailed, match="(?s)exit code 1.*parchment") as failed:
        await asyncio.wait_for(engine.pause(), WAIT)
    with pytest.raises(RunFailed):
        await within(10, *flying)
    await engine.close()
    await until(lambda: not alive(engine._host.pid), 30)
    log = engine._host.log
    assert str(log) in str(failed.value) and log.exists()


async def test_after_an_update_the_cache_serves_as_in_a_fresh_engine_which_is_given_up_when_it_stalls(
        engine, make, play, load, expected, model_path, tmp_path, monkeypatch):
    prompts = [[3 + (i * factor) % 300 for i in range(200)] for factor in (7, 11)]
    await play(engine, prompts, max_tokens=2)
    model = load(seed=3)
    await update(engine, model, 1)
    replies = await play(engine, prompts, max_tokens=20, temperature=0)
    check(replies, prompts, model, expected)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path)
    fresh = make(tmp_path, transfer_timeout=10.0)
    for ours, theirs in zip(replies, await play(fresh, prompts, max_tokens=20, temperature=0), strict=True):
        assert ours.ids == theirs.ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)

    core, = (number for number, words in alive(fresh._host.pid).items() if "EngineCore" in words)
    monkeypatch.setattr(vllm_engine, "CALL_TIMEOUT", 0.5)
    os.kill(core, signal.SIGSTOP)
    with pytest.raises(RunFailed, match=r"did not answer within 0.5 s \(pause\)"):
        await fresh.pause()
    os.kill(core, signal.SIGCONT)
    monkeypatch.setattr(vllm_engine, "CALL_TIMEOUT", WAIT)
    await fresh.resume()
    await play(fresh, PROMPTS)
    await fresh.pause()

    monkeypatch.setattr(HostProcess, "call", stalls_at("receive", HostProcess.call))
    started = time.monotonic()
    with pytest.raises(RunFailed, match=r"did not answer within 10 s \(receive\)"):
        await fresh.update_weights(load().named_parameters(), 2)
    assert 10 <= time.monotonic() - started < WAIT
    await until(lambda: not alive(fresh._host.pid), 30)
    await asyncio.wait_for(fresh.close(), 30)


def stalls_at(method: str, call: Callable) -> Callable:
    """As a machine that is frozen: all processes of the engine stop."""
    def stalling(host, name, *arguments):
        if name == method:
            os.killpg(host.pid, signal.SIGSTOP)
        return call(host, name, *arguments)

    return stalling


# The last test, as it takes the shared engine away.
async def test_an_engine_that_is_killed_fails_all_who_wait_and_leaves_nothing(engine):
    flying = engine.submit([Request(prompt, Sampling(max_tokens=250, temperature=0)) for prompt in PROMPTS])
    group = engine._host.pid
    assert len(alive(group)) >= 2
    os.kill(group, signal.SIGKILL)
    for future in flying:
        with pytest.raises(RunFailed, match=r"exit code -9.*engine\.log"):
            await asyncio.wait_for(future, 10)
    for late in (engine.pause(), *engine.submit([Request([5], Sampling())])):
        with pytest.raises(RunFailed, match="exit code -9"):
            await asyncio.wait_for(late, 10)
    await engine.resume()
    await until(lambda: not alive(group), 30)
    await asyncio.wait_for(engine.close(), 10)
