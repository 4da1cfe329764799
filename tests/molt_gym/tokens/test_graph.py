import math
import threading
from dataclasses import replace

import numpy as np
import pytest

from molt_gym.messages import InternedMessage, InternedTools, has_digest
from molt_gym.tokens import Generation, TokenGraph, Trajectory
from molt_gym.tokens.generation import TOP

OK = {"role": "user", "content": "ok"}
END = 257
THOUGHT = [259, 10, 262, 10, 260, 261, 266, 257]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Session:
    """Plays turns on one graph with an engine that returns what the test says."""

    def __init__(self, renderer, engine, **kwargs) -> None:
        self.renderer, self.engine = renderer, engine
        self.graph = TokenGraph(renderer, **kwargs)
        self.node = -1

    def ask(self, messages, sampled, finish_reason="stop", *, tools=(), stop=()) -> list[dict]:
        """The conversation with the reply."""
        self.prompt = self.graph.prepare(messages, tools)
        generation = self.engine.generate(list(self.prompt.ids), sampled, finish_reason)
        reply = self.renderer.parse(sampled, messages, tools, stop=stop)
        self.node = self.graph.commit(self.prompt, generation, reply)
        assert self.graph.path(self.node) == self.engine.received[-1] + sampled
        return [*messages, reply]

    def shapes(self) -> list[tuple[int, int]]:
        """(length, trained ids) of the rows."""
        return [(len(row.ids), sum(row.mask)) for row in self.graph.rows()]


@pytest.fixture
def session(renderer_of, engine) -> Session:
    return Session(renderer_of(), engine)


def test_the_next_request_goes_on_from_the_sampled_ids(session, prompt_ids):
    talk = session.ask([OK], [262, 264, END])
    session.ask([*talk, OK], [266, END])
    assert session.engine.received == [prompt_ids, prompt_ids + [262, 264, END, 10] + prompt_ids]
    assert len(session.engine.received[1]) == 44
    (row,) = session.graph.rows()
    assert [place for place, trained in enumerate(row.mask) if trained] == [20, 21, 22, 44, 45]
    assert row.ids == session.engine.received[1] + [266, END]
    assert row.logprobs[20:23] == [-1, -2, -3] and set(row.logprobs[23:44]) == {0.0}
    assert row.versions[19:23] == [-1, 0, 0, 0]
    assert (session.prompt.kind, session.graph.forks, session.graph.turns) == ("extend", 0, 2)


def test_rows_have_the_likeliest_tokens_of_all_that_they_train_or_none(session, monkeypatch):
    generate = session.engine.generate

    def telling(*args):
        generation = generate(*args)
        top = np.zeros((len(generation.ids), 2), TOP)
        top["id"][:, 0], top["logprob"][:, 0] = generation.ids, generation.logprobs
        return replace(generation, top=top)

    monkeypatch.setattr(session.engine, "generate", telling)
    talk = session.ask([OK], [262, 264, END])
    session.ask([*talk, OK], [266, END])
    session.ask([*talk, OK], [265, END])
    for row in session.graph.rows():
        trained = [(i, logprob) for i, bit, logprob in zip(row.ids, row.mask, row.logprobs, strict=True) if bit]
        assert list(map(tuple, row.top[:, 0].tolist())) == trained
    (first, _) = rows = session.graph.rows()
    assert len(first.top) == 5 and "top" not in Trajectory("A-v0", 0, rows=rows).to_json()
    monkeypatch.setattr(session.engine, "generate", generate)
    session.ask([*talk, {"role": "user", "content": "no"}], [266, END])
    assert session.graph.rows()[-1].top is None
    with pytest.raises(ValueError, match="generation.top: 1 values for 2 ids"):
        replace(Generation([1, END], [-1, -1], [0, 0], "stop"), top=np.zeros((1, 2), TOP)).checked()


def test_the_end_id_is_trained_where_it_was_sampled_though_it_is_the_padding_id_too(session):
    talk = session.ask([OK], [266, END])
    session.ask([*talk, OK], [266, END])
    (row,) = session.graph.rows()
    assert [row.mask[place] for place, i in enumerate(row.ids) if i == END] == [0, 1, 0, 1]


def test_history_that_the_template_rewrites_starts_a_second_row(session, prompt_ids):
    talk = session.ask([OK], THOUGHT)
    session.ask([*talk, OK], [266, END])
    assert len(session.engine.received[1]) == 43
    assert session.shapes() == [(28, 8), (45, 2)]
    assert (session.prompt.kind, session.prompt.parent, session.graph.forks) == ("fork", None, 1)


def test_history_can_be_kept_as_it_was_sampled(renderer_of, engine, prompt_ids):
    session = Session(renderer_of(), engine, history="keep")
    talk = session.ask([OK], THOUGHT)
    talk = session.ask([*talk, OK], THOUGHT)
    session.ask([*talk, OK], [266, END])
    assert engine.received[2] == (prompt_ids + THOUGHT + [10]) * 2 + prompt_ids
    assert session.shapes() == [(len(engine.received[2]) + 2, 18)]
    assert session.graph.forks == 0


def test_an_unknown_way_with_history_is_refused(renderer_of):
    with pytest.raises(ValueError, match="history: 'forget'"):
        TokenGraph(renderer_of(), history="forget")


def test_a_trunk_that_branches_share_is_trained_once(session):
    trunk = session.ask([OK], [262, 264, END])
    session.ask([*trunk, OK], [266, END])
    session.ask([*trunk, {"role": "user", "content": "no"}], [266, 266, 266, END])
    rows = session.graph.rows()
    assert [sum(row.mask) for row in rows] == [5, 4]
    assert sum(sum(row.mask) for row in rows) == 9
    assert session.prompt.kind == "extend" and session.graph.forks == 0
    assert all(
        (trained, logprob, version) == (0, 0.0, -1)
        for trained, logprob, version in zip(rows[1].mask[:23], rows[1].logprobs, rows[1].versions, strict=False)
    )


def test_the_same_messages_asked_again_are_a_new_sample(session, prompt_ids):
    for sampled in ([266, END], [262, END], [266, END]):
        session.ask([OK], sampled)
        assert session.prompt.kind == "root"
    assert session.shapes() == [(22, 2)] * 3
    assert session.graph.forks == 0


def test_equal_replies_to_the_same_messages_go_on_from_the_last(session):
    session.ask([OK], [262, 264, END])
    first = session.node
    talk = session.ask([OK], [265, END])
    session.ask([*talk, OK], [266, END])
    assert session.prompt.parent not in (first, None)
    assert session.shapes() == [(23, 3), (45, 4)]


def test_two_interleaved_conversations_are_two_branches(session):
    other = {"role": "user", "content": "hello"}
    talks = [[OK], [other]]
    for _ in range(3):
        for place, talk in enumerate(talks):
            talks[place] = [*session.ask(talk, [266, END]), OK]
    assert len(session.graph.rows()) == 2
    assert [shape[1] for shape in session.shapes()] == [6, 6]
    assert session.graph.forks == 0


def test_other_tools_are_another_conversation(renderer_of, engine):
    session = Session(renderer_of("tools"), engine)
    talk = session.ask([OK], [266, END], tools=[ADD])
    session.ask([*talk, OK], [266, END])
    assert session.prompt.parent is None
    session.ask([*talk, OK], [266, END], tools=[ADD])
    assert session.prompt.parent is not None


def test_an_edited_reply_forks_from_the_last_common_turn(session):
    talk = session.ask([OK], [262, 264, END])
    common = session.node
    talk = session.ask([*talk, OK], [266, END])
    edited = [*talk[:-1], {"role": "assistant", "content": "other"}, OK]
    session.ask(edited, [266, END])
    assert (session.prompt.kind, session.prompt.parent, session.graph.forks) == ("fork", common, 1)
    assert session.engine.received[2][20:23] == [262, 264, END]


def test_an_edited_request_under_a_recorded_reply_is_a_fork(session):
    *_, reply = session.ask([OK], [262, 264, END])
    session.ask([{"role": "user", "content": "edited"}, reply, OK], [266, END])
    assert (session.prompt.kind, session.prompt.parent, session.graph.forks) == ("fork", None, 1)


def test_a_sample_more_of_a_forked_prompt_is_no_fork_more(session):
    talk = session.ask([OK], THOUGHT)
    for _ in range(3):
        session.ask([*talk, OK], [266, END])
    assert session.graph.forks == 1 and len(session.graph.rows()) == 4


def test_compaction_to_a_summary_is_a_fork(session):
    talk = session.ask([OK], [266, END])
    session.ask([*talk, OK], [266, END])
    session.ask([OK, {"role": "user", "content": "summary"}], [266, END])
    assert (session.prompt.kind, session.graph.forks) == ("fork", 1)


def test_the_wire_spellings_of_a_reply_are_the_same_reply(renderer_of, engine):
    session = Session(renderer_of("tools"), engine)
    sampled = [267, *b'{"name":"f","arguments":{"b":1,"a":2}}', 268, END]
    *_, reply = session.ask([OK], sampled, tools=[ADD])
    (call,) = reply["tool_calls"]
    echoed = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [call | {"function": {"name": "f", "arguments": '{"a": 2, "b": 1}'}}],
    }
    tool = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "3"}]}
    session.ask([OK, echoed, tool], [266, END], tools=[ADD])
    assert session.prompt.kind == "extend"


def test_a_reply_cut_by_length_gets_the_end_of_turn_as_context(session, prompt_ids):
    talk = session.ask([OK], [262, 264], "length")
    session.ask([*talk, OK], [266, END])
    assert session.engine.received[1][20:24] == [262, 264, END, 10]
    assert session.graph.rows()[0].mask[20:24] == [1, 1, 0, 0]


def test_a_reply_cut_at_a_stop_string_keeps_its_ids_and_only_these_are_trained(session):
    talk = session.ask([OK], [104, 105, 33, 33], stop=["!!"])
    assert talk[-1]["content"] == "hi"
    session.ask([*talk, OK], [266, END])
    (row,) = session.graph.rows()
    assert row.ids[20:26] == [104, 105, 33, 33, END, 10]
    assert row.mask[20:26] == [1, 1, 1, 1, 0, 0] and row.logprobs[24] == 0.0
    assert session.engine.received[1] == row.ids[:-2]


def test_a_request_that_failed_leaves_no_trace(session):
    talk = session.ask([OK], [266, END])
    before = session.shapes()
    assert session.graph.prepare([*talk, OK]) == session.graph.prepare([*talk, OK])
    assert (session.graph.turns, session.graph.forks, session.shapes()) == (1, 0, before)
    session.ask([*talk, OK], [266, END])
    assert session.graph.turns == 2 and len(session.graph.rows()) == 1


@pytest.mark.parametrize(
    ("field", "generation"),
    [
        ("logprobs", Generation([266, END], [-0.5], [0, 0], "stop")),
        ("logprobs", Generation([266], [math.nan], [0], "stop")),
        ("versions", Generation([266], [-0.5], [], "stop")),
        ("finish_reason", Generation([266], [-0.5], [0], "abort")),
    ],
)
def test_a_generation_that_does_not_hold_together_is_not_recorded(session, field, generation):
    prompt = session.graph.prepare([OK])
    with pytest.raises(ValueError, match=rf"generation\.{field}"):
        session.graph.commit(prompt, generation, {"role": "assistant", "content": "ok"})
    assert (session.graph.turns, session.graph.rows()) == (0, [])


@pytest.mark.parametrize("change", [lambda ids: ids[1:], lambda ids: (*ids[:-1], 0)])
def test_a_prompt_that_was_changed_after_it_was_made_is_refused(session, change):
    prompt = session.graph.prepare([OK])
    prompt = replace(prompt, ids=change(prompt.ids))
    with pytest.raises(ValueError, match=r"prompt\.ids"):
        session.graph.commit(prompt, Generation([266], [-0.5], [0], "stop"), {"role": "assistant", "content": "ok"})


def test_a_prompt_of_another_graph_is_refused(session, renderer_of):
    talk = session.ask([OK], [266, END])
    prompt = session.graph.prepare([*talk, OK])
    with pytest.raises(ValueError, match=r"prompt\.parent"):
        TokenGraph(renderer_of()).commit(prompt, Generation([], [], [], "stop"), {"role": "assistant", "content": ""})


def test_messages_changed_after_the_prompt_was_made_do_not_change_the_record(session):
    messages = [dict(OK)]
    prompt = session.graph.prepare(messages)
    messages[0]["content"] = "changed"
    reply = {"role": "assistant", "content": "ok"}
    session.graph.commit(prompt, Generation([266, END], [-0.5] * 2, [0, 0], "stop"), reply)
    assert session.graph.prepare([OK, reply, OK]).kind == "extend"


def test_interned_messages_and_plain_ones_are_the_same_conversation(session):
    talk = session.ask([OK], [266, END])
    session.ask([*map(InternedMessage, talk), OK], [266, END], tools=InternedTools())
    assert session.prompt.kind == "extend"
    edited = [*map(InternedMessage, talk[:-1]), InternedMessage(talk[-1] | {"content": "other"}), OK]
    session.ask(edited, [266, END])
    assert session.prompt.kind == "fork"


def test_only_a_prompt_with_little_new_text_is_made_in_short(session):
    talk = list(map(InternedMessage, session.ask([InternedMessage(OK)], [265, END])))
    more = InternedMessage(role="user", content="x" * 100)
    short = session.graph.prepare_short
    assert short([*talk, more], at_most=107) == session.graph.prepare([*talk, more])
    assert short([*talk, more], at_most=100) is not None, "the digests of the history are known by now"
    assert short([*talk, more], at_most=99) is None
    assert short([*talk, more], InternedTools([ADD]), at_most=100) is None
    long = InternedMessage(role="user", content="x" * 1_000_000)
    assert short([*talk, long], at_most=100) is None and not has_digest(long)


@pytest.mark.filterwarnings("ignore:.*drops tools")
def test_tools_that_are_shown_for_the_first_time_are_text_to_encode(session):
    talk = list(map(InternedMessage, session.ask([InternedMessage(OK)], [265, END], tools=InternedTools([ADD]))))
    tools = InternedTools([ADD | {"description": "x" * 1000}])
    assert session.graph.prepare_short(talk[:1], tools, at_most=1000) is None
    assert session.graph.prepare_short(talk[:1], tools, at_most=2000).kind == "root"
    goes_on = session.graph.prepare_short([*talk, InternedMessage(OK)], InternedTools([ADD]), at_most=10)
    assert goes_on.kind == "extend"


def test_history_that_the_template_writes_anew_is_text_to_encode(renderer_of, engine):
    session = Session(renderer_of(), engine)
    talk = session.ask([{"role": "user", "content": "x" * 50}], THOUGHT)
    assert session.graph.prepare_short([*talk, OK], at_most=20) is None
    assert session.graph.prepare_short([*talk, OK], at_most=100).kind == "fork"


def test_the_path_of_every_turn_stays_known_whatever_goes_on_from_it(session):
    talk, nodes = [OK], []
    for _ in range(20):
        talk = [*session.ask(talk, [266, END]), OK]
        nodes.append((session.node, session.graph.path(session.node)))
    for _ in range(20):
        session.ask([OK], [262, END])
    assert all(session.graph.path(node) == path for node, path in nodes)
    session.ask(talk[:5], [266, END])
    assert session.graph.path(session.node)[: len(nodes[1][1])] == nodes[1][1]


def test_turns_can_be_recorded_from_many_threads(session, new_engine):
    def play(name: str) -> None:
        talk = [{"role": "user", "content": name}]
        for _ in range(5):
            prompt = session.graph.prepare(talk)
            generation = new_engine().generate(prompt.ids, [266, END])
            reply = session.renderer.parse(generation.ids)
            session.graph.commit(prompt, generation, reply)
            talk = [*talk, reply, OK]

    threads = [threading.Thread(target=play, args=(name,)) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert session.graph.turns == 40
    assert [trained for _, trained in session.shapes()] == [10] * 8
