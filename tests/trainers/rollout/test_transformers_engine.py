import asyncio
import gc
import threading
import time
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config

from molt_gym.errors import ConfigError, PromptTooLong
from molt_gym.tokens import Sampling
from molt_gym.trainers.rollout import transformers_engine
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.transformers_engine import TransformersEngine

STOP = 2
PROMPTS = [[5, 7, 9], [1, 40, 300, 17, 200], [11], list(range(20, 60)), [5, 7, 9, 100]]


async def within(seconds, *futures):
    return await asyncio.wait_for(asyncio.gather(*futures), seconds)


async def until(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def shifted(model, scale=0.05, seed=1):
    """Moves the model's weights, and returns them by name."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


async def update(engine, weights, version):
    await engine.pause()
    await engine.update_weights(weights, version)
    await engine.resume()


def check(replies, prompts, model, expected, **sampling):
    for reply, prompt in zip(replies, prompts, strict=True):
        assert reply.logprobs == pytest.approx(expected(model, prompt, reply.ids, **sampling), abs=1e-4)


# Log-probabilities

async def test_logprobs_are_those_of_a_plain_forward_pass(engine, play, tiny_model, expected):
    replies = await play(engine, PROMPTS)
    check(replies, PROMPTS, tiny_model, expected)
    assert all(len(r.ids) == len(r.logprobs) == len(r.versions) for r in replies)


@pytest.mark.parametrize("sampling", [
    {"temperature": 0.6}, {"temperature": 1.8}, {"top_k": 5}, {"top_p": 0.7},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9}])
async def test_logprobs_are_of_the_distribution_that_was_sampled(engine, play, tiny_model, expected, sampling):
    check(await play(engine, PROMPTS, **sampling), PROMPTS, tiny_model, expected, **sampling)


async def test_requests_join_and_leave_a_running_batch(make_engine, tiny_model, expected):
    engine = make_engine(max_sequences=3)
    prompts = [PROMPTS[i % len(PROMPTS)] + [30 + i] for i in range(12)]
    futures = []
    for number, prompt in enumerate(prompts):
        futures += engine.submit([Request(prompt, Sampling(max_tokens=3 + 5 * (number % 4), seed=number))])
        await asyncio.sleep(0.004)
    check(await within(20, *futures), prompts, tiny_model, expected)


async def test_equal_prompts_share_their_prefill_but_not_their_sample(engine, play, tiny_model, expected):
    prompts = [PROMPTS[3], PROMPTS[1], PROMPTS[3], PROMPTS[3], PROMPTS[1]]
    replies = await play(engine, prompts)
    check(replies, prompts, tiny_model, expected)
    assert len({tuple(reply.ids) for reply in replies}) == 5


async def test_a_conversation_that_goes_on_starts_from_what_its_last_turn_left(engine, play, tiny_model, expected):
    prompts = PROMPTS
    for turn in range(3):
        replies = await play(engine, prompts, seed=100 * turn, max_tokens=6)
        check(replies, prompts, tiny_model, expected)
        prompts = [prompt + reply.ids + [4, 8 + turn] for prompt, reply in zip(prompts, replies, strict=True)]


async def test_two_goes_on_from_one_conversation(engine, play, tiny_model, expected):
    first, = await play(engine, [PROMPTS[3]], max_tokens=6)
    path = PROMPTS[3] + first.ids
    prompts = [path + [9], path + [9, 10, 11], path + [12], path[:-2] + [70], path]
    check(await play(engine, prompts), prompts, tiny_model, expected)


async def test_long_prompts_are_computed_in_several_passes(make_engine, play, tiny_model, expected):
    engine = make_engine(max_context=1024)
    lengths = {7: 900, 11: 900, 13: 850, 17: 20, 19: 300}
    prompts = [[3 + (i * factor) % 300 for i in range(length)] for factor, length in lengths.items()]
    check(await play(engine, prompts, max_tokens=4), prompts, tiny_model, expected)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
async def test_models_of_other_kinds_are_computed_rightly(tmp_path, renderer, play, expected, kind):
    config = AutoConfig.for_model(
        kind, vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, initializer_range=0.3, head_dim=16, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(tmp_path)
    engine = TransformersEngine(tmp_path, renderer, dtype=torch.float32, max_context=64, max_sequences=4)
    check(await play(engine, PROMPTS), PROMPTS, model, expected)
    await engine.close()


async def test_an_engine_in_bfloat16_computes_what_the_model_does_in_bfloat16(make_engine, play, tiny_model, expected):
    engine = make_engine(dtype=torch.bfloat16)
    replies = await play(engine, PROMPTS)
    for reply, prompt in zip(replies, PROMPTS, strict=True):
        assert reply.logprobs == pytest.approx(expected(tiny_model.bfloat16(), prompt, reply.ids), abs=0.25)


async def test_samples_follow_the_softmax(make_engine, tiny_model):
    engine = make_engine(max_sequences=64)
    prompt, count = [5, 7, 9], 2000
    requests = [Request(prompt, Sampling(max_tokens=1, temperature=0.8, seed=seed)) for seed in range(count)]
    replies = await within(20, *engine.submit(requests))
    observed = torch.bincount(torch.tensor([reply.ids[0] for reply in replies]), minlength=320).double()
    with torch.no_grad():
        p = (tiny_model(torch.tensor([prompt])).logits[0, -1].double() / 0.8).softmax(-1) * count
    likely = p > 5
    statistic = ((observed - p)[likely] ** 2 / p[likely]).sum() + (observed - p)[~likely].sum() ** 2 / p[~likely].sum()
    degrees = int(likely.sum())
    assert degrees >= 10
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


# Determinism

async def test_equal_seeds_give_equal_replies_whatever_else_is_in_the_batch(make_engine, play):
    together = await play(make_engine(), PROMPTS)
    alone = [(await play(make_engine(), [prompt], seed=number))[0] for number, prompt in enumerate(PROMPTS)]
    assert [reply.ids for reply in alone] == [reply.ids for reply in together]
    engine = make_engine(max_sequences=2)
    requests = [Request(prompt, Sampling(max_tokens=12, seed=number)) for number, prompt in enumerate(PROMPTS)]
    backwards = await within(20, *engine.submit(requests[::-1]))
    assert [reply.ids for reply in backwards[::-1]] == [reply.ids for reply in together]


async def test_the_same_requests_in_the_same_order_give_the_same_bits(make_engine, play):
    assert await play(make_engine(), PROMPTS * 3) == await play(make_engine(), PROMPTS * 3)


async def test_temperature_zero_is_greedy(engine, play, tiny_model):
    reply, = await play(engine, [PROMPTS[0]], temperature=0, max_tokens=4)
    ids = list(PROMPTS[0])
    with torch.no_grad():
        for token in reply.ids:
            assert token == tiny_model(torch.tensor([ids])).logits[0, -1].argmax()
            ids.append(token)


# Ends

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
    text = renderer.decode(whole.ids[:8])
    stop = text[-3:]
    cut, = await play(engine, [PROMPTS[0]], max_tokens=40, seed=5, stop=("never said", stop))
    assert cut.finish_reason == "stop"
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert stop in renderer.decode(cut.ids) and stop not in renderer.decode(cut.ids[:-1])


async def test_max_tokens_and_the_context_cut_a_reply(engine, play):
    reply, = await play(engine, [[5]], max_tokens=1, stop_token_ids=())
    assert (len(reply.ids), reply.finish_reason) == (1, "length")
    prompt = [3 + i % 300 for i in range(253)]
    replies = await play(engine, [prompt] * 20, max_tokens=40)
    assert max(len(reply.ids) for reply in replies) == 3
    assert {reply.finish_reason for reply in replies if reply.ids[-1] != STOP} == {"length"}


async def test_a_prompt_that_fills_the_context_is_refused_and_others_are_not(engine):
    long, short = engine.submit([Request([5] * 256, Sampling()), Request([5] * 255, Sampling())])
    with pytest.raises(PromptTooLong, match=r"256 tokens.*rollout.max_context = 256"):
        await within(10, long)
    assert len((await within(10, short))[0].ids) == 1


@pytest.mark.parametrize(("ids", "named"), [([], "there are none"), ([5, 320], r"\[320\]"), ([5, -1], r"\[-1\]")])
async def test_ids_that_the_model_does_not_have_fail_their_request_alone(engine, play, ids, named):
    bad, good = engine.submit([Request(ids, Sampling()), Request([5], Sampling(max_tokens=2))])
    with pytest.raises(ValueError, match=named + ".*0 to 319"):
        await within(10, bad)
    await within(10, good)
    await play(engine, [[5]])


async def test_a_model_with_a_cache_of_another_kind_is_refused(tmp_path):
    DeepseekV3Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model: deepseek_v3 keeps compressed keys .* write rollout.engine = 'vllm'"):
        TransformersEngine(tmp_path, None, dtype=torch.float32, max_context=64, max_sequences=1)


async def test_a_context_longer_than_the_models_is_refused(make_engine):
    with pytest.raises(ConfigError, match="rollout.max_context"):
        make_engine(max_context=4096)


# Weights

async def test_new_weights_are_used_from_then_on(engine, play, tiny_model, expected):
    before = await play(engine, PROMPTS)
    await update(engine, shifted(tiny_model), 1)
    after = await play(engine, PROMPTS)
    check(after, PROMPTS, tiny_model, expected)
    assert [reply.ids for reply in before] != [reply.ids for reply in after]
    assert {v for r in before for v in r.versions} == {0} and {v for r in after for v in r.versions} == {1}


async def test_what_old_weights_left_is_not_used_after_an_update(engine, play, tiny_model, expected):
    replies = await play(engine, PROMPTS)
    prompts = [prompt + reply.ids + [9] for prompt, reply in zip(PROMPTS, replies, strict=True)]
    await update(engine, shifted(tiny_model), 1)
    check(await play(engine, prompts), prompts, tiny_model, expected)


@pytest.mark.parametrize("version", [0, 1])
async def test_what_was_in_flight_during_an_update_is_not_used_after_it(engine, play, tiny_model, expected, version):
    flying = engine.submit([Request(PROMPTS[3], Sampling(max_tokens=150, seed=1))])[0]
    await until(lambda: engine.busy_seconds > 0)
    await update(engine, shifted(tiny_model), version)
    reply, = await within(10, flying)
    prompt = PROMPTS[3] + reply.ids + [9]
    check(await play(engine, [prompt]), [prompt], tiny_model, expected)


async def test_a_request_in_flight_goes_on_and_its_versions_change_at_the_update(engine, tiny_model, expected):
    old = {name: parameter.clone() for name, parameter in tiny_model.named_parameters()}
    requests = [Request(prompt, Sampling(max_tokens=120, seed=number)) for number, prompt in enumerate(PROMPTS)]
    futures = engine.submit(requests)
    await until(lambda: engine.busy_seconds > 0)
    await engine.pause()
    busy = engine.busy_seconds
    await asyncio.sleep(0.05)
    assert engine.busy_seconds == busy
    await engine.update_weights(shifted(tiny_model), 7)
    await engine.resume()
    replies = await within(20, *futures)
    tiny_model.load_state_dict(old, strict=False)
    straddling = 0
    for reply, prompt in zip(replies, PROMPTS, strict=True):
        before = reply.versions.count(0)
        assert reply.versions == [0] * before + [7] * (len(reply.ids) - before)
        sampled_before = expected(tiny_model, prompt, reply.ids)[:before]
        assert reply.logprobs[:before] == pytest.approx(sampled_before, abs=1e-4)
        if before < len(reply.ids):
            straddling += 1
            assert abs(reply.logprobs[before] - expected(tiny_model, prompt, reply.ids)[before]) > 1e-4
    assert straddling


async def test_weights_are_refused_while_the_engine_runs(engine, tiny_model):
    with pytest.raises(RuntimeError, match=r"pause\(\)"):
        await engine.update_weights(tiny_model.named_parameters(), 1)
    assert engine.version == 0


def fail() -> None:
    raise ValueError("a rank died")


@pytest.mark.parametrize(("change", "message"), [
    (lambda weights: [*weights, ("model.extra.weight", torch.zeros(2))], r"model\.extra\.weight of shape \(2,\)"),
    (lambda weights: weights[:-1], r"1 parameters were not sent, such as model\.norm\.weight"),
    (lambda weights: [*weights[:-1], ("model.norm.weight", torch.zeros(63))], r"model\.norm\.weight of shape \(63,\)"),
    (lambda weights: [*weights[:-1], ("model.norm.weight", torch.zeros(1))], r"model\.norm\.weight of shape \(1,\)"),
    (lambda weights: (weights[number] if number < 3 else fail() for number in range(9)), "a rank died"),
])
async def test_weights_that_do_not_fit_are_named_and_can_be_sent_again(
        engine, play, tiny_model, expected, change, message):
    weights = shifted(tiny_model)
    await engine.pause()
    with pytest.raises(ValueError, match=message):
        await engine.update_weights(change(weights), 1)
    assert engine.version == 0
    await engine.update_weights(weights, 2)
    await engine.resume()
    replies = await play(engine, PROMPTS)
    check(replies, PROMPTS, tiny_model, expected)
    assert {version for reply in replies for version in reply.versions} == {2}


async def test_a_reset_prefix_cache_leaves_nothing_to_later_requests(make_engine, play):
    engine, fresh = make_engine(), make_engine()
    reply, = await play(engine, [PROMPTS[3]], max_tokens=30)
    prompts = [PROMPTS[3] + reply.ids + [9, 10], PROMPTS[1]]
    await engine.reset_prefix_cache()
    assert await play(engine, prompts) == await play(fresh, prompts)


async def test_the_prefix_cache_can_be_reset_at_any_time(make_engine):
    engine = make_engine(max_sequences=4)
    futures = engine.submit([Request([5, 6 + i % 50], Sampling(max_tokens=2, seed=i)) for i in range(100)])
    while not all(future.done() for future in futures):
        await engine.reset_prefix_cache()
        await asyncio.sleep(0.0005)
    await within(1, *futures)


# Ends of requests and of the engine

async def test_a_cancelled_request_frees_its_slot_at_once(make_engine):
    engine = make_engine(max_sequences=1, max_context=1024)
    endless = engine.submit([Request([5], Sampling(max_tokens=1000, temperature=0, stop_token_ids=()))])[0]
    queued = engine.submit([Request([5], Sampling(max_tokens=1000)), Request([6], Sampling(max_tokens=2))])
    await until(lambda: engine.busy_seconds > 0)
    assert not endless.done()
    endless.cancel()
    queued[0].cancel()
    # Far less than the thousand tokens of the others take.
    await within(5, queued[1])


async def test_engines_can_be_made_in_several_threads_at_a_time(make_engine, play):
    engines = await asyncio.gather(*(asyncio.to_thread(make_engine) for _ in range(4)))
    replies = [(await play(engine, PROMPTS[:2]))[1].ids for engine in engines]
    assert replies == replies[:1] * 4


async def test_cancelling_some_leaves_the_others_as_they_were(make_engine, play, tiny_model, expected):
    engine = make_engine()
    requests = [Request(PROMPTS[i % 5] + [30 + i], Sampling(max_tokens=60, seed=i)) for i in range(8)]
    futures = engine.submit(requests)
    await until(lambda: engine.busy_seconds > 0)
    for future in (futures[0], futures[3], futures[6]):
        future.cancel()
    left = [number for number in range(8) if number not in (0, 3, 6)]
    replies = await within(20, *(futures[number] for number in left))
    check(replies, [requests[number].ids for number in left], tiny_model, expected)


async def test_closing_fails_what_waits_and_what_comes_later(make_engine):
    engine = make_engine(max_sequences=1, max_context=1024)
    futures = engine.submit([Request([5 + i], Sampling(max_tokens=1000, temperature=0)) for i in range(3)])
    await asyncio.wait_for(engine.close(), 5)
    await asyncio.wait_for(engine.close(), 5)
    for future in (*futures, *engine.submit([Request([5], Sampling())])):
        with pytest.raises(RuntimeError, match="closed"):
            await within(1, future)


async def test_an_engine_is_closed_amid_many_long_prompts(make_engine, monkeypatch):
    engine, passes, begun = make_engine(max_sequences=32), [], threading.Event()
    forward = engine._forward

    def slow(*arguments, **options):
        passes.append(1)
        begun.set()
        time.sleep(0.02)
        return forward(*arguments, **options)

    monkeypatch.setattr(engine, "_forward", slow)
    monkeypatch.setattr(transformers_engine, "PREFILL_TOKENS", 1)
    replies = engine.submit([Request([number, 9], Sampling(max_tokens=1)) for number in range(3, 35)])
    await asyncio.to_thread(begun.wait, 10)
    await asyncio.wait_for(engine.close(), 5)
    assert len(passes) < 32
    with pytest.raises(RuntimeError, match="closed"):
        await within(5, *replies)


async def test_a_paused_engine_can_be_closed(engine):
    await engine.pause()
    future, = engine.submit([Request([5], Sampling())])
    await asyncio.wait_for(engine.close(), 5)
    with pytest.raises(RuntimeError, match="closed"):
        await within(1, future)


async def test_closing_an_engine_lets_its_memory_go(tiny_path, renderer):
    engine = TransformersEngine(tiny_path, renderer, dtype=torch.float32, max_context=64, max_sequences=2)
    await within(10, *engine.submit([Request([5], Sampling(max_tokens=2))]))
    await engine.close()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


class Faulty:
    """A renderer whose decoding fails, as that of a broken tokenizer would; the engine decodes for stop strings."""

    stop_token_ids, vision = (STOP,), None

    def decode(self, ids):
        raise OSError("no space on device")


async def test_an_error_in_the_engine_reaches_all_who_wait_and_later_ones(make_engine):
    engine = make_engine(renderer=Faulty(), max_sequences=2)
    requests = [Request([5 + i], Sampling(max_tokens=200, temperature=0)) for i in range(5)]
    requests[1] = Request([7], Sampling(stop=("x",)))
    futures = engine.submit(requests)
    for future in (*futures, *engine.submit([Request([5], Sampling())])):
        with pytest.raises(OSError, match="no space"):
            await within(10, future)
    await asyncio.wait_for(engine.pause(), 5)
    await engine.resume()
    await asyncio.wait_for(engine.close(), 5)
