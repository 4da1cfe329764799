"""Requests that are sent again, that fail, and that nobody waits for any more."""

import asyncio
import json
import time

import anthropic
import openai
import pytest

from molt_gym.errors import RunFailed

END, NEWLINE = 257, 10
OK = {"role": "user", "content": "ok"}
HELLO = [262, 264, END]

pytestmark = pytest.mark.timeout(60)
every_wire = pytest.mark.parametrize("name", ["chat", "responses", "messages"])
BODIES = {
    "chat": {"model": "m", "messages": [OK]},
    "responses": {"model": "m", "input": [OK]},
    "messages": {"model": "m", "messages": [OK], "max_tokens": 64},
}


@every_wire
async def test_the_same_body_again_is_answered_from_the_record(agent, engine, wire, name):
    first = await wire.post(agent.session, wire.paths[name], BODIES[name])
    again = await wire.post(agent.session, wire.paths[name], BODIES[name])
    assert first[0] == 200 and first[2] == again[2]
    assert (len(engine.received), agent.session.turns, len(agent.rows)) == (1, 1, 1)


@every_wire
async def test_the_same_body_twice_at_once_is_one_turn(agent, engine, wire, name):
    engine.seconds = 0.05
    first, again = await asyncio.gather(*(wire.post(agent.session, wire.paths[name], BODIES[name]) for _ in range(2)))
    assert first[0] == 200 and first[2] == again[2]
    assert (len(engine.received), agent.session.turns, len(agent.rows)) == (1, 1, 1)


@every_wire
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_of_a_stream_or_reply_whose_bytes_were_lost_says_the_same(agent, engine, wire, name, stream):
    bodies = []
    for attempt in ("0", "1", "2"):
        bodies.append(await raw(agent.session, wire.paths[name], BODIES[name] | {"stream": stream}, attempt))
    assert bodies[0] == bodies[1] == bodies[2] and len(engine.received) == 1


async def raw(session, path, body, attempt) -> bytes:
    import aiohttp

    headers = {"x-api-key": session.key, "x-stainless-retry-count": attempt}
    async with aiohttp.ClientSession() as client:
        async with client.post(session.url + path, json=body, headers=headers) as response:
            assert response.status == 200
            return await response.read()


@every_wire
async def test_the_sdk_tries_again_after_a_failure_on_the_first_and_on_a_later_turn(agent_of, engine, wire, name):
    agent = agent_of(max_retries=2)
    engine.script = [RuntimeError("down"), HELLO, RuntimeError("down"), [266, END]]
    first = await agent.ask(name, OK)
    assert (len(engine.received), agent.session.turns, agent.graph.turns) == (2, 1, 1)
    second = await agent.ask(name, OK, *wire.said(first), OK)
    assert wire.text_of(second) == "ok" and (len(engine.received), agent.session.turns) == (4, 2)
    prompt = engine.received[0]
    assert engine.received[1] == prompt
    assert engine.received[2] == engine.received[3] == prompt + HELLO + [NEWLINE] + prompt
    (row,) = agent.rows
    assert row.ids == engine.received[3] + [266, END] and sum(row.mask) == 5
    assert agent.session.failure is None


@every_wire
async def test_a_failure_that_is_not_tried_again_leaves_the_record_as_it_was(agent, engine, wire, name):
    first = await agent.ask(name, OK)
    rows = agent.rows
    engine.script = [RuntimeError("down")]
    with pytest.raises((openai.InternalServerError, anthropic.APIStatusError), match="down") as failed:
        await agent.ask(name, OK, *wire.said(first), OK)
    assert failed.value.status_code == 503 and failed.value.response.headers["x-should-retry"] == "true"
    assert agent.rows == rows and agent.session.turns == 1 and str(agent.session.failure) == "down"


async def test_equal_bodies_of_two_sessions_are_two_turns(agent_of, engine, wire):
    one, other = agent_of(), agent_of()
    replies = [await wire.post(agent.session, wire.paths["chat"], BODIES["chat"]) for agent in (one, other)]
    assert len(engine.received) == 2 and replies[0][2]["id"] != replies[1][2]["id"]
    assert (one.session.turns, other.session.turns, len(one.rows), len(other.rows)) == (1, 1, 1, 1)


async def test_an_sdk_that_asks_the_same_again_gets_another_sample(agent, engine):
    engine.script = [HELLO, [266, END]]
    replies = [(await agent.chat(OK)).choices[0].message.content for _ in range(2)]
    assert replies == ["hello", "ok"] and agent.session.turns == 2


@pytest.mark.parametrize("path, other", [("/v1/chat/completions", "/v1/messages"), ("/v1/messages/", "/v1/messages")])
async def test_a_body_is_a_retry_only_on_the_same_route(agent, engine, wire, path, other):
    first = await wire.post(agent.session, path, BODIES["messages"])
    second = await wire.post(agent.session, other, BODIES["messages"])
    assert first[0] == second[0] == 200
    assert len(engine.received) == (1 if path.rstrip("/") == other else 2)


@every_wire
async def test_an_engine_that_always_fails_is_called_once_an_attempt(agent_of, engine, name):
    agent = agent_of(max_retries=2)
    engine.script = [RuntimeError("down")] * 9
    with pytest.raises((openai.InternalServerError, anthropic.APIStatusError), match="down"):
        await agent.ask(name, OK)
    assert len(engine.received) == 3 and (agent.session.turns, agent.rows) == (0, [])
    assert isinstance(agent.session.failure, RuntimeError)


@every_wire
async def test_an_engine_that_has_ended_is_not_asked_again(agent_of, engine, name):
    agent = agent_of(max_retries=2)
    engine.script = [RunFailed("no engine is left")] * 9
    with pytest.raises((openai.InternalServerError, anthropic.APIStatusError), match="no engine is left"):
        await agent.ask(name, OK)
    assert len(engine.received) == 1 and isinstance(agent.session.failure, RunFailed)


@every_wire
async def test_a_slow_reply_is_waited_for_and_generated_once(agent_of, engine, wire, name, monkeypatch):
    for limit in ("streaming.KEEP_ALIVE", "server.BODY_TIMEOUT", "server.SHUTDOWN_TIMEOUT"):
        monkeypatch.setattr(f"molt_gym.server.{limit}", 0.1)
    agent, engine.seconds = agent_of(max_retries=2), 0.3
    assert wire.text_of(await agent.ask(name, OK)) == "hello"
    assert (len(engine.received), engine.aborted, agent.session.turns) == (1, 0, 1)


@every_wire
async def test_a_deadline_is_not_tried_again(agent_of, engine, server, name):
    server._timeout = 0.05
    agent, engine.seconds = agent_of(max_retries=2), 30.0
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match=r"no reply within 0\.05 s") as late:
        await agent.ask(name, OK)
    assert late.value.status_code == 503 and late.value.response.headers["x-should-retry"] == "false"
    assert (len(engine.received), engine.aborted, agent.rows) == (1, 1, [])


@every_wire
@pytest.mark.parametrize("stream", [None, "not begun", "begun"])
async def test_a_client_that_goes_away_aborts_its_generation(agent, engine, server, wire, name, stream, monkeypatch):
    monkeypatch.setattr("molt_gym.server.streaming.KEEP_ALIVE", 0.01 if stream == "begun" else 10.0)
    engine.seconds = 30.0
    body = json.dumps(BODIES[name] | {"stream": stream is not None}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    head = f"POST {wire.paths[name]} HTTP/1.1\r\nHost: x\r\nx-api-key: {agent.session.key}\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await engine.until(1)
    if stream == "begun":
        assert await reader.readuntil(b"\n: ")
    writer.close()
    await engine.until(0, seconds=1.0)
    assert engine.aborted == 1
    assert (agent.session.turns, agent.rows) == (0, [])
    engine.seconds = 0.0
    assert wire.text_of(await agent.ask(name, OK)) == "hello" and agent.session.turns == 1


@every_wire
async def test_a_retry_after_the_client_gave_up_waiting_is_one_turn(agent_of, engine, name, wire):
    agent = agent_of(max_retries=1)
    engine.seconds = 0.5
    asked = asyncio.ensure_future(agent.ask(name, OK, timeout=0.2))
    await engine.until(1)
    engine.seconds = 0.0
    assert wire.text_of(await asked) == "hello"
    assert (len(engine.received), engine.aborted, agent.session.turns, len(agent.rows)) == (2, 1, 1, 1)


async def test_a_session_that_is_closed_ends_the_requests_under_way(agent_of, engine):
    agent, engine.seconds = agent_of(max_retries=2), 30.0
    asked = asyncio.ensure_future(agent.chat(OK))
    await engine.until(1)
    agent.session.close()
    with pytest.raises(openai.APIStatusError, match="is over") as refused:
        await asked
    assert (refused.value.status_code, len(engine.received), engine.aborted) == (410, 1, 1)


async def test_a_server_that_closes_ends_the_requests_under_way(engine, respondent_of):
    import aiohttp

    from molt_gym.server.server import LoopbackServer

    engine.seconds = 30.0
    server = LoopbackServer()
    await server.start()
    session = server.open(respondent_of())
    async with aiohttp.ClientSession() as client:
        asked = asyncio.ensure_future(client.post(
            server.url + "/v1/chat/completions", json=BODIES["chat"], headers={"x-api-key": session.key}))
        await engine.until(1)
        began = time.monotonic()
        await server.close()
        assert (await asked).status == 410 and time.monotonic() < began + 1
    assert (engine.running, engine.aborted, server.sessions) == (0, 1, 0)
