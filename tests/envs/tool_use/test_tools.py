import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_gym.envs.tool_use.tools import TOOLS, run_tool

TABLE = {"lamp": {"price": 37, "stock": 12, "weight": 5}, "cup": {"price": 4, "stock": 99, "weight": 1}}


def call(name, **arguments):
    return run_tool(name, json.dumps(arguments), TABLE)


def test_the_tools_really_run():
    assert call("calculate", expression="12*37") == "444"
    assert call("look_up", item="lamp", column="price") == "37"
    assert call("look_up", item="cup", column="stock", reason="curious") == "99"


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("think", "{}", "there is no tool 'think'; call calculate or look_up"),
        ("calculate", "{", "the arguments are no JSON"),
        ("calculate", "[" * 100_000, "the arguments are no JSON"),
        ("calculate", '"1+1"', "calculate takes expression, as text"),
        ("calculate", '{"expression": 2}', "calculate takes expression, as text"),
        ("calculate", '{"expression": "2*"}', "that is no arithmetic expression"),
        ("look_up", '{"item": "lamp"}', "look_up takes item and column, as text"),
        ("look_up", '{"item": "dog", "column": "price"}', "there is no 'dog'; there are lamp, cup"),
        ("look_up", '{"item": "lamp", "column": "age"}', "there is no column 'age'; there are price, stock, weight"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(name, arguments, complaint):
    assert run_tool(name, arguments, TABLE) == f"Error: {complaint}"


@given(st.sampled_from(["calculate", "look_up", "?"]), st.text())
def test_no_call_raises(name, arguments):
    assert run_tool(name, arguments, TABLE).startswith("Error: ")


def test_every_tool_is_offered_with_what_it_takes():
    for tool in TOOLS:
        function = tool["function"]
        names = " and ".join(function["parameters"]["properties"])
        assert run_tool(function["name"], "{}", TABLE) == f"Error: {function['name']} takes {names}, as text"
