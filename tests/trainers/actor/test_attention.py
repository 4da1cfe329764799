"""Who sees whom in a packed sequence: the same for torch's own attention and for blocks of flex attention."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from molt_gym.trainers.actor.attention import BLOCK, Visible, attend, sparse

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


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (6, 2, 16), (4, 4, 8)])
def test_flex_attention_computes_what_torch_does(heads: int, groups: int, width: int) -> None:
    torch.manual_seed(0)
    visible = Visible(forest(7, 3 * BLOCK))
    query, key, value = (torch.randn(1, number, 3 * BLOCK, width) for number in (heads, groups, groups))
    expected, _ = attend(torch.nn.Identity(), query, key, value, visible=visible, scaling=0.3)
    torch.testing.assert_close(sparse(query, key, value, visible, 0.3).transpose(1, 2), expected, rtol=0, atol=1e-5)
