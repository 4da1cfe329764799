"""Bodies that are wrong, too large, compressed, slow or cut off; and connections that are used again."""

import asyncio
import gzip
import json
import time
import zlib

import aiohttp
import anthropic
import openai
import pytest

from molt_gym.server import server as server_module

OK = {"role": "user", "content": "ok"}
BODY = {"model": "m", "messages": [OK], "input": [OK], "max_tokens": 64}
WHOLE = json.dumps(BODY).encode()

pytestmark = pytest.mark.timeout(60)
every_wire = pytest.mark.parametrize("name", ["chat", "responses", "messages"])


def head(session, path="/v1/chat/completions", **headers) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"x-api-key: {session.key}"]
    return "\r\n".join(lines + [f"{key}: {value}" for key, value in headers.items()]).encode() + b"\r\n\r\n"


async def connect(session):
    return await asyncio.open_connection("127.0.0.1", int(session.url.rpartition(":")[2]))


async def response(reader) -> tuple[int, dict]:
    async with asyncio.timeout(10):
        top = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in top.decode().split("\r\n")[1:] if line)
        return int(top.split()[1]), json.loads(await reader.readexactly(int(fields["Content-Length"])))


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b'"text"', b"null", b"7", b"\xff\xfe", b"{}}", b'{"model": NaN}', b"{'model': 1}", b"\x00",
    b'{"messages": ' + b"[" * 5000, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", b"{}",
    b'{"model": "m", "messages": [], "input": [], "max_tokens": 1}',
    b'{"model": "m", "messages": {}, "input": {}, "max_tokens": 1}',
    b'{"model": 1, "messages": [{"role": "user", "content": "ok"}], "input": "ok", "max_tokens": 1}',
    b'{"model": "m", "messages": ["ok"], "input": [1], "max_tokens": 1}',
    b'{"model": "m", "messages": [{"role": "robot", "content": "ok"}], "input": [{"role": "robot"}], "max_tokens": 1}',
    b'{"model": "m", "messages": [{"role": "user", "content": 1}], "input": 1, "max_tokens": 1}',
    b'{"model": "m", "messages": [{"role": "user", "content": "ok"}], "input": "ok", "max_tokens": 1, "stream": "no"}',
])
@every_wire
async def test_a_body_that_cannot_be_read_is_a_400_and_the_session_goes_on(agent, engine, wire, name, body):
    status, headers, answer = await wire.post(agent.session, wire.paths[name], body)
    assert status == 400 and answer["error"]["message"] and headers["x-should-retry"] == "false"
    assert (engine.received, agent.session.turns, agent.rows) == ([], 0, [])
    assert wire.text_of(await agent.ask(name, OK)) == "hello"


@every_wire
async def test_a_body_above_the_cap_is_a_413_whether_its_size_was_declared_or_not(
        respondent_of, engine, wire, name, server, monkeypatch):
    async def chunks():
        for _ in range(4):
            yield b" " * 100

    monkeypatch.setattr(server_module, "MAX_BODY", len(WHOLE))
    async with aiohttp.ClientSession() as client:
        session = server.open(respondent_of())
        assert (await wire.post(session, wire.paths[name], WHOLE))[0] == 200
        status, _, body = await wire.post(session, wire.paths[name], WHOLE + b" ")
        assert status == 413 and f"more than {len(WHOLE)} bytes" in body["error"]["message"]
        headers = {"x-api-key": session.key}
        async with client.post(session.url + wire.paths[name], data=chunks(), headers=headers) as answer:
            assert answer.status == 413
        squeezed = gzip.compress(WHOLE + b" " * 10**6)
        status, _, body = await wire.post(session, wire.paths[name], squeezed, **{"Content-Encoding": "gzip"})
        assert status == 413
        sdk = openai.AsyncOpenAI(base_url=session.url + "/v1", api_key=session.key, max_retries=2)
        with pytest.raises(openai.APIStatusError) as refused:
            await sdk.chat.completions.create(model="m", messages=[OK | {"content": "x" * 200}])
        assert refused.value.status_code == 413 and len(engine.received) == 1
        await sdk.close()


async def test_an_sdk_that_sends_far_too_much_is_told_so(agent_of, engine, wire, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_BODY", 2**20)
    agent = agent_of(max_retries=2)
    for name in wire.names:
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="more than 1048576") as refused:
            await agent.ask(name, OK | {"content": "x" * 20 * 2**20})
        assert refused.value.status_code == 413
    assert engine.received == [] and wire.text_of(await agent.chat(OK)) == "hello"


async def test_a_declared_size_above_the_cap_is_refused_before_the_body_came(server, respondent_of):
    reader, writer = await connect(session := server.open(respondent_of()))
    writer.write(head(session, **{"Content-Length": 10**12}))
    assert (await response(reader))[0] == 413
    writer.close()


@every_wire
async def test_a_body_may_come_in_chunks_and_compressed(agent, engine, wire, name):
    async def chunks():
        for place in range(0, len(WHOLE), 7):
            yield WHOLE[place : place + 7]

    async with aiohttp.ClientSession(headers={"x-api-key": agent.session.key}) as client:
        async with client.post(agent.session.url + wire.paths[name], data=chunks()) as answer:
            assert answer.status == 200
    for encoding in ("gzip", "deflate"):
        data = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding](WHOLE)
        status, _, _ = await wire.post(agent.session, wire.paths[name], data, **{"Content-Encoding": encoding})
        assert status == 200
    # A client without a retry header that sends equal bytes is retrying, whatever the transfer.
    assert len(engine.received) == 1


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_a_body_that_is_not_compressed_as_it_says_is_refused(agent, engine, wire, encoding):
    reader, writer = await connect(agent.session)
    writer.write(head(agent.session, **{"Content-Length": len(WHOLE), "Content-Encoding": encoding}) + WHOLE)
    async with asyncio.timeout(5):
        status = int((await reader.readline()).split()[1])
    assert 400 <= status < 500 and engine.received == []
    writer.close()
    assert wire.text_of(await agent.chat(OK)) == "hello"


async def test_a_body_that_stops_arriving_is_given_up(agent, engine, wire, monkeypatch):
    monkeypatch.setattr("molt_gym.server.server.BODY_TIMEOUT", 0.1)
    reader, writer = await connect(agent.session)
    writer.write(head(agent.session, **{"Content-Length": 100}) + b'{"model"')
    status, body = await response(reader)
    assert status == 400 and "did not arrive within 0.1 s" in body["error"]["message"]
    writer.close()
    assert engine.received == [] and wire.text_of(await agent.chat(OK)) == "hello"


async def test_a_client_that_leaves_in_the_middle_of_the_body_leaves_nothing_behind(agent, engine, wire, caplog):
    for ending in (b"", WHOLE[:20]):
        reader, writer = await connect(agent.session)
        writer.write(head(agent.session, **{"Content-Length": len(WHOLE)}) + ending)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()
    await asyncio.sleep(0.05)
    assert engine.received == [] and (agent.session.turns, agent.session.failure) == (0, None)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert wire.text_of(await agent.chat(OK)) == "hello"


async def test_a_connection_serves_one_request_after_the_other(agent, engine):
    reader, writer = await connect(agent.session)
    for content in ("ok", "he", ""):
        body = json.dumps(BODY | {"messages": [OK | {"content": content}]}).encode()
        writer.write(head(agent.session, **{"Content-Length": len(body)}) + body)
        assert (await response(reader))[0] == 200
    for bad in (b"{", b"[]"):
        writer.write(head(agent.session, **{"Content-Length": len(bad)}) + bad)
        assert (await response(reader))[0] == 400
    writer.write(head(agent.session, "/v1/messages", **{"Content-Length": len(WHOLE)}) + WHOLE)
    assert (await response(reader))[1]["type"] == "message"
    assert len(engine.received) == 4
    writer.close()


async def test_pipelined_requests_are_answered_in_order(agent, engine):
    engine.script, engine.seconds = [[262, 257], [266, 257]], 0.02
    bodies = [json.dumps(BODY | {"messages": [OK | {"content": text}]}).encode() for text in ("ok", "he")]
    reader, writer = await connect(agent.session)
    writer.write(b"".join(head(agent.session, **{"Content-Length": len(body)}) + body for body in bodies))
    answers = [await response(reader) for _ in bodies]
    assert [answer["choices"][0]["message"]["content"] for _, answer in answers] == ["he", "ok"]
    writer.close()


async def test_a_client_that_waits_for_the_go_ahead_gets_it(agent):
    reader, writer = await connect(agent.session)
    writer.write(head(agent.session, **{"Content-Length": len(WHOLE), "Expect": "100-continue"}))
    async with asyncio.timeout(5):
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
    writer.write(WHOLE)
    assert (await response(reader))[0] == 200
    writer.close()


async def test_what_is_no_http_is_refused_and_hurts_nobody(agent, wire):
    for junk in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"POST\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"\r\n" * 1000):
        _, writer = await connect(agent.session)
        writer.write(junk)
        await writer.drain()
        writer.close()
    assert wire.text_of(await agent.chat(OK)) == "hello"


async def test_a_body_of_many_megabytes_does_not_hold_up_other_sessions(agent, agent_of):
    other = agent_of(max_context=100)
    large = json.dumps(BODY | {"messages": [OK | {"content": "x y " * 2_000_000}]}).encode()
    reader, writer = await connect(other.session)
    writer.write(head(other.session, **{"Content-Length": len(large)}) + large)
    answering = asyncio.ensure_future(response(reader))
    waits = []
    while not answering.done():
        began = time.monotonic()
        await agent.chat(OK)
        waits.append(time.monotonic() - began)
    status, body = answering.result()
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert len(waits) < 3 or sorted(waits)[len(waits) // 2] < 1
    writer.close()
