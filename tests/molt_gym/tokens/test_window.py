"""A long conversation is gone on from as if all of it was written, whatever the chat template makes of it."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_gym.tokens import ChatTemplateError, Renderer
from molt_gym.tokens.template import ChatTemplate

_spec = importlib.util.spec_from_file_location("family_templates", Path(__file__).with_name("family_templates.py"))
families = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(families)

CHATML = """{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' -}}{% endif -%}"""
LOCAL = {"chatml": CHATML, **families.FAMILIES}
GLOBAL = {
    "numbers its questions": CHATML.replace("m.role +", "m.role ~ (loop.index if m.role == 'user' else '') ~"),
    "keeps the latest": CHATML.replace("in messages", "in messages[-30:]"),
    "keeps reasoning of two replies": CHATML.replace(
        "m.content", "((m.reasoning_content or '') if loop.revindex0 < 4 else '') + m.content"
    ),
    "refuses long talks": "{% if messages | length > 12 %}{{ raise_exception('too long') }}{% endif %}" + CHATML,
}
MARKERS = ("<tool_call>", "</tool_call>")
TOOL = {"type": "function", "function": {"name": "f", "description": "<|im_end|>", "parameters": {"type": "object"}}}

WORDS = st.sampled_from(["", "ok", " hello\n", "<|im_end|>", "</think>x", "<b>", "é"])
QUESTIONS = WORDS | st.sampled_from(["<tool_response>\nx\n</tool_response>", [{"type": "text", "text": "ok"}]])
REASONING = st.none() | st.sampled_from(["hm", "hm", "<think>"])


@st.composite
def replies(draw, calls: int) -> dict:
    message = {"role": "assistant", "content": draw(WORDS)}
    if reasoning := draw(REASONING):
        message["reasoning_content"] = reasoning
    if calls:
        ids = [f"call{number:05d}" for number in range(calls)]
        function = {"name": "f", "arguments": '{"a": "<|im_end|>"}'}
        message["tool_calls"] = [{"id": i, "type": "function", "function": function} for i in ids]
    return message


@st.composite
def conversations(draw) -> list[dict]:
    messages = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    loops = draw(st.booleans())
    for _ in range(draw(st.integers(3, 6))):
        for _ in range(draw(st.sampled_from([1, 1, 1, 1, 2]))):
            messages.append({"role": "user", "content": draw(QUESTIONS)})
        for _ in range(draw(st.integers(0, 3)) if loops else 0):
            calls = draw(st.integers(1, 2))
            messages.append(draw(replies(calls)))
            results = range(draw(st.sampled_from([calls, calls, calls, 0])))
            messages += [{"role": "tool", "tool_call_id": f"call{i:05d}", "content": draw(WORDS)} for i in results]
        if draw(st.sampled_from([True] * 7 + [False])):
            messages.append(draw(replies(0)))
        if draw(st.sampled_from([True] + [False] * 9)):
            messages.append({"role": "system", "content": draw(WORDS)})
    return [*messages, {"role": "user", "content": draw(QUESTIONS)}]


@pytest.fixture(scope="module")
def pair(tokenizer_of):
    """A renderer, and one that always writes the whole conversation."""
    made = {}

    def make(template: str) -> tuple[Renderer, Renderer]:
        if template not in made:
            made[template] = Renderer(tokenizer_of(template, MARKERS)), Renderer(tokenizer_of(template, MARKERS))
            made[template][1]._extension.__dict__["writes_locally"] = False
        return made[template]

    return make


@pytest.mark.parametrize("family", LOCAL)
def test_templates_of_most_models_need_only_the_end_of_a_conversation(pair, family):
    assert pair(LOCAL[family])[0]._extension.writes_locally


@pytest.mark.parametrize("family", GLOBAL)
def test_a_template_that_needs_the_whole_conversation_gets_it(pair, family):
    assert not pair(GLOBAL[family])[0]._extension.writes_locally


@pytest.mark.parametrize("family", [*LOCAL, *GLOBAL])
@given(
    messages=conversations(),
    tools=st.sampled_from([[], [TOOL]]),
    sampled=st.sampled_from([[], [266, 257], [259, 260]]),
    keep=st.booleans(),
    data=st.data(),
)
@settings(max_examples=40)
def test_the_end_of_a_conversation_gives_what_the_whole_gives(pair, family, messages, tools, sampled, keep, data):
    quick, whole = pair((LOCAL | GLOBAL)[family])
    tools = tools if family not in ("chatml", "gemma", "kimi", "harmony", "deepseek", *GLOBAL) else []
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place > 1]
    if not places:
        return
    place = data.draw(st.sampled_from(places))
    end = next((i for i in range(place + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
    end = data.draw(st.sampled_from([end, len(messages)]))
    extension = (messages[:place], messages[place], messages[place + 1 : end], tools, sampled)
    try:
        whole.render(messages[:place], tools)
    except ChatTemplateError:
        return
    assert quick.extend(*extension, keep=keep) == whole.extend(*extension, keep=keep)


def test_a_conversation_without_a_question_is_written_whole(pair):
    quick, whole = pair(families.QWEN3)
    function = {"name": "f", "arguments": "{}"}
    calls = {"tool_calls": [{"id": "call00000", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "call00000", "content": "ok"}
    reply = {"role": "assistant", "content": "", "reasoning_content": "hm", **calls}
    for fed in ("<tool_response>ok</tool_response>", "ok"):
        talk = [{"role": "user", "content": fed}, *[{"role": "assistant", "content": "", **calls}, result] * 3]
        extensions = [renderer.extend(talk, reply, [result], [], []) for renderer in (quick, whole)]
        assert extensions[0] == extensions[1]
        assert (extensions[0] is None) is (fed != "ok")


def test_what_is_written_for_a_turn_does_not_grow_with_the_turns_before_it(tokenizer_of, monkeypatch):
    renderer = Renderer(tokenizer_of(CHATML))
    talk = [{"role": "user" if i % 2 == 0 else "assistant", "content": "ok"} for i in range(201)]
    renderer.extend(talk[:199], talk[199], talk[200:], [], [266, 257])
    written, write = [], ChatTemplate.write

    def record(self, prepared, tools, *, header):
        written.append(len(prepared))
        return write(self, prepared, tools, header=header)

    monkeypatch.setattr(ChatTemplate, "write", record)
    assert renderer.extend(talk[:199], talk[199], talk[200:], [], [266, 257]) is not None
    assert 0 < max(written) < 8


@pytest.mark.parametrize("change", ["m.content | e", "m.content | replace('b>', 'x')", "m.content | upper"])
def test_a_template_that_writes_text_otherwise_than_it_was_said_goes_on_from_none_of_it(tokenizer_of, change):
    renderer = Renderer(tokenizer_of(CHATML.replace("m.content", f"({change})")))
    talk = [{"role": "user", "content": "hello"}]
    reply = {"role": "assistant", "content": "<b> & hello"}
    assert renderer.extend(talk, reply, talk, [], [266, 257]) is None


def test_a_plain_conversation_is_gone_on_from_by_its_end_alone(tokenizer_of, monkeypatch):
    renderer, talk = Renderer(tokenizer_of(CHATML)), [{"role": "user", "content": "hello"}]
    reply = {"role": "assistant", "content": "ok"}
    expected = renderer.extend(talk, reply, talk, [], [266, 257])
    written = []
    write = ChatTemplate.write
    monkeypatch.setattr(ChatTemplate, "write", lambda self, *args, **kwargs: written.append(1) or write(
        self, *args, **kwargs))
    assert renderer.extend(talk * 1, reply, talk, [], [266, 257]) == expected and len(written) == 1
