import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from molt_gym.trainers.rollout.kv_cache import ATTENTION, SlotCache


@pytest.fixture
def slots(tiny_path):
    """A model that reads and writes a cache of 4 slots of 12 positions, and the cache."""
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32, attn_implementation=ATTENTION).eval()
    return model, SlotCache(model.config, 4, 12, torch.float32, torch.device("cpu"))


@torch.no_grad()
def feed(model, cache, rows, *, first=False):
    """Run {slot: (past, ids)} in one pass; the logits of each row's own tokens by slot."""
    width, window = max(len(ids) for _, ids in rows.values()), max(past + len(ids) for past, ids in rows.values())
    ids = torch.tensor([row + [0] * (width - len(row)) for _, row in rows.values()])
    positions = torch.tensor([[past + t for t in range(width)] for past, _ in rows.values()])
    columns = torch.tensor([[past + t if t < len(row) else 12 for t in range(width)] for past, row in rows.values()])
    cache.aim(torch.tensor(list(rows)), columns, window, first=first)
    mask = torch.arange(window) <= positions[:, :, None]
    logits = model(input_ids=ids, position_ids=positions, attention_mask=mask[:, None], past_key_values=cache).logits
    return {slot: logits[b, : len(row)] for b, (slot, (_, row)) in enumerate(rows.items())}


@torch.no_grad()
def plain(model, ids):
    return model(torch.tensor([ids])).logits[0]


A, B, C = [5, 9, 200, 31, 7, 64], [11, 12], [300, 40, 41, 42]


def test_slots_of_different_lengths_compute_what_separate_sequences_do(slots, tiny_model):
    model, cache = slots
    out = feed(model, cache, {0: (0, A), 3: (0, B), 1: (0, C)})
    for slot, ids in ((0, A), (3, B), (1, C)):
        torch.testing.assert_close(out[slot], plain(tiny_model, ids), atol=2e-5, rtol=0)


@pytest.mark.parametrize("first", [True, False])
def test_decoding_reads_what_was_written_before(slots, tiny_model, first):
    model, cache = slots
    feed(model, cache, {1: (0, B), 0: (0, A[:-1]), 2: (0, C[:-2])})
    out = feed(model, cache, {0: (5, A[-1:]), 1: (2, [70]), 2: (2, C[2:3])}, first=first)
    for slot, ids in ((0, A), (1, [*B, 70]), (2, C[:3])):
        torch.testing.assert_close(out[slot][-1], plain(tiny_model, ids)[-1], atol=2e-5, rtol=0)


def test_what_a_slot_held_before_does_not_shine_through(slots, tiny_model):
    model, cache = slots
    feed(model, cache, {0: (0, [8] * 12), 1: (0, [9] * 12)})
    out = feed(model, cache, {0: (0, B), 1: (0, A)})
    torch.testing.assert_close(out[0], plain(tiny_model, B), atol=2e-5, rtol=0)


def test_a_slot_can_be_moved_saved_and_loaded_in_part(slots, tiny_model):
    model, cache = slots
    feed(model, cache, {0: (0, A)})
    cache.move(0, 2, 4)
    saved = cache.save(0, 6)
    feed(model, cache, {0: (0, [9] * 8)})
    cache.load(3, saved, 5)
    out = feed(model, cache, {2: (4, [77]), 3: (5, [78, 79])})
    torch.testing.assert_close(out[2][-1], plain(tiny_model, [*A[:4], 77])[-1], atol=2e-5, rtol=0)
    torch.testing.assert_close(out[3], plain(tiny_model, [*A[:5], 78, 79])[5:], atol=2e-5, rtol=0)


def test_saving_copies(slots):
    model, cache = slots
    feed(model, cache, {0: (0, A)})
    saved = cache.save(0, 6)
    before = saved.clone()
    feed(model, cache, {0: (0, C + B)})
    assert torch.equal(saved, before)


def test_a_full_slot_is_not_touched_by_the_padding_of_others(slots, tiny_model):
    model, cache = slots
    long = [5 + i for i in range(11)]
    feed(model, cache, {0: (0, long)})
    feed(model, cache, {1: (0, A), 2: (0, [4])})
    out = feed(model, cache, {0: (11, [90])})
    torch.testing.assert_close(out[0][-1], plain(tiny_model, [*long, 90])[-1], atol=2e-5, rtol=0)


def test_the_cache_agrees_with_that_of_transformers(slots, tiny_model):
    model, cache = slots
    theirs = DynamicCache(config=tiny_model.config)
    with torch.no_grad():
        tiny_model(torch.tensor([A]), past_key_values=theirs)
    feed(model, cache, {1: (0, A)})
    saved = cache.save(1, len(A))
    for layer in range(2):
        torch.testing.assert_close(saved[layer, 0], theirs.layers[layer].keys[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(saved[layer, 1], theirs.layers[layer].values[0], atol=2e-5, rtol=0)
