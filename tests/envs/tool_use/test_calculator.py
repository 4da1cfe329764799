import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_gym.envs.tool_use.calculator import CalculatorError, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2*(35+48)", "166"),
        (" -7 // 2 ", "-4"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("1e3 + .5", "1000.5"),
        ("17 % 5 - +3", "-1"),
        ("2**100", str(2**100)),
        ("9**.5", "3"),
    ],
)
def test_it_calculates(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("", "no arithmetic expression"),
        ("2*", "no arithmetic expression"),
        ("3 4", "no arithmetic expression"),
        ("(" * 199, "no arithmetic expression"),
        ("007", "no arithmetic expression"),
        ("2(3)", "only numbers"),
        ("e", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("True+1", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("2j", "only numbers"),
        ("1\ud800", "only numbers"),
        ("1/(3-3)", "division by zero"),
        ("0**-1", "division by zero"),
        ("1e999", "too large"),
        ("9**9**9", "too large"),
        ("(-8)**.5", "no such power"),
        ("9" * 100, "too large"),
        ("1+" * 100 + "1", "201 characters; 200 are allowed"),
    ],
)
def test_it_says_why_there_is_no_value(expression, complaint):
    started = time.perf_counter()
    with warnings.catch_warnings(), pytest.raises(CalculatorError, match=complaint):
        warnings.simplefilter("error")
        calculate(expression)
    assert time.perf_counter() - started < 0.5


@given(st.text("0123456789.+-*/%()e ", max_size=60))
def test_no_text_does_harm(expression):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            assert abs(float(calculate(expression))) < 1.2e77
        except CalculatorError:
            pass
