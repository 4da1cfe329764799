import pickle

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from hypothesis import given, settings
from hypothesis import strategies as st

import molt_gym
from molt_gym import ConfigError, EnvFailure, GameEnv, IllegalMove
from molt_gym.multi_agent import FORFEIT, result_of


class Auction(GameEnv):
    """Three seats bid by turns, twice each; the highest single bid pays itself and wins 9, and seat c always pays 1."""

    seats = ("a", "b", "c")

    def begin(self, index):
        self.bids, self.secret = [], {seat: int(self.rng.integers(1000, 9999)) for seat in self.seats}

    def turn(self):
        return None if len(self.bids) == 6 else self.seats[len(self.bids) % 3]

    def rules(self, seat):
        return f"You are {seat}. Your secret is {self.secret[seat]}."

    def view(self, seat):
        return f"Bids: {self.bids}."

    def move(self, seat, message):
        text = molt_gym.text_of(message)
        if not text.isdecimal():
            raise IllegalMove("write a number")
        self.bids.append(int(text))
        rewards = {"c": -1.0} if seat == "c" else {}
        if len(self.bids) == 6:
            winner = self.seats[int(np.argmax(self.bids)) % 3]
            rewards[winner] = rewards.get(winner, 0) + 9.0 - max(self.bids)
        return rewards

    def random_move(self, seat, rng):
        return str(rng.integers(9))


def say(text):
    return {"role": "assistant", "content": text}


def play(env, replies, index=0):
    """Play replies by seat until the end; the infos of all steps and the sums of rewards."""
    _, info = env.reset(options={"index": index})
    infos, totals, over = [], dict.fromkeys(env.seats, 0.0), False
    while not over:
        seat = info["seat"]
        _, reward, terminated, truncated, info = env.step(say(replies[seat]))
        assert reward == info["rewards"][seat]
        infos.append(info)
        totals = {each: total + info["rewards"][each] for each, total in totals.items()}
        over = terminated or truncated
    return infos, totals


def test_each_seat_moves_in_turn_and_gets_its_own_reward() -> None:
    infos, totals = play(Auction(), {"a": "2", "b": "3", "c": "1"})
    assert [info["seat"] for info in infos] == ["b", "c", "a", "b", "c", "c"]
    assert totals == {"a": 0.0, "b": 6.0, "c": -2.0}
    assert infos[-1]["results"] == {"a": "loss", "b": "win", "c": "loss"} and "results" not in infos[-2]


def test_a_seat_sees_its_own_conversation_and_nothing_of_the_others() -> None:
    env = Auction()
    observation, info = env.reset(options={"index": 5})
    seen = {seat: [] for seat in env.seats}
    for number in range(6):
        seat = info["seat"]
        texts = [message["content"] for message in observation["messages"]]
        assert texts[: len(seen[seat])] == seen[seat] and texts[-1] == f"Bids: {list(range(number))}."
        assert [str(env.secret[other]) in str(texts) for other in env.seats] == [other == seat for other in env.seats]
        seen[seat] = [*texts, str(number)]
        observation, _, _, _, info = env.step(say(str(number)))


def test_what_is_no_legal_move_is_told_and_loses_the_game_after_as_many_as_the_limit() -> None:
    env = Auction(illegal_limit=2)
    env.reset(options={"index": 0})
    observation, reward, terminated, _, info = env.step(say("nonsense"))
    assert observation["messages"][-1]["content"] == "That is no legal move: write a number."
    assert (reward, terminated, info["seat"], info["illegal"]) == (0.0, False, "a", 1)
    env.step(say("1"))
    env.step(say("?"))
    env.step(say("2"))
    env.step(say("!"))
    _, reward, terminated, truncated, info = env.step(say("!"))
    assert (reward, terminated, truncated) == (FORFEIT, True, False)
    assert info["rewards"] == {"a": 0.0, "b": 0.0, "c": FORFEIT} and info["results"]["c"] == "loss"
    with pytest.raises(ResetNeeded):
        env.step(say("1"))


def test_against_an_opponent_the_policy_has_one_seat_which_the_task_draws() -> None:
    env, seats = Auction(opponent="random"), []
    for index in range(30):
        _, info = env.reset(options={"index": index})
        seats.append(info["seat"])
        for _ in range(2):
            assert (info["seat"], info["player"], info["opponent"]) == (seats[-1], "policy", "random")
            _, _, terminated, _, info = env.step(say("4"))
        assert terminated
    assert set(seats) == set(env.seats)


@settings(max_examples=20, deadline=None)
@given(index=st.integers(0, 2**31 - 1))
def test_a_task_is_the_same_game_again_whatever_the_seed(index: int) -> None:
    games = []
    for seed in (1, 2):
        env = Auction(opponent=["random", "self"])
        observation, info = env.reset(seed=seed, options={"index": index})
        games.append([observation, info, env.step(say("3")), env.render_mode])
    assert games[0] == games[1]


def test_a_function_plays_the_other_seats_and_sees_what_they_see() -> None:
    asked = []

    def opponent(conversation):
        asked.append(conversation["messages"][-1]["content"])
        return "7"

    env = Auction(opponent=opponent)
    _, info = env.reset(options={"index": 3})
    seat = info["seat"]
    env.step(say("1"))
    env.step(say("1"))
    assert len(asked) == 4 and env.bids == [1 if other == seat else 7 for other in (*env.seats, *env.seats)]
    assert env.reset()[1]["opponent"].endswith("opponent")


def always_seven(conversation):
    return "7"


def test_an_opponent_by_name_goes_into_the_spec() -> None:
    env = Auction(opponent=f"{__name__}:always_seven")
    env.reset(options={"index": 0})
    env.step(say("1"))
    env.step(say("1"))
    assert env.bids.count(7) == 4
    assert pickle.loads(pickle.dumps(env)).bids == env.bids


def test_opponents_that_fail_are_a_failure_of_the_env_and_no_reward() -> None:
    def broken(conversation):
        raise RuntimeError("gone")

    for opponent, words in ((broken, "gone"), (lambda messages: 3, "returned 3"), (lambda messages: "?", "over")):
        with pytest.raises(EnvFailure, match=words) as failure:
            env = Auction(opponent=opponent)
            for index in range(20):
                env.reset(options={"index": index})
        assert failure.value.reason == "opponent"


def test_a_random_player_that_knows_no_legal_move_is_a_failure_and_wins_nobody_a_game(monkeypatch) -> None:
    monkeypatch.setattr(Auction, "random_move", lambda self, seat, rng: "?")
    with pytest.raises(EnvFailure, match=r"Auction.random_move: '\?' is no legal move: write a number") as failure:
        env = Auction(opponent="random")
        env.reset(options={"index": 3})
        env.step(say("1"))
    assert failure.value.reason == "opponent"


def test_a_game_that_ended_by_chance_before_the_policys_turn_is_begun_again() -> None:
    class Quits(Auction):
        def turn(self):
            return None if 0 in self.bids else super().turn()

        def random_move(self, seat, rng):
            return str(rng.integers(2))

    for index in range(30):
        starts = [Quits(opponent="random").reset(options={"index": index}) for _ in range(2)]
        assert starts[0] == starts[1] and starts[0][1]["player"] == "policy"


def test_messages_of_a_view_are_copies() -> None:
    class Views(Auction):
        def view(self, seat):
            self.shown = [{"role": "user", "content": f"Bids: {self.bids}."}]
            return self.shown

    env = Views()
    env.reset(options={"index": 0})
    env.shown[0]["content"] = "changed"
    assert env.conversation("a")["messages"][-1]["content"] == "Bids: []."


@pytest.mark.parametrize(("options", "words"), [
    ({"opponent": "nobody"}, "opponent: 'nobody'; write 'self', 'random'"),
    ({"opponent": []}, "opponent: the list is empty"),
    ({"opponent": "model:/no/such"}, "no such folder"),
    ({"opponent": "no_such_module:f"}, "opponent: 'no_such_module:f' is no module:function"),
    ({"opponent": 3}, "opponent: 3 is no plain function"),
    ({"illegal_limit": 0}, "illegal_limit: 0; write an integer from 1 on"),
])
def test_arguments_that_make_no_sense_are_refused_by_name(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Auction(**options)


@pytest.mark.parametrize(("method", "value", "write"), [
    ("turn", "d", "one of \\('a', 'b', 'c'\\), or None"), ("view", None, "a text, or messages"),
    ("move", None, "the rewards by seat, {} for none"), ("move", 1.0, "the rewards by seat")])
def test_a_game_that_returns_something_else_is_told_what_to_return(monkeypatch, method, value, write) -> None:
    monkeypatch.setattr(Auction, method, lambda self, *given: value)
    env = Auction()
    with pytest.raises(TypeError, match=f"Auction.{method} returned {value!r}; return {write}"):
        env.reset(seed=0)
        env.step(say("1"))


@pytest.mark.parametrize("seats", [(), ("a", "a"), ("ab")])
def test_seats_have_names_of_their_own(monkeypatch, seats) -> None:
    monkeypatch.setattr(Auction, "seats", seats)
    with pytest.raises(ConfigError, match="Auction.seats: .*; write a name for each"):
        Auction().reset(seed=0)


def test_a_reward_for_nobody_is_a_failure() -> None:
    class Odd(Auction):
        def move(self, seat, message):
            return {"d": 1.0}

    env = Odd()
    env.reset()
    with pytest.raises(EnvFailure, match="a reward for 'd'"):
        env.step(say("1"))


def test_render_shows_every_seat() -> None:
    env = Auction(render_mode="ansi")
    env.reset(options={"index": 0})
    env.step(say("4"))
    text = env.render()
    assert all(f"=== {seat} (0)" in text for seat in env.seats) and "[assistant]\n4" in text


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(-5, 5), min_size=1))
def test_there_is_one_winner_or_a_draw_of_the_best(totals: dict) -> None:
    results = {seat: result_of(totals, seat) for seat in totals}
    best = [seat for seat, total in totals.items() if total == max(totals.values())]
    assert {seat for seat, result in results.items() if result == "loss"} == set(totals) - set(best)
    assert {results[seat] for seat in best} == ({"win"} if len(best) == 1 else {"draw"})
