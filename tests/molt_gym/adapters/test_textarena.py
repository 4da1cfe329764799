"""Games of TextArena, on the package itself."""

import inspect
import random
import re
import subprocess
import sys

import numpy as np
import pytest

import molt_gym
from molt_gym.adapters import textarena_opponents
from molt_gym.adapters.global_random import GlobalRandom
from molt_gym.conformance import check

textarena = pytest.importorskip("textarena")

PLAYED = ["textarena/GuessTheNumber-v0", "textarena/TicTacToe-v0", "textarena/Countdown-v0"]


def say(text):
    return {"role": "assistant", "content": text}


def last(observation):
    return observation["messages"][-1]["content"]


def first_free(seen, _generator):
    """The lowest free cell."""
    return re.findall(r"Available Moves: '(\[\d\])", seen)[-1]


def says_nothing(_seen, _generator):
    """No move of any game."""
    return "I pass"


def breaks(_seen, _generator):
    """An opponent with a bug."""
    raise KeyError("bug")


def test_a_binary_search_earns_what_the_game_itself_pays_it_in_fifty_episodes():
    env = molt_gym.make("textarena/GuessTheNumber-v0")
    for index in range(50):
        env.reset(options={"index": index})
        theirs = textarena.make("GuessTheNumber-v0")
        lent = GlobalRandom()
        lent.seed(index)
        with lent:
            theirs.reset(num_players=1, seed=index)
        low, high, over = 1, 20, False
        while not over:
            guess = (low + high) // 2
            observation, reward, over, _, info = env.step(say(f"Between {low} and {high}: [{guess}]"))
            done, _ = theirs.step(f"[{guess}]")
            assert done == over
            low, high = (low, guess - 1) if "lower" in last(observation) else (guess + 1, high)
        assert reward == theirs.close()[0][0] == 1.0, index
        assert info == {"reason": "Congratulations! You guessed the correct number.", "invalid_move": False,
                        "task_index": index}


def test_the_game_speaks_for_itself_each_thing_once():
    env = molt_gym.make("textarena/GuessTheNumber-v0")
    opening, _ = env.reset(options={"index": 1})
    assert [message["role"] for message in opening["messages"]] == ["user"]
    assert "guess the number between 1 and 20" in last(opening)
    observation, reward, over, *_ = env.step(say("[4]"))
    assert (last(observation), reward, over) == ("The target number is higher.", 0.0, False)


def test_a_second_illegal_reply_loses_as_the_game_says():
    env = molt_gym.make("textarena/TicTacToe-v0")
    env.reset(options={"index": 0})
    observation, _, over, *_ = env.step(say("the middle"))
    assert "invalid move" in last(observation) and not over
    _, reward, over, _, info = env.step(say("the middle"))
    assert (reward, over, info["invalid_move"]) == (-1, True, True)


@pytest.mark.parametrize("game", ["Countdown", "ThreeCardMonte"])
def test_games_that_swap_reward_and_reason_lose_by_illegal_replies_too(game):
    env = molt_gym.make(f"textarena/{game}-v0")
    env.reset(options={"index": 0})
    env.step(say("zz"))
    _, reward, over, _, info = env.step(say("zz"))
    assert (reward, over, info["invalid_move"]) == (-1, True, True)


def test_a_reply_that_a_game_breaks_at_loses(monkeypatch):
    from textarena.envs.TicTacToe.env import TicTacToeEnv

    env = molt_gym.make("textarena/TicTacToe-v0")
    env.reset(options={"index": 0})
    monkeypatch.setattr(TicTacToeEnv, "step", lambda self, action: {}["bug"])
    _, reward, over, _, info = env.step(say("[4]"))
    assert (reward, over, info["reason"]) == (-1, True, "TicTacToe-v0 broke at the reply: KeyError")


def test_the_task_decides_the_seat_unless_it_is_fixed():
    def opening(index, **kwargs):
        return last(molt_gym.make("textarena/TicTacToe-v0", **kwargs).reset(options={"index": index})[0])

    assert "Player 1:" not in opening(0) and "You are Player 0" in opening(0)
    assert "You are Player 1" in opening(1) and "Player 0: [" in opening(1)
    assert "You are Player 0" in opening(1, seat=0)
    for seat in (2, -1, "first"):
        with pytest.raises(molt_gym.ConfigError, match="seat"):
            molt_gym.make("textarena/TicTacToe-v0", seat=seat)


def test_a_scripted_opponent_is_beaten_by_who_knows_it_and_pays_what_the_game_pays(monkeypatch, tmp_path):
    (tmp_path / "first_free.py").write_text(f"import re\n\n{inspect.getsource(first_free)}")
    monkeypatch.syspath_prepend(tmp_path)
    for opponent in (first_free, "first_free:first_free"):
        env = molt_gym.make("textarena/TicTacToe-v0", seat=0, opponent=opponent)
        for moves, expected in [(("[6]", "[7]", "[8]"), 1), (("[8]", "[7]", "[5]"), -1)]:
            env.reset(options={"index": 0})
            for move in moves:
                _, reward, over, _, info = env.step(say(move))
            assert (reward, over, info["invalid_move"]) == (expected, True, False)


@pytest.mark.parametrize(("opponent", "words"), [
    ("nobody", "opponent: 'nobody'"), ("no_such_module:play", "no_such_module"), ("math:no_such", "no_such"), (7, "7")])
def test_an_opponent_that_is_none_is_named(opponent, words):
    with pytest.raises(molt_gym.ConfigError, match=words):
        molt_gym.make("textarena/TicTacToe-v0", opponent=opponent)


def test_an_opponent_that_raises_is_a_failure_and_one_that_blunders_loses():
    env = molt_gym.make("textarena/TicTacToe-v0", seat=0, opponent=breaks)
    env.reset(options={"index": 0})
    with pytest.raises(molt_gym.EnvFailure, match="opponent: KeyError"):
        env.step(say("[4]"))
    env = molt_gym.make("textarena/TicTacToe-v0", seat=0, opponent=says_nothing)
    env.reset(options={"index": 0})
    assert env.step(say("[4]"))[1:3] == (1, True)


@pytest.mark.parametrize("game", ["TicTacToe", "ConnectFour", "KuhnPoker", "Nim", "IteratedPrisonersDilemma"])
def test_the_random_player_never_loses_by_an_illegal_move(game):
    env = molt_gym.make(f"textarena/{game}-v0")
    for index in range(4):
        observation, _ = env.reset(options={"index": index})
        generator, over, moves = random.Random(index), False, ["[0]"]
        for _ in range(60):
            moves = re.findall(r"\[\w+\]", last(observation)) or moves
            observation, reward, over, _, info = env.step(say(generator.choice(moves)))
            if over:
                break
        assert over and (reward <= 0 if info["invalid_move"] else "nvalid" not in info["reason"]), info


def test_a_game_whose_moves_the_random_player_does_not_know_asks_for_an_opponent(monkeypatch):
    with pytest.raises(molt_gym.ConfigError, match="opponent missing"):
        molt_gym.make("textarena/Alquerque-v0")
    molt_gym.make("textarena/Alquerque-v0", opponent=says_nothing).reset(options={"index": 0})
    monkeypatch.setattr(textarena_opponents, "_takes", lambda _game, _move: False)
    env = molt_gym.make("textarena/Alquerque-v0", opponent="random", seat=1)
    with pytest.raises(molt_gym.EnvFailure, match="the random player knows no legal move of Alquerque-v0"):
        env.reset(options={"index": 0})


def test_settings_go_to_the_game_and_bad_ones_are_named():
    with pytest.raises(molt_gym.ConfigError, match="colour"):
        molt_gym.make("textarena/TicTacToe-v0", colour=1)
    env = molt_gym.make("textarena/GuessTheNumber-v0", max_number=50)
    assert "between 1 and 50" in last(env.reset(options={"index": 0})[0])


def test_word_games_say_what_to_download(monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: False)
    with pytest.raises(molt_gym.ConfigError, match=r"python -m nltk\.downloader words"):
        molt_gym.make("textarena/Wordle-v0")


@pytest.mark.parametrize("env_id", PLAYED)
def test_it_conforms(env_id):
    assert [found for found in check(env_id) if found.problem] == []


def test_the_callers_generators_stay_as_they_are():
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    env = molt_gym.make("textarena/Sudoku-v0")
    env.reset(options={"index": 4})
    env.step(say("[1 1 1]"))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_games_of_one_and_two_are_listed_and_judged_ones_are_not():
    script = ("import molt_gym; print(molt_gym.registry.find_spec('textarena/Sudoku-easy-v0').kwargs)\n"
              "ids = {info.id for info in molt_gym.list_envs('textarena')}\n"
              "import sys; old = sys.version_info < (3, 12)\n"
              "print(len(ids) > 150, 'textarena/Debate-v0' in ids, 'textarena/Poker-v0' in ids,\n"
              "      ('textarena/Chess-v0' in ids) != old)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "{'game': 'Sudoku-v0-easy', 'players': 1, 'opponent': 'random'}", "True False False True"], done.stderr
