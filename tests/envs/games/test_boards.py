import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import molt_gym
from molt_gym.envs.games import ConnectFour, TicTacToe
from molt_gym.envs.games.boards import lines

GAMES = [TicTacToe, ConnectFour]


def play(env, moves, index=0):
    """The last step of a game with these moves, and the observations before each."""
    observation, info = env.reset(options={"index": index})
    texts = [observation["messages"][-1]["content"]]
    for move in moves:
        observation, _, terminated, _, info = env.step({"role": "assistant", "content": str(move)})
        texts.append(observation["messages"][-1]["content"])
    return terminated, info, texts


def against(env, index, choose, other=None):
    """The result of the policy's seat in a game against the env's own opponent."""
    _, info = env.reset(options={"index": index})
    seat, rng, terminated = info["seat"], np.random.default_rng(index), False
    while not terminated:
        _, _, terminated, _, info = env.step({"role": "assistant", "content": choose(seat, rng)})
    return info["results"][seat]


@pytest.mark.parametrize(("moves", "rewards"), [
    ((1, 4, 2, 5, 3), {"X": 1.0, "O": -1.0}),  # a row
    ((1, 2, 4, 5, 9, 8), {"X": -1.0, "O": 1.0}),  # a column
    ((3, 1, 5, 2, 7), {"X": 1.0, "O": -1.0}),  # a diagonal
    ((1, 2, 3, 5, 4, 6, 8, 7, 9), {"X": 0.0, "O": 0.0}),
])
def test_three_in_a_line_win_tic_tac_toe_and_a_full_board_is_a_draw(moves: tuple, rewards: dict) -> None:
    terminated, info, _ = play(TicTacToe(), moves)
    assert terminated and info["rewards"] == rewards


@pytest.mark.parametrize("moves", [(1, 1, 2, 2, 3, 3, 4), (1, 2, 1, 2, 1, 2, 1), (1, 2, 2, 3, 3, 4, 3, 4, 4, 6, 4)])
def test_four_in_a_line_win_connect_four(moves: tuple) -> None:
    terminated, info, _ = play(ConnectFour(), moves)
    assert terminated and info["rewards"] == {"X": 1.0, "O": -1.0}


def test_marks_fall_and_a_full_column_is_no_move() -> None:
    _, info, texts = play(ConnectFour(), (2, 2, 2, 2, 2, 2, 2))
    assert texts[-2].splitlines() == ["1 2 3 4 5 6 7"] + [f". {mark} . . . . ." for mark in "OXOXOX"]
    assert texts[-1] == "That is no legal move: 2 is taken; write one of 1, 3, 4, 5, 6, 7." and info["illegal"] == 1


def test_the_board_of_tic_tac_toe_has_numbers_for_free_cells_and_the_lines_that_can_be_won() -> None:
    _, _, texts = play(TicTacToe(), (1, 5, 9))
    assert texts[-1] == "X 2 3\n4 O 6\n7 8 X\nlines: X23 X47 O28 X36 O37 O46 X78"
    assert texts[0] == "1 2 3\n4 5 6\n7 8 9"


def test_the_lines_are_all_there_are() -> None:
    for rows, columns, length, count in ((3, 3, 3, 8), (6, 7, 4, 69)):
        found = set(itertools.chain(*lines(rows, columns, length)))
        assert len(found) == count
        assert all(cell in line for cell, through in enumerate(lines(rows, columns, length)) for line in through)


@pytest.mark.parametrize("game", GAMES)
@settings(max_examples=15, deadline=None)
@given(index=st.integers(0, 2**31 - 1))
def test_random_moves_are_always_legal_and_games_end(game: type, index: int) -> None:
    env = game()
    _, info = env.reset(options={"index": index})
    rng, terminated = np.random.default_rng(index), False
    while not terminated:
        _, _, terminated, _, info = env.step({"role": "assistant", "content": env.random_move(info["seat"], rng)})
        assert info["illegal"] == 0
    assert sum(info["rewards"].values()) == 0


def test_the_good_player_of_tic_tac_toe_never_loses_and_beats_a_random_one() -> None:
    env = TicTacToe(opponent="random")
    results = [against(env, index, env.good_move) for index in range(60)]
    assert results.count("loss") == 0 and results.count("win") > 45
    assert [against(env, index, env.random_move) for index in range(60)].count("loss") > 10


@pytest.mark.parametrize("game", GAMES)
def test_demonstrations_are_legal_games_fixed_by_the_seed(game: type) -> None:
    env = game()
    found = env.demonstrations(30, 1)
    assert found == game().demonstrations(30, 1) and found != env.demonstrations(30, 2)
    assert len(found) == 30 and {message["content"].split()[2] for message in (one[0] for one in found)} == {"X", "O"}
    for conversation in found:
        assert [message["role"] for message in conversation] == ["system", *["user", "assistant"] * (
            len(conversation) // 2)]


@pytest.mark.parametrize("env_id", ["TicTacToe-v0", "ConnectFour-v0", "Negotiation-v0"])
def test_evaluation_is_against_the_random_player_unless_told_otherwise(env_id: str) -> None:
    assert molt_gym.make(env_id).unwrapped.presets[""]["eval"] == {"env_kwargs": {"opponent": "random"}}
