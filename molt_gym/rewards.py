"""Rewards made of named parts, each of which is logged by itself.

Invariants: a reward is the weighted sum of all its parts; a part that fails, or is no finite number, fails the rollout
by its name, and is never a 0. In `info`, what begins with a prefix in `SUMMED` adds up over the turns of an episode.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .errors import ConfigError, EnvFailure
from .task_env import finite

__all__ = ["SUMMED", "Reward", "Rewards", "add_parts", "parts_of"]

SUMMED = ("reward/", "judge/")
_TAKEN = ("mean", "std")

Part = float | Callable[[], float]
"""The value of a part, or what computes it."""


class Reward(float):
    """A reward that knows its parts: `info` has each as "reward/NAME", without its weight. Sums of it do not."""

    info: dict[str, float]

    def __new__(cls, value: float = 0.0, info: Mapping[str, float] | None = None) -> "Reward":
        """See `Rewards`."""
        reward = super().__new__(cls, value)
        reward.info = dict(info or {})
        return reward


class Rewards:
    """Names the parts of a reward: `Rewards(right=1, style=0.3)` is called with a value for each of them.

    Args:
        weights: by name; or as keywords.

    Raises:
        ConfigError: a name is no identifier or stands for something else in the metrics, or a weight is no number.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, /, **more: float) -> None:
        self.weights = {**(weights or {}), **more}
        if not self.weights:
            raise ConfigError("rewards: there are no parts; write NAME=WEIGHT for each, such as Rewards(right=1)")
        for name, weight in self.weights.items():
            if not (isinstance(name, str) and name.isidentifier()) or name in _TAKEN:
                raise ConfigError(f"rewards: a part named {name!r}; write letters, digits and _, and neither 'mean' "
                                  "nor 'std', which metrics have already")
            try:
                finite(weight, name)
            except EnvFailure:
                raise ConfigError(f"rewards: {name} has the weight {weight!r}; write a finite number") from None

    def __call__(self, **parts: Part) -> Reward:
        """The reward, for `Turn.reward`, `Result.reward` or `ctx.add_reward`.

        Args:
            **parts: a value for each name, or a function that gives it.

        Raises:
            TypeError: a part is missing, or is not among the names.
            EnvFailure: a part is no finite number (reason "reward"), or could not be had: for its own reason if it
                raised an EnvFailure, else "reward".
        """
        if parts.keys() != self.weights.keys():
            wrong = ", ".join(sorted(parts.keys() ^ self.weights.keys()))
            raise TypeError(f"rewards: {wrong}: missing or unknown; give a value for each of {', '.join(self.weights)}")
        values = {name: _value(name, part) for name, part in parts.items()}
        total = sum(weight * values[name] for name, weight in self.weights.items())
        return Reward(finite(total, "the sum of all parts"), {f"reward/{name}": values[name] for name in values})


def parts_of(reward: Any) -> dict[str, float]:
    """The info of a `Reward`; {} for another number."""
    return dict(reward.info) if isinstance(reward, Reward) else {}


def add_parts(before: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """The info of a turn, with the sums of what is summed over it and the turns `before` it."""
    sums = {name: value for name, value in before.items() if name.startswith(SUMMED) and isinstance(value, int | float)}
    return {**sums, **{name: value + sums[name] if name in sums and isinstance(value, int | float) else value
                       for name, value in info.items()}}


def _value(name: str, part: Part) -> float:
    try:
        value = part() if callable(part) else part
    except EnvFailure as failure:
        raise EnvFailure(failure.reason, f"part {name!r} of the reward: {failure.detail}") from failure
    except Exception as error:  # noqa: BLE001  whatever a user's part raises fails this rollout alone
        raise EnvFailure("reward", f"part {name!r} of the reward raised {type(error).__name__}: {error}") from error
    return finite(value, f"part {name!r} of the reward")
