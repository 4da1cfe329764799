import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_gym.messages import (
    InternedMessage,
    InternedTools,
    arguments_of,
    canonical,
    digest_of,
    digest_of_tools,
    same_message,
    text_of,
    validate_conversation,
    validate_message,
)


def call(arguments, **extra):
    return {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": arguments}, **extra}


def calling(arguments, **fields):
    return {"role": "assistant", "tool_calls": [call(arguments)], **fields}


def test_content_that_is_none_absent_empty_or_an_empty_list_is_the_same():
    spellings = [calling("{}"), *(calling("{}", content=content) for content in (None, "", []))]
    assert all(same_message(a, b) for a in spellings for b in spellings)
    assert canonical(spellings[0])["content"] == ""


@pytest.mark.parametrize("other", ["{}", '{"city": "Lyon"}', '{"city": "Paris", "n": 1}', "[]", "Paris"])
def test_calls_with_other_arguments_differ(other):
    assert not same_message(calling('{"city": "Paris"}'), calling(other))


@pytest.mark.parametrize("same", [{"b": [True], "a": "é"}, '{"a":"\\u00e9","b":[true]}', '{"b": [true], "a": "é"}'])
def test_arguments_are_the_same_as_text_or_mapping_in_any_order_and_spacing(same):
    assert same_message(calling('{"a": "é", "b": [true]}'), calling(same))


def test_arguments_keep_the_difference_between_true_and_one():
    assert not same_message(calling('{"a": 1}'), calling('{"a": true}'))


@pytest.mark.parametrize("nothing", [None, "", " ", "null", "{}", {}])
def test_no_arguments_are_an_empty_mapping(nothing):
    assert arguments_of(call(nothing)) == {}
    assert same_message(calling(nothing), calling("{}"))


@pytest.mark.parametrize("broken", ['{"a":', "[1]", "7", '"text"', "[" * 100_000, '{"n": ' + "1" * 5000 + "}"])
def test_broken_arguments_stay_the_raw_text(broken):
    assert arguments_of(call(broken)) == broken
    assert canonical(calling(broken))["tool_calls"][0]["function"]["arguments"] == broken


def test_arguments_that_json_can_only_read_stay_the_raw_text_in_canonical_form():
    assert canonical(calling('{"a": 1e999}'))["tool_calls"][0]["function"]["arguments"] == '{"a": 1e999}'


def test_parts_that_are_all_text_are_their_text_and_beside_images_they_are_not():
    text = {"type": "text", "text": "hi"}
    assert same_message({"role": "user", "content": [text]}, {"role": "user", "content": "hi"})
    assert same_message({"role": "user", "content": [text, {**text, "note": 1}]}, {"role": "user", "content": "hihi"})
    seen = [text, {"type": "image_url", "image_url": {"url": "x"}}]
    assert canonical({"role": "user", "content": seen})["content"] == seen
    assert text_of({"role": "user", "content": [text, {"type": "image_url", "image_url": {}}, text]}) == "hihi"
    assert text_of({"role": "assistant", "content": None}) == ""


def test_fields_that_a_client_adds_without_a_value_make_no_difference():
    sent_back = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": [], "annotations": []}
    assert canonical(sent_back) == {"role": "assistant", "content": "hi"}
    streamed = {**calling("{}"), "tool_calls": [call("{}", index=0)]}
    assert same_message(streamed, calling("{}"))


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hi "},
        {"role": "assistant", "content": "hi", "reasoning_content": "hm"},
        {"role": "assistant", "content": "hi", "name": "bob"},
    ],
)
def test_what_a_model_could_see_makes_a_difference(other):
    assert not same_message({"role": "assistant", "content": "hi"}, other)


def test_the_canonical_form_is_a_copy():
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}
    before = copy.deepcopy(message)
    canonical(message)["content"][0]["image_url"]["url"] = "b"
    assert message == before


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_canonical_is_idempotent_and_blind_to_the_way_arguments_are_written(arguments):
    spelled = [arguments, json.dumps(arguments), json.dumps(arguments, indent=2, ensure_ascii=False)]
    forms = [canonical(calling(spelling)) for spelling in spelled]
    assert forms[0] == forms[1] == forms[2] == canonical(forms[0])
    validate_message(forms[0])


@given(st.text(st.characters(codec=None), max_size=20))
def test_any_string_is_legal_text(text):
    validate_message({"role": "user", "content": text})
    validate_message({"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call(text)]})
    validate_message({"role": "tool", "content": text, "tool_call_id": text})


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("hello", "messages[1]: 'hello' is no message"),
        ({"role": "robot", "content": ""}, "messages[1].role: 'robot' is none of system, developer, user"),
        ({"content": "hi"}, "messages[1].role: None"),
        ({"role": "user"}, "messages[1].content: None; write a string, '' for no text"),
        ({"role": "user", "content": 7}, "messages[1].content: 7"),
        ({"role": "user", "content": ["hi"]}, "messages[1].content[0]: 'hi'; write a part"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text: None"),
        ({"role": "tool", "content": "4"}, "messages[1].tool_call_id: None"),
        ({"role": "user", "content": "", "tool_calls": [call("{}")]}, "messages[1].tool_calls: only an assistant"),
        ({"role": "assistant", "reasoning_content": 1}, "messages[1].reasoning_content: 1"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls: {}"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[1].tool_calls[0]: 'f'; write"),
        ({"role": "assistant", "tool_calls": [{**call("{}"), "id": 1}]}, "messages[1].tool_calls[0].id: 1"),
        ({"role": "assistant", "tool_calls": [{**call("{}"), "type": "x"}]}, "messages[1].tool_calls[0].type: 'x'"),
        (calling({"a": 1}), "messages[1].tool_calls[0].function.arguments: {'a': 1}; write JSON text"),
        ({"role": "assistant", "content": "", "extra": float("nan")}, "messages[1]: "),
        ({"role": "assistant", "content": "", "extra": {1: 2}}, "messages[1]: "),
    ],
)
def test_an_error_names_the_field_the_value_and_the_remedy(message, complaint):
    with pytest.raises(ValueError) as caught:
        validate_conversation({"messages": [{"role": "user", "content": "hi"}, message], "tools": []})
    assert str(caught.value).startswith(complaint)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("conversation", "complaint"),
    [
        ([], "conversation: []; write"),
        ({"messages": []}, "conversation: "),
        ({"messages": [], "tools": []}, "messages: []; write a list of at least one message"),
        ({"messages": [{"role": "user", "content": ""}], "tools": None}, "tools: None"),
        ({"messages": [{"role": "user", "content": ""}], "tools": [{"type": {1}}]}, "tools[0]: "),
    ],
)
def test_a_conversation_has_messages_and_tools(conversation, complaint):
    with pytest.raises(ValueError) as caught:
        validate_conversation(conversation)
    assert str(caught.value).startswith(complaint)


def test_data_nested_too_deep_is_refused_and_does_not_crash():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="holds a value that JSON has not"):
        validate_message({"role": "user", "content": "", "extra": deep})


@given(
    st.fixed_dictionaries(
        {"role": st.just("user"), "content": st.text() | st.lists(st.fixed_dictionaries({"type": st.just("text")}))},
        optional={"name": json_values, "extra": json_values},
    ),
    st.text(max_size=3),
)
def test_digests_are_equal_where_the_canonical_forms_are(message, suffix):
    assert digest_of(message) == digest_of(canonical(message)) == digest_of(InternedMessage(message))
    assert len(digest_of(message)) == 16
    for other in (message | {"content": suffix}, message | {"name": suffix}):
        written = [json.dumps(canonical(each), sort_keys=True) for each in (message, other)]
        assert (digest_of(message) == digest_of(other)) is (written[0] == written[1])


def test_the_digest_of_an_interned_message_is_computed_once(monkeypatch):
    message, tools = InternedMessage(calling('{"a": 1}')), InternedTools([{"type": "function"}])
    first = digest_of(message), digest_of_tools(tools)
    assert first == (digest_of(calling('{"a":1}', content=None)), digest_of_tools(({"type": "function"},)))
    monkeypatch.setattr("molt_gym.messages._digest", None)
    assert (digest_of(message), digest_of_tools(tools)) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(content=""),
        lambda m: m.__setitem__("content", ""),
        lambda m: m.__delitem__("content"),
        lambda m: m.pop("content"),
        lambda m: m.popitem(),
        lambda m: m.clear(),
        lambda m: m.setdefault("name", "x"),
        lambda m: m.__ior__({"content": ""}),
    ],
)
def test_an_interned_message_cannot_be_changed(change):
    message = InternedMessage(role="user", content="hi")
    with pytest.raises(TypeError, match="InternedMessage: is shared"):
        change(message)
    assert message == {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.append({}),
        lambda t: t.extend([{}]),
        lambda t: t.insert(0, {}),
        lambda t: t.__setitem__(0, {}),
        lambda t: t.__delitem__(0),
        lambda t: t.__iadd__([{}]),
        lambda t: t.__imul__(2),
        lambda t: t.pop(),
        lambda t: t.remove({"name": "f"}),
        lambda t: t.clear(),
        lambda t: t.reverse(),
        lambda t: t.sort(key=str),
    ],
)
def test_interned_tools_cannot_be_changed(change):
    tools = InternedTools([{"name": "f"}])
    with pytest.raises(TypeError, match="InternedTools: is shared"):
        change(tools)
    assert tools == [{"name": "f"}]


@pytest.mark.parametrize("shared", [InternedMessage(role="user", content=["hi"]), InternedTools([{"name": ["f"]}])])
def test_copies_of_what_is_interned_are_plain(shared):
    plain = type(shared).__base__
    copies = [copy.copy(shared), shared.copy(), copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))]
    assert [type(each) for each in copies] == [plain] * 4 and copies == [shared] * 4
    deep = copies[2]["content"] if plain is dict else copies[2][0]["name"]
    deep.append("more")
    assert copies[0] == shared and json.loads(json.dumps(shared)) == shared
