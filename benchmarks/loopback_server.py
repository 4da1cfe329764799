"""What the loopback server costs, beside bare JSON endpoints, in one run.

    python benchmarks/loopback_server.py [--wire chat] [--sessions 1 16 64 256] [--turns 20] [--requests 2000] ...

The servers are in this process, the agents in one of their own (`loopback_client.py`). The engine answers at once, with
20 ids of a script; all else is real: HTTP, JSON, sessions, chat template, tokenizer (byte-level BPE, trained here on
sources of the standard library), token graph. The bare endpoints decode the same bodies and encode a reply of the same
shape. CPU is that of this process.
"""

import argparse
import asyncio
import gc
import inspect
import itertools
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
import uvicorn
from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from molt_gym.server.exchange import Call, Reply
from molt_gym.server.respond import Rules, TokenRespondent
from molt_gym.server.server import LoopbackServer
from molt_gym.tokens import Generation, Renderer, Sampling

MODULES = (argparse, inspect, platform, statistics, subprocess, textwrap, typing)
REPLY_IDS = 20
VOCABULARY = 8192
CHATML = """
{%- if tools -%}
{{- '<|im_start|>system\n' -}}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' -}}{% endif -%}
{{- 'You can call these tools:' -}}
{%- for tool in tools %}{{- '\n' + tool | tojson -}}{% endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' -}}{% endif -%}
"""
BARE = {
    "handler": "aiohttp, low-level handler, msgspec",
    "application": "aiohttp, web.Application, json",
    "starlette": "Starlette under uvicorn, json",
}
JOB_TIMEOUT = 180.0


class ScriptedEngine:
    """Answers at once, from a round of replies that are all different."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, words: list[str]) -> None:
        draw = random.Random(0)
        texts = [" ".join(draw.choices(words, k=REPLY_IDS)) for _ in range(499)]
        replies = [[*tokenizer.encode(text)[: REPLY_IDS - 1], tokenizer.eos_token_id] for text in texts]
        self._next = itertools.cycle(
            [Generation(ids, [-draw.random() for _ in ids], [0] * len(ids), "stop") for ids in replies])

    async def __call__(self, ids: list[int], sampling: Sampling, number: int) -> Generation:
        """See `molt_gym.server.respond.Generate`."""
        return next(self._next)


class Texts:
    """A respondent without tokens."""

    async def answer(self, call: Call) -> list[Reply]:
        """See `Respondent.answer`."""
        return [Reply({"role": "assistant", "content": "It is what the documentation of the parser says about it."})]

    async def count(self, call: Call) -> int:
        """See `Respondent.count`."""
        return 0


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the ChatML template."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=CHATML)


class Bare:
    """An endpoint to compare with.

    Args:
        kind: of `BARE`.
    """

    reply: Any = None
    """What it always answers."""
    port = 0

    def __init__(self, kind: str) -> None:
        application = web.Application(client_max_size=2**26)
        application.router.add_post("/v1/{rest:.*}", self._route)
        starlette = Starlette(routes=[Route("/v1/{rest:path}", self._starlette, methods=["POST"])])
        self._uvicorn = uvicorn.Server(uvicorn.Config(starlette, port=0, log_level="critical", lifespan="off"))
        self._runner: Any = {
            "handler": web.ServerRunner(web.Server(self._handle, access_log=None)),
            "application": web.AppRunner(application, access_log=None), "starlette": None}[kind]

    async def start(self) -> None:
        """Listen."""
        if self._runner is None:
            self._serving = asyncio.create_task(self._uvicorn.serve())
            while not self._uvicorn.started:
                await asyncio.sleep(0.01)
            self.port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
            return
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is None:
            self._uvicorn.should_exit = True
            await asyncio.wait_for(self._serving, 10)
            return
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        msgspec.json.decode(await request.content.read())
        return web.Response(body=msgspec.json.encode(self.reply), content_type="application/json")

    async def _route(self, request: web.Request) -> web.Response:
        await request.json()
        return web.json_response(self.reply)

    async def _starlette(self, request: Request) -> JSONResponse:
        await request.json()
        return JSONResponse(self.reply)


@dataclass(frozen=True)
class Cost:
    """Of one turn. cpu: of the server, seconds. client: share of its time that the client was busy."""

    rate: float
    cpu: float
    client: float


class Lab:
    """Both servers and the client. Use it as an async context manager."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        text = "\n".join(inspect.getsource(module) for module in MODULES)
        self._words = re.findall(r"[a-z]{2,12}", text)[:8000]
        tokenizer = make_tokenizer(text)
        self._renderer, self._engine = Renderer(tokenizer), ScriptedEngine(tokenizer, self._words)
        self._rules = Rules(Sampling(64), max_context=2**24)
        self.server, self.bares = LoopbackServer(), {kind: Bare(kind) for kind in BARE}
        self.bare = self.bares["handler"]
        self._jobs = asyncio.Lock()

    async def __aenter__(self) -> "Lab":
        await self.server.start()
        for bare in self.bares.values():
            await bare.start()
        self._client = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).with_name("loopback_client.py")), limit=2**26,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        await self._send({"wire": self.options.wire, "words": self._words, "tools": self.options.tools})
        # What the bare endpoint answers has the shape and size of a real reply.
        first = await self.job("load", port=self.port, keys=self.keys(1), sessions=1, turns=1)
        for bare in self.bares.values():
            bare.reply = json.loads(first["reply"])
        return self

    async def __aexit__(self, *error: object) -> None:
        self._client.stdin.close()
        try:
            await asyncio.wait_for(self._client.wait(), 10)
        except TimeoutError:
            self._client.kill()
        await self.server.close()
        for bare in self.bares.values():
            await bare.close()

    @property
    def port(self) -> int:
        """Of our server."""
        return int(self.server.url.rpartition(":")[2])

    def keys(self, count: int, *, tokens: bool = True) -> list[str]:
        """Of new sessions; the earlier ones are closed."""
        for session in list(self.server._sessions.values()):
            session.close()
        return [
            self.server.open(
                TokenRespondent(self._renderer, self._engine, self._rules, threads=self.server.threads)
                if tokens else Texts()
            ).key
            for _ in range(count)
        ]

    async def job(self, kind: str, **arguments: Any) -> Any:
        """What the client measured."""
        await self._send({"kind": kind} | arguments)
        line = await asyncio.wait_for(self._client.stdout.readline(), JOB_TIMEOUT)
        if not line:
            raise RuntimeError("the client died; what it wrote is above")
        return json.loads(line)

    async def load(self, port: int, sessions: int, *, tokens: bool = True) -> Cost:
        """Conversations until `--requests` are answered, `sessions` of them at a time."""
        count = max(sessions, round(self.options.requests / self.options.turns / sessions) * sessions)
        keys = self.keys(count, tokens=tokens)
        begin = process_time()
        result = await self.job("load", port=port, keys=keys, sessions=sessions, turns=self.options.turns)
        cpu = process_time() - begin
        return Cost(
            result["turns"] / result["seconds"], cpu / result["turns"], result["cpu"] / result["seconds"])

    async def _send(self, value: Any) -> None:
        self._client.stdin.write(json.dumps(value).encode() + b"\n")
        await self._client.stdin.drain()


def middle(costs: Sequence[Cost]) -> Cost:
    """The medians."""
    return Cost(*(statistics.median(getattr(cost, name) for cost in costs) for name in ("rate", "cpu", "client")))


async def throughput(lab: Lab) -> None:
    """Rates and CPU at several numbers of sessions."""
    print("\n| sessions | server | turns/s | CPU ms/turn | molt-gym's rate, of it (goal >= .46) | molt-gym's CPU, x it "
          "(goal <= 3) | client busy |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for sessions in lab.options.sessions:
        rounds = [{"molt-gym": await lab.load(lab.port, sessions)} | {
            what: await lab.load(lab.bares[kind].port, sessions) for kind, what in BARE.items()
        } for _ in range(lab.options.repeat)]
        for name in rounds[0]:
            cost = middle([costs[name] for costs in rounds])
            rate = statistics.median(costs["molt-gym"].rate / costs[name].rate for costs in rounds)
            cpu = statistics.median(costs["molt-gym"].cpu / costs[name].cpu for costs in rounds)
            shares = ("", "") if name == "molt-gym" else (f"{rate:.2f}", f"{cpu:.2f}")
            print(f"| {sessions} | {name} | {cost.rate:.0f} | {1000 * cost.cpu:.3f} | {shares[0]} | {shares[1]} | "
                  f"{cost.client:.2f} |", flush=True)
    sessions = lab.options.sessions[-1] if len(lab.options.sessions) < 3 else lab.options.sessions[-2]
    bare = await lab.load(lab.bare.port, sessions)
    without, whole = await lab.load(lab.port, sessions, tokens=False), await lab.load(lab.port, sessions)
    print(f"\nCPU of a turn at {sessions} sessions: HTTP and JSON {1000 * bare.cpu:.3f} ms, wire and session "
          f"{1000 * (without.cpu - bare.cpu):.3f} ms more, tokens {1000 * (whole.cpu - without.cpu):.3f} ms more",
          flush=True)


async def latency(lab: Lab) -> None:
    """What is added to one conversation's turns as it grows."""
    at = lab.options.at
    keys = lab.keys(lab.options.conversations)
    taken = await lab.job("latency", ports=[lab.bare.port, lab.port], keys=keys, turns=max(at), at=at)
    print("\n| turn | bare ms | molt-gym ms | added ms | lowest bare ms | lowest molt-gym ms | added ms |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    added, least = [], []
    for turn, pairs in zip(at, taken, strict=True):
        bare, ours = ([1000 * seconds for seconds in times] for times in zip(*pairs, strict=True))
        added.append(statistics.median(b - a for a, b in zip(bare, ours, strict=True)))
        least.append(min(ours) - min(bare))
        print(f"| {turn} | {statistics.median(bare):.2f} | {statistics.median(ours):.2f} | {added[-1]:.2f} | "
              f"{min(bare):.2f} | {min(ours):.2f} | {least[-1]:.2f} |")
    print(f"\nAdded at turn {at[-1]}: {added[-1] / added[0]:.2f} x that at turn {at[0]} (goal <= 1.5); by the lowest "
          f"times, which other programs disturb less: {least[-1] / least[0]:.2f} x", flush=True)


async def big_message(lab: Lab) -> None:
    """One big message, and what a bystander notices of it."""
    size = round(lab.options.megabytes * 1e6)
    print(f"\n| {lab.options.megabytes:g} MB message | s | bystander before: turns | median ms | worst ms | meanwhile: "
          "turns | median ms | worst ms (goal <= 50) |\n|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, port in (("bare", lab.bare.port), *(("molt-gym", lab.port),) * lab.options.repeat):
        result = await lab.job("big", port=port, keys=lab.keys(2), size=size)
        told = "" if result["status"] == 200 else f" (status {result['status']}: {result['reply'][:200]})"
        times = [[1000 * seconds for seconds in result[part]] or [0.0] for part in ("before", "during")]
        shown = " | ".join(f"{len(part)} | {statistics.median(part):.2f} | {max(part):.1f}" for part in times)
        print(f"| {name}{told} | {result['seconds']:.2f} | {shown} |", flush=True)


async def measure(options: argparse.Namespace) -> None:
    """Prints the tables."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("aiohttp", "msgspec", "tokenizers", "molt-gym"))
    print(f"Python {platform.python_version()}, {packages}; {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"Wire {options.wire}, {options.tools} tools; conversations of {options.turns} turns; medians of "
          f"{options.repeat}; for latencies the bare endpoint is: {BARE['handler']}")
    async with Lab(options) as lab:
        for _ in range(2):  # warms up
            await lab.load(lab.bare.port, 4)
            await lab.load(lab.port, 4)
        # As training does, so that what is loaded by now is not looked through for garbage.
        gc.collect()
        gc.freeze()
        for part in options.parts:
            await {"throughput": throughput, "latency": latency, "big": big_message}[part](lab)


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", choices=("chat", "responses", "messages"), default="chat")
    parser.add_argument("--parts", nargs="+", choices=("throughput", "latency", "big"),
                        default=("throughput", "latency", "big"))
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--turns", type=int, default=20, help="of a conversation, where throughput is measured")
    parser.add_argument("--requests", type=int, default=2000, help="in each measurement of throughput, about")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tools", type=int, default=0, help="offered with every request")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 10, 50, 100], help="turns whose latency is measured")
    parser.add_argument("--conversations", type=int, default=31, help="whose latency is measured")
    parser.add_argument("--megabytes", type=float, default=2.0, help="of the big message")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
