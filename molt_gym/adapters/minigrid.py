"""What the agent of a MiniGrid env sees, in words: its view as a map, and the things in it by where they are."""

from typing import Any

import gymnasium as gym

__all__ = ["describe"]

_DIRECTIONS = ("east", "south", "west", "north")
_SYMBOLS = {"unseen": "?", "empty": ".", "wall": "#", "floor": ".", "door": "D", "key": "K", "ball": "B", "box": "X",
            "goal": "G", "lava": "~", "agent": "A"}
_PLAIN = {"unseen", "empty", "wall", "floor"}


def describe(env: gym.Env, observation: dict[str, Any], _info: dict[str, Any]) -> str:
    """The mission, what is carried, and what is in view; ahead is up, and the agent stands at @."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    states = {number: name for name, number in STATE_TO_IDX.items()}
    # [column, row, (kind, colour, state)]; the agent is in the middle of the last row.
    view = observation["image"]
    width, height = view.shape[:2]
    rows, things = [], []
    for y in range(height):
        row = ""
        for x in range(width):
            kind, colour, state = (int(value) for value in view[x, y])
            name, here = IDX_TO_OBJECT[kind], (x, y) == (width // 2, height - 1)
            row += "@" if here else _SYMBOLS.get(name, "O")
            if not here and name not in _PLAIN:
                look = "" if name in ("goal", "lava") else f"{IDX_TO_COLOR[colour]} "
                things.append(f"{states[state] + ' ' if name == 'door' else ''}{look}{name} "
                              f"{_where(x - width // 2, height - 1 - y)}")
        rows.append(row)
    carried = getattr(env.unwrapped, "carrying", None)
    return "\n".join([
        f"Mission: {observation['mission']}", f"You face {_DIRECTIONS[int(observation['direction'])]}"
        + (f" and carry a {carried.color} {carried.type}." if carried else "."),
        "What you see (ahead is up, you are @, # wall, . free, ? not seen):", *rows,
        *([f"In view: {'; '.join(things)}."] if things else [])])


def _where(right: int, ahead: int) -> str:
    parts = [f"{ahead} ahead"] if ahead else []
    if right:
        parts.append(f"{abs(right)} to the {'right' if right > 0 else 'left'}")
    return " and ".join(parts)
