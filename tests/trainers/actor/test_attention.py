"""Who sees whom in a packed sequence: the same for torch's own attention and for blocks of flex attention."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from molt_gym.errors import ConfigError
from molt_gym.trainers.actor.attention import ATTENTION, BLOCK, Visible, attend, sparse
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.model import Policy
from molt_gym.trainers.actor.packing import TrainRow, build_trie, collate
from molt_gym.trainers.architecture import check_architecture

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


def forest(seed: int, size: int) -> Tensor:
    """The ends of random tries side by side."""
    chance, ends = random.Random(seed), [0] * size

    def grow(start: int, stop: int) -> None:
        while start < stop:
            middle = chance.randint(start + 1, stop)
            chain = chance.randint(1, middle - start)
            ends[start : start + chain] = [middle] * chain
            grow(start + chain, middle)
            start = middle

    grow(0, size)
    return torch.tensor(ends)


def mask_of(ends: Tensor) -> Tensor:
    """[query, key] bool, by the definition."""
    places = torch.arange(len(ends))
    return (places <= places[:, None]) & (places[:, None] < ends)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 400))
def test_stretches_cover_all_that_is_seen_and_nothing_else(seed: int, size: int) -> None:
    ends = forest(seed, size)
    found = torch.zeros(size, size, dtype=torch.bool)
    for start, stop, mask in Visible(ends).stretches:
        found[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril() if mask is None else mask
    assert torch.equal(found, mask_of(ends))


@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_those_that_torch_makes_of_the_mask(seed: int) -> None:
    size = 4 * BLOCK
    ends = forest(seed, size)
    blocks = Visible(ends).blocks
    expected = create_block_mask(lambda _b, _h, q, k: (k <= q) & (q < ends[k]), None, None, size, size, device="cpu")
    assert torch.equal(blocks.to_dense(), expected.to_dense())
    assert torch.equal(blocks.kv_num_blocks, expected.kv_num_blocks)
    for row, count in enumerate(expected.full_kv_num_blocks[0, 0]):
        assert torch.equal(blocks.full_kv_indices[0, 0, row, :count], expected.full_kv_indices[0, 0, row, :count])


@pytest.mark.parametrize(("heads", "groups", "width", "of_values"), [
    (4, 2, 16, 16), (6, 2, 16, 16), (4, 4, 8, 8), (4, 4, 16, 32), (4, 4, 8, 16), (4, 4, 24, 8)])
def test_flex_attention_computes_what_torch_does(heads: int, groups: int, width: int, of_values: int) -> None:
    torch.manual_seed(0)
    visible = Visible(forest(7, 3 * BLOCK))
    query, key = (torch.randn(1, number, 3 * BLOCK, width) for number in (heads, groups))
    value = torch.randn(1, groups, 3 * BLOCK, of_values)
    expected, _ = attend(torch.nn.Identity(), query, key, value, visible=visible, scaling=0.3)
    torch.testing.assert_close(sparse(query, key, value, visible, 0.3).transpose(1, 2), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "more"), [
    ("Doge", {"keep_window_size": 4}), ("Nemotron", {}), ("GPT2", {}), ("Gemma2", {"layer_types": ["full_attention"]})])
def test_a_model_whose_attention_is_another_one_is_refused_and_not_computed_wrongly(name: str, more: dict) -> None:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    batch = collate([build_trie([TrainRow(list(range(9)), [1] * 9, [0.0] * 9, 1.0, 1.0, 0, 0)])], torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"^model: {name}.*; choose another model"):
        Policy(model)(batch)


@pytest.mark.parametrize(("name", "more", "words"), [
    ("Falcon", {}, "FalconForCausalLM computes attention in its own way"),
    ("ModernBertDecoder", {"intermediate_size": 48, "layer_types": ["full_attention"] * 2},
     "ModernBertDecoderForCausalLM makes its logits in another way than by its output embedding alone")])
def test_a_model_that_would_not_be_run_as_its_own_forward_does_is_refused_at_the_start(
    spec: Callable[..., ActorSpec], tmp_path: Path, name: str, more: dict, words: str
) -> None:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **more)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"^model: {words}.*; choose another model"):
        LocalActor(spec(tmp_path, rollout__max_context=32, rollout__max_tokens=16))


def test_a_model_that_has_no_number_of_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="model: bloom has no number of positions"):
        check_architecture(transformers.BloomConfig(), 64)


def test_a_context_in_which_the_angles_of_rows_depend_on_the_longest_one_is_refused() -> None:
    config = transformers.Phi3Config(max_position_embeddings=64, original_max_position_embeddings=32, pad_token_id=0,
                                     rope_parameters={"rope_type": "longrope", "rope_theta": 1e4,
                                                      "short_factor": [1.0] * 48, "long_factor": [4.0] * 48,
                                                      "original_max_position_embeddings": 32})
    check_architecture(config, 32)
    with pytest.raises(ConfigError, match="rollout.max_context: 33 is more than 32 positions"):
        check_architecture(config, 33)
