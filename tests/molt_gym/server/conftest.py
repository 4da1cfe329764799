"""A toy tokenizer, an engine that does what the test says, and a server that is really listening."""

import asyncio
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from molt_gym.server.respond import Rules, TokenRespondent
from molt_gym.tokens import Generation, Sampling

_spec = importlib.util.spec_from_file_location("toy", Path(__file__).parents[1] / "tokens" / "conftest.py")
toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy)

END = 257


class Engine:
    """Answers from `script`, each entry ids or an exception; after its end, with the one called `always`."""

    def __init__(self) -> None:
        self.script: list = []
        self.always: list[int] = [262, 264, END]
        self.received: list[list[int]] = []
        self.images: list[tuple] = []
        self.samplings: list[Sampling] = []
        self.seconds = 0.0
        self.aborted = 0
        self.running = 0
        self._logprob = itertools.count(1)

    async def __call__(self, ids: list[int], sampling: Sampling, number: int, images: tuple) -> Generation:
        self.received.append(list(ids))
        self.images.append(images)
        self.samplings.append(sampling)
        answer = self.script.pop(0) if self.script else self.always
        self.running += 1
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        if isinstance(answer, BaseException):
            raise answer
        answer = list(answer)
        cut = answer[: sampling.max_tokens]
        logprobs = [-float(next(self._logprob)) for _ in cut]
        reason = "length" if len(cut) < len(answer) or cut[-1] != END else "stop"
        return Generation(cut, logprobs, [0] * len(cut), reason)

    async def until(self, running: int, *, seconds: float = 5.0) -> None:
        """Waits until so many samples are under way."""
        async with asyncio.timeout(seconds):
            while self.running != running:
                await asyncio.sleep(0.005)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="session")
def renderer_of():
    return toy.make_renderer


@pytest.fixture
def respondent_of(engine):
    """Makes respondents with the toy tokenizer."""
    def make(template: str = "toy", *, max_tokens: int = 64, max_context: int = 4096, free: bool = False, **options):
        rules = Rules(Sampling(max_tokens), max_context, free=free)
        return TokenRespondent(toy.make_renderer(template), options.pop("generate", engine), rules, **options)
    return make


@pytest.fixture
async def server():
    from molt_gym.server.server import LoopbackServer

    async with LoopbackServer(timeout=30.0) as server:
        yield server


WIRES = ("chat", "responses", "messages")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


class Agent:
    """A program with stock SDK clients of one session, which can ask the same thing over each of the three wires."""

    def __init__(self, session, *, max_retries: int = 0) -> None:
        import anthropic
        import openai

        self.session, self.graph = session, getattr(session.respondent, "graph", None)
        # Without certificates a client is made in a millisecond.
        self._open = [sdk.DefaultAsyncHttpxClient(verify=False, trust_env=False) for sdk in (openai, anthropic)]
        options = {"api_key": session.key, "max_retries": max_retries}
        self.openai = openai.AsyncOpenAI(base_url=session.url + "/v1", http_client=self._open[0], **options)
        self.anthropic = anthropic.AsyncAnthropic(base_url=session.url, http_client=self._open[1], **options)

    async def chat(self, *messages, model="m", **options):
        return await self.openai.chat.completions.create(model=model, messages=list(messages), **options)

    async def responses(self, *items, model="m", max_tokens=None, **options):
        if max_tokens is not None:
            options["max_output_tokens"] = max_tokens
        return await self.openai.responses.create(model=model, input=list(items), **options)

    async def messages(self, *messages, model="m", max_tokens=64, **options):
        create = self.anthropic.messages.create
        return await create(model=model, messages=list(messages), max_tokens=max_tokens, **options)

    async def ask(self, wire: str, *messages, **options):
        return await getattr(self, wire)(*messages, **options)

    @property
    def rows(self) -> list:
        return self.graph.rows()

    async def close(self) -> None:
        for client in self._open:
            await client.aclose()


def said(reply) -> list:
    """The messages or items with which a reply is sent back."""
    if hasattr(reply, "choices"):
        return [reply.choices[0].message]
    return list(reply.output) if hasattr(reply, "output") else [{"role": "assistant", "content": reply.content}]


def text_of(reply) -> str:
    if hasattr(reply, "choices"):
        return reply.choices[0].message.content
    if hasattr(reply, "output"):
        return reply.output_text
    return "".join(block.text for block in reply.content if block.type == "text")


def counts_of(usage) -> tuple[int, int]:
    """Tokens of prompt and reply."""
    if hasattr(usage, "cache_read_input_tokens"):
        return usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens
    if hasattr(usage, "input_tokens"):
        return usage.input_tokens, usage.output_tokens
    return usage.prompt_tokens, usage.completion_tokens


async def post(session, path: str, body, **headers):
    """Status, headers and JSON of a plain HTTP request; without retry header, unless one is given."""
    import aiohttp

    sent = {"Authorization": f"Bearer {session.key}", "Content-Type": "application/json"} | headers
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as client:
        async with client.post(session.url + path, data=data, headers=sent) as response:
            return response.status, response.headers, json.loads(await response.read())


@pytest.fixture
async def agent_of(server, respondent_of):
    """Opens a session, with SDK clients; takes what `respondent_of` takes, or a respondent."""
    agents = []

    def make(template: str = "toy", *, respondent=None, max_retries: int = 0, max_turns=None, **options):
        respondent = respondent or respondent_of(template, threads=server.threads, **options)
        agents.append(Agent(server.open(respondent, max_turns=max_turns), max_retries=max_retries))
        return agents[-1]

    yield make
    for agent in agents:
        await agent.close()


@pytest.fixture
def agent(agent_of) -> Agent:
    return agent_of()


@pytest.fixture(scope="session")
def prompt_ids() -> list[int]:
    """The prompt for one user message "ok" in the toy template, with the header of the reply."""
    return [256, *b"user\n", 266, END, 10, 256, *b"assistant\n"]


@pytest.fixture(scope="session")
def wire():
    """What tests share to speak over any wire."""
    return SimpleNamespace(names=WIRES, paths=PATHS, said=said, text_of=text_of, counts_of=counts_of, post=post)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    """The SDKs wait only a moment before they try again, where they have this constant."""
    for sdk in ("openai", "anthropic"):
        if f"{sdk}._base_client" in sys.modules:
            monkeypatch.setattr(sys.modules[f"{sdk}._base_client"], "INITIAL_RETRY_DELAY", 0.01, raising=False)
