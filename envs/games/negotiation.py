"""Negotiation: two seats that value things differently divide them, in their own words."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from molt_gym.errors import ConfigError
from molt_gym.messages import Message, text_of
from molt_gym.multi_agent import GameEnv, IllegalMove

from .demonstrations import demonstrations

__all__ = ["Negotiation"]

THINGS = ("books", "hats", "balls")
TOTAL = 10
"""What all things together are worth to each seat."""
LONGEST = 1000
"""Characters at the end of a reply that the other seat reads."""
_COUNT = r"(?<!\D[-\N{MINUS SIGN}\N{EN DASH}])(\d+)"
_OFFER = re.compile(rf"\W*offer\W*{_COUNT}\D+{_COUNT}\D+{_COUNT}\D*", re.IGNORECASE)
_ACCEPT = re.compile(r"\W*accept\W*", re.IGNORECASE)


class Negotiation(GameEnv):
    """Negotiation: two seats that value things differently divide them, in their own words.

    There are one to three books and hats, and one or two balls. What they are worth is known to each seat for itself
    alone, and comes to 10 for all of them. By turns a seat writes what it likes, which the other one reads, and in the
    last line "offer 1 0 2", the numbers of books, hats and balls that it wants to have, or "accept". Rewards after an
    agreement: a tenth of what a seat's things are worth to it. Without one after `turns` replies of each, both get 0.

    Args:
        turns: replies of a seat, from 1 on.
        **options: of `molt_gym.GameEnv`: `opponent`, `illegal_limit`, `render_mode`.

    Raises:
        ConfigError: an argument makes no sense.
    """

    seats = ("A", "B")
    presets = {"": GameEnv.presets[""] | {"rollout": {"max_tokens": 256}}, "tiny": {"rollout": {"max_tokens": 24}}}

    def __init__(self, *, turns: int = 4, **options: Any) -> None:
        super().__init__(**options)
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
            raise ConfigError(f"turns: {turns!r}; write an integer from 1 on")
        self._turns = turns

    def begin(self, index: int) -> None:
        """Draws how many things there are and what they are worth."""
        # With three of each, no values would come to the total.
        self.counts = tuple(int(count) for count in self.rng.integers(1, (4, 4, 3)))
        possible = [(a, b, c) for a in range(TOTAL + 1) for b in range(TOTAL + 1) for c in range(TOTAL + 1)
                    if a * self.counts[0] + b * self.counts[1] + c * self.counts[2] == TOTAL]
        self.values = {seat: possible[self.rng.integers(len(possible))] for seat in self.seats}
        self.offer: tuple[int, ...] | None = None
        self.agreed, self._made, self._last = False, 0, ""

    def turn(self) -> str | None:
        """A and B by turns, until one accepts or there are no turns left."""
        over = self.agreed or self._made == 2 * self._turns
        return None if over else self.seats[self._made % 2]

    def rules(self, seat: str) -> str:
        """What there is, what it is worth to this seat, and how to reply."""
        there = ", ".join(f"{count} {thing}" for count, thing in zip(self.counts, THINGS, strict=True))
        worth = ", ".join(f"{value} for each of the {thing}" for value, thing in
                          zip(self.values[seat], THINGS, strict=True))
        return (f"You are {seat} and divide things with another: {there}. They are worth to you: {worth}. The other "
                f"values them differently. Each of you has {self._turns} replies; without an agreement nobody gets "
                "anything. Write what you like to the other, and in the last line either 'offer', with the numbers of "
                f"{', '.join(THINGS)} that you want to have, such as 'offer 1 0 1', or 'accept'.")

    def view(self, seat: str) -> str:
        """What the other wrote, and what is left to this seat."""
        if self.offer is None:
            return "You begin."
        left = ", ".join(f"{number} {thing}" for number, thing in zip(self._rest(), THINGS, strict=True))
        return f"The other wrote:\n{self._last}\nThat would leave you {left}."

    def move(self, seat: str, message: Message) -> Mapping[str, float]:
        """Makes or accepts an offer.

        Raises:
            IllegalMove: the last line is neither, or there is nothing to accept, or not so many things.
        """
        text = text_of(message).strip()
        last = text.splitlines()[-1] if text else ""
        if _ACCEPT.fullmatch(last):
            if self.offer is None:
                raise IllegalMove("there is nothing to accept; make an offer")
            self.agreed = True
            mine, other = self._rest(), self.seats[seat == self.seats[0]]
            return {seat: self._worth(seat, mine), other: self._worth(other, self.offer)}
        found = _OFFER.fullmatch(last)
        numbers = tuple(int(number.lstrip("0")[:9] or 0) for number in found.groups()) if found else ()
        if not numbers or any(number > count for number, count in zip(numbers, self.counts, strict=True)):
            raise IllegalMove("write in the last line 'accept', or 'offer' and how many of the "
                              f"{' '.join(map(str, self.counts))} you want, such as 'offer 1 0 1'")
        self.offer, self._last = numbers, text[-LONGEST:]
        self._made += 1
        return {}

    def random_move(self, seat: str, rng: np.random.Generator) -> str:
        """Accepts one offer of three; otherwise asks for anything."""
        if self.offer is not None and rng.random() < 1 / 3:
            return "accept"
        return "offer " + " ".join(str(rng.integers(count + 1)) for count in self.counts)

    def good_move(self, seat: str, rng: np.random.Generator) -> str:
        """Accepts what is worth half or more; asks for what is worth much, and for less as turns go by."""
        if self.offer is not None and self._worth(seat, self._rest()) >= 0.5:
            return "accept"
        values = self.values[seat]
        most = max(values) if self._made < self._turns else 0
        wanted = [count if value and value >= most / 2 else 0 for count, value in
                  zip(self.counts, values, strict=True)]
        return "offer " + " ".join(map(str, wanted))

    demonstrations = demonstrations

    def _rest(self) -> tuple[int, ...]:
        return tuple(count - number for count, number in zip(self.counts, self.offer, strict=True))

    def _worth(self, seat: str, things: tuple[int, ...]) -> float:
        return sum(number * value for number, value in zip(things, self.values[seat], strict=True)) / TOTAL
