"""Pictures of step envs, played with tokens: into the rows as they are, or a clear outcome."""

import asyncio

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from molt_gym import Turn, as_policy
from molt_gym.images import images_of
from molt_gym.tokens import Renderer, Sampling
from molt_gym.tokens.vision import Vision
from molt_gym.trainers.rollout.gate import OpenGate
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import PolicySeat, TokenSeat
from molt_gym.trainers.rollout.ticket import Ticket
from molt_gym.trainers.rollout.transformers_engine import TransformersEngine

PAD, TICKET = 5, Ticket(3, 5, 2, seed=7)


@pytest.fixture(scope="module")
def renderer(vision_path) -> Renderer:
    path = vision_path("qwen3_vl")
    return Renderer(AutoTokenizer.from_pretrained(path), vision=Vision.of(path))


@pytest.fixture
async def play(vision_path, renderer):
    """`await play(make, max_context=...)`: the trajectory of one rollout."""
    engine = TransformersEngine(vision_path("qwen3_vl"), renderer, dtype=torch.float32, max_context=256,
                                max_sequences=2)
    gate = OpenGate(engine)

    async def run(make, max_context=256):
        runner = Runner("Test-v0", make, lambda ticket, attempt: TokenSeat(
            renderer, "rerender", Sampling(max_tokens=4), max_context, ticket, attempt, gate), Limits(),
                        live=gate.rollout)
        return await asyncio.wait_for(runner.play(TICKET), 60)

    yield run
    await engine.close()


def shows(*images, role="user"):
    content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": "?"}]
    return {"role": role, "content": content} | ({"tool_call_id": "c"} if role == "tool" else {})


def plain(colour, side=32):
    return Image.new("RGB", (side, side), colour)


async def test_pictures_of_several_turns_and_of_tools_are_in_the_rows_once_each(scripted, play, renderer):
    later = [[shows(plain("blue"), plain("lime", 64), role="tool")], [shows(plain("red"))], []]

    def answer(env, message):
        return Turn(later[len(env.messages) // 2 - 1], terminated=len(env.messages) > 5)

    trajectory = await play(scripted(answer, begin=lambda env, index: [shows(plain("red"))]))
    assert trajectory.failure is None and trajectory.turns == 3
    for row in trajectory.rows:
        assert all(row.ids[start : start + count] == [PAD] * count and not any(row.mask[start : start + count])
                   for start, count, _ in row.images)
    longest = max(trajectory.rows, key=lambda row: len(row.ids))
    assert [image.uri for image in longest.images] == images_of(trajectory.messages)
    assert [image.count for image in longest.images] == [4, 4, 16, 4]
    assert longest.images[0].uri is longest.images[3].uri, "equal images are one string"


async def test_a_conversation_whose_pictures_no_longer_fit_ends_and_none_is_cut(scripted, play):
    trajectory = await play(scripted(lambda env, message: Turn([shows(plain("blue", 64))])), max_context=70)
    assert trajectory.length_limited and trajectory.truncated and trajectory.failure is None
    assert trajectory.rows and all(image.count == 16 and image.start + 16 < len(row.ids)
                                   for row in trajectory.rows for image in row.images)


@pytest.mark.parametrize(("image", "words"), [
    ("nowhere.png", "nowhere.png cannot be read"), ("https://a.b/c.png", "would have to be fetched"),
    ("data:image/png;base64,AAAA", "3 bytes that are no PNG"), (None, "is no image")])
@pytest.mark.parametrize("place", ["reset", "step"])
async def test_what_is_no_picture_is_the_env_s_failure_and_named(scripted, place, image, words):
    broken = [shows(image)]
    make = (scripted(begin=lambda env, index: broken) if place == "reset"
            else scripted(lambda env, message: Turn(broken)))
    runner = Runner("Test-v0", make, lambda ticket, attempt: PolicySeat(as_policy(lambda _: "x")), Limits())
    trajectory = await asyncio.wait_for(runner.play(TICKET), 20)
    assert trajectory.reward is None and trajectory.failure.reason == f"{place}_error"
    assert "messages[0].content[0]: " in trajectory.failure.message and words in trajectory.failure.message


async def test_a_picture_that_this_model_cannot_see_fails_the_rollout_and_is_named(scripted, play):
    trajectory = await play(scripted(begin=lambda env, index: [shows(plain("red").resize((3, 900)))]))
    assert trajectory.reward is None
    assert "messages[0]: 3 x 900 pixels: absolute aspect ratio" in trajectory.failure.message
