"""Who answers a session: the policy that samples token by token, or any other policy, in messages.

Invariants: all replies to a call are recorded in the graph before any of them is seen, or none is; a prompt is rendered
outside the event loop where that takes long; every sampled id is recorded with what it was sampled under.
"""

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar

from ..errors import PromptTooLong
from ..images import ImageSpan
from ..messages import Message
from ..policy import EndpointMessage, Policy
from ..spaces import AssistantMessageSpace
from ..tokens import Generation, Prompt, Renderer, Sampling, TokenGraph
from ..tokens.parsing import malformed_calls
from .errors import WireError, aborted
from .exchange import Call, Options, Reply, Token

T = TypeVar("T")
Generate = Callable[[list[int], Sampling, int, tuple[ImageSpan, ...]], Awaitable[Generation]]
"""From prompt ids, how to sample, the number of the sample in its session, and the prompt's images, to the sample."""

_ONE_TOKEN = 1e-6
"""The `top_p` that leaves the most probable token alone, which is what 0 asks for."""
INLINE_TEXT = 4000
"""Characters that are rendered and encoded on the event loop, which takes less than a hop to a thread and back."""


@dataclass(frozen=True)
class Rules:
    """What a session's requests may decide.

    sampling: of the run; its `max_tokens` caps those of a request.
    free: whether requests choose temperature, top_p and top_k, as when nothing is trained. Otherwise the run's hold.
    seed: the seed of a sample, from its number in the session, its request's seed and its number among the replies.
    """

    sampling: Sampling
    max_context: int
    free: bool = False
    seed: Callable[[int, int | None, int], int | None] = lambda number, seed, sample: None


class TokenRespondent:
    """Renders, samples, parses, and records token for token what the engine received and returned.

    Args:
        threads: where long texts are rendered.
    """

    graph: TokenGraph
    """What was sampled."""
    last: tuple[Call, Reply] | None
    """The last turn."""
    cut: bool
    """Whether the last reply was cut by its length."""
    tool_calls: int
    """Tool calls in all replies."""
    malformed_calls: int
    """Replies that began a tool call which could not be read."""
    tools_offered: int
    """Turns in which tools could have been called."""

    def __init__(
        self, renderer: Renderer, generate: Generate, rules: Rules, *,
        history: Literal["keep", "rerender"] = "rerender", threads: ThreadPoolExecutor | None = None,
    ) -> None:
        self.graph = TokenGraph(renderer, history=history)
        self.last: tuple[Call, Reply] | None = None
        self.cut = False
        self.tool_calls = self.malformed_calls = self.tools_offered = 0
        self._renderer, self._generate, self._rules, self._threads = renderer, generate, rules, threads
        self._asked = 0

    async def answer(self, call: Call) -> list[Reply]:
        """See `Respondent.answer`."""
        prompt = await self._prepare(call, self._rules.max_context)
        room = self._rules.max_context - len(prompt.ids)
        if room <= 0:
            raise PromptTooLong(f"the prompt has {len(prompt.ids)} tokens, which leaves no room for a reply in a "
                                f"context of {self._rules.max_context} (rollout.max_context)")
        sampling, ignored = self._sampling(call, room)
        first, self._asked = self._asked, self._asked + call.n
        ids = list(prompt.ids)
        samples = [self._generate(ids, self._seeded(sampling, call, first, i), first + i, prompt.images)
                   for i in range(call.n)]
        generations = [await samples[0]] if call.n == 1 else await _all(samples)
        return self._record(call, prompt, generations, sampling, ignored)

    async def count(self, call: Call) -> int:
        """See `Respondent.count`. What is too long to be answered is counted all the same."""
        return len((await self._prepare(call, math.inf)).ids)

    async def _prepare(self, call: Call, limit: float) -> Prompt:
        try:
            prompt = self.graph.prepare_short(call.messages, call.tools, limit=limit, at_most=INLINE_TEXT)
            if prompt is None:
                prepare = partial(self.graph.prepare, call.messages, call.tools, limit=limit)
                prompt = await asyncio.get_running_loop().run_in_executor(self._threads, prepare)
            return prompt
        except PromptTooLong:
            raise
        except ValueError as error:
            raise WireError("invalid_request", str(error), param="messages", code="invalid_value") from error

    def _sampling(self, call: Call, room: int) -> tuple[Sampling, tuple[str, ...]]:
        run = self._rules.sampling
        asked = replace(call.options, seed=None) if call.options.seed is not None else call.options
        return _chosen(run, asked, min(room, run.max_tokens), self._rules.free)

    def _seeded(self, sampling: Sampling, call: Call, first: int, sample: int) -> Sampling:
        seed = self._rules.seed(first + sample, call.options.seed, sample)
        return sampling if seed == sampling.seed else replace(sampling, seed=seed)

    def _record(
        self, call: Call, prompt: Prompt, generations: list[Generation], sampling: Sampling, ignored: tuple[str, ...]
    ) -> list[Reply]:
        if len(generations) > 1:
            generations = [generation.checked() for generation in generations]
        generations = [self._stopped(generation, sampling.stop) for generation in generations]
        replies = [self._reply(call, prompt, generation, sampling.stop, ignored) for generation in generations]
        for generation, reply in zip(generations, replies, strict=True):
            self.graph.commit(prompt, generation, reply.message)
            calls = len(reply.message.get("tool_calls") or ())
            self.tool_calls += calls
            self.malformed_calls += not calls and bool(call.tools) and malformed_calls(reply.message) > 0
        self.tools_offered += len(replies) if call.tools else 0
        self.cut = generations[-1].finish_reason == "length"
        self.last = call, replies[-1]
        return replies

    def _stopped(self, generation: Generation, stop: tuple[str, ...]) -> Generation:
        """The generation without what an engine that takes several tokens at a time sampled after a stop string."""
        if generation.finish_reason == "abort":
            raise aborted()
        length = self._renderer.length_to_stop(generation.ids, stop)
        return generation if length is None else generation.ended_at(length)

    def _reply(
        self, call: Call, prompt: Prompt, generation: Generation, stops: tuple[str, ...], ignored: tuple[str, ...]
    ) -> Reply:
        message = self._renderer.parse(generation.ids, call.messages, call.tools, stop=stops, prompt=prompt.ids)
        stop = None
        if call.options.stop and generation.finish_reason == "stop":
            text = self._renderer.decode(generation.ids)
            found = [(text.index(string), string) for string in call.options.stop if string in text]
            stop = min(found)[1] if found else None
        finish = generation.finish_reason
        if finish == "stop" and message.get("tool_calls"):
            finish = "tool_calls"
        return Reply(
            message, finish, stop, len(prompt.ids), len(generation.ids),
            reasoning_tokens=self._renderer.reasoning_length(generation.ids) if message.get("reasoning_content") else 0,
            cached_tokens=len(prompt.ids) - len(prompt.context) if prompt.parent is not None else 0,
            tokens=self._tokens(generation) if call.options.logprobs else None, ignored=ignored)

    def _tokens(self, generation: Generation) -> list[Token]:
        tokens = []
        for i, logprob in zip(generation.ids, generation.logprobs, strict=True):
            text = self._renderer.decode([i])
            if tokens:
                # Some tokenizers drop the space that a text begins with.
                text = self._renderer.decode([i, i])[len(text) :]
            tokens.append(Token(text, None if "\ufffd" in text else text.encode("utf-8", "surrogatepass"), logprob))
        return tokens


@lru_cache(256)
def _chosen(run: Sampling, asked: Options, room: int, free: bool) -> tuple[Sampling, tuple[str, ...]]:
    """How to sample, but for the seed, and the names of what was asked for in vain; `free` as in `Rules`."""
    chosen: dict[str, Any] = {}
    ignored = []
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(asked, name)
        value = _ONE_TOKEN if name == "top_p" and value == 0 else value
        if value is not None and value != getattr(run, name):
            chosen |= {name: value} if free else {}
            ignored += [] if free else [name]
    limit = asked.max_tokens if asked.max_tokens is not None else run.max_tokens
    if limit > run.max_tokens:
        ignored.append("max_tokens")
    return replace(run, stop=run.stop + asked.stop, max_tokens=min(limit, room), **chosen), tuple(ignored)


class PolicyRespondent:
    """Any policy; there are no tokens to record, and to count those that an endpoint tells of."""

    turns: int
    """Replies so far."""
    tokens: int
    """Of these replies."""
    last: tuple[Call, Reply] | None
    """The last turn."""

    def __init__(self, policy: Policy) -> None:
        self.turns, self.tokens, self.last = 0, 0, None
        self._policy, self._space = policy, AssistantMessageSpace()

    async def answer(self, call: Call) -> list[Reply]:
        """See `Respondent.answer`."""
        ignored = call.options.without_tokens()
        replies = [replace(reply, ignored=ignored) for reply in await _all([self._sample(call) for _ in range(call.n)])]
        self.turns, self.last = self.turns + len(replies), (call, replies[-1])
        self.tokens += sum(reply.completion_tokens for reply in replies)
        return replies

    async def count(self, call: Call) -> int:
        """See `Respondent.count`."""
        return 0

    async def _sample(self, call: Call) -> Reply:
        message = await self._policy.reply(copy.deepcopy(call.messages), copy.deepcopy(call.tools))
        self._space.validate(message)
        reply = reply_of(message)
        if not isinstance(message, EndpointMessage):
            return reply
        finish = "length" if message.cut else reply.finish_reason
        return replace(reply, finish_reason=finish, completion_tokens=message.completion_tokens)


def reply_of(message: Message) -> Reply:
    """A reply that was not sampled."""
    return Reply(message, "tool_calls" if message.get("tool_calls") else "stop")


async def _all(work: list[Awaitable[T]]) -> list[T]:
    """The results, in order. If one fails or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
