import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_gym import ConfigError
from molt_gym.envs.games import Negotiation
from molt_gym.envs.games.negotiation import LONGEST


def say(text):
    return {"role": "assistant", "content": text}


def begun(index=0, **options):
    env = Negotiation(**options)
    return env, env.reset(options={"index": index})[0]


@settings(max_examples=40, deadline=None)
@given(index=st.integers(0, 2**31 - 1), take=st.tuples(*[st.integers(0, 3)] * 3))
def test_an_agreement_pays_each_seat_what_its_things_are_worth_to_it(index: int, take: tuple) -> None:
    env, _ = begun(index)
    assert all(np.dot(env.counts, env.values[seat]) == 10 for seat in env.seats)
    offer = [min(pair) for pair in zip(take, env.counts, strict=True)]
    env.step(say(f"Let us be fair.\noffer {offer[0]} {offer[1]} {offer[2]}"))
    _, reward, terminated, _, info = env.step(say("Fine.\nAccept!"))
    rest = np.subtract(env.counts, offer)
    assert terminated and info["rewards"]["A"] == pytest.approx(np.dot(offer, env.values["A"]) / 10)
    assert reward == info["rewards"]["B"] == pytest.approx(np.dot(rest, env.values["B"]) / 10)


def test_without_an_agreement_nobody_gets_anything() -> None:
    env, _ = begun(turns=2)
    for number in range(4):
        _, _, terminated, _, info = env.step(say("offer 1 1 1"))
        assert terminated == (number == 3)
    assert info["rewards"] == {"A": 0.0, "B": 0.0} and info["results"] == {"A": "draw", "B": "draw"}


def test_a_seat_reads_what_the_other_wrote_and_what_is_left_but_not_its_values() -> None:
    env, observation = begun(7)
    assert observation["messages"][-1]["content"] == "You begin."
    observation = env.step(say("I like hats" + "!" * 2 * LONGEST + "\noffer 0 1 0"))[0]
    text = observation["messages"][-1]["content"]
    left = np.subtract(env.counts, (0, 1, 0))
    assert text.endswith(f"!\noffer 0 1 0\nThat would leave you {left[0]} books, {left[1]} hats, {left[2]} balls.")
    assert len(text) < LONGEST + 100 and "like" not in text
    rules = [env.rules(seat) for seat in env.seats]
    assert rules[0].split("worth to you")[1] != rules[1].split("worth to you")[1]


@pytest.mark.parametrize("text", ["**Offer: 1, 0, 1.**", "offer 1-0-1", "- offer 1 book, 0 hats, 1 ball",
                                  "offer " + "0" * 20 + "1 0 1"])
def test_an_offer_is_its_three_numbers_however_they_are_set_apart(text: str) -> None:
    env, _ = begun()
    assert env.step(say(text))[4]["illegal"] == 0 and env.offer == (1, 0, 1)


@pytest.mark.parametrize("text", ["", "accept", "offer 9 0 0", "offer 1 1", "I offer nothing", "offer 1 0 0\nplease",
                                  "offer " + "9" * 10_000 + " 0 0", "offer -1 0 0", "offer 1, -1, 0",
                                  "offer \N{MINUS SIGN}1 0 0", "offer " + "0" * 20 + "9 0 0"])
def test_other_last_lines_are_no_legal_moves(text: str) -> None:
    env, _ = begun()
    _, _, terminated, _, info = env.step(say(text))
    assert not terminated and (info["illegal"], info["seat"]) == (1, "A")


def test_demonstrations_reach_agreements_and_the_good_player_earns_more() -> None:
    env = Negotiation(opponent="random")
    assert sum("accept" in one[-1]["content"] for one in env.demonstrations(100)) > 20
    sums = {}
    for name in ("good_move", "random_move"):
        total = 0.0
        for index in range(60):
            _, info = env.reset(options={"index": index})
            rng, over = np.random.default_rng(index), False
            while not over:
                _, reward, over, _, info = env.step(say(getattr(env, name)(info["seat"], rng)))
                total += reward
        sums[name] = total
    assert sums["good_move"] > sums["random_move"] + 6


def test_turns_are_a_positive_number() -> None:
    with pytest.raises(ConfigError, match="turns: 0; write an integer from 1 on"):
        Negotiation(turns=0)
