"""What the wires have in common: a call, and what comes back, in no particular API's shape.

Invariants: the messages of a call are in the OpenAI chat form and valid; a reply is made only after its turn was
recorded; nothing here knows of HTTP.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from ..messages import Message
from .errors import WireError, unsupported
from .memory import WireMemory

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Options:
    """What a request says about sampling; None where it says nothing.

    max_tokens: most tokens of the reply. stop: strings that end it, not part of its text. logprobs: whether the
    log-probabilities of the sampled tokens are wanted.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False

    def without_tokens(self) -> tuple[str, ...]:
        """Names of what a request asks for in vain where whoever answers it writes messages, and has no tokens.

        Raises:
            WireError: it asks for log-probabilities.
        """
        if self.logprobs:
            raise unsupported("logprobs", "this policy answers in text and has none; leave it out")
        names = ("temperature", "top_p", "top_k", "max_tokens", "stop", "seed")
        return tuple(name for name in names if getattr(self, name) not in (None, ()))


@dataclass(frozen=True)
class Call:
    """A request for `n` replies to one conversation.

    tools: schemas in the OpenAI chat form, `{"type": "function", "function": {...}}`; [] if none may be called.
    model: the name that the client sent, for the echo.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    options: Options = Options()
    n: int = 1
    model: str = ""


@dataclass(frozen=True)
class Token:
    """One sampled token: its text, its bytes (None if it is a part of a character), natural log of its probability."""

    text: str
    data: bytes | None
    logprob: float


@dataclass(frozen=True)
class Reply:
    """One sample.

    message: the assistant message, as `Renderer.parse` makes it: content "", a string; `reasoning_content` and
        `tool_calls` only where there are any; arguments are a JSON string.
    finish_reason: "tool_calls" if the message calls tools, unless it was cut ("length").
    stop: the stop string of the request that ended it.
    prompt_tokens, completion_tokens, reasoning_tokens: how many; the recorded ids. 0 where a person or a policy without
        tokens answered. cached_tokens: how many of the prompt's were there before this turn.
    tokens: one for each sampled id if the request asked for log-probabilities.
    ignored: names of the sampling options of the request that the run overrides.
    """

    message: Message
    finish_reason: FinishReason = "stop"
    stop: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    tokens: list[Token] | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """The answer to a call: `n` replies. A retry gets the very same object.

    id: 24 letters and digits, to which a wire puts its prefix. created: seconds since 1970.
    """

    id: str
    created: int
    replies: list[Reply]


class Respondent(Protocol):
    """Who answers the calls of a session; several at a time."""

    async def answer(self, call: Call) -> list[Reply]:
        """`call.n` replies, all of them recorded, or none and an exception.

        Raises:
            PromptTooLong: the conversation leaves no room for a reply.
            WireError: the call cannot be honoured.
        """
        ...

    async def count(self, call: Call) -> int:
        """How many tokens the prompt of this call has; 0 if there are no tokens."""
        ...


@dataclass(frozen=True)
class Parsed:
    """A request that was understood. A wire may derive its own class with more fields."""

    call: Call
    stream: bool = False


Event = tuple[str | None, Any]
"""Name (None: the SSE stream has none) and data of a server-sent event; data that is a str is sent as it is."""


class Wire(Protocol):
    """One API, in pure functions."""

    def parse(self, fields: Mapping[str, msgspec.Raw], memory: WireMemory) -> Parsed:
        """Understands a body, given by its top-level fields. Unknown fields are accepted.

        Raises:
            WireError: a field is missing, wrong or cannot be honoured. Nothing else, whatever the body.
        """
        ...

    def reply(self, parsed: Any, completion: Completion, memory: WireMemory) -> dict[str, Any]:
        """The JSON body of the answer."""
        ...

    def events(self, parsed: Any, completion: Completion, memory: WireMemory) -> Iterator[Event]:
        """The same answer as a stream, from the first event to the last."""
        ...

    def error(self, error: WireError) -> dict[str, Any]:
        """The JSON body of an error."""
        ...

    def error_events(self, error: WireError) -> Iterator[Event]:
        """The error as the end of a stream that had begun."""
        ...
