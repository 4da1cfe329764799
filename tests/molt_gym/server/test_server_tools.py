"""Tool calls over the wires: their results, their arguments in every shape, and whole loops with the SDKs."""

import json

import pytest

END, NEWLINE = 257, 10
OK = {"role": "user", "content": "ok"}
CALL, END_CALL, RESPONSE, END_RESPONSE = 267, 268, 269, 270
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "lookup", "parameters": SCHEMA}}],
    "responses": [{"type": "function", "name": "lookup", "parameters": SCHEMA, "strict": False}],
    "messages": [{"name": "lookup", "input_schema": SCHEMA}],
}

# Writes arguments pair by pair, as some templates do.
PAIRS = """
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content -}}
  {%- for call in message.tool_calls or [] -%}
    {{- '[' + call.function.name -}}
    {%- for key, value in call.function.arguments.items() %}{{- ' ' + key + '=' + value | string -}}{% endfor -%}
    {{- ']' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{% endif -%}
"""

pytestmark = pytest.mark.timeout(60)
every_wire = pytest.mark.parametrize("name", ["chat", "responses", "messages"])


def call_ids(city: str) -> list[int]:
    return [CALL, *f'\n{{"name": "lookup", "arguments": {{"city": "{city}"}}}}\n'.encode(), END_CALL]


def prompt_text(renderer_of, engine, number=-1, template="tools") -> str:
    return renderer_of(template).decode(engine.received[number])


def called(arguments, identifier="call_1") -> list[dict]:
    return [{"id": identifier, "type": "function", "function": {"name": "lookup", "arguments": arguments}}]


SUNNY = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"}


@pytest.mark.parametrize("template", ["tools", "chatml"])
async def test_a_call_without_content_is_read_alike_in_all_its_spellings(agent_of, engine, renderer_of, wire, template):
    agent = agent_of(template)
    asked = {"role": "assistant", "tool_calls": called('{"city":"Paris"}')}
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        await agent.chat(OK, asked | content, SUNNY)
        status, _, _ = await wire.post(
            agent.session, "/v1/chat/completions", {"model": "m", "messages": [OK, asked | content, SUNNY]})
        assert status == 200
    use = {"type": "tool_use", "id": "call_1", "name": "lookup", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "Sunny"}
    await agent.messages(OK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]})
    item = {"type": "function_call", "call_id": "call_1", "name": "lookup", "arguments": '{"city":"Paris"}'}
    await agent.responses(OK, item, {"type": "function_call_output", "call_id": "call_1", "output": "Sunny"})
    assert all(ids == engine.received[0] for ids in engine.received) and len(engine.received) == 10
    text = prompt_text(renderer_of, engine)
    assert '"city": "Paris"' in text and "Sunny" in text and text.count("<|im_start|>assistant") == 2
    assert "None" not in text and "null" not in text


@pytest.mark.parametrize("arguments, dumped, pairs", [
    ('{"city": "Paris"}', '{"city": "Paris"}', " city=Paris"), ('{"city":"Paris"}', '{"city": "Paris"}', " city=Paris"),
    ("", "{}", ""), (None, "{}", ""), ('{"a":', None, ' arguments={"a":'),
])
async def test_arguments_reach_the_template_as_a_mapping(agent_of, engine, renderer_of, arguments, dumped, pairs):
    history = OK, {"role": "assistant", "content": None, "tool_calls": called(arguments)}, SUNNY
    await agent_of("tools").chat(*history)
    await agent_of(PAIRS).chat(*history)
    text, other = prompt_text(renderer_of, engine, 0), prompt_text(renderer_of, engine, 1, PAIRS)
    assert "Sunny" in text and f"[lookup{pairs}]" in other
    if dumped is not None:
        assert f'"arguments": {dumped}' in text and '\\"' not in text


@pytest.mark.parametrize("value, dumped, pairs", [
    ({"city": "Paris"}, '{"city": "Paris"}', " city=Paris"), ({}, "{}", ""), (None, "{}", ""), ("", "{}", ""),
    ({"INVALID_JSON": '{"a":'}, None, ' arguments={"a":'),
])
async def test_inputs_of_tool_uses_reach_the_template_as_a_mapping(
    agent_of, engine, renderer_of, wire, value, dumped, pairs
):
    use = {"type": "tool_use", "id": "call_1", "name": "lookup", "input": value}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "Sunny"}
    body = {"model": "m", "max_tokens": 9, "messages": [
        OK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]}
    for template in ("tools", PAIRS):
        assert (await wire.post(agent_of(template).session, "/v1/messages", body))[0] == 200
    text, other = prompt_text(renderer_of, engine, 0), prompt_text(renderer_of, engine, 1, PAIRS)
    assert "Sunny" in text and f"[lookup{pairs}]" in other
    if dumped is not None:
        assert f'"arguments": {dumped}' in text and '\\"' not in text


BROKEN = [CALL, *b'\n{"name": "lookup", "arguments": {"city":\n', END_CALL, END]


@every_wire
@pytest.mark.parametrize("sampled", [BROKEN, BROKEN[:-3]], ids=["broken", "cut"])
async def test_a_broken_call_of_the_policy_is_text_and_the_sampled_ids_stay(agent_of, engine, wire, name, sampled):
    agent, engine.script = agent_of("tools"), [sampled]
    reply = await agent.ask(name, OK, tools=TOOLS[name])
    assert '"arguments": {"city":' in wire.text_of(reply)
    await agent.ask(name, OK, *wire.said(reply), OK, tools=TOOLS[name])
    after = [NEWLINE] if sampled[-1] == END else [END, NEWLINE]
    ask = [256, *b"user\n", 266, END, NEWLINE, 256, *b"assistant\n"]
    assert engine.received[1] == engine.received[0] + sampled + after + ask and len(agent.rows) == 1
    assert agent.session.respondent.malformed_calls == 1 and agent.session.respondent.tool_calls == 0


@every_wire
@pytest.mark.parametrize("offered", [False, True], ids=["absent", "none"])
async def test_what_looks_like_a_call_is_text_where_no_tool_may_be_called(agent_of, engine, wire, name, offered):
    agent, engine.always = agent_of("tools", max_tokens=512), [*call_ids("Rome"), END]
    none = {"type": "none"} if name == "messages" else "none"
    reply = await agent.ask(name, OK, **({"tools": TOOLS[name], "tool_choice": none} if offered else {}))
    assert wire.text_of(reply).startswith("<tool_call>") and results_of(reply) == []
    await agent.ask(name, OK, *wire.said(reply), OK)
    assert len(agent.rows) == 1


def results_of(reply) -> list:
    """What a program sends back for the calls of a reply."""
    if hasattr(reply, "choices"):
        calls = [(call.id, json.loads(call.function.arguments)) for call in reply.choices[0].message.tool_calls or []]
        return [{"role": "tool", "tool_call_id": key, "content": value["city"] + " ok"} for key, value in calls]
    if hasattr(reply, "output"):
        calls = [(item.call_id, json.loads(item.arguments)) for item in reply.output if item.type == "function_call"]
        kind = "function_call_output"
        return [{"type": kind, "call_id": key, "output": value["city"] + " ok"} for key, value in calls]
    calls = [(block.id, block.input) for block in reply.content if block.type == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": key, "content": value["city"] + " ok"} for key, value in calls]
    return [{"role": "user", "content": blocks}] if blocks else []


def result_ids(city: str) -> list[int]:
    text = [*city.encode(), *b" ", 266]
    return [256, *b"user\n", RESPONSE, NEWLINE, *text, NEWLINE, END_RESPONSE, END, NEWLINE]


@every_wire
async def test_a_tool_loop_runs_to_its_end_on_the_sampled_ids(agent_of, engine, wire, name):
    agent = agent_of("tools", max_tokens=512)
    both = [*call_ids("Rome"), NEWLINE, *call_ids("Oslo"), END]
    one = [266, NEWLINE, *call_ids("Bern"), END]
    engine.script = [both, one, [262, 264, END]]
    history, reply = [OK], await agent.ask(name, OK, max_tokens=512, tools=TOOLS[name])
    while results := results_of(reply):
        history += [*wire.said(reply), *results]
        reply = await agent.ask(name, *history, max_tokens=512, tools=TOOLS[name])
    assert wire.text_of(reply) == "hello" and agent.session.turns == 3
    header = [256, *b"assistant\n"]
    first, second, third = engine.received
    assert second == first + both + [NEWLINE] + result_ids("Rome") + result_ids("Oslo") + header
    assert third == second + one + [NEWLINE] + result_ids("Bern") + header
    (row,) = agent.rows
    assert row.ids == third + [262, 264, END] and sum(row.mask) == len(both) + len(one) + 3
    respondent = agent.session.respondent
    assert (respondent.tool_calls, respondent.tools_offered, respondent.malformed_calls) == (3, 3, 0)
    calls = [call["id"] for message in respondent.last[0].messages for call in message.get("tool_calls", ())]
    assert len(calls) == len(set(calls)) == 3


async def test_the_anthropic_tool_runner_loops_by_itself(agent_of, engine):
    import anthropic

    seen = []

    @anthropic.beta_async_tool
    async def lookup(city: str) -> str:
        """Tells the weather."""
        seen.append(city)
        return "ok"

    agent = agent_of("tools", max_tokens=512)
    engine.script = [[*call_ids("Rome"), NEWLINE, *call_ids("Oslo"), END], [262, 264, END]]
    runner = agent.anthropic.beta.messages.tool_runner(model="m", max_tokens=512, tools=[lookup], messages=[OK])
    message = await runner.until_done()
    assert sorted(seen) == ["Oslo", "Rome"] and message.content[0].text == "hello"
    assert agent.session.turns == 2 and len(agent.rows) == 1


async def test_a_conversation_goes_on_by_the_id_of_its_last_response(agent_of, engine):
    agent = agent_of("tools", max_tokens=512)
    engine.script = [[*call_ids("Rome"), END], [262, 264, END]]
    first = await agent.responses(OK, tools=TOOLS["responses"], max_tokens=512)
    second = await agent.responses(
        *results_of(first), tools=TOOLS["responses"], previous_response_id=first.id, max_tokens=512)
    assert second.output_text == "hello"
    sampled = [*call_ids("Rome"), END]
    assert engine.received[1] == engine.received[0] + sampled + [NEWLINE] + result_ids("Rome") + [256, *b"assistant\n"]
    assert len(agent.rows) == 1
