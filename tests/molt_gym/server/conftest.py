"""A toy tokenizer, an engine that does what the test says, and a server that is really listening."""

import asyncio
import importlib.util
import itertools
from pathlib import Path

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
        self.samplings: list[Sampling] = []
        self.seconds = 0.0
        self.aborted = 0
        self.running = 0
        self._logprob = itertools.count(1)

    async def __call__(self, ids: list[int], sampling: Sampling, number: int) -> Generation:
        self.received.append(list(ids))
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
