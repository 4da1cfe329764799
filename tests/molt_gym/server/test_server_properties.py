"""What holds whatever the order of requests and however often they are sent again."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molt_gym.tokens import Generation

END = 257

pytestmark = pytest.mark.timeout(120)
checks = list(HealthCheck)
wires = st.sampled_from(["chat", "responses", "messages"])


async def digits(ids, sampling, number, images):
    """Says how long the prompt was, after a moment that depends on it."""
    for _ in range(len(ids) % 5):
        await asyncio.sleep(0)
    sampled = [*str(len(ids)).encode(), END]
    return Generation(sampled, [-1.0] * len(sampled), [0] * len(sampled), "stop")


def spelled(reply, spelling: int) -> list:
    """A reply as programs send it back: the objects of the SDK, all of their fields, or those that say something."""
    def form(value):
        return value if spelling == 1 else value.model_dump(exclude_none=spelling == 3)

    if hasattr(reply, "choices"):
        return [form(reply.choices[0].message)]
    if hasattr(reply, "output"):
        return [form(item) for item in reply.output]
    return [{"role": "assistant", "content": [form(block) for block in reply.content]}]


@settings(max_examples=20, deadline=None, suppress_health_check=checks)
@given(st.lists(st.lists(st.tuples(wires, st.text("abc 0\n", max_size=5), st.integers(0, 3)), min_size=1, max_size=4),
                min_size=1, max_size=5))
async def test_conversations_that_run_at_the_same_time_are_a_row_each(agent_of, renderer_of, wire, conversations):
    agent = agent_of("chatml", generate=digits)

    async def converse(number, turns):
        histories, plain = {name: [] for name in wire.names}, []
        for name, text, spelling in turns:
            user = {"role": "user", "content": f"{number} {text}"}
            reply = await agent.ask(name, *histories[name], user)
            said = {"role": "assistant", "content": wire.text_of(reply)}
            for other, history in histories.items():
                history += [user, *(spelled(reply, spelling) if other == name and spelling else [said])]
            plain += [user, said]
        return plain

    said = await asyncio.gather(*(converse(*numbered) for numbered in enumerate(conversations)))
    whole = [renderer_of("chatml").render(messages, add_generation_prompt=False) for messages in said]
    rows = agent.rows
    assert sorted(row.ids for row in rows) == sorted(ids[:-1] for ids in whole)
    assert agent.session.turns == sum(map(len, conversations)) and agent.graph.forks == 0
    sampled = sum(len(message["content"]) + 1 for messages in said for message in messages[1::2])
    assert sum(sum(row.mask) for row in rows) == sampled
    agent.session.close()


@settings(max_examples=20, deadline=None, suppress_health_check=checks)
@given(st.lists(st.tuples(wires, st.integers(1, 4), st.booleans(), st.booleans()), min_size=1, max_size=5), st.data())
async def test_a_storm_of_retries_records_each_turn_once(agent_of, engine, wire, turns, data):
    agent = agent_of("chatml")
    engine.received.clear()
    sent, history, failures = [], [], 0
    for number, (name, times, at_once, fails) in enumerate(turns):
        history.append({"role": "user", "content": f"{number}"})
        body = {"model": "m", "messages": list(history), "input": list(history), "max_tokens": 64}
        sent.append((wire.paths[name], json.dumps(body).encode()))
        if fails:
            failures += 1
            engine.script = [RuntimeError("down")]
            assert (await wire.post(agent.session, *sent[-1], **{"x-stainless-retry-count": "0"}))[0] == 503
        retries = [(*sent[-1], attempt + fails) for attempt in range(times)]
        retries += [(*data.draw(st.sampled_from(sent)), data.draw(st.integers(1, 3))) for _ in range(2)]
        asks = [wire.post(agent.session, path, raw, **{"x-stainless-retry-count": str(attempt)})
                for path, raw, attempt in retries]
        answers = await asyncio.gather(*asks) if at_once else [await ask for ask in asks]
        assert all(status == 200 for status, _, _ in answers)
        same = [json.dumps(answer) for path, raw in sent[-1:] for (p, r, _), (_, _, answer)
                in zip(retries, answers, strict=True) if (p, r) == (path, raw)]
        assert len(set(same)) == 1
        history.append({"role": "assistant", "content": "hello"})
    assert len(engine.received) == len(turns) + failures
    assert (agent.session.turns, agent.graph.turns, len(agent.rows)) == (len(turns), len(turns), 1)
    agent.session.close()
