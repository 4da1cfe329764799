"""The seats of one rollout: who answers for each, what each has got, and what each leaves behind.

An env that is no game has one seat without a name. Invariants: a seat that the policy plays has a token graph and seeds
of its own, and its rollout has its own reward; what others said is in no row.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from molt_gym.errors import EnvFailure
from molt_gym.opponents import POLICY
from molt_gym.task_env import finite
from molt_gym.tokens import Trajectory

from .env_calls import GameInfo
from .seats import Seat
from .ticket import Ticket

__all__ = ["Others", "Table"]

Others = Callable[[str, Ticket, int], tuple[str, Seat]]
"""From a player that is not the policy, such as "league", the ticket and the attempt, to its name and who answers."""


@dataclass
class _Place:
    seat: Seat
    player: str
    info: dict[str, Any] = field(default_factory=dict)


class Table:
    """Where one attempt at a ticket is played.

    Args:
        policy: makes a seat for the policy, in attempt number `attempt` at a ticket.
        others: makes one for another player.
    """

    def __init__(self, ticket: Ticket, attempt: int, policy: Callable[[Ticket, int], Seat],
                 others: Others | None) -> None:
        self._ticket, self._attempt, self._policy, self._others = ticket, attempt, policy, others
        self.first = policy(ticket, attempt)
        """The policy's seat, or its first one in a game."""
        self._places: dict[str, _Place] = {}
        self._totals: dict[str, float] = defaultdict(float)
        self._results: dict[str, str] = {}
        self._opponent: str | None = None
        self._turn = ""

    def turn(self, info: dict[str, Any]) -> Seat:
        """Who is to reply to the observation that came with `info`.

        Raises:
            EnvFailure: reason "opponent": the game is to be played by somebody who is not here.
        """
        self._turn, player = (info["seat"], info["player"]) if isinstance(info, GameInfo) else ("", POLICY)
        if self._turn not in self._places:
            self._places[self._turn] = self._sit(player)
        return self._places[self._turn].seat

    def earn(self, reward: float, info: dict[str, Any]) -> None:
        """Take down what a step gave to the seat that replied, and in a game to all."""
        rewards = {self._turn: reward}
        if isinstance(info, GameInfo):
            rewards, self._results = info.pop("rewards"), info.pop("results")
        for seat, value in rewards.items():
            self._totals[seat] += value
        self._places[self._turn].info = info

    def finish(self, rollout: Trajectory) -> None:
        """Give the rollout its reward; that of a game becomes the one of the first seat, and has all others."""
        if list(self._places) == [""]:
            rollout.reward = _total(self._totals[""])
            return
        trained = [name for name, place in self._places.items() if place.player == POLICY]
        if not trained:
            raise EnvFailure("opponent", "the game was over before the policy's first turn")
        cut, rollout.length_limited = rollout.length_limited, False
        rollout.messages, rollout.tools = [], []
        others = [replace(rollout) for _ in trained[1:]]
        for name, own in zip(trained, (rollout, *others), strict=True):
            own.seat, own.reward, own.info = name, _total(self._totals[name]), self._told(name)
            own.length_limited = cut and name == self._turn
            self._places[name].seat.record(own)
        rollout.others = others

    def _sit(self, player: str) -> _Place:
        if player == POLICY:
            if all(place.seat is not self.first for place in self._places.values()):
                return _Place(self.first, player)
            ticket = replace(self._ticket, seat=1 + len(self._places))
            return _Place(self._policy(ticket, self._attempt), player)
        if self._others is None:
            raise EnvFailure("opponent", f"opponent: {player!r} plays only against a model that is loaded here; write "
                             "'self', 'random' or 'module:function'")
        self._opponent, seat = self._others(player, replace(self._ticket, seat=1 + len(self._places)), self._attempt)
        return _Place(seat, player)

    def _told(self, name: str) -> dict[str, Any]:
        """The info of a seat's last step, without what was said of the next turn."""
        info = {key: value for key, value in self._places[name].info.items() if key not in ("seat", "player")}
        opponent = {} if self._opponent is None else {"opponent": self._opponent}
        result = {"result": self._results[name]} if name in self._results else {}
        return info | opponent | result


def _total(value: float) -> float:
    return finite(value, "the sum of the rewards")
