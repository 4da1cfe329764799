"""What a request says about sampling: honoured, overridden and named, or refused; never dropped in silence."""

import json

import anthropic
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from molt_gym.server.respond import Rules, TokenRespondent
from molt_gym.tokens import Generation, Renderer, Sampling

END, NEWLINE = 257, 10
OK = {"role": "user", "content": "ok"}
HELLO = [262, 264, END]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

pytestmark = pytest.mark.timeout(60)
every_wire = pytest.mark.parametrize("name", ["chat", "responses", "messages"])


@every_wire
async def test_a_conversation_that_is_too_long_is_named_so_and_the_branch_goes_on(agent_of, engine, wire, name):
    agent = agent_of(max_context=48, max_retries=2)
    first = await agent.ask(name, OK)
    history = [OK, *wire.said(first)]
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="83 tokens.* 48") as refused:
        await agent.ask(name, *history, {"role": "user", "content": "x" * 40})
    assert refused.value.status_code == 400 and agent.session.overflowed and len(engine.received) == 1
    if name == "messages":
        assert refused.value.body["error"]["message"].startswith("prompt is too long")
    else:
        assert refused.value.code == "context_length_exceeded"
    await agent.ask(name, *history, OK)
    assert not agent.session.overflowed and len(agent.rows) == 1 and engine.samplings[-1].max_tokens == 4


async def test_a_prompt_that_fills_the_context_to_its_last_token_leaves_room_for_one(agent_of, engine):
    reply = await agent_of(max_context=21).chat(OK)
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 1)
    with pytest.raises(openai.BadRequestError, match="20 tokens.* 20"):
        await agent_of(max_context=20).chat(OK)


@every_wire
async def test_the_runs_cap_holds_and_is_named(agent_of, engine, name):
    agent = agent_of(max_tokens=2)
    create = {"chat": agent.openai.chat.completions, "responses": agent.openai.responses,
              "messages": agent.anthropic.messages}[name].with_raw_response.create
    more = {"chat": {"max_tokens": 9, "messages": [OK]}, "responses": {"max_output_tokens": 9, "input": "ok"},
            "messages": {"max_tokens": 9, "messages": [OK]}}[name]
    raw = await create(model="m", **more)
    assert raw.headers["x-molt-gym-ignored"] == "max_tokens" and engine.samplings[0].max_tokens == 2
    less = more | ({"max_output_tokens": 1} if name == "responses" else {"max_tokens": 1})
    assert "x-molt-gym-ignored" not in (await create(model="m", **less)).headers


@every_wire
async def test_the_runs_temperature_holds_while_it_trains_and_is_named(agent_of, engine, wire, name):
    agent = agent_of()
    body = {"model": "m", "messages": [OK], "input": "ok", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
    for stream in (False, True):
        async with streaming(agent, wire.paths[name], body | {"stream": stream}) as response:
            assert response.headers["x-molt-gym-ignored"] == "temperature, top_p"
    assert [(s.temperature, s.top_p) for s in engine.samplings] == [(1.0, 1.0)] * 2
    own = agent_of(free=True)
    status, headers, _ = await wire.post(own.session, wire.paths[name], body)
    assert status == 200 and "x-molt-gym-ignored" not in headers
    assert (engine.samplings[-1].temperature, engine.samplings[-1].top_p) == (0.5, 0.9)
    assert (await wire.post(own.session, wire.paths[name], body | {"top_p": 0}))[0] == 200
    assert 0 < engine.samplings[-1].top_p < 1e-5
    same = await wire.post(agent.session, wire.paths[name], body | {"temperature": 1.0, "top_p": 1})
    assert "x-molt-gym-ignored" not in same[1]


def streaming(agent, path, body):
    from contextlib import asynccontextmanager

    import aiohttp

    @asynccontextmanager
    async def opened():
        async with aiohttp.ClientSession(headers={"x-api-key": agent.session.key}) as client:
            async with client.post(agent.session.url + path, json=body) as response:
                assert response.status == 200
                yield response
                await response.read()
    return opened()


async def test_three_choices_are_three_samples_of_one_prompt(agent, engine, prompt_ids):
    engine.script = [HELLO, [266, END], [262, END]]
    reply = await agent.chat(OK, n=3)
    assert [choice.message.content for choice in reply.choices] == ["hello", "ok", "he"]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (20, 7)
    assert engine.received == [prompt_ids] * 3 and agent.session.turns == 3
    assert [row.ids[20:] for row in agent.rows] == [HELLO, [266, END], [262, END]]
    engine.script = [[264, END]]
    await agent.chat(OK, reply.choices[1].message, OK)
    assert engine.received[3] == prompt_ids + [266, END, NEWLINE] + prompt_ids


async def test_if_one_of_the_choices_fails_none_is_recorded(agent, engine):
    engine.script = [HELLO, RuntimeError("down"), HELLO]
    with pytest.raises(openai.InternalServerError, match="down"):
        await agent.chat(OK, n=3)
    assert (agent.session.turns, agent.rows, engine.running) == (0, [], 0)
    assert len((await agent.chat(OK, n=3)).choices) == 3 and len(agent.rows) == 3


async def test_logprobs_are_those_recorded(agent_of, engine, renderer_of):
    agent = agent_of()
    engine.always = [0xF0, 0x9F, 0x98, 0x80, 264, END]
    chat = (await agent.chat(OK, logprobs=True)).choices[0].logprobs.content
    reply = await agent.responses(OK, include=["message.output_text.logprobs"])
    (text,) = [part for item in reply.output if item.type == "message" for part in item.content]
    for row, tokens in zip(agent.rows, (chat, text.logprobs), strict=True):
        assert [token.logprob for token in tokens] == row.logprobs[20:]
        assert tokens[4].token == "llo" and bytes(tokens[4].bytes) == b"llo" and tokens[5].token == "<|im_end|>"
    assert (await agent.chat(OK)).choices[0].logprobs is None


async def test_texts_of_tokens_keep_the_spaces_between_words_where_a_text_is_decoded_without_its_first(server):
    letters = [*"▁<|user>astin:\n", "</s>", "▁he", "▁ok", "he"]
    backend = Tokenizer(models.BPE({token: place for place, token in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    template = "{% for m in messages %}{{ m.role ~ m.content ~ '</s>' }}{% endfor %}{{ 'assistant:' }}"
    renderer = Renderer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template))
    sampled = [letters.index(token) for token in ("▁he", "he", "▁ok", "</s>")]

    async def generate(ids, *_):
        return Generation(sampled, [-1.0] * 4, [0] * 4, "stop")

    session = server.open(TokenRespondent(renderer, generate, Rules(Sampling(8), 99)))
    async with openai.AsyncOpenAI(base_url=f"{session.url}/v1", api_key=session.key) as client:
        choice = (await client.chat.completions.create(model="m", messages=[OK], logprobs=True)).choices[0]
    assert choice.message.content == "hehe ok"
    assert [token.token for token in choice.logprobs.content] == ["he", "he", " ok", "</s>"]


@pytest.mark.parametrize("name", ["chat", "messages"])
async def test_a_stop_string_ends_the_reply_and_its_ids_are_kept(agent, engine, wire, name):
    sampled = [262, 264, *b" STOP"]
    engine.script = [[*sampled, END]]
    stop = {"stop": ["STOP", "never"]} if name == "chat" else {"stop_sequences": ["STOP", "never"]}
    reply = await agent.ask(name, OK, **stop)
    assert wire.text_of(reply) == "hello " and engine.samplings[0].stop == ("STOP", "never")
    if name == "messages":
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "STOP")
    else:
        assert reply.choices[0].finish_reason == "stop"
    assert agent.rows[0].ids[20:] == sampled
    plain = await agent.messages(OK, stop_sequences=["never"])
    assert (plain.stop_reason, plain.stop_sequence) == ("end_turn", None)


IMAGES = {
    "chat": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
    "responses": {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
}


@every_wire
async def test_an_image_is_refused_where_the_model_sees_none(agent, engine, wire, name):
    text = {"type": "input_text" if name == "responses" else "text", "text": "ok"}
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="image") as refused:
        await agent.ask(name, {"role": "user", "content": [text, IMAGES[name]]})
    assert refused.value.status_code in (400, 422)
    assert (engine.received, agent.rows, agent.session.failure) == ([], [], None)
    assert wire.text_of(await agent.ask(name, {"role": "user", "content": [text]})) == "hello"
    assert len(engine.received[0]) == 20


@pytest.mark.parametrize("name, options", [
    ("chat", {"response_format": {"type": "json_object"}}), ("chat", {"presence_penalty": 1.0}),
    ("chat", {"logprobs": True, "top_logprobs": 2}), ("responses", {"text": {"format": {"type": "json_object"}}}),
    ("responses", {"tools": [{"type": "web_search"}]}),
    ("messages", {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}),
])
async def test_what_cannot_be_honoured_is_unprocessable(agent, engine, name, options):
    with pytest.raises((openai.UnprocessableEntityError, anthropic.UnprocessableEntityError)) as refused:
        await agent.ask(name, OK, **options)
    assert refused.value.status_code == 422 and engine.received == []


@every_wire
async def test_unknown_fields_are_accepted(agent, engine, name):
    await agent.ask(name, OK, extra_body={"novel": {"deep": [1]}, "metadata": {"user_id": "u"}, "user": "u"})
    assert len(engine.received) == 1


async def test_a_changing_billing_line_does_not_change_the_prompt(agent, engine, wire):
    def system(nonce: str) -> list[dict]:
        header = {"type": "text", "text": f"x-anthropic-billing-header: v=1; cch={nonce};"}
        return [header, {"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}}]

    first = await agent.messages(OK, system=system("aaaaa"), metadata={"user_id": "u"})
    await agent.messages(OK, *wire.said(first), OK, system=system("bbbbb"))
    prompt = [256, *b"system\nYou are ", 262, *b"lpful.", END, NEWLINE, *engine.received[0][-20:]]
    assert engine.received[0] == prompt and len(agent.rows) == 1
    assert engine.received[1] == prompt + HELLO + [NEWLINE] + prompt[-20:]
    await agent.messages(OK, system="You are helpful.")
    assert engine.received[2] == prompt


async def test_counted_tokens_are_those_of_the_prompt(agent, agent_of, engine):
    count = agent.anthropic.messages.count_tokens
    assert (await count(model="m", messages=[OK])).input_tokens == 20
    assert (await count(model="m", messages=[OK], system="ok")).input_tokens == 31
    with pytest.raises(anthropic.BadRequestError):
        await count(model="m", messages=[])
    assert (engine.received, agent.session.turns) == ([], 0)
    long = {"role": "user", "content": "x" * 60_000}
    assert (await count(model="m", messages=[long])).input_tokens == 60_019 and not agent.session.overflowed
    tools = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
    await (other := agent_of("tools")).messages(OK, tools=tools)
    counted = await other.anthropic.messages.count_tokens(model="m", messages=[OK], tools=tools)
    assert counted.input_tokens == len(engine.received[0])


@pytest.mark.parametrize("text", ["\ud800", "\x00", "\u2028\x85\x0b", "😀" * 50, "", " ", "e\u0301"])
async def test_any_text_can_be_said(agent, engine, wire, text):
    body = {"model": "m", "max_tokens": 9, "messages": [OK | {"content": text}], "input": [OK | {"content": text}]}
    for path in wire.paths.values():
        status, _, answer = await wire.post(agent.session, path, json.dumps(body).encode())
        assert status == 200, answer
    assert engine.received[0] == engine.received[1] == engine.received[2]
