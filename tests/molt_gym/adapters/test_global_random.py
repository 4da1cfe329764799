"""The global generators are lent and come back."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from molt_gym.adapters.global_random import GlobalRandom


def drawn(count: int) -> list[float]:
    return [value for _ in range(count) for value in (random.random(), float(np.random.random()))]


@given(st.integers(0, 2**40), st.lists(st.integers(0, 5), max_size=5), st.integers(0, 5))
def test_each_side_draws_as_if_the_other_were_not_there(seed, counts, between):
    lent = GlobalRandom()
    lent.seed(seed)
    random.seed(1)
    np.random.seed(1)
    ours, theirs = [], []
    for count in counts:
        with lent:
            theirs += drawn(count)
        ours += drawn(between)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    assert theirs == drawn(sum(counts))
    random.seed(1)
    np.random.seed(1)
    assert ours == drawn(between * len(counts))


def test_without_a_seed_it_goes_on_where_the_caller_is_and_gives_that_back():
    random.seed(5)
    before = random.getstate()
    with GlobalRandom():
        random.random()
    assert random.getstate() == before
