"""Images over all three wires: the same ids and the same images as in the messages, also in the results of tools."""

import base64
import io

import pytest
from PIL import Image
from transformers import AutoTokenizer

from molt_gym.images import images_of
from molt_gym.server.respond import Rules, TokenRespondent
from molt_gym.tokens import Renderer, Sampling
from molt_gym.tokens.vision import Vision

PAD, END = 5, 2
every_wire = pytest.mark.parametrize("name", ["chat", "responses", "messages"])


@pytest.fixture(scope="module")
def renderer(vision_path):
    path = vision_path("qwen3_vl")
    return Renderer(AutoTokenizer.from_pretrained(path), vision=Vision.of(path))


@pytest.fixture
def agent(agent_of, engine, server, renderer):
    engine.always = [100, 101, END]
    rules = Rules(Sampling(64), 128)
    return agent_of(respondent=TokenRespondent(renderer, engine, rules, threads=server.threads))


def png(width: int, height: int, colour: str = "red") -> str:
    file = io.BytesIO()
    Image.effect_mandelbrot((width, height), (-2, -1, 1, 1), 50).convert("RGB").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def part(name: str, data: str) -> dict:
    if name == "messages":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    url = f"data:image/png;base64,{data}"
    return ({"type": "image_url", "image_url": {"url": url}} if name == "chat"
            else {"type": "input_image", "image_url": url, "detail": "auto"})


def said(name: str, words: str) -> dict:
    return {"type": "input_text" if name == "responses" else "text", "text": words}


def call_and_result(name: str, data: str) -> list[dict]:
    if name == "chat":
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        return [{"role": "assistant", "content": "x", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": [said(name, "seen"), part(name, data)]}]
    if name == "responses":
        return [{"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [said(name, "seen"), part(name, data)]}]
    return [{"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [
                said(name, "seen"), part(name, data)]}]}]


@every_wire
async def test_images_of_questions_and_of_tool_results_reach_the_engine_and_the_rows(agent, engine, renderer, name):
    first, second = png(40, 24), png(64, 64)
    question = {"role": "user", "content": [said(name, "Which colour?"), part(name, first)]}
    await agent.ask(name, question)
    await agent.ask(name, question, *call_and_result(name, second))
    one = [{"role": "user", "content": [{"type": "text", "text": "Which colour?"}, {
        "type": "image_url", "image_url": {"url": f"data:image/png;base64,{first}"}}]}]
    assert engine.received[0] == renderer.render(one)
    assert engine.images[0] == renderer.image_spans(engine.received[0], one)
    assert [image.uri for image in engine.images[1]] == [
        *images_of(one), f"data:image/png;base64,{second}"] and len(engine.images[1]) == 2
    for image in engine.images[1]:
        assert engine.received[1][image.start : image.start + image.count] == [PAD] * image.count
    assert [row.images for row in agent.rows] == [list(images) for images in engine.images]


@every_wire
@pytest.mark.parametrize(("data", "words"), [
    (png(64, 64)[:-400], "cannot be decoded"), (base64.b64encode(b"hello").decode(), "5 bytes that are no PNG"),
    (png(3, 900), "absolute aspect ratio")], ids=["cut off", "no image", "narrow"])
async def test_a_broken_image_is_the_client_s_mistake(agent, engine, wire, name, data, words):
    with pytest.raises(Exception, match=words) as refused:
        await agent.ask(name, {"role": "user", "content": [said(name, "?"), part(name, data)]})
    assert refused.value.status_code in (400, 422)
    assert (engine.received, agent.rows, agent.session.failure) == ([], [], None)


@every_wire
async def test_images_that_do_not_fit_are_refused_whole(agent, engine, name):
    images = [part(name, png(64, 64)) for _ in range(8)]
    with pytest.raises(Exception, match="which leaves no room for a reply|context") as refused:
        await agent.ask(name, {"role": "user", "content": images})
    assert refused.value.status_code in (400, 413) and engine.received == []
    assert agent.session.overflowed
