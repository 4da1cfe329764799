"""Noisy demonstrations: what a small policy is trained on before reinforcement learning, so that it can begin.

In about .3 of the conversations a seat plays well, in the others at random: so reinforcement learning has something to
find out. All moves in them are legal.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from molt_gym.messages import Message

if TYPE_CHECKING:
    from molt_gym.multi_agent import GameEnv

__all__ = ["demonstrations"]

_GOOD = 0.3


def demonstrations(game: "GameEnv", count: int, seed: int = 0) -> list[list[Message]]:
    """One conversation of each seat that had a turn, from as many games as it takes; a method of the games.

    Args:
        game: with a method `good_move` beside those of a `GameEnv`.
        count: how many.
        seed: fixes them.
    """
    rng = np.random.default_rng([seed, 0x6D6F])
    conversations: list[list[Message]] = []
    while len(conversations) < count:
        conversations += _play(game, rng)
    return conversations[:count]


def _play(game: "GameEnv", rng: np.random.Generator) -> Iterator[list[Message]]:
    game.rng = rng
    game.begin(int(rng.integers(2**31)))
    good = {seat: rng.random() < _GOOD for seat in game.seats}
    said = {seat: [{"role": "system", "content": game.rules(seat)}] for seat in game.seats}
    while (seat := game.turn()) is not None:
        reply = (game.good_move if good[seat] else game.random_move)(seat, rng)
        said[seat] += [{"role": "user", "content": game.view(seat)}, {"role": "assistant", "content": reply}]
        game.move(seat, said[seat][-1])
    return (conversation for conversation in said.values() if len(conversation) > 1)
