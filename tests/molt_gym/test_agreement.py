import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_gym.agreement import krippendorff_alpha, standard_error

# The example of Krippendorff (2011), four observers and twelve units, of which the last has one value.
EXAMPLE = [[1, 1, 1], [2, 2, 3, 2], [3, 3, 3, 3], [3, 3, 3, 3], [2, 2, 2, 2], [1, 2, 3, 4], [4, 4, 4, 4], [1, 1, 2, 1],
           [2, 2, 2, 2], [5, 5, 5], [1, 1], [3]]
UNITS = st.lists(st.lists(st.integers(-5, 5), min_size=2, max_size=4), min_size=2, max_size=6).filter(
    lambda units: len({value for unit in units for value in unit}) > 1)


@pytest.mark.parametrize(("level", "alpha"), [("nominal", 0.743), ("interval", 0.849)])
def test_alpha_is_that_of_the_published_example(level, alpha):
    assert krippendorff_alpha(EXAMPLE, level) == pytest.approx(alpha, abs=5e-4)


@settings(max_examples=50, deadline=None)
@given(UNITS)
def test_alpha_is_observed_over_expected_disagreement(units):
    distances = {"interval": lambda a, b: (a - b) ** 2, "nominal": lambda a, b: float(a != b)}
    values = [value for unit in units for value in unit]
    for level, distance in distances.items():
        observed = sum(distance(a, b) / (len(unit) - 1) for unit in units for a, b in permutations(unit, 2))
        expected = sum(distance(a, b) for a, b in permutations(values, 2)) / (len(values) - 1)
        assert krippendorff_alpha(units, level) == pytest.approx(1 - observed / expected)


@settings(max_examples=50, deadline=None)
@given(UNITS, st.integers(1, 9), st.integers(-1000, 1000))
def test_another_scale_does_not_change_alpha(units, factor, shift):
    moved = [[factor * value + shift for value in unit] for unit in units]
    assert krippendorff_alpha(moved) == pytest.approx(krippendorff_alpha(units))


def test_alpha_of_agreement_is_1_and_of_nothing_to_tell_apart_nan():
    assert krippendorff_alpha([["a", "a"], ["b", "b"]], "nominal") == krippendorff_alpha([[1, 1], [2, 2]]) == 1.0
    for units in ([], [[1], [2]], [[0.1, 0.1], [0.1, 0.1, 0.1]]):
        assert math.isnan(krippendorff_alpha(units)) and math.isnan(krippendorff_alpha(units, "nominal"))


def test_the_standard_error_is_that_of_the_mean():
    assert standard_error([1, 2, 3]) == pytest.approx(1 / math.sqrt(3)) and math.isnan(standard_error([1]))
