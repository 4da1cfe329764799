"""The experts that an engine told: kept by token, over turns, branches and the file form."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from molt_gym.tokens import Row, TokenGraph, Trajectory

OK, NO = ({"role": "user", "content": text} for text in ("ok", "no"))
END = 257


@pytest.fixture
def ask(renderer_of, engine):
    """`ask(graph, messages, sampled, told)`: a turn whose engine told experts `told`, but of `cached` ids."""
    renderer = renderer_of()

    def turn(graph, messages, sampled, told, cached=0) -> list[dict]:
        prompt = graph.prepare(messages)
        experts = np.full((len(prompt.ids) + len(sampled) - 1, 2, 1), told, np.int16)
        experts[:cached] = -1
        generation = replace(engine.generate(list(prompt.ids), sampled, "stop"), routed_experts=experts)
        reply = renderer.parse(sampled, messages, ())
        graph.commit(prompt, generation, reply)
        return [*messages, reply]

    return renderer, turn


def told(row: Row) -> list[int]:
    assert row.experts.dtype == np.int16 and row.experts.shape == (len(row.ids), 2, 1)
    return row.experts[:, 0, 0].tolist()


def test_the_first_computation_counts_and_the_next_turn_tells_of_the_last_id(ask):
    renderer, turn = ask
    graph = TokenGraph(renderer)
    talk = turn(graph, [OK], [262, 264, END], 1)
    assert told(graph.rows()[0]) == [1] * 22 + [-1]
    turn(graph, [*talk, OK], [266, END], 2)
    (row,) = graph.rows()
    assert told(row) == [1] * 22 + [2] * (len(row.ids) - 23) + [-1]


def test_what_a_cached_prefix_hid_stays_unknown_until_it_is_computed(ask):
    renderer, turn = ask
    graph = TokenGraph(renderer)
    talk = turn(graph, [OK], [262, END], 1, cached=16)
    assert told(graph.rows()[0]) == [-1] * 16 + [1] * 5 + [-1]
    turn(graph, [*talk, OK], [266, END], 2)
    assert told(graph.rows()[0])[:23] == [2] * 16 + [1] * 5 + [2, 2]


def test_branches_agree_about_the_ids_that_they_share(ask):
    renderer, turn = ask
    graph = TokenGraph(renderer)
    trunk = turn(graph, [OK], [262, 264, END], 1)
    turn(graph, [*trunk, OK], [266, END], 2)
    turn(graph, [*trunk, NO], [266, END], 3)
    first, second = graph.rows()
    assert told(first)[:23] == told(second)[:23] == [1] * 22 + [2]
    assert set(told(first)[23:-1]) == {2} and set(told(second)[24:-1]) == {3}


def test_an_engine_that_tells_nothing_leaves_rows_without_experts(ask, engine):
    renderer, _ = ask
    graph = TokenGraph(renderer)
    prompt = graph.prepare([OK])
    graph.commit(prompt, engine.generate(list(prompt.ids), [266, END], "stop"), renderer.parse([266, END], [OK], ()))
    assert graph.rows()[0].experts is None


def test_rows_keep_their_experts_between_processes_but_not_on_disk():
    row = Row([1, 2], [0, 1], [0.0, -1.0], [-1, 0], np.array([[[3]], [[-1]]], np.int16))
    other = pickle.loads(pickle.dumps(row))
    assert np.array_equal(other.experts, row.experts) and other == row
    (read,) = Trajectory.from_json(Trajectory("Any-v0", 0, rows=[row]).to_json()).rows
    assert read.experts is None and read == row
    with pytest.raises(ValueError, match="row.experts: 1 values for 2 ids"):
        Row([1, 2], [0, 1], [0.0, -1.0], [-1, 0], np.zeros((1, 1, 1), np.int16))
