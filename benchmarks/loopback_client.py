"""The load on `loopback_server.py`, in a process of its own: jobs as JSON lines on stdin, results on stdout.

It speaks HTTP/1.1 by hand over connections that are kept alive, one for each agent, and sends what an SDK sends: its
headers, and the whole conversation with every turn, in which replies stand as they came.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
WORDS_A_MESSAGE = 12
BYSTANDER_TURNS = 10
QUIET = 2.0
"""Seconds that a bystander is alone before the big message."""
DEADLINE = 120.0
"""Seconds that one job may take."""

_SYSTEM = "You are a careful assistant that answers in one sentence and never guesses."
_HEADERS = """Host: 127.0.0.1
Accept-Encoding: gzip, deflate
Connection: keep-alive
Accept: application/json
Content-Type: application/json
User-Agent: AsyncOpenAI/Python 3.57.0
X-Stainless-Lang: python
X-Stainless-Package-Version: 3.57.0
X-Stainless-OS: Linux
X-Stainless-Arch: x64
X-Stainless-Runtime: CPython
X-Stainless-Runtime-Version: 3.11.13
X-Stainless-Async: async:asyncio
anthropic-version: 2023-06-01
x-stainless-retry-count: 0
x-stainless-read-timeout: 600
"""
_encode = msgspec.json.encode


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport, self._received, self._length = transport, bytearray(), -1
        self._reply: asyncio.Future[tuple[int, bytes]] | None = None

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received += data
        if self._length < 0:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            start = self._received.lower().index(b"content-length:") + len(b"content-length:")
            self._body, self._length = end + 4, int(self._received[start : self._received.index(b"\r\n", start)])
        if len(self._received) - self._body >= self._length and self._reply is not None:
            reply = int(self._received[9:12]), bytes(self._received[self._body :])
            self._received, self._length = bytearray(), -1
            self._reply.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConnectionError("the server closed the connection"))

    async def post(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
        return await self._reply

    def close(self) -> None:
        """Close it."""
        self._transport.close()


class Client:
    """Does jobs.

    Args:
        wire: of `PATHS`.
        words: what messages are made of.
        tools: tools that every request offers.
    """

    def __init__(self, wire: str, words: list[str], tools: int) -> None:
        self._wire, self._words, self._random = wire, words, random.Random(0)
        self._offered = b""
        if tools:
            self._offered = b',"tools":' + _encode([self._tool(f"tool_{i}") for i in range(tools)])

    async def load(self, port: int, keys: list[str], sessions: int, turns: int) -> dict[str, Any]:
        """A conversation of `turns` for each key, `sessions` of them at a time."""
        conversations = [(key, [self._user() for _ in range(turns)]) for key in keys]
        waiting = iter(conversations)
        connections = [await self._connect(port) for _ in range(sessions)]
        begin, cpu = time.perf_counter(), time.process_time()
        last = await asyncio.gather(*(self._agent(connection, waiting) for connection in connections))
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        self._close(connections)
        return {"turns": len(keys) * turns, "seconds": seconds, "cpu": cpu, "reply": last[0].decode()}

    async def latency(self, ports: list[int], keys: list[str], turns: int, at: list[int]) -> list[list[list[float]]]:
        """Seconds that each of the ports took in these turns: by turn, conversation and port.

        Every body goes to all ports, one after the other; the last one's replies go into the conversation.
        """
        connections = [await self._connect(port) for port in ports]
        taken: list[list[list[float]]] = [[] for _ in at]
        for key in keys:
            head, items = self._head(key), self._opening()
            for turn in range(1, turns + 1):
                items.append(self._user())
                body, seconds, reply = self._body(items), [], b""
                for connection in connections:
                    begin = time.perf_counter()
                    reply = await self._post(connection, head, body)
                    seconds.append(time.perf_counter() - begin)
                items += self._items(reply)
                if turn in at:
                    taken[at.index(turn)].append(seconds)
        self._close(connections)
        return taken

    async def big(self, port: int, keys: list[str], size: int) -> dict[str, Any]:
        """One message of `size` bytes, while a bystander takes small turns: its time, and theirs before and during."""
        big, small = [await self._connect(port) for _ in keys]
        text = " ".join(self._random.choices(self._words, k=size // 4))[:size]
        body = self._body([*self._opening(), self._user(text)])
        before: list[float] = []
        during: list[float] = []
        async with asyncio.timeout(DEADLINE):
            alone = time.perf_counter() + QUIET
            while time.perf_counter() < alone:
                await self._bystand(small, keys[1], before, lambda: False)
            begin = time.perf_counter()
            task = asyncio.ensure_future(big.post(self._head(keys[0]), body))
            while not task.done():
                await self._bystand(small, keys[1], during, task.done)
            status, reply = await task
        seconds = time.perf_counter() - begin
        self._close([big, small])
        return {"status": status, "seconds": seconds, "before": before, "during": during, "reply": reply.decode()}

    async def _bystand(self, connection: Connection, key: str, taken: list[float], over: Callable[[], bool]) -> None:
        head, items = self._head(key), self._opening()
        for _ in range(BYSTANDER_TURNS):
            if over():
                return
            items.append(self._user())
            body = self._body(items)
            begin = time.perf_counter()
            reply = await self._post(connection, head, body)
            taken.append(time.perf_counter() - begin)
            items += self._items(reply)

    async def _agent(self, connection: Connection, waiting: Iterator[tuple[str, list[bytes]]]) -> bytes:
        reply = b""
        for key, users in waiting:
            head, items = self._head(key), self._opening()
            for user in users:
                items.append(user)
                reply = await self._post(connection, head, self._body(items))
                items += self._items(reply)
        return reply

    async def _connect(self, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
        return connection

    async def _post(self, connection: Connection, head: bytes, body: bytes) -> bytes:
        status, reply = await connection.post(head, body)
        if status != 200:
            raise RuntimeError(f"status {status}: {reply[:500]!r}")
        return reply

    def _close(self, connections: list[Connection]) -> None:
        for connection in connections:
            connection.close()

    def _head(self, key: str) -> bytes:
        headers = _HEADERS.replace("\n", "\r\n")
        return f"POST {PATHS[self._wire]} HTTP/1.1\r\n{headers}Authorization: Bearer {key}\r\nContent-Length: ".encode()

    def _opening(self) -> list[bytes]:
        return [_encode({"role": "system", "content": _SYSTEM})] if self._wire == "chat" else []

    def _user(self, text: str | None = None) -> bytes:
        text = " ".join(self._random.choices(self._words, k=WORDS_A_MESSAGE)) if text is None else text
        return _encode({"role": "user", "content": text})

    def _body(self, items: list[bytes]) -> bytes:
        history = b",".join(items)
        if self._wire == "chat":
            return b'{"messages":[%s],"model":"policy","max_tokens":64%s}' % (history, self._offered)
        if self._wire == "responses":
            return b'{"input":[%s],"instructions":"%s","model":"policy"%s}' % (history, _SYSTEM.encode(), self._offered)
        return b'{"max_tokens":64,"messages":[%s],"model":"policy","system":"%s"%s}' % (
            history, _SYSTEM.encode(), self._offered)

    def _items(self, reply: bytes) -> list[bytes]:
        answer = msgspec.json.decode(reply)
        if self._wire == "chat":
            return [_encode(answer["choices"][0]["message"])]
        if self._wire == "responses":
            return [_encode(item) for item in answer["output"]]
        return [_encode({"role": "assistant", "content": answer["content"]})]

    def _tool(self, name: str) -> dict[str, Any]:
        texts = (" ".join(self._random.choices(self._words, k=WORDS_A_MESSAGE)) for _ in itertools.count())
        fields = {field: {"type": "string", "description": next(texts)} for field in ("path", "query", "unit")}
        schema = {"type": "object", "properties": fields, "required": ["path"]}
        if self._wire == "messages":
            return {"name": name, "description": next(texts), "input_schema": schema}
        function = {"name": name, "description": next(texts), "parameters": schema}
        return {"type": "function", "function": function} if self._wire == "chat" else {"type": "function"} | function


async def main() -> None:
    """Answers jobs until stdin ends."""
    client: Client | None = None
    for line in sys.stdin:
        job = json.loads(line)
        if client is None:
            client = Client(**job)
            continue
        async with asyncio.timeout(DEADLINE):
            result = await getattr(client, job.pop("kind"))(**job)
            await asyncio.sleep(0)  # lets closed connections go
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
