"""The games of TextArena as chat envs: `textarena/NAME-v0` for those of one player and of two.

Invariants: the reward is the one that the game gives this seat when it is over; what happens depends on the index of
the task and the replies alone; every episode has a game of its own, as wrappers and states of the suite keep what they
have seen; an observation, which the suite gives but once, is read once.
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..env import ChatEnv, Turn
from ..errors import ConfigError, EnvFailure
from ..messages import Message, text_of
from ..registry import register
from ..task_env import finite
from .global_random import GlobalRandom
from .textarena_opponents import Opponent, find_opponent

__all__ = ["TextArenaEnv", "register_ids"]

LONGEST = 2000
"""Characters of a reply that a game reads, the last ones: its patterns take quadratic time."""
TURNS = 100
"""Cap on turns of the ids."""
_HARD = {"Alquerque", "Breakthrough", "Briscola", "Checkers", "Chess", "Chopsticks", "ColonelBlotto", "GermanWhist",
         "Golf", "LinesOfAction", "NewRecruit", "QuantumTicTacToe", "Tak"}
"""Games whose texts do not show the random player a legal move."""
_NEWER = {"Checkers", "Chess", "IteratedStagHunt", "Klondike", "ReverseTicTacToe", "UltimateTexasHoldem"}
"""Games that are written for Python 3.12."""
# What asks a judge on the network for the outcome, lacks files in the package, or expects more than two players.
_LEFT_OUT = re.compile(r"OpenRouter|\bjury|UsedCarNegotiation|TwoDollar", re.IGNORECASE)


class TextArenaEnv(ChatEnv):
    """A game of TextArena, against an opponent that belongs to the env where it is for two.

    Reward: the game's own, when it is over. A reply that a game breaks at ends it with -1, as illegal ones do.
    `info["reason"]` is why the game ended, `info["invalid_move"]` whether it was this seat's illegal move.

    Args:
        game: id in TextArena, such as "TicTacToe-v0".
        players: 1 or 2.
        seat: 0 or 1, of the policy; None: even tasks are played from seat 0, odd ones from seat 1.
        opponent: "random", or a function of the text that it has seen since its last move and of a
            `numpy.random.Generator` that returns its reply, or the "module:function" of one.
        render_mode: None or "ansi".
        **settings: of the game, such as `max_turns=5`.

    Raises:
        ConfigError: the game cannot be made, or refuses a setting.
    """

    own_process = True
    presets = {"": {"rollout": {"max_tokens": 512}}}

    def __init__(
        self, *, game: str, opponent: str | Opponent, players: int = 1, seat: int | None = None,
        render_mode: str | None = None, **settings: Any,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if seat not in (None, *range(players)):
            raise ConfigError(f"seat: {seat!r}; write a number from 0 to {players - 1}, or None")
        self._id, self._players, self._fixed_seat, self._settings = game, players, seat, settings
        self._opponent = find_opponent(opponent)
        self._random = GlobalRandom()
        with self._random, _quietly():
            self._make()

    def begin(self, index: int) -> list[Message]:
        """The rules, and what the opponent has done so far."""
        self._seat = index % self._players if self._fixed_seat is None else self._fixed_seat
        self._random.seed(index)
        self._rival = self._opponent(index)
        with self._random, _quietly():
            try:
                self._game = self._make()
                self._game.reset(num_players=self._players, seed=index)
            except ConfigError:
                raise
            except Exception as error:
                raise EnvFailure("suite", f"{self._id}, task {index}: {type(error).__name__}: {error}") from error
            if self._others_play():
                raise EnvFailure("suite", f"{self._id}, task {index}: the game is over before the policy's first move")
            return [{"role": "user", "content": self._seen()}]

    def answer(self, message: Message) -> Turn:
        """Plays the move, then the opponent's."""
        with self._random, _quietly():
            try:
                over, _ = self._game.step(text_of(message)[-LONGEST:])
            except Exception as error:  # noqa: BLE001  games raise whatever a reply makes them raise
                reason = f"{self._id} broke at the reply: {type(error).__name__}"
                return Turn(reward=-1.0, terminated=True, info={"reason": reason, "invalid_move": True})
            if not (over or self._others_play()):
                return Turn([{"role": "user", "content": self._seen()}])
            return self._outcome()

    def _make(self) -> Any:
        import textarena

        try:
            return textarena.make(self._id, **self._settings)
        except LookupError as error:
            hint = "python -m nltk.downloader words averaged_perceptron_tagger_eng"
            raise ConfigError(f"game: {self._id!r} needs word lists that have to be downloaded once: {hint}") from error
        except Exception as error:
            raise ConfigError(f"game: {self._id!r} cannot be made with {self._settings}: {error}") from error

    @property
    def _inner(self) -> Any:
        """The game without its wrappers, which would repeat all that was said at each turn."""
        game = self._game
        while hasattr(game, "env"):
            game = game.env
        return game

    def _others_play(self) -> bool:
        """Plays the opponent's moves until it is the policy's turn; whether the game is over."""
        over = False
        while not over and self._inner.state.current_player_id != self._seat:
            move = self._rival(self._game, self._seen())
            try:
                over, _ = self._game.step(move)
            except Exception as error:
                raise EnvFailure("opponent", f"{self._id} broke at {move!r:.200}: {error!r}") from error
        return bool(over)

    def _seen(self) -> str:
        """What the player to move has not read yet, but for its own replies."""
        player, heard = self._inner.get_observation()
        names = self._inner.state.role_mapping
        # Some games swap the arguments when they repeat a reply to its player.
        lines = [text if speaker < 0 else f"{names.get(speaker, f'Player {speaker}')}: {text}"
                 for speaker, text, _ in heard if speaker != player and isinstance(speaker, int)]
        return "\n\n".join(line.strip() for line in lines if line.strip()) or "Go on."

    def _outcome(self) -> Turn:
        rewards, notes = self._game.close()
        reward, note = (rewards or {}).get(self._seat), notes[self._seat]
        info = {"reason": str(note.get("reason")), "invalid_move": bool(note["invalid_move"])}
        # Some games swap the reward of an illegal move and the words about it.
        if info["invalid_move"] and isinstance(reward, str):
            reward = -1.0
        return Turn(reward=finite(reward, f"{self._id}: the reward"), terminated=True, info=info)


def register_ids() -> None:
    """An id for each game of one or two players that needs nobody on the network."""
    for game, players in _games():
        name, _, variant = game.partition("-v0")
        opponent = {} if name in _HARD else {"opponent": "random"}
        register(f"textarena/{name}{variant}-v0", TextArenaEnv, max_episode_steps=TURNS,
                 kwargs={"game": game, "players": players, **opponent})


def _games() -> Iterator[tuple[str, int]]:
    with GlobalRandom(), _quietly():
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    root = Path(textarena.__file__).parent.parent
    for game, spec in ENV_REGISTRY.items():
        file = root / f"{spec.entry_point.partition(':')[0].replace('.', '/')}.py"
        # The suite's records do not tell how many may play; "-raw" and "-train" are other wrappers around the same.
        if game.endswith(("-raw", "-train")) or not file.is_file():
            continue
        if game.partition("-v0")[0] in _NEWER and sys.version_info < (3, 12):
            continue
        source = file.read_text(encoding="utf-8")
        players = 1 if "SinglePlayerState(" in source else 2 if "TwoPlayerState(" in source else 0
        if players and not _LEFT_OUT.search(f"{game} {source}"):
            yield game, players


def _quietly() -> contextlib.AbstractContextManager[Any]:
    """Games print."""
    return contextlib.redirect_stdout(io.StringIO())
