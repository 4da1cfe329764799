"""The Responses wire as pure functions: what it understands, what it refuses, and that echoed items are the reply."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from molt_gym.messages import canonical, digest_of, validate_conversation
from molt_gym.server.errors import WireError
from molt_gym.server.exchange import Completion, Reply, Token
from molt_gym.server.json import decode_fields, encode
from molt_gym.server.memory import WireMemory
from molt_gym.server.responses import Responses

WIRE = Responses()
IMAGE = "data:image/png;base64,iVBORw0KGgo="
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}


def new_memory():
    return WireMemory()


def parse(memory=None, **body):
    return WIRE.parse(decode_fields(encode(body)), memory or new_memory())


def messages_of(*items, memory=None):
    return parse(memory, input=list(items)).call.messages


def assistant(content="", reasoning=None, calls=()):
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(name="add", arguments="{}", id="call00000"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(message, memory=None, key="a" * 24, reply=None, **body):
    """The response to a request, read strictly by the SDK's type."""
    memory = memory or new_memory()
    parsed = parse(memory, **({"model": "policy", "input": "Hi"} | body))
    data = WIRE.reply(parsed, Completion(key, 1_700_000_000, [reply or Reply(message)]), memory)
    return Response.model_validate(json.loads(encode(data)), strict=False)


def echoed(response):
    """The output items as a program sends them back."""
    return [item.model_dump(exclude_none=True) for item in response.output]


def error_of(**body):
    with pytest.raises(WireError) as caught:
        parse(**body)
    return caught.value


class TestWhatIsUnderstood:
    def test_a_string_is_a_user_message_and_instructions_a_system_message(self):
        parsed = parse(model="m", input="Hi", instructions="Be brief.")
        assert parsed.call.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        assert parsed.call.model == "m" and not parsed.stream and parsed.call.n == 1

    def test_easy_messages_and_message_items_are_the_same(self):
        easy = messages_of({"role": "developer", "content": "x"}, {"role": "user", "content": "Hi"})
        items = messages_of(
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}], "status": None},
        )
        assert easy == items == [{"role": "developer", "content": "x"}, {"role": "user", "content": "Hi"}]

    @pytest.mark.parametrize("value", ['"\\ud800"', '[{"role": "user", "content": "\\ud800"}]'])
    def test_half_a_surrogate_pair_is_text(self, value):
        body = b'{"input": %b, "instructions": "\\udc00"}' % value.encode()
        messages = WIRE.parse(decode_fields(body), new_memory()).call.messages
        assert [m["content"] for m in messages] == ["\udc00", "\ud800"]

    def test_an_item_is_not_taken_for_what_is_remembered_of_another_field(self):
        memory = new_memory()
        parse(memory, input="Hi", tools=[ADD])
        for body in ({"input": [["user", "Hi"]]}, {"input": "Hi", "tools": [[ADD]]}):
            with pytest.raises(WireError):
                parse(memory, **body)

    def test_images_and_several_texts_stay_parts(self):
        [message] = messages_of({"role": "user", "content": [
            {"type": "input_text", "text": "What is"},
            {"type": "input_text", "text": " this?"},
            {"type": "input_image", "image_url": IMAGE, "detail": "auto", "file_id": None},
        ]})
        assert message["content"] == [
            {"type": "text", "text": "What is"},
            {"type": "text", "text": " this?"},
            {"type": "image_url", "image_url": {"url": IMAGE}},
        ]

    def test_items_of_one_turn_are_one_message_and_outputs_are_tool_messages(self):
        assert messages_of(
            {"role": "user", "content": "Add"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Two calls."}],
             "encrypted_content": "gAAA"},
            {"type": "message", "role": "assistant", "id": "m_2", "content": [{"type": "output_text", "text": "Well"}]},
            {"type": "function_call", "id": "fc_3", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        ) == [
            {"role": "user", "content": "Add"},
            assistant("Well", "Two calls.", [call(arguments='{"a": 1}', id="c1"), call(arguments='{"a": 2}', id="c2")]),
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
            {"role": "tool", "tool_call_id": "c2", "content": "2"},
        ]

    def test_two_texts_in_a_row_are_two_messages_and_reasoning_begins_one(self):
        thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
        said = {"role": "assistant", "content": "a"}
        assert messages_of(said, said, thought, said) == [assistant("a"), assistant("a"), assistant("a", "Hm")]

    def test_reasoning_that_only_others_can_read_is_passed_over(self):
        secret = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
        said = {"role": "assistant", "content": "a"}
        assert messages_of({"role": "user", "content": "Hi"}, secret, said)[1:] == [assistant("a")]

    def test_a_refusal_is_text(self):
        [message] = messages_of({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]})
        assert message == assistant("No.")

    @pytest.mark.parametrize("nothing", [{}, {"content": None, "arguments": None, "output": None}])
    def test_what_an_assistant_or_a_tool_may_leave_out_is_nothing(self, nothing):
        function_call = {"type": "function_call", "call_id": "c1", "name": "add"}
        output = {"type": "function_call_output", "call_id": "c1"}
        assert messages_of(*({"role": "assistant"} | nothing, function_call | nothing, output | nothing)) == [
            assistant("", None, [call(arguments="{}", id="c1")]), {"role": "tool", "tool_call_id": "c1", "content": ""}]

    def test_tools_take_the_chat_form_without_strict(self):
        parsed = parse(input="Hi", tools=[ADD, {"type": "function", "name": "now"}], tool_choice="auto")
        function = {key: ADD[key] for key in ("name", "description", "parameters")}
        assert parsed.call.tools == [
            {"type": "function", "function": function},
            {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
        ]

    def test_tool_choice_none_offers_no_tools(self):
        assert parse(input="Hi", tools=[ADD], tool_choice="none", parallel_tool_calls=False).call.tools == []

    def test_options_are_read(self):
        options = parse(input="Hi", temperature=1, top_p=0.5, max_output_tokens=7,
                        include=["message.output_text.logprobs", "reasoning.encrypted_content"]).call.options
        assert (options.temperature, options.top_p, options.max_tokens, options.logprobs) == (1.0, 0.5, 7, True)

    def test_null_is_absent_and_what_has_no_effect_is_accepted(self):
        body = {"input": "Hi", "store": False, "metadata": {"run": "7"}, "user": "u", "service_tier": "flex",
                "reasoning": {"effort": "high", "summary": "long", "enabled": True}, "max_tool_calls": 3,
                "text": {"format": {"type": "text"}, "verbosity": "low"},
                "truncation": "disabled", "background": False, "conversation": None, "top_logprobs": 0,
                "stream_options": {"include_obfuscation": False}, "prompt_cache_key": "k", "safety_identifier": "s",
                "include": ["reasoning.encrypted_content"], "frobnicate": [1]}
        assert parse(**body).call == parse(**(dict.fromkeys(body) | {"input": "Hi"})).call
        assert answer(assistant("x"), **body).reasoning is None

    def test_the_same_items_are_the_same_objects_so_that_history_costs_a_lookup(self):
        memory = new_memory()
        items = [*echoed(answer(assistant("x", "y", [call()]))), {"role": "user", "content": "Hi"}]
        first, second = (messages_of(*items, memory=memory) for _ in range(2))
        assert all(a is b for a, b in zip(first, second, strict=True)) and len(first) == 2


REFUSED = [
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
    ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
    ({"tools": [ADD | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
     "input[0].content[0].file_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]},
     "input[0].content[0].image_url"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": [
        {"type": "input_image", "image_url": "file:///etc/passwd"}]}]}, "input[0].output[0].image_url"),
]  # fmt: skip

WRONG = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": [1]}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
    ({"input": [{"type": "reasoning", "summary": ["x"]}]}, "input[0].summary[0]"),
    ({"input": [{"type": "reasoning", "summary": [{}]}]}, "input[0].summary[0].text"),
    ({"input": [{"type": 3}]}, "input[0].type"),
    ({"instructions": ["x"]}, "instructions"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 2.5}, "max_output_tokens"),
    ({"max_output_tokens": True}, "max_output_tokens"),
    ({"metadata": {"x": 1}}, "metadata"),
    ({"stream": 1}, "stream"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [{"name": "add"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools[0].name"),
    ({"tools": [ADD | {"parameters": []}]}, "tools[0].parameters"),
    ({"text": {"format": {"type": "poem"}}}, "text.format"),
]  # fmt: skip


class TestWhatIsRefused:
    @pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: json.dumps(value)[:60])
    def test_what_cannot_be_honoured_is_unsupported(self, body, param):
        error = error_of(**({"input": "Hi"} | body))
        assert (error.status, error.code, error.param) == (422, "unsupported_parameter", param)
        assert str(error).startswith(param)

    @pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: json.dumps(value)[:60])
    def test_what_is_wrong_is_named(self, body, param):
        error = error_of(**({"input": "Hi"} | body))
        assert (error.status, error.param) == (400, param)
        assert str(error).startswith(param)

    def test_an_unknown_response_is_not_found(self):
        error = error_of(input="Hi", previous_response_id="resp_1")
        assert (error.status, error.param) == (404, "previous_response_id")

    @pytest.mark.parametrize("item_id", ["msg_68af", "msg_" + "a" * 24, "rs", ""])
    def test_a_reference_to_an_unknown_item_is_not_found(self, item_id):
        error = error_of(input=[{"type": "item_reference", "id": item_id}])
        assert (error.status, error.param) == (404, "input[0].id")

    @pytest.mark.parametrize("value", [b"1e999", b"9" * 5000, b"[" * 70 + b"]" * 70], ids=["inf", "huge", "deep"])
    def test_a_schema_that_cannot_be_written_is_refused(self, value):
        body = b'{"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": {"x": %b}}]}' % value
        with pytest.raises(WireError):
            WIRE.parse(decode_fields(body), new_memory())

    def test_errors_have_the_shape_of_openai(self):
        error = error_of(input="Hi", background=True)
        assert WIRE.error(error) == {"error": {
            "message": error.message, "type": "invalid_request_error", "param": "background",
            "code": "unsupported_parameter"}}


class TestReply:
    def test_text_reasoning_and_calls_are_items_in_this_order(self):
        response = answer(assistant("Well", "Hm", [call(), call(id="call00001")]))
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert response.output[0].content[0].text == "Hm" and response.output_text == "Well"
        assert [item.call_id for item in response.output[2:]] == ["call00000", "call00001"]
        assert len({item.id for item in response.output}) == 4
        assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)

    def test_an_empty_reply_is_an_empty_message(self):
        response = answer(assistant(""))
        assert [item.type for item in response.output] == ["message"] and response.output_text == ""

    def test_a_cut_reply_is_incomplete(self):
        response = answer(None, reply=Reply(assistant("We", "Hm"), "length"))
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [item.status for item in response.output] == ["completed", "incomplete"]

    def test_usage_has_its_details(self):
        reply = Reply(assistant("x"), prompt_tokens=9, completion_tokens=4, reasoning_tokens=2, cached_tokens=5)
        usage = answer(None, reply=reply).usage
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (9, 4, 13)
        assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (5, 2)

    def test_the_request_is_repeated(self):
        response = answer(assistant("x"), tools=[ADD], tool_choice="auto", instructions="Be brief.",
                          metadata={"a": "b"}, temperature=0.5, max_output_tokens=9, model="m")
        assert [tool.to_dict() for tool in response.tools] == [ADD]
        assert (response.tool_choice, response.instructions, response.metadata) == ("auto", "Be brief.", {"a": "b"})
        assert (response.temperature, response.max_output_tokens, response.model) == (0.5, 9, "m")
        assert response.parallel_tool_calls is True

    def test_every_sampled_token_is_listed_even_where_there_is_no_text(self):
        tokens = [Token("<tool", b"<tool", -0.5), Token("\ufffd", None, -1.0)]
        response = answer(None, reply=Reply(assistant("", None, [call()]), "tool_calls", tokens=tokens))
        message, function_call = response.output
        assert [(t.token, t.logprob) for t in message.content[0].logprobs] == [("<tool", -0.5), ("\ufffd", -1.0)]
        assert message.content[0].text == "" and function_call.name == "add"


class TestGoingOn:
    def test_instructions_are_not_carried_over(self):
        memory = new_memory()
        response = answer(assistant("Hello"), memory, instructions="Be brief.")
        after = parse(memory, input="And?", previous_response_id=response.id, instructions="Be kind.")
        assert [m["content"] for m in after.call.messages] == ["Be kind.", "Hi", "Hello", "And?"]
        without = parse(memory, input="And?", previous_response_id=response.id)
        assert [m["content"] for m in without.call.messages] == ["Hi", "Hello", "And?"]

    def test_a_stream_is_remembered_from_its_first_event(self):
        memory = new_memory()
        events = WIRE.events(parse(memory, input="Hi"), Completion("b" * 24, 0, [Reply(assistant("Hello"))]), memory)
        next(events)
        assert memory.responses["resp_" + "b" * 24][-1] == assistant("Hello")

    def test_two_branches_can_go_on_from_one_response(self):
        memory = new_memory()
        first = answer(assistant("one"), memory)
        for key, said in (("b" * 24, "left"), ("c" * 24, "right")):
            second = answer(assistant(said), memory, key, input=said, previous_response_id=first.id)
            assert [m["content"] for m in memory.responses[second.id]] == ["Hi", "one", said, said]
        assert len(memory.responses[first.id]) == 2

    def test_items_of_two_replies_in_a_row_are_two_messages(self):
        memory = new_memory()
        replies = [assistant("", None, [call()]), assistant("", None, [call(id="call00001")])]
        items = [item for i, reply in enumerate(replies) for item in echoed(answer(reply, memory, f"{i}" * 24))]
        assert messages_of(*items, memory=memory) == replies

    def test_calls_with_their_results_in_between_are_still_one_reply(self):
        memory = new_memory()
        replies = [assistant("Well", "Hm", [call(id="a"), call(id="b")]), assistant("", None, [call(id="c")])]
        items, said = [], []
        for index, reply in enumerate(replies):
            said += [reply, *({"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in reply["tool_calls"])]
            for item in echoed(answer(reply, memory, f"{index}" * 24)):
                items.append(item)
                if item["type"] == "function_call":
                    items.append({"type": "function_call_output", "call_id": item["call_id"], "output": "3"})
        assert messages_of(*items, memory=memory) == said

    def test_calls_of_unknown_origin_with_results_in_between_are_turns_of_their_own(self):
        items = [
            {"type": kind, "call_id": id, "name": "add", "arguments": "{}", "output": "3"}
            for id in "ab"
            for kind in ("function_call", "function_call_output")
        ]
        assert [m["role"] for m in messages_of(*items)] == ["assistant", "tool", "assistant", "tool"]

    def test_an_item_can_be_referred_to(self):
        memory = new_memory()
        reply = assistant("", "Hm", [call(), call(id="call00001")])
        references = [{"type": "item_reference", "id": item.id} for item in answer(reply, memory).output]
        assert messages_of(*references, memory=memory) == [reply]
        assert messages_of({"id": references[1]["id"]}, memory=memory) == [assistant("", None, [call()])]

    def test_reasoning_that_comes_back_as_its_stream_began_is_what_was_recorded(self):
        memory = new_memory()
        begun, *rest = answer(assistant("a", "Hm"), memory).output
        item = begun.to_dict() | {"content": [], "status": "in_progress"}
        assert messages_of(item, *(each.to_dict() for each in rest), memory=memory) == [assistant("a", "Hm")]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
arguments = texts | st.dictionaries(texts, st.integers() | texts | st.none(), max_size=3).map(json.dumps)
replies = st.builds(
    lambda content, reasoning, calls: assistant(
        content, reasoning, [call(name, text, f"call{index:05d}") for index, (name, text) in enumerate(calls)]
    ),
    texts | st.lists(texts.map(lambda text: {"type": "text", "text": text}), min_size=2, max_size=3),
    texts,
    st.lists(st.tuples(texts, arguments), max_size=3),
)
tokens = st.none() | st.just([Token("x", b"x", -1.0)])


class TestRoundTrip:
    @settings(max_examples=200)
    @given(st.lists(st.tuples(replies, tokens, st.booleans()), min_size=1, max_size=4), st.booleans())
    def test_echoed_items_are_the_reply(self, turns, in_this_session):
        """Also where several replies follow on one another with nothing in between, if this session made them."""
        memory, there = new_memory(), new_memory()
        items, said = [], []
        for index, (reply, sampled, cut) in enumerate(turns):
            made = Reply(reply, "length" if cut else "stop", tokens=sampled)
            items += echoed(answer(None, memory if in_this_session else there, f"{index:024d}", made))
            said.append(reply)
            if not in_this_session:
                items.append({"role": "user", "content": "go on"})
                said.append({"role": "user", "content": "go on"})
        understood = messages_of(*items, memory=memory)
        assert [canonical(m) for m in understood] == [canonical(m) for m in said]
        assert [digest_of(m) for m in understood] == [digest_of(m) for m in said]

    @given(st.lists(replies, min_size=1, max_size=4))
    def test_previous_response_id_and_echoed_items_ask_the_same(self, turns):
        memory = new_memory()
        items, previous = [], None
        for index, reply in enumerate(turns):
            said = [{"role": "user", "content": f"turn {index}"}]
            items += said
            body = {"input": said} if previous is None else {"input": said, "previous_response_id": previous}
            by_id, by_items = (parse(memory, **b).call.messages for b in (body, {"input": items}))
            assert [canonical(m) for m in by_id] == [canonical(m) for m in by_items]
            response = answer(reply, memory, f"{index:024d}", **body)
            items, previous = items + echoed(response), response.id


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TYPES = ["message", "reasoning", "function_call", "function_call_output", "item_reference", "input_text", "output_text",
         "input_image", "function", "refusal"]
shaped = st.recursive(
    json_values,
    lambda inner: st.fixed_dictionaries({"type": st.sampled_from(TYPES) | json_values}, optional={
        name: inner | st.lists(inner, max_size=3) | st.text(max_size=8)
        for name in ("role", "content", "text", "id", "call_id", "name", "arguments", "output", "summary", "image_url")
    }),
    max_leaves=6,
)
FIELDS = ["input", "instructions", "tools", "tool_choice", "text", "metadata", "include", "previous_response_id",
          "model", "temperature", "top_p", "max_output_tokens", "stream", "reasoning", "truncation", "top_logprobs",
          "prompt", "prompt_cache_options", "parallel_tool_calls", "conversation"]


class TestAnyBody:
    @settings(max_examples=200)
    @given(st.dictionaries(st.sampled_from(FIELDS), json_values | shaped | st.lists(shaped, max_size=3), max_size=5))
    def test_is_understood_or_refused(self, body):
        memory = new_memory()
        raw = json.dumps({"input": "Hi"} | body).encode()
        try:
            parsed = WIRE.parse(decode_fields(raw), memory)
        except WireError as error:
            assert error.message and not memory.responses
            return
        validate_conversation({"messages": parsed.call.messages, "tools": parsed.call.tools})
        response = WIRE.reply(parsed, Completion("d" * 24, 0, [Reply(assistant("x"))]), memory)
        Response.model_validate(json.loads(encode(response)))

    @settings(max_examples=200)
    @given(st.lists(shaped, min_size=1, max_size=4))
    def test_of_items_is_understood_or_refused(self, items):
        try:
            parsed = parse(input=items)
        except WireError:
            return
        validate_conversation({"messages": parsed.call.messages, "tools": []})

    @pytest.mark.parametrize("raw", [b"\"\xff\"", b"[" * 5000, b"[" * 400 + b"]" * 400, b"9" * 6000, b"NaN", b"{", b""])
    @pytest.mark.parametrize("name", FIELDS)
    def test_with_broken_json_in_a_field_is_refused_or_harmless(self, name, raw):
        fields = {"input": msgspec.Raw(b'"Hi"')} | {name: msgspec.Raw(raw)}
        try:
            WIRE.parse(fields, new_memory())
        except WireError as error:
            assert error.status < 500
