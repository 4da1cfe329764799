"""What replies and observations mean, without a server."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_gym import ConfigError
from molt_gym.adapters.openenv_actions import KINDS, Actions, actions_of, describe, tool_text, tools_of
from molt_gym.messages import validate_message

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
NAMES = st.sampled_from(["content", "text", "message", "data"])
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8)
CALLS = st.lists(st.tuples(st.sampled_from(["act", "other"]), st.text() | st.sampled_from(['{"n": 1}', "[]", "{"])),
                 max_size=3)


def schema(required, **fields):
    return {"title": "An action!", "properties": {"metadata": {"type": "object"}} | fields, "required": required}


def test_the_schema_says_how_actions_are_written():
    kinds = {"text": schema(["message"], message=TEXT), "mcp": schema(["tool_name"], tool_name=TEXT, arguments={}),
             "tool": schema(["code"], code=TEXT, seconds=NUMBER)}
    assert {kind: actions_of(given).kind for kind, given in kinds.items()} == {kind: kind for kind in KINDS}
    assert actions_of(schema([])).kind == "mcp" and actions_of(schema(["n"], n=NUMBER)).kind == "tool"
    assert actions_of(schema(["c"], c=TEXT | {"enum": ["a", "b"]})).kind == "tool"
    assert actions_of(schema(["path", "words"], path=TEXT, words=TEXT)).kind == "tool"
    assert actions_of(schema(["c"], c=TEXT | {"const": "go"})).kind == "tool"
    assert actions_of(schema([], message=TEXT | {"default": ""})) == Actions("text", "message")
    assert actions_of(kinds["tool"], "text") == Actions("text", "code")
    assert actions_of(kinds["tool"]).tools[0]["function"]["name"] == "act"


def test_definitions_that_fields_refer_to_go_with_them():
    given = schema(["c"], c={"$ref": "#/$defs/C"}) | {"$defs": {"C": {"enum": ["a"]}}}
    assert actions_of(given).tools[0]["function"]["parameters"]["$defs"] == given["$defs"]


def test_text_with_no_field_to_go_to_is_refused():
    for fields in ({"n": NUMBER}, {"a": TEXT, "b": TEXT}):
        with pytest.raises(ConfigError, match="action: 'text' needs an action with one string to fill in"):
            actions_of(schema(list(fields), **fields), "text")


def test_a_function_that_returns_no_action_is_a_mistake_of_its_author():
    with pytest.raises(TypeError, match="action: the function returned 3; return a dict, or raise ValueError"):
        list(Actions("text", parse=lambda text: 3).of({"role": "assistant", "content": "x"}))


@given(st.sampled_from(KINDS), st.text(), CALLS)
def test_any_reply_is_taken_and_each_of_its_calls_can_be_answered(kind, text, calls):
    called = [{"id": str(n), "type": "function", "function": {"name": name, "arguments": arguments}}
              for n, (name, arguments) in enumerate(calls)]
    actions = actions_of(schema(["n"], n=NUMBER), "tool") if kind == "tool" else Actions(kind, "message")
    wanted = list(actions.of({"role": "assistant", "content": text, "tool_calls": called}))
    assert len(wanted) == (1 if kind == "text" else len(calls))
    for want in wanted:
        assert isinstance(want.action, dict) if not want.problem else want.action is None
        validate_message(want.answered("so"))


@given(st.dictionaries(st.sampled_from(["text", "metadata", "at", "tool_name", "result", "error", "tools"]), JSON))
def test_any_observation_is_told(observation):
    assert isinstance(describe(observation), str) and isinstance(tool_text(observation), str)


def test_tools_of_either_spelling_are_read():
    for name in ("input_schema", "inputSchema"):
        assert tools_of({"tools": [{"name": "a", "description": None, name: {"type": "object"}}]}) == [
            {"type": "function", "function": {"name": "a", "description": "", "parameters": {"type": "object"}}}]
