"""Asking a judge, on one event loop of this process, so that all its envs share the limits and what is known already.

Invariants: a judgement ends with a verdict that has the form that was asked for, or with an EnvFailure of reason
"judge"; a verdict that is malformed is asked for once more, and what failed is not remembered; each wait for a judge
has a deadline.
"""

import asyncio
import inspect
import json
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from .errors import EnvFailure
from .judge_prompts import Judgement, repair
from .judge_source import Calls, Seat
from .messages import Message, text_of
from .policy import EndpointMessage, Policy
from .threads import loop_in_thread

__all__ = ["Question", "judge_loop", "judged", "meter", "metered", "rehearsal", "rehearsing"]

MOST_KNOWN = 50_000
"""Verdicts that are remembered, those that were asked for last."""

meter: ContextVar["Counter[str]"] = ContextVar("meter")
"""What judges are counted in: "judge/requests", "judge/tokens" of their replies, "judge/cached", "judge/seconds"."""
rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


@dataclass(frozen=True)
class Question:
    """What is asked. read: makes a judgement of a reply, or raises ValueError; reader: tells readers apart. number:
    among the judgements of the same thing; None for the only one."""

    messages: list[Message]
    read: Callable[[str], Judgement]
    reader: Hashable
    number: int | None = None
    usual: Judgement = Judgement(0.5)
    """What it is in a rehearsal."""


class _Office:
    """What the judges of this process have in common; all but the loop belongs to the loop's thread."""

    def __init__(self) -> None:
        self.loop = loop_in_thread("molt-gym-judge")
        self.policies: dict[Hashable, tuple[Policy, asyncio.Semaphore]] = {}
        self.known: OrderedDict[Hashable, asyncio.Task[Judgement]] = OrderedDict()


_lock = threading.Lock()
_office: _Office | None = None


def _the_office() -> _Office:
    global _office
    with _lock:
        _office = _office or _Office()
        return _office


def _forget() -> None:
    global _lock, _office
    _lock, _office = threading.Lock(), None


# A child has a copy of the loop, but not the thread that runs it.
os.register_at_fork(after_in_child=_forget)


def judge_loop() -> asyncio.AbstractEventLoop:
    """The loop on which `judged` is to run."""
    return _the_office().loop


def metered() -> AbstractContextManager["Counter[str]"]:
    """Counts what judges do that are asked within this block."""
    return _holding(meter, Counter())


def rehearsal() -> AbstractContextManager[bool]:
    """Within this block nobody is asked: judgements are neither good nor bad."""
    return _holding(rehearsing, True)


@contextmanager
def _holding(variable: ContextVar[Any], value: Any) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


async def judged(seat: Seat, question: Question, calls: Calls, counted: "Counter[str]") -> Judgement:
    """The judgement; that of before, or of the one under way, if the same was asked.

    Raises:
        EnvFailure: reason "judge", or that of the policy that was asked.
    """
    if not (calls.cache and seat.version is not None):
        return await _asked(seat, question, calls, counted)
    known, key = _the_office().known, _key(seat, question)
    task = known.get(key)
    if task is None:
        task = known[key] = asyncio.ensure_future(_asked(seat, question, calls, counted))
        task.add_done_callback(lambda task: _keep(key, task))
    else:
        counted["judge/cached"] += 1
        known.move_to_end(key)
    return await asyncio.shield(task)


def _key(seat: Seat, question: Question) -> Hashable:
    content = json.dumps([question.messages, question.number], sort_keys=True).encode()
    return seat.key, seat.version, question.reader, blake2b(content, digest_size=16).digest()


def _keep(key: Hashable, task: "asyncio.Task[Judgement]") -> None:
    known = _the_office().known
    if task.cancelled() or task.exception() is not None:
        known.pop(key, None)
    while len(known) > MOST_KNOWN:
        known.popitem(last=False)


async def _asked(seat: Seat, question: Question, calls: Calls, counted: "Counter[str]") -> Judgement:
    policies = _the_office().policies
    if seat.key not in policies:
        policies[seat.key] = seat.make(), asyncio.Semaphore(calls.concurrency)
    policy, turn = policies[seat.key]
    async with turn:
        limit = asyncio.timeout(calls.deadline)
        try:
            async with limit:
                return await _verdict(policy, seat.name, question, counted)
        except EnvFailure:
            raise
        except Exception as error:  # noqa: BLE001  whatever a policy raises, it is the judge that failed
            why = f"no verdict within {calls.deadline:g} s (calls.deadline)" if limit.expired() else (
                f"{type(error).__name__}: {error}")
            raise EnvFailure("judge", f"{seat.name}: {why}") from error


async def _verdict(policy: Policy, name: str, question: Question, counted: "Counter[str]") -> Judgement:
    messages = question.messages
    seeded = question.number is not None and "seed" in inspect.signature(policy.reply).parameters
    options = {"seed": question.number} if seeded else {}
    for _ in range(2):
        counted["judge/requests"] += 1
        reply = await policy.reply(messages, [], **options)
        text, cut = text_of(reply), ""
        if isinstance(reply, EndpointMessage):
            counted["judge/tokens"] += reply.completion_tokens
            cut = ", as max_tokens cut it off" * reply.cut
        try:
            return question.read(text)
        except ValueError as error:
            problem = f"{error}{cut}"
            messages = repair(question.messages, text, problem)
    raise EnvFailure("judge", f"{name}: a malformed verdict, also when it was asked again ({problem}): {text!r:.300}")
