"""Images in vLLM: the same ids and probabilities as transformers and the actor, before and after an update."""

import asyncio
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from molt_gym.tokens import Renderer, Sampling, TokenGraph
from molt_gym.tokens.vision import Vision
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.config import load_config
from molt_gym.trainers.parity import ParityProbe
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.transformers_engine import TransformersEngine
from molt_gym.trainers.rollout.vllm_engine import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

PAD, WAIT = 5, 240.0


def user(*parts):
    return {"role": "user", "content": list(parts)}


async def ask(engine, requests):
    return await asyncio.wait_for(asyncio.gather(*engine.submit(requests)), WAIT)


async def play(engine, renderer, picture, seed):
    """Rows of conversations of three turns, with one image, several, and one in the result of a tool."""
    talks = [[user(picture("red", 40, 24), {"type": "text", "text": "Which colour?"})],
             [user(picture("blue", 40, 24), {"type": "text", "text": "Which colour?"})],
             [user({"type": "text", "text": "two"}, picture("red", 60, 60), picture("lime", 20, 70))]]
    graphs = [TokenGraph(renderer) for _ in talks]
    for turn in range(3):
        prompts = [graph.prepare(talk) for graph, talk in zip(graphs, talks, strict=True)]
        replies = await ask(engine, [Request(list(prompt.ids), Sampling(max_tokens=6, seed=seed + turn),
                                             images=prompt.images) for prompt in prompts])
        for graph, talk, prompt, reply in zip(graphs, talks, prompts, replies, strict=True):
            graph.commit(prompt, reply, message := {"role": "assistant", "content": f"t{turn}"})
            talk += [message, {"role": "tool", "tool_call_id": "c", "content": [picture("green", 16 * (turn + 2), 32)]}]
    return [row for graph in graphs for row in graph.rows()]


def check(actor, rows):
    """What the sampler told is what the actor computes."""
    trained = [TrainRow(row.ids, row.mask, row.logprobs, 1.0, 0.1, number, number, images=row.images)
               for number, row in enumerate(rows)]
    for row, told in zip(trained, actor.score(trained), strict=True):
        assert torch.allclose(torch.tensor(told), torch.tensor(row.behaviour), atol=1e-4)
    return trained


async def test_vllm_the_engine_on_transformers_and_the_actor_agree_also_after_an_update(vision_path, picture):
    path = vision_path("qwen3_vl")
    renderer = Renderer(AutoTokenizer.from_pretrained(path), vision=Vision.of(path))
    engine = VllmEngine(path, renderer, dtype=torch.float32, max_context=256, max_sequences=8)
    other = TransformersEngine(path, renderer, dtype=torch.float32, max_context=256, max_sequences=8)
    settings = {"actor__lr": 5e-2, "actor__freeze_vision": False, "rollout__max_context": 256, "rollout__max_tokens": 8}
    actor = LocalActor(ActorSpec(str(path), load_config("Any-v0", overrides=settings), torch.float32, 10))
    probe = ParityProbe.of(renderer, 256, torch.float32, gpu=False)
    assert len(probe.images) == 1
    try:
        rows = await play(engine, renderer, picture, 1)
        check(actor, await play(other, renderer, picture, 1))
        trained = check(actor, rows)
        assert {PAD} == {row.ids[image.start] for row in rows for image in row.images} and len(rows[0].images) == 3
        assert await probe.check(engine, actor) < 1e-4

        for number, row in enumerate(trained):
            row.advantage = 1.0 - number
        actor.train([trained])
        name = "model.visual.merger.linear_fc2.weight"
        before = AutoModelForImageTextToText.from_pretrained(path).get_parameter(name)
        assert not torch.allclose(before, dict(actor.weights())[name], atol=1e-3), "the tower has learnt"
        for one in (engine, other):
            await one.pause()
            await one.update_weights(actor.weights(), 1)
            await one.resume()
            again = await play(one, renderer, picture, 1)
            check(actor, again)
            assert {version for row in again for version in row.versions} == {-1, 1}
        assert await probe.check(engine, actor) < 1e-4

        prompt = TokenGraph(renderer).prepare([user(picture())])
        flying = engine.submit([Request(list(prompt.ids), Sampling(max_tokens=100, seed=seed), images=prompt.images)
                                for seed in range(4)])
        await asyncio.sleep(0.1)
        await engine.pause()
        await engine.update_weights(actor.weights(), 2)
        await engine.resume()
        for reply in await asyncio.wait_for(asyncio.gather(*flying), WAIT):
            graph = TokenGraph(renderer)
            graph.commit(graph.prepare([user(picture())]), reply, {"role": "assistant", "content": "x"})
            check(actor, graph.rows())
            assert set(reply.versions) <= {1, 2}

        (future,) = engine.submit([Request(list(prompt.ids), Sampling(), images=(prompt.images[0]._replace(count=3),))])
        with pytest.raises(Exception, match="request.images: 3 tokens from .* for an image of 4"):
            await asyncio.wait_for(future, WAIT)
        assert engine.ended is None
    finally:
        await engine.close()
        await other.close()
        actor.close()
