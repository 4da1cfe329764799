"""Who plays against the policy in a `GameEnv`, by name.

Invariant: a name says wholly who it is, so that a spec can be sent to other processes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .adapters.text_env import named_function
from .errors import ConfigError

__all__ = ["LEAGUE", "MODEL", "POLICY", "find_opponent", "is_outside"]

POLICY, LEAGUE, MODEL = "policy", "league", "model:"
"""Players that the env asks for by handing out the turns of their seats: the policy that is trained, one of its earlier
checkpoints, and the model in a folder."""


def find_opponent(given: Any) -> tuple[str, Callable[..., Any] | None]:
    """Its name, and the function that plays for it; None for those that need none.

    Raises:
        ConfigError: it is nobody.
    """
    if given in ("self", "random", LEAGUE):
        return given, None
    if isinstance(given, str) and given.startswith(MODEL):
        if not Path(given.removeprefix(MODEL)).is_dir():
            raise ConfigError(f"opponent: {given!r}: there is no such folder; write {MODEL}FOLDER")
        return given, None
    if given is None or isinstance(given, str) and ":" not in given:
        raise ConfigError(f"opponent: {given!r}; write 'self', 'random', 'league', 'model:FOLDER' or "
                          "'module:function'")
    function = named_function(given, "opponent", "one from a conversation to a message or its text")
    return given if isinstance(given, str) else getattr(given, "__qualname__", type(given).__name__), function


def is_outside(player: str) -> bool:
    """Whether whoever steps the env answers for this player."""
    return player in (POLICY, LEAGUE) or player.startswith(MODEL)
