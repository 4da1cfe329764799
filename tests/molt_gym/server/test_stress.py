"""A thousand sessions on one server, half of which come to a bad end; clients that speak HTTP by hand."""

import asyncio
import gc
import json
import logging
import os
import random
import resource
import threading
import time
from collections import Counter

import pytest

from molt_gym.server.server import LoopbackServer
from molt_gym.tokens import Generation, Row

START, END = 256, 257
TURNS = 3
SESSIONS = 1000
ACTIVE = 200
DEADLINE = 6.0
PATIENCE = 25.0
FATES = ["agent raises", "client vanishes", "engine fails", "deadline passes", "session is closed"]
LONG_TEXT = "7" * 5000


class Engine:
    """Of one session: samples digits that are its own, after a moment; `trouble` comes in one of its turns."""

    running = 0

    def __init__(self, number: int, draw: random.Random, fate: str | None) -> None:
        self.number, self.draw, self.fate = number, draw, fate
        self.bad_turn = draw.randrange(TURNS)
        stuck = ("deadline passes", "session is closed", "agent raises")
        self.stuck = fate in stuck or fate == "client vanishes" and draw.random() < 0.5
        self.busy = 0
        self.prompts: list[list[int]] = []
        self.asked = asyncio.Event()

    def generation(self, turn: int) -> Generation:
        ids = [*f"{self.number}.{turn}".encode(), END]
        return Generation(ids, [-float(self.number + turn + place) for place in range(len(ids))], [turn] * len(ids),
                          "stop")

    async def __call__(self, ids, sampling, number, images) -> Generation:
        turn = len(self.prompts)
        bad = turn == self.bad_turn
        Engine.running += 1
        self.busy += 1
        try:
            if bad:
                self.asked.set()
            await asyncio.sleep(self.draw.uniform(0, 0.03))
            if bad and self.fate == "engine fails":
                raise RuntimeError("out of memory")
            if bad and self.stuck:
                await asyncio.sleep(60)
        finally:
            Engine.running -= 1
            self.busy -= 1
        self.prompts.append(ids)
        return self.generation(turn)


class AgentError(Exception):
    pass


class Client:
    """One keep-alive connection."""

    def __init__(self, session) -> None:
        self._port, self._key = int(session.url.rpartition(":")[2]), session.key

    async def __aenter__(self) -> "Client":
        self._reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *error) -> None:
        self.writer.close()

    def request(self, messages) -> bytes:
        body = json.dumps({"messages": messages}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {self._key}\r\n"
        return f"{head}x-stainless-retry-count: 0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def ask(self, messages):
        self.writer.write(self.request(messages))
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split()[0])
        return int(head.split()[1]), json.loads(await self._reader.readexactly(length))


def text_of(number: int, turn: int) -> str:
    return LONG_TEXT if number % 10 == 0 and turn == 0 else f"{number}-{turn}"


def expected_row(engine: Engine, turns: int) -> Row:
    row = Row([], [], [], [])
    for turn in range(turns):
        context = [10] * (turn > 0) + [START, *b"user\n", *text_of(engine.number, turn).encode(), END, 10]
        context += [START, *b"assistant\n"]
        sampled = engine.generation(turn)
        row.ids += context + sampled.ids
        row.mask += [0] * len(context) + [1] * len(sampled.ids)
        row.logprobs += [0.0] * len(context) + sampled.logprobs
        row.versions += [-1] * len(context) + sampled.versions
    return row


async def converse(client: Client, engine: Engine) -> tuple[int, str | None]:
    """Replies that came, and what ended the conversation."""
    messages, draw = [], engine.draw
    for turn in range(TURNS):
        messages.append({"role": "user", "content": text_of(engine.number, turn)})
        if engine.fate == "client vanishes" and turn == engine.bad_turn:
            request = client.request(messages)
            client.writer.write(request[: draw.choice([40, len(request) - 5, len(request), len(request)])])
            await asyncio.sleep(draw.uniform(0, 0.05))
            if draw.random() < 0.5:
                client.writer.transport.abort()
            return turn, "vanished"
        status, answer = await client.ask(messages)
        if status != 200:
            return turn, answer["error"]["code"]
        messages.append(answer["choices"][0]["message"])
    return TURNS, None


async def run(session, engine: Engine) -> tuple[int, str | None]:
    """A rollout: the session is closed when it is over, however it ends."""
    conversation = None
    try:
        async with Client(session) as client:
            conversation = asyncio.create_task(converse(client, engine))
            conversation.add_done_callback(lambda _: engine.asked.set())
            if engine.fate in ("agent raises", "session is closed"):
                await engine.asked.wait()
                await asyncio.sleep(engine.draw.uniform(0, 0.05))
                if engine.fate == "agent raises":
                    raise AgentError
                session.close()
            end = await conversation
        while engine.busy:  # a client that goes away takes its request with it
            await asyncio.sleep(0.02)
        return end
    except AgentError:
        return engine.bad_turn, "raised"
    finally:
        if conversation is not None:
            conversation.cancel()
        session.close()


async def wave(server, respondent_of, sessions: int) -> Counter:
    """Opens all the sessions, runs them, and looks at what each of them recorded."""
    fates = [None] * (sessions // 2) + FATES * (sessions // 2 // len(FATES))
    random.Random(1).shuffle(fates)
    engines = [Engine(number, random.Random(number), fate) for number, fate in enumerate(fates)]
    respondents = [
        respondent_of("chatml", max_context=8000, generate=engine, threads=server.threads) for engine in engines]
    opened = [server.open(respondent) for respondent in respondents]
    assert server.sessions == sessions
    active = asyncio.Semaphore(ACTIVE)

    async def one(session, engine):
        async with active, asyncio.timeout(PATIENCE):
            return await run(session, engine)

    ends = await asyncio.gather(*map(one, opened, engines))
    for engine, respondent, (turns, _) in zip(engines, respondents, ends, strict=True):
        recorded = respondent.graph.turns
        assert recorded == turns or engine.fate == "client vanishes" and recorded == turns + 1
        assert respondent.graph.rows() == ([expected_row(engine, recorded)] if recorded else [])
        assert [ids + engine.generation(turn).ids for turn, ids in enumerate(engine.prompts)][:recorded] == [
            expected_row(engine, turn + 1).ids for turn in range(recorded)]
    return Counter((engine.fate, end) for engine, (_, end) in zip(engines, ends, strict=True))


def held() -> dict[str, int]:
    return {"tasks": len(asyncio.all_tasks()), "threads": threading.active_count(), "files": len(os.listdir("/dev/fd"))}


async def settled(before: dict[str, int]) -> dict[str, int]:
    """What is held once as little is as before, or after some seconds."""
    for _ in range(100):
        gc.collect()
        if all(held()[name] <= count for name, count in before.items()) and not Engine.running:
            break
        await asyncio.sleep(0.05)
    return held()


@pytest.fixture
def enough_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * ACTIVE + 200
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
async def test_a_thousand_sessions_of_which_half_die_leave_nothing_behind(respondent_of, enough_files, caplog):
    caplog.set_level(logging.WARNING)
    Engine.running = 0
    async with LoopbackServer(timeout=DEADLINE) as server:
        for _ in range(8):  # starts all threads
            server.threads.submit(time.sleep, 0.05)
        idle = held()
        await wave(server, respondent_of, 20)
        before = await settled(idle)
        ends = await wave(server, respondent_of, SESSIONS)
        after = await settled(before)
        assert server.sessions == 0 and Engine.running == 0
    each = SESSIONS // 2 // len(FATES)
    assert ends == {
        (None, None): SESSIONS // 2,
        ("agent raises", "raised"): each,
        ("client vanishes", "vanished"): each,
        ("engine fails", "engine_failed"): each,
        ("deadline passes", "deadline_exceeded"): each,
        ("session is closed", "session_closed"): each,
    }
    assert after == before
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []
