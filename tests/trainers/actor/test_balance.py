"""Bins of a limited size, and shares of about the same size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_gym.trainers.actor.balance import first_fit, karmarkar_karp


@pytest.mark.parametrize(("sizes", "limit", "bins"), [
    ([5, 5, 5, 5], 10, [0, 0, 1, 1]), ([5, 3, 7, 2, 6], 10, [0, 0, 1, 0, 2]), ([30, 4], 10, [0, 1])])
def test_a_size_goes_to_the_first_bin_that_has_room(sizes: list[int], limit: int, bins: list[int]) -> None:
    assert first_fit(sizes, limit) == bins


@pytest.mark.parametrize(("sizes", "equal", "shares"), [
    ([8, 7, 6, 5, 4, 3, 2, 1], True, [[0, 3, 5, 6], [1, 2, 4, 7]]),
    ([100, 1, 1, 1], True, [[0, 1], [2, 3]]),
    ([100, 1, 1, 1], False, [[0], [1, 2, 3]])])
def test_shares_differ_little(sizes: list[int], equal: bool, shares: list[list[int]]) -> None:
    assert sorted(karmarkar_karp(sizes, 2, equal=equal)) == shares


@given(sizes=st.lists(st.integers(1, 50), max_size=12), shares=st.integers(1, 4))
def test_shares_have_as_many_sizes_as_their_number_allows(sizes: list[int], shares: int) -> None:
    counts = [len(share) for share in karmarkar_karp(sizes, shares, equal=True)]
    assert sum(counts) == len(sizes) and max(counts) - min(counts) <= 1


@given(sizes=st.lists(st.integers(1, 50), max_size=12), shares=st.integers(1, 4))
def test_everything_is_dealt_once_and_no_share_is_larger_than_the_mean_and_the_largest_size(
    sizes: list[int], shares: int
) -> None:
    found = karmarkar_karp(sizes, shares)
    assert len(found) == shares
    assert sorted(place for share in found for place in share) == list(range(len(sizes)))
    assert max(sum(sizes[place] for place in share) for share in found) <= sum(sizes) / shares + max(sizes, default=0)
