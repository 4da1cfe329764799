"""Whatever is said, sampled and rewritten: what the engine received and returned is what is recorded."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from molt_gym.tokens import TokenGraph

TEXT = st.lists(
    st.sampled_from(
        ["ok", "hello", " ", "\n", "<|im_end|>", "<|im_start|>user\n", "<think>", "</think>", "é", "\ud800", "<|"]
    )
).map("".join) | st.text(max_size=5)
SAMPLED = st.lists(
    st.integers(0, 255) | st.sampled_from([10, 10, 104, 101, 108, 111, 261, 262, 264, 265, 266, *range(256, 261)]),
    max_size=12,
)
TEMPLATES = ["toy", "chatml", "tools", "bos", "role markers", "opens thinking", "no markers", "trimming"]


@dataclass
class Rollout:
    """Conversations that an agent goes on with, edits and samples anew, and what the engine saw of it."""

    renderer: object
    engine: object
    graph: TokenGraph
    talks: list[list[dict]] = field(default_factory=list)
    turns: dict[int, tuple[list[int], list[int], list[float]]] = field(default_factory=dict)

    def ask(self, messages: list[dict], sampled: list[int], finish_reason: str, *, fails: bool = False) -> None:
        prompt = self.graph.prepare(messages)
        if fails:
            return
        if finish_reason == "stop":
            sampled = [*sampled, self.renderer.stop_token_ids[-1]]
        generation = self.engine.generate(prompt.ids, sampled, finish_reason, version=len(self.turns))
        reply = self.renderer.parse(sampled, messages)
        node = self.graph.commit(prompt, generation, reply)
        self.turns[node] = (self.engine.received[-1], sampled, generation.logprobs)
        self.talks.append([*messages, reply])

    def check(self) -> None:
        for node, (received, returned, _) in self.turns.items():
            assert self.graph.path(node) == received + returned
        rows = self.graph.rows()
        sampled = {
            logprob: (i, version)
            for version, (_, ids, logprobs) in enumerate(self.turns.values())
            for i, logprob in zip(ids, logprobs, strict=True)
        }
        trained = Counter()
        for row in rows:
            assert len(row.ids) == len(row.mask) == len(row.logprobs) == len(row.versions)
            assert any(row.ids == received + returned for received, returned, _ in self.turns.values())
            for i, mask, logprob, version in zip(row.ids, row.mask, row.logprobs, row.versions, strict=True):
                if mask:
                    assert sampled[logprob] == (i, version)
                    trained[logprob] += 1
                else:
                    assert (logprob, version) == (0.0, -1)
        assert trained == Counter(dict.fromkeys(sampled, 1))
        assert self.graph.turns == len(self.turns)


def step(data, rollout: Rollout) -> None:
    moves = ["start", "go on", "go on", "go on", "ask again", "edit", "cut out", "fail"]
    move = data.draw(st.sampled_from(moves))
    sampled, finish_reason = data.draw(SAMPLED), data.draw(st.sampled_from(["stop", "stop", "length"]))
    new = [
        {"role": role, "content": data.draw(TEXT), "tool_call_id": "x"}
        for role in data.draw(st.lists(st.sampled_from(["user", "tool"]), min_size=1, max_size=2))
    ]
    if move == "start" or not rollout.talks:
        rollout.ask(new, sampled, finish_reason)
        return
    talk = list(data.draw(st.sampled_from(rollout.talks)))
    if move == "ask again":
        rollout.ask(talk[:-1], sampled, finish_reason)
    else:
        place = data.draw(st.integers(0, len(talk) - 1))
        if move == "edit":
            talk[place] = talk[place] | {"content": data.draw(TEXT)}
        elif move == "cut out" and place:
            del talk[1 : place + 1]
        rollout.ask([*talk, *new], sampled, finish_reason, fails=move == "fail")


@pytest.mark.parametrize("history", ["rerender", "keep"])
@given(data=st.data(), template=st.sampled_from(TEMPLATES))
@settings(max_examples=60)
def test_the_record_is_what_the_engine_received_and_returned(renderer_of, new_engine, history, data, template):
    renderer = renderer_of(template)
    rollout = Rollout(renderer, new_engine(), TokenGraph(renderer, history=history))
    for _ in range(data.draw(st.integers(1, 8))):
        step(data, rollout)
    rollout.check()


@given(sampled=SAMPLED)
@example(sampled=[259, 260, 266])
def test_ids_that_do_not_survive_decoding_and_encoding_are_context_as_they_are(renderer_of, new_engine, sampled):
    renderer = renderer_of("chatml")
    rollout = Rollout(renderer, new_engine(), TokenGraph(renderer))
    user = {"role": "user", "content": "ok"}
    rollout.ask([user], sampled, "length")
    rollout.ask([*rollout.talks[0], user], [266], "stop")
    first, second = rollout.engine.received
    assert second[: len(first) + len(sampled)] == first + sampled
    assert rollout.graph.forks == 0
    rollout.check()


def test_a_long_episode_is_one_row(renderer_of, new_engine):
    renderer, draw = renderer_of("chatml"), random.Random(0)
    rollout = Rollout(renderer, new_engine(), TokenGraph(renderer))
    messages = [{"role": "user", "content": "hello"}]
    for _ in range(60):
        rollout.ask(messages, [draw.randrange(256) for _ in range(20)], draw.choice(["stop", "length"]))
        messages = [*rollout.talks[-1], {"role": "user", "content": "<|im_end|>" * draw.randrange(3)}]
    rollout.check()
    assert len(rollout.graph.rows()) == 1 and rollout.graph.forks == 0
