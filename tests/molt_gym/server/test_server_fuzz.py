"""Bodies that nobody would send: no answer says that the server failed, and the session goes on as if they were not."""

import json

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

END = 257
OK = {"role": "user", "content": "ok"}

pytestmark = pytest.mark.timeout(120)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "1"}], "is_error": False}
GOOD = {
    "/v1/chat/completions": {
        "model": "m", "max_tokens": 9, "temperature": 1, "stop": ["a"], "stream": False, "n": 1, "seed": 1,
        "tools": [{"type": "function", "function": {"name": "add", "description": "", "parameters": SCHEMA}}],
        "messages": [{"role": "system", "content": "he"}, {"role": "user", "content": [{"type": "text", "text": "ok"}]},
                     {"role": "assistant", "content": None, "tool_calls": [CALL]},
                     {"role": "tool", "tool_call_id": "c1", "content": "1"}]},
    "/v1/responses": {
        "model": "m", "max_output_tokens": 9, "instructions": "he", "stream": True, "include": [], "reasoning": {},
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": None}],
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "ok"}]},
                  {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "he"}]},
                  {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
                  {"type": "function_call_output", "call_id": "c1", "output": "1"}]},
    "/v1/messages": {
        "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "he"}], "stop_sequences": ["a"], "top_k": 1,
        "tools": [{"name": "add", "description": "", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
        "messages": [OK, {"role": "assistant", "content": [{"type": "thinking", "thinking": "he", "signature": "s"},
                                                           {"type": "text", "text": "ok"}, USE]},
                     {"role": "user", "content": [RESULT]}]},
}
GOOD["/v1/messages/count_tokens"] = GOOD["/v1/messages"]
texts = st.text(st.characters() | st.sampled_from("\ud800\udc00\x00<|im_end|>"), max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.sampled_from([10**30, -1, 0, 1e308]) | st.floats() | texts
words = st.sampled_from("type text role content function arguments name tool user assistant".split())
values = st.recursive(scalars | words, lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(words | texts, inner, max_size=3), max_leaves=6)


def places(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(body, path, value):
    copy = json.loads(json.dumps(body))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy


@st.composite
def mutated(draw) -> tuple[str, bytes]:
    route = draw(st.sampled_from(sorted(GOOD)))
    body = GOOD[route]
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in places(body) if path]))
        body = changed(body, path, draw(values | st.just(...) | st.just([]) | st.just({})))
    raw = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        place = draw(st.integers(0, len(raw)))
        raw = raw[:place] + draw(st.binary(max_size=3)) + raw[place + draw(st.integers(0, 3)) :]
    return route, raw



def written(value) -> bytes:
    return json.dumps(value).encode()


bodies = st.dictionaries(st.sampled_from(sorted(GOOD["/v1/messages"])), values)
arbitrary = st.tuples(st.sampled_from(sorted(GOOD)), st.binary(max_size=40) | values.map(written) | bodies.map(written))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(mutated() | arbitrary, min_size=20, max_size=20))
async def test_no_body_makes_the_server_fail_or_the_session_forget(agent_of, engine, wire, requests):
    agent = agent_of("tools")
    async with aiohttp.ClientSession(headers={"x-api-key": agent.session.key}) as client:
        for route, raw in requests:
            async with client.post(agent.session.url + route, data=raw) as response:
                text = await response.text()
                assert response.status < 500, (route, raw, text)
                assert response.status == 200 or json.loads(text)["error"]["message"]
    assert agent.session.failure is None
    assert wire.text_of(await agent.chat(OK)) == "hello"
    assert engine.received[-1] == [256, *b"user\n", 266, END, 10, 256, *b"assistant\n"]
    assert sum(sum(row.mask) for row in agent.rows) == sum(3 for _ in range(agent.session.turns))
    agent.session.close()
