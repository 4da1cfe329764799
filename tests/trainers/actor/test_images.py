"""Images in the actor: packed is what transformers computes for each row alone, and gradients go where they should."""

import random

import pytest
import torch
from transformers import AutoModelForImageTextToText

from molt_gym.images import ImageSpan, images_of
from molt_gym.tokens.vision import Vision
from molt_gym.trainers.actor.images import ImageBatch
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow, build_trie, collate
from molt_gym.trainers.vision_inputs import pictures

PAD = 5


def uri(part):
    return images_of([{"role": "user", "content": [part]}])[0]


def row_of(vision, rng, uris, number, group, *, prompt=None):
    """A row of text and images in turn; `prompt`: the row whose beginning it shares."""
    ids, images = (list(prompt.ids[:-4]), list(prompt.images)) if prompt else ([], [])
    for one in uris:
        ids += [rng.randrange(7, 250) for _ in range(rng.randint(1, 4))] + [3]
        images.append(ImageSpan(len(ids), vision.count(one), one))
        ids += [PAD] * vision.count(one) + [4]
    mask = [0] * len(ids) + [1, 1, 0, 1]
    ids += [rng.randrange(7, 250) for _ in range(4)]
    return TrainRow(ids, mask, [-1.0 * bit for bit in mask], rng.uniform(-2, 2), 0.05, number, group, number,
                    images=images)


@pytest.fixture(scope="module")
def path(request, vision_path):
    return vision_path(getattr(request, "param", "qwen3_vl"))


@pytest.fixture(scope="module")
def vision(path):
    return Vision.of(path)


@pytest.fixture(scope="module")
def rows(vision, picture):
    """Groups with an image, with several, with later ones, without any; and one of equal ids and other images."""
    rng = random.Random(0)
    red, blue, wide = uri(picture("red", 32, 48)), uri(picture("blue", 32, 48)), uri(picture("lime", 64, 16))
    first = row_of(vision, rng, [red, wide], 0, 0)
    made = [first, row_of(vision, rng, [], 1, 0, prompt=first), row_of(vision, rng, [blue], 2, 0, prompt=first)]
    other = TrainRow(first.ids, first.mask, first.logprobs, 1.0, 0.05, 3, 0, 3,
                     images=[first.images[0]._replace(uri=blue), first.images[1]])
    alone = row_of(vision, rng, [wide], 4, 1)
    return [*made, other, alone, row_of(vision, rng, [red], 5, 2), row_of(vision, rng, [], 6, 3)]


def plain(model, row, vision):
    """[trained] log-probabilities as transformers itself computes them."""
    kinds = torch.zeros(1, len(row.ids), dtype=torch.long)
    for start, count, _ in row.images:
        kinds[0, start : start + count] = 1
    pixels, grids = pictures(row.images, vision, torch.device("cpu")) if row.images else (None, None)
    logits = model(input_ids=torch.tensor([row.ids]), pixel_values=pixels, image_grid_thw=grids,
                   mm_token_type_ids=kinds, use_cache=False).logits[0]
    logs = logits.log_softmax(-1)
    return torch.stack([logs[place - 1, row.ids[place]] for place in row.trained])


@pytest.fixture
def model(path):
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def test_what_rows_share_is_computed_once_and_equal_ids_of_other_images_are_not_shared(rows, vision):
    trie = build_trie(rows[:4])
    first, _, later, other = (len(row.ids) for row in rows[:4])
    assert len(trie.ids) == first + 4 + (later - (first - 4)) + (other - rows[0].images[0].start)
    batch = collate([trie, build_trie(rows[4:5])], torch.device("cpu"))
    images = ImageBatch.of([trie, build_trie(rows[4:5])], batch.input_ids.shape[1], vision, torch.device("cpu"))
    assert len(images.grids) == 6, "red and wide, a later one, the same two with another first one, and one alone"
    assert torch.equal(images.shown, batch.input_ids == PAD)
    assert ImageBatch.of([build_trie(rows[6:])], len(rows[6].ids), vision, torch.device("cpu")) is None


@pytest.mark.parametrize(("path", "tokens"), [
    ("qwen3_vl", 2000), ("qwen3_vl", 1), ("qwen2_5_vl", 2000), ("qwen3_vl_moe", 2000)], indirect=["path"])
def test_log_probabilities_are_transformers_own(path, spec, rows, vision, model, tokens):
    actor = LocalActor(spec(path, actor__micro_batch_tokens=tokens, actor__logprob_micro_batch_tokens=tokens))
    try:
        told = actor.score(rows)
        with torch.no_grad():
            for row, values in zip(rows, told, strict=True):
                assert torch.allclose(torch.tensor(values), plain(model, row, vision), atol=1e-4)
            whole = actor.logprobs(rows[0].ids, rows[0].images)
            assert whole[-1] == pytest.approx(told[0][-1], abs=1e-4)
            assert actor.logprobs(rows[0].ids, rows[3].images)[-1] != pytest.approx(whole[-1], abs=1e-2)
    finally:
        actor.close()


@pytest.mark.parametrize(("path", "freeze", "ranks"), [
    ("qwen3_vl", True, 1), ("qwen3_vl", False, 1), pytest.param("qwen3_vl", False, 2, marks=pytest.mark.slow),
    ("qwen2_5_vl", False, 1), ("qwen3_vl_moe", False, 1)], indirect=["path"])
def test_an_update_is_that_of_each_row_by_itself(path, spec, rows, vision, model, weights_of, freeze, ranks):
    actor = LocalActor(spec(path, actor__freeze_vision=freeze, actor__world_size=ranks, actor__lr=1e-2,
                            actor__micro_batch_tokens=60))
    try:
        before = weights_of(actor)
        actor.train([rows])
        after = weights_of(actor)
    finally:
        actor.close()
    model.model.visual.requires_grad_(not freeze)
    loss = torch.zeros(())
    for row in rows:
        logp = plain(model, row, vision)
        loss = loss - row.weight * row.advantage * (logp - logp.detach()).exp().sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
                                   {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0}],
                                  lr=1e-2, betas=(0.9, 0.95), eps=0.1)
    optimizer.step()
    for name, parameter in named.items():
        assert torch.allclose(after[name], parameter, atol=1e-5), name
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("visual.merger" in name for name in moved) == any("visual.blocks.0" in name for name in moved) != freeze
    assert any("language_model.layers.0" in name for name in moved)


def test_a_row_made_with_another_processor_is_refused(path, spec, rows):
    actor = LocalActor(spec(path, actor__max_pixels=300))
    try:
        with pytest.raises(ValueError, match="row.images: 6 tokens for an image of 1; its row was made with another"):
            actor.score(rows[:1])
    finally:
        actor.close()
