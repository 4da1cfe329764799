"""Who plays the other seat of a game of TextArena: a random player, or a function."""

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ConfigError, EnvFailure
from .global_random import GlobalRandom
from .text_env import named_function

__all__ = ["Opponent", "find_opponent"]

Opponent = Callable[[str, np.random.Generator], str]
"""Of what it has seen since its last move, and of the only randomness that it should use; gives its reply."""
Player = Callable[[Any, str], str]
_WORDS, _VARIANTS = 60, 400
_ANYWHERE = [f"[{word}]" for word in (*range(10), "pass")]


def find_opponent(opponent: str | Opponent) -> Callable[[int], Player]:
    """What makes a player for a task, of the game and of what it has seen.

    Args:
        opponent: "random", a function, or "module:function".

    Raises:
        ConfigError: it names nothing that can be called.
    """
    if opponent == "random":
        return RandomPlayer
    if opponent is None or isinstance(opponent, str) and ":" not in opponent:
        raise ConfigError(f"opponent: {opponent!r}; write 'random', a function of a text and a generator, or its "
                          "'module:function'")
    function = named_function(opponent, "opponent", "one of a text and a generator, or its 'module:function'")
    return lambda index: _scripted(function, index)


class RandomPlayer:
    """Plays one of the moves that stand in brackets in what it has seen, or one of their form, that the game takes.

    Whether it does is tried on a copy of the game.

    Raises:
        EnvFailure: reason "opponent": it found none, and would lose by that.
    """

    def __init__(self, index: int) -> None:
        self._generator = np.random.default_rng((index, 1))
        self._words: dict[str, None] = {}

    def __call__(self, game: Any, seen: str) -> str:
        """Its move."""
        self._words = dict.fromkeys([*re.findall(r"\[[^\[\]\n]{1,60}\]", seen), *self._words])
        words = list(self._words)[:_WORDS]
        for move in [*self._shuffled(words), *self._shuffled(_ANYWHERE)]:
            if _takes(game, move):
                return move
        for _ in range(_VARIANTS if words else 0):
            move = re.sub(r"[A-Ha-h0-9]", self._other, words[self._generator.integers(len(words))])
            if _takes(game, move):
                return move
        raise EnvFailure("opponent", f"the random player knows no legal move of {game.env_id}; opponent='module:"
                         "function' names one that does")

    def _shuffled(self, words: list[str]) -> list[str]:
        return [words[place] for place in self._generator.permutation(len(words))]

    def _other(self, match: re.Match[str]) -> str:
        old = match.group()
        if old.isdigit():
            return str(self._generator.integers(10))
        return chr(ord("a" if old.islower() else "A") + int(self._generator.integers(8)))


def _takes(game: Any, move: str) -> bool:
    trial = copy.deepcopy(game)
    player = trial.state.current_player_id
    with GlobalRandom():
        try:
            trial.step(move)
        except Exception:  # noqa: BLE001  games raise whatever a move makes them raise
            return False
    return not trial.state.error_count and not trial.state.game_info[player]["invalid_move"]


def _scripted(function: Opponent, index: int) -> Player:
    generator = np.random.default_rng((index, 1))

    def play(_game: Any, seen: str) -> str:
        try:
            move = function(seen, generator)
        except Exception as error:
            raise EnvFailure("opponent", f"{type(error).__name__}: {error}") from error
        if not isinstance(move, str):
            raise EnvFailure("opponent", f"it said {move!r:.200}; a reply is a string")
        return move

    return play
