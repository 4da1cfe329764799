"""Images in the engine on plain transformers: the distribution is that of transformers' own forward pass."""

import asyncio

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from molt_gym.images import ImageSpan
from molt_gym.tokens import Generation, Renderer, Sampling, TokenGraph
from molt_gym.tokens.vision import Vision
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.transformers_engine import TransformersEngine
from molt_gym.trainers.vision_inputs import pictures, rope_positions

PAD = 5


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe"])
def path(request, vision_path):
    return vision_path(request.param)


@pytest.fixture(scope="module")
def renderer(path) -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(path), vision=Vision.of(path))


@pytest.fixture
async def engine(path, renderer):
    made = TransformersEngine(path, renderer, dtype=torch.float32, max_context=256, max_sequences=8)
    yield made
    await made.close()


@torch.no_grad()
def expected(path, ids, images, vision):
    """Log-probability of each id but the first, from transformers' own processing of ids and images."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    kinds = torch.zeros(1, len(ids), dtype=torch.long)
    for start, count, _ in images:
        kinds[0, start : start + count] = 1
    # What only spells an image is text, which transformers cannot be told otherwise.
    whole = torch.tensor([ids])
    assert not ((whole == PAD) & (kinds == 0)).any()
    pixels, grids = pictures(images, vision, torch.device("cpu")) if images else (None, None)
    positions, _ = model.model.get_rope_index(whole, mm_token_type_ids=kinds, image_grid_thw=grids)
    assert torch.equal(positions[:, 0], rope_positions(len(ids), images, vision))
    logits = model(input_ids=whole, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds).logits[0]
    return logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()


async def ask(engine, *requests) -> list[Generation]:
    return await asyncio.wait_for(asyncio.gather(*engine.submit(requests)), 60)


def user(*parts):
    return {"role": "user", "content": list(parts)}


async def test_replies_to_images_over_several_turns_have_the_model_s_own_probabilities(engine, path, renderer, picture):
    talks = [[user(picture("red", 40, 24), {"type": "text", "text": "Which colour?"})],
             [user(picture("blue", 40, 24), {"type": "text", "text": "Which colour?"})],
             [user({"type": "text", "text": "No picture"})],
             [user(picture("red", 60, 60), picture("lime", 20, 70))],
             [user(picture("red", 40, 24), {"type": "text", "text": "Which colour?"})]]
    graphs = [TokenGraph(renderer) for _ in talks]
    for turn in range(3):
        prompts = [graph.prepare(talk) for graph, talk in zip(graphs, talks, strict=True)]
        replies = await ask(engine, *(Request(list(prompt.ids), Sampling(max_tokens=6, seed=10 * turn + number % 4),
                                              images=prompt.images) for number, prompt in enumerate(prompts)))
        assert turn or replies[0].ids == replies[4].ids != replies[1].ids, "only the colour tells these apart"
        for graph, talk, prompt, reply in zip(graphs, talks, prompts, replies, strict=True):
            graph.commit(prompt, reply, message := {"role": "assistant", "content": f"t{turn}"})
            ids = [*prompt.ids, *reply.ids]
            if ids.count(PAD) == sum(image.count for image in prompt.images):
                there = expected(path, ids, prompt.images, renderer.vision)[-len(reply.ids) :]
                assert torch.allclose(torch.tensor(there), torch.tensor(reply.logprobs), atol=1e-4)
            talk += [message, user({"type": "text", "text": "and"}, picture("green", 16 * (turn + 2), 32))]


async def test_an_image_that_a_model_spells_is_text(engine, renderer, picture):
    ids = renderer.render([user(picture())])
    spans = renderer.image_spans(ids, [user(picture())])
    strange = [*ids, PAD, PAD, 7]
    (one, two) = await ask(engine, Request(strange, Sampling(max_tokens=3, seed=0), images=spans),
                           Request([PAD, 7], Sampling(max_tokens=3, seed=0)))
    assert len(one.ids) == len(two.ids) == 3 or one.finish_reason == two.finish_reason == "stop"


async def test_images_that_do_not_fit_their_tokens_are_refused(engine, renderer, picture):
    ids = renderer.render([user(picture())])
    (span,) = renderer.image_spans(ids, [user(picture())])
    wrong = [span._replace(count=3), span._replace(start=len(ids) - 1), span._replace(start=-1)]
    for future in engine.submit([Request(ids, Sampling(), images=(one,)) for one in wrong]):
        with pytest.raises(ValueError, match=r"request.images: \d tokens from -?\d+ on for an image of 4"):
            await future
    (fine,) = await ask(engine, Request(ids, Sampling(max_tokens=1), images=(span,)))
    assert len(fine.ids) == 1


    for data, words in (("", "no image in base64"), ("data:image/png;base64,AAAA", "3 bytes that are no PNG")):
        (future,) = engine.submit([Request(ids, Sampling(), images=(ImageSpan(1, 1, data),))])
        with pytest.raises(ValueError, match=words):
            await future


async def test_an_engine_whose_model_sees_nothing_refuses_images(make_engine, path):
    blind = make_engine(renderer=Renderer(AutoTokenizer.from_pretrained(path)))
    (future,) = blind.submit([Request([5, 6], Sampling(), images=(ImageSpan(0, 1, "data:,"),))])
    with pytest.raises(ValueError, match="for a model that sees none"):
        await future
