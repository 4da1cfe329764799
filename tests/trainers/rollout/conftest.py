"""Engines on the tiny model, and what plain transformers computes for the same ids."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import Qwen3ForCausalLM

from molt_gym.tokens import Generation, Renderer, Sampling
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.transformers_engine import TransformersEngine

WAIT = 60.0


@pytest_asyncio.fixture
async def make_engine(tiny_path: Path, renderer: Renderer) -> AsyncIterator[Callable[..., TransformersEngine]]:
    """Makes engines that are closed after the test."""
    engines = []

    def make(**options) -> TransformersEngine:
        settings = {"dtype": torch.float32, "max_context": 256, "max_sequences": 8, "renderer": renderer} | options
        engines.append(TransformersEngine(tiny_path, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., TransformersEngine]) -> TransformersEngine:
    """An engine with room for 8 sequences of 256 tokens."""
    return make_engine()


@pytest.fixture
def play() -> Callable:
    """`await play(engine, prompts, **sampling)`: the replies to prompts submitted together, seeded by their number."""

    async def run(engine, prompts: Sequence[Sequence[int]], seed: int = 0, **sampling) -> list[Generation]:
        requests = [Request(list(prompt), Sampling(**{"max_tokens": 12, "seed": seed + number} | sampling))
                    for number, prompt in enumerate(prompts)]
        return await asyncio.wait_for(asyncio.gather(*engine.submit(requests)), WAIT)

    return run


@pytest.fixture
def expected() -> Callable:
    """`expected(model, prompt, reply, sampling)`: log-probabilities of a reply, from one plain forward pass."""

    @torch.no_grad()
    def score(model: Qwen3ForCausalLM, prompt: Sequence[int], reply: Sequence[int], temperature: float = 1.0,
              top_k: int = 0, top_p: float = 1.0) -> list[float]:
        logits = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1].double()
        probabilities = (logits / temperature).softmax(-1)
        ranked = probabilities.sort(-1, descending=True).values
        if top_k:
            probabilities = probabilities * (probabilities >= ranked[:, top_k - 1 : top_k])
            probabilities /= probabilities.sum(-1, keepdim=True)
            ranked = probabilities.sort(-1, descending=True).values
        for row, (values, best) in enumerate(zip(probabilities, ranked, strict=True)):
            kept = int((best.cumsum(0) < top_p).sum()) + 1 if top_p < 1 else len(best)
            probabilities[row] = values * (values >= best[kept - 1])
        probabilities /= probabilities.sum(-1, keepdim=True)
        return probabilities.log()[range(len(reply)), list(reply)].tolist()

    return score
