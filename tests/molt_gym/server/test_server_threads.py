"""Programs that block: more of them than there are threads, each waiting for replies through the server."""

import asyncio
import gzip
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest

LONG = "x " * 3000

pytestmark = pytest.mark.timeout(60)


def chat(session) -> list[str]:
    client = openai.DefaultHttpxClient(verify=False, trust_env=False)
    with openai.OpenAI(base_url=session.url + "/v1", api_key=session.key, http_client=client) as sdk:
        messages = [{"role": "user", "content": LONG}]
        for _ in range(2):
            reply = sdk.chat.completions.create(model="m", messages=messages).choices[0].message
            messages += [reply, {"role": "user", "content": LONG}]
    return [message.content for message in messages[1::2]]


def messages(session) -> list[str]:
    client = anthropic.DefaultHttpxClient(verify=False, trust_env=False)
    with anthropic.Anthropic(base_url=session.url, api_key=session.key, http_client=client) as sdk:
        history = [{"role": "user", "content": LONG}]
        for _ in range(2):
            with sdk.messages.stream(model="m", max_tokens=64, messages=history) as stream:
                reply = stream.get_final_message()
            history += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": LONG}]
    return [message["content"][0].text for message in history[1::2]]


def compressed(session) -> list[str]:
    """Without any SDK."""
    texts = []
    for number in range(2):
        body = {"model": "m", "input": LONG + str(number)}
        headers = {"Authorization": f"Bearer {session.key}", "Content-Encoding": "gzip"}
        request = urllib.request.Request(
            session.url + "/v1/responses", gzip.compress(json.dumps(body).encode()), headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as response:
            texts.append(json.load(response)["output"][0]["content"][0]["text"])
    return texts


@pytest.mark.parametrize(("threads", "count"), [(1, 2), (1, 4), (2, 3), (2, 8), (4, 16)])
async def test_more_blocking_programs_than_threads_of_the_default_pool_finish(
        server, respondent_of, engine, threads, count):
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
    engine.seconds = 0.02
    sessions = [server.open(respondent_of(max_context=100_000, threads=server.threads)) for _ in range(count)]
    programs = [(chat, messages, compressed)[number % 3] for number in range(count)]
    async with asyncio.timeout(30):
        replies = await asyncio.gather(
            *(asyncio.to_thread(program, session) for program, session in zip(programs, sessions, strict=True)))
    assert replies == [["hello", "hello"]] * count and len(engine.received) == 2 * count
    assert [session.turns for session in sessions] == [2] * count


async def test_blocking_programs_in_threads_of_their_own_run_at_the_same_time(server, respondent_of, engine):
    engine.seconds = 0.1
    sessions = [server.open(respondent_of()) for _ in range(8)]

    def ask(session):
        request = urllib.request.Request(
            session.url + "/v1/responses", b'{"input": "ok"}', {"x-api-key": session.key})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as response:
            return response.status

    with ThreadPoolExecutor(8) as pool:
        loop = asyncio.get_running_loop()
        asked = asyncio.gather(*(loop.run_in_executor(pool, ask, session) for session in sessions))
        await engine.until(8)
        assert await asked == [200] * 8
