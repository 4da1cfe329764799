"""GameEnv: games with several seats, each of which has a conversation of its own.

Invariants: an observation is the conversation of the seat whose turn it is, and holds nothing that only other seats
know; a step's `info["rewards"]` gives the reward of every seat, so that their sums over an episode are all that a seat
gets; a reply that is no legal move never reaches the game; task i is always the same game, seats and chance included.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium.error import ResetNeeded

from .errors import ConfigError, EnvFailure
from .messages import Conversation, Message, text_of
from .opponents import POLICY, find_opponent, is_outside
from .spaces import AssistantMessageSpace
from .task_env import TaskEnv, _rendered, finite

__all__ = ["GameEnv", "IllegalMove", "result_of"]

FORFEIT = -1.0
"""Reward of a seat that makes no legal move; the others get nothing for that."""
_STARTS = 100
"""Games that the random player may end before the policy's first turn, each with moves of its own."""
Opponent = str | Callable[[Conversation], Message | str]


class IllegalMove(ValueError):
    """The reply is no legal move; the message says what would be one, to the seat that made it."""


class GameEnv(TaskEnv):
    """A Gymnasium env with several seats: implement the six methods below, and register the class.

    `step` takes the reply of the seat that `info["seat"]` of the last observation names, and returns the conversation
    of the next one. Its scalar reward is that of the seat which replied; `info["rewards"]` has those of all seats.
    **A reply that is no legal move** changes nothing: the seat is told why, and after `illegal_limit` of them in a row
    it loses: the game ends with `FORFEIT` for this seat and 0 for the others. At the end `info["results"]` says "win",
    "draw" or "loss" for each seat (`result_of`).

    Args:
        opponent: who plays against the policy. "self": the policy has all seats. Otherwise it has one, and which one
            the task draws; "random": legal moves at random; "module:function", or a function from a conversation to a
            message or its text; "league": earlier checkpoints of the run; "model:FOLDER": a model that is not trained.
            Of a list, each task draws one.
        illegal_limit: illegal replies in a row with which a seat loses.
        render_mode: "ansi" to get all conversations from `render()`.

    Raises:
        ConfigError: an argument makes no sense.
    """

    seats: Sequence[str] = ()
    """Their names, at least two, in the order of play."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {"eval": {"env_kwargs": {"opponent": "random"}}}}

    def __init__(
        self, *, opponent: Opponent | Sequence[Opponent] = "self", illegal_limit: int = 3,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if isinstance(illegal_limit, bool) or not isinstance(illegal_limit, int) or illegal_limit < 1:
            raise ConfigError(f"illegal_limit: {illegal_limit!r}; write an integer from 1 on")
        chosen = list(opponent) if isinstance(opponent, list | tuple) else [opponent]
        if not chosen:
            raise ConfigError("opponent: the list is empty; write 'self', 'random', 'league' or a function")
        self._opponents = [find_opponent(one) for one in chosen]
        self._limit = illegal_limit
        self.rng = np.random.default_rng(0)

    @abstractmethod
    def begin(self, index: int) -> None:
        """Sets up the game of task `index`; chance is drawn from `self.rng`, which depends on the task alone."""

    @abstractmethod
    def turn(self) -> str | None:
        """The seat that moves next; None when the game is over."""

    @abstractmethod
    def rules(self, seat: str) -> str:
        """The system message of a seat."""

    @abstractmethod
    def view(self, seat: str) -> str | list[Message]:
        """What the seat whose turn it is reads: a user message's text, or messages."""

    @abstractmethod
    def move(self, seat: str, message: Message) -> Mapping[str, float]:
        """Makes the move that a reply means; returns the rewards that seats get for it, others get 0.

        Raises:
            IllegalMove: it means none; nothing has changed.
            EnvFailure: the game itself cannot go on.
        """

    @abstractmethod
    def random_move(self, seat: str, rng: np.random.Generator) -> Message | str:
        """A reply that means some legal move; one that means none is a failure of the env."""

    def cut(self) -> bool:
        """Whether the game that is over was cut, by a limit of its own on its length."""
        return False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Conversation, dict[str, Any]]:
        """Starts a game, up to the first turn of the policy.

        Args:
            seed: seeds `self.np_random`, which draws the task.
            options: `{"index": i}` to choose the task, i from 0 on.

        Returns:
            The conversation of the seat that moves, and an info with "seat", "player" (who has it: "policy", "league"
            or "model:FOLDER"), "opponent" and `task_index`.

        Raises:
            EnvFailure: reason "opponent": an opponent ended the game before that; the random player, in each of
                `_STARTS` games.
        """
        self._choose(seed, options)
        if not self.seats or isinstance(self.seats, str) or len(set(self.seats)) < len(self.seats):
            raise ConfigError(f"{self._name}.seats: {self.seats!r}; write a name for each, in the order of play")
        draws = np.random.default_rng([self._index, 1])
        mine, self._opponent = self.seats[draws.integers(len(self.seats))], draws.choice(len(self._opponents))
        self._chance = np.random.default_rng([self._index, 2])
        name, _ = self._opponents[self._opponent]
        self._players = {seat: POLICY if name == "self" or seat == mine else name for seat in self.seats}
        for _ in range(_STARTS if name == "random" else 1):
            self._start()
            if not self._ended:
                self._over = False
                return self._observe_seat(), self._about(self._seat)
        raise EnvFailure("opponent", f"{self._name}: the game was over before the policy's first turn")

    def step(self, action: Message) -> tuple[Conversation, float, bool, bool, dict[str, Any]]:
        """Takes the reply of the seat whose turn it is, and lets the env's own opponents move after it.

        Returns:
            The conversation of the next seat (at the end, of the one that replied), the reward of the one that replied,
            terminated, truncated, and an info as that of `reset`, with "rewards", "illegal" (how many illegal replies
            the seat that replied made so far) and, at the end, "results".

        Raises:
            ResetNeeded: before `reset`, after the end of a game, and after an EnvFailure.
            ValueError: `action` is not in the action space; the game goes on as if it had not been sent.
            EnvFailure: the game or an opponent failed.
        """
        if self._over:
            raise ResetNeeded(f"{self._name}: no game is running; call reset() before step()")
        self.action_space.validate(action)
        self._over, seat = True, self._seat
        self._take(seat, copy.deepcopy(action))
        self._advance()
        earned, self._earned = self._earned, dict.fromkeys(self.seats, 0.0)
        self._over = self._ended
        cut = self._over and not self._lost and self.cut()
        if self._over:
            self._seat = seat
        info = {**self._about(self._seat), "rewards": earned, "illegal": self._illegal[seat]}
        if self._over:
            info["results"] = {each: result_of(self._totals, each) for each in self.seats}
        return self._observe_seat(), earned[seat], self._over and not cut, cut, info

    def conversation(self, seat: str) -> Conversation:
        """A copy of what a seat has heard and said so far."""
        return copy.deepcopy({"messages": self._conversations[seat], "tools": self.tools})

    def render(self) -> str | None:
        """All conversations with `render_mode="ansi"`, each under its seat, with what the seat got so far."""
        if self.render_mode is None:
            return super().render()
        if self._index < 0:
            return ""
        return "\n\n".join("\n\n".join([f"=== {seat} ({self._totals[seat]:g})", *map(_rendered, conversation)])
                           for seat, conversation in self._conversations.items())

    def _start(self) -> None:
        self.rng = np.random.default_rng([self._index])
        self.begin(self._index)
        self._conversations = {seat: self._opening(seat) for seat in self.seats}
        self._totals = dict.fromkeys(self.seats, 0.0)
        self._illegal, self._in_a_row, self._lost = dict.fromkeys(self.seats, 0), 0, False
        self._earned = dict.fromkeys(self.seats, 0.0)
        self._advance()

    @property
    def _ended(self) -> bool:
        return self._lost or self.turn() is None

    def _about(self, seat: str) -> dict[str, Any]:
        return {"seat": seat, "player": self._players[seat], "opponent": self._opponents[self._opponent][0],
                "task_index": self._index}

    def _opening(self, seat: str) -> list[Message]:
        rules = self.rules(seat)
        return [{"role": "system", "content": rules}] if rules else []

    def _observe_seat(self) -> Conversation:
        self._messages = self._conversations[self._seat]
        return self._observe(f"view({self._seat!r})", self.tools)

    def _advance(self) -> None:
        """Shows the next seat its view; plays for it, and goes on, if the env itself has it."""
        while not self._ended:
            seat = self.turn()
            self._seat = self._returned("turn", seat, seat in self.seats, f"one of {self.seats}, or None at the end")
            conversation = self._conversations[self._seat]
            if not conversation or conversation[-1]["role"] in ("assistant", "system"):
                shown = self.view(self._seat)
                self._returned("view", shown, isinstance(shown, str | list | tuple), "a text, or messages")
                conversation += [{"role": "user", "content": shown}] if isinstance(shown, str) else self._fresh(shown)
            if is_outside(self._players[self._seat]):
                return
            self._take(self._seat, self._answer(self._seat))

    def _returned(self, method: str, value: Any, legal: bool, write: str) -> Any:
        if not legal:
            raise TypeError(f"{self._name}.{method} returned {value!r:.200}; return {write}")
        return value

    def _answer(self, seat: str) -> Message:
        name, function = self._opponents[self._opponent]
        if function is None:
            reply = self.random_move(seat, self._chance)
        else:
            try:
                reply = function(copy.deepcopy({"messages": self._conversations[seat], "tools": self.tools}))
            except Exception as error:
                raise EnvFailure("opponent", f"{name} raised {type(error).__name__}: {error}") from error
        message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
        try:
            AssistantMessageSpace().validate(message)
        except ValueError as error:
            raise EnvFailure("opponent", f"{name} returned {reply!r:.200}; return a message or its text ({error})"
                             ) from error
        return message

    def _take(self, seat: str, message: Message) -> None:
        self._conversations[seat].append(message)
        try:
            rewards = self.move(seat, copy.deepcopy(message))
        except IllegalMove as error:
            if self._players[seat] == "random":
                raise EnvFailure("opponent", f"{self._name}.random_move: {text_of(message)!r:.200} is no legal move: "
                                 f"{error}") from error
            self._illegal[seat] += 1
            self._in_a_row += 1
            self._conversations[seat].append({"role": "user", "content": f"That is no legal move: {error}."})
            self._lost = self._in_a_row >= self._limit
            rewards = {seat: FORFEIT} if self._lost else {}
        else:
            self._in_a_row = 0
        self._returned("move", rewards, isinstance(rewards, Mapping), "the rewards by seat, {} for none")
        for each, reward in rewards.items():
            if each not in self._totals:
                raise EnvFailure("reward", f"{self._name}.move: a reward for {each!r}, which is none of {self.seats}")
            number = finite(reward, f"{self._name}.move: the reward of {each}")
            self._earned[each] += number
            self._totals[each] += number


def result_of(totals: Mapping[str, float], seat: str) -> str:
    """How a game ended for a seat: "win" if it got more than every other one, "loss" if another got more, or "draw"."""
    best = max((total for other, total in totals.items() if other != seat), default=-np.inf)
    return "win" if totals[seat] > best else "loss" if totals[seat] < best else "draw"
