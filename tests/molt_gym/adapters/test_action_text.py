"""Which action a reply means, and when it means none."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from hypothesis import given
from hypothesis import strategies as st

from molt_gym.adapters.action_text import IllegalReply, is_small, parse_action, said, words_for

LAKE = ["Move left", "Move down", "Move right", "Move up"]


@pytest.mark.parametrize("reply", [
    "2", "Action: 2", "I think the hole is below.\n\n**Action: Move right**", "move RIGHT.", "right", "2 (Move right)",
    "2: right", "```\n2\n```", "```text\nMove right\n```\n**", "- 2",
    "<action>2</action> because of 0 and 1", "<action>0</action> no:\n<action>right</action>", "`2`",
    "[2]"])
def test_an_action_may_be_written_as_its_number_or_its_name(reply):
    assert parse_action(reply, Discrete(4), LAKE) == 2


@pytest.mark.parametrize("reply", [
    "", "   \n", "4", "-1", "2.5", "left or right", "move", "1 2", "2 (Move left)", "right\nthat is my move", "nothing",
    "<action></action>", "not right", "9" * 5000])
def test_a_reply_that_does_not_name_one_action_is_illegal(reply):
    with pytest.raises(IllegalReply, match=r"0 \(Move left\), 1 \(Move down\), 2 \(Move right\), 3 \(Move up\)"):
        parse_action(reply, Discrete(4), LAKE)


def test_numbers_begin_where_the_space_begins():
    assert parse_action("-1", Discrete(3, start=-1), ["a", "b", "c"]) == -1
    assert parse_action("c", Discrete(3, start=-1), ["a", "b", "c"]) == 1
    assert words_for(Discrete(3, start=5)) == "an integer from 5 to 7"


def test_several_numbers_are_written_side_by_side():
    assert parse_action("Action: 1, 0", MultiDiscrete([2, 3]), ()).tolist() == [1, 0]
    assert parse_action("[0 1 1]", MultiBinary(3)).tolist() == [0, 1, 1]
    found = parse_action("-0.5 1e-1", Box(-1, 1, (2,), np.float32))
    assert found.dtype == np.float32 and np.allclose(found, [-0.5, 0.1])


@pytest.mark.parametrize(("reply", "space", "words"), [
    ("1", MultiDiscrete([2, 3]), "1 numbers in '1'; write 2 integers: from 0 to 1, from 0 to 2"),
    ("1.5 0", MultiDiscrete([2, 3]), "fractions"),
    ("2 0", MultiDiscrete([2, 3]), "out of range"),
    ("1e400 0", MultiDiscrete([2, 3]), "fractions"),
    ("1e20 0", MultiDiscrete([2, 3]), "out of range"),
    ("257 0", Box(0, 255, (2,), np.uint8), "out of range"),
    ("1.5 0", Box(0, 255, (2,), np.uint8), "fractions"),
    ("1e39", Box(-np.inf, np.inf, (1,)), "out of range"),
    ("3", Box(-2, 2, (1,)), "out of range; write 1 number: number 1 from -2 to 2"),
    ("left", Box(-2, 2, (1,)), "0 numbers")])
def test_what_is_wrong_with_numbers_is_said(reply, space, words):
    with pytest.raises(IllegalReply, match=words):
        parse_action(reply, space)


def test_points_and_minus_signs_are_those_of_numbers():
    space = Box(-9, 9, (2,), np.float64)
    assert parse_action("Action: .5 \N{MINUS SIGN}2.", space).tolist() == [0.5, -2]
    assert parse_action("**\N{MINUS SIGN}1.**", Discrete(3, start=-1)) == -1


@pytest.mark.parametrize("dash", "-\N{MINUS SIGN}\N{EN DASH}\N{FULLWIDTH HYPHEN-MINUS}")
def test_whatever_dash_is_written_is_a_minus_or_no_action_at_all(dash):
    for space, number in ((Box(-9, 9, (1,)), -2), (Discrete(9, start=-4), -2), (MultiDiscrete([9], start=[-4]), -2)):
        assert parse_action(f"Action: {dash}2", space) == number
        for loose in (f"{dash} 2", f"1{dash}2", f"{dash}{dash}2"):
            with pytest.raises(IllegalReply, match="write"):
                parse_action(loose, space)


def test_bounds_that_are_integers_have_all_their_digits():
    assert words_for(Box(0, 1234567, (1,), np.int64)) == "1 number: number 1 from 0 to 1234567"


def test_a_bound_may_be_written_as_its_decimal():
    assert parse_action("0.1", Box(-0.1, 0.1, (1,), np.float32)) in Box(-0.1, 0.1, (1,), np.float32)


def test_only_a_few_numbers_can_be_written():
    assert [is_small(space) for space in (Discrete(10_000), Box(0, 1, (16,)), MultiDiscrete([5] * 16))] == [True] * 3
    assert [is_small(space) for space in (Box(0, 1, (17,)), Box(0, 255, (8, 8, 3)), Dict(a=Discrete(2)))] == [False] * 3


@pytest.mark.filterwarnings("error")
@given(st.lists(st.integers() | st.floats(), min_size=2, max_size=2))
def test_numbers_that_are_taken_are_those_that_were_written(numbers):
    for space in (MultiDiscrete([2, 2]), MultiBinary(2), Box(-1, 1, (2,)), Box(-np.inf, np.inf, (2,)),
                  Box(-9, 9, (2,), np.int8), Box(0, 255, (2,), np.uint8)):
        try:
            found = parse_action(" ".join(map(repr, numbers)), space).tolist()
            assert found == pytest.approx(numbers, rel=1e-6, abs=1e-6)
        except IllegalReply as error:
            assert "write" in str(error)


@given(st.text(max_size=200))
def test_no_text_breaks_the_reading_of_it(text):
    for space in (Discrete(4), MultiDiscrete([2, 2]), Box(-1, 1, (2,))):
        try:
            assert parse_action(text, space, LAKE if isinstance(space, Discrete) else ()) in space
        except IllegalReply as error:
            assert "write" in str(error)
    assert "\n" not in said(text)


@given(st.integers(0, 3), st.sampled_from(["{}", "so be it\n{}", "Action: {}", "<action> {} </action>"]))
def test_every_action_can_be_said_by_number_and_by_name(action, form):
    assert parse_action(form.format(action), Discrete(4), LAKE) == action
    assert parse_action(form.format(LAKE[action]), Discrete(4), LAKE) == action
