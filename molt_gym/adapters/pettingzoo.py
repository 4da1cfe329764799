"""PettingZoo's games as chat envs: `pettingzoo/NAME-vN` for its classic ones, `PettingZooEnv` for any other.

Invariants: rewards and ends are those of the game; task i is the game that `reset(seed=i)` starts; an illegal reply
never reaches it.
"""

import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space, Text

from ..errors import ConfigError, EnvFailure, NotAChatEnv
from ..messages import Message, text_of
from ..multi_agent import GameEnv, IllegalMove, Opponent
from ..registry import register
from .action_text import is_small, parse_action, words_for
from .env_text import describe as describe_value
from .suites import SUITES
from .text_env import named_function, with_line

__all__ = ["PettingZooEnv", "register_ids"]

Describe = Callable[[Any, str, Any, dict[str, Any]], Any]
Parse = Callable[[Any, str, str], Any]
_ACTION_MASK = "action_mask"
_NO_PROSE = re.compile(r"\s*(\||```|:|This environment is part of)")
_LONGEST = 1500
_IMPORTED_LATE = {"hanabi": ["pyspiel"]}
"""What games import only when they are made."""


class PettingZooEnv(GameEnv):
    """A game of PettingZoo, turn by turn or with all at once, that is played by talking.

    Observations are told in words: text as it is, boards of two kinds of marks as a grid of X (the seat's own) and O,
    anything else by its numbers. A reply means the action that its last line, or its last <action> tag, names; where
    the game tells which ones are legal (`action_mask`), those are listed and no others taken. In a ParallelEnv the
    seats reply one after the other, none of them knowing what the others do in the same round. A game that a limit of
    its own ends is truncated. What a seat is owed when the game is cut from outside, it does not get.

    Args:
        env: a function that makes an AECEnv or a ParallelEnv, "module:function", or an id of `pettingzoo.make`.
        describe: of the user: (env, agent, observation, info) → text or content parts; or "module:function".
        parse: of the user: (env, agent, reply text) → action, or ValueError with what to write; or "module:function".
        instructions: in place of what the docstring says.
        opponent, illegal_limit, render_mode: as for `GameEnv`.
        **kwargs: for the game.

    Raises:
        ConfigError: PettingZoo, or what the game needs besides, is not installed; or an argument makes no sense.
        NotAChatEnv: its actions are none that can be written, and there is no `parse`.
    """

    def __init__(
        self, env: str | Callable[..., Any], *, describe: str | Describe | None = None,
        parse: str | Parse | None = None, instructions: str | None = None,
        opponent: Opponent | Sequence[Opponent] = "self", illegal_limit: int = 3, render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(opponent=opponent, illegal_limit=illegal_limit, render_mode=render_mode)
        self._describe, self._parse = named_function(describe, "describe"), named_function(parse, "parse")
        self.env = _made(env, kwargs)
        self._agents = {str(agent): agent for agent in self.env.possible_agents}
        self.seats = tuple(self._agents)
        for agent in self._agents.values():
            space = self.env.action_space(agent)
            if self._parse is None and not isinstance(space, Text) and not is_small(space):
                self.env.close()
                raise NotAChatEnv(f"{env}: the actions of {agent} are {space!r:.200}, which a reply can hardly name; "
                                  "give parse='module:function', which makes an action of (env, agent, reply text)")
        self._instructions = _purpose(self.env) if instructions is None else instructions

    def begin(self, index: int) -> None:
        """Resets the game with the seed `index`."""
        self._cut = False
        self.env.reset(seed=index)
        self._owed_last = set(self.env.agents)
        self._owed = self._collect()

    def turn(self) -> str | None:
        """The agent that the game has selected."""
        return str(self.env.agent_selection) if self.env.agents else None

    def cut(self) -> bool:
        """Whether the game truncated itself."""
        return self._cut

    def rules(self, seat: str) -> str:
        """The instructions, and how to reply."""
        how = f"You are {seat}. "
        space = self.env.action_space(self._agents[seat])
        if not isinstance(space, Text) or self._parse is not None:
            how += "Reply with one action: the last line of your reply must be nothing but the action"
            how += f".\nActions: {words_for(space)}." if self._parse is None else "."
        return "\n\n".join(filter(None, [self._instructions, how.strip()]))

    def view(self, seat: str) -> str | list[Message]:
        """The observation in words, and which actions are legal."""
        agent = self._agents[seat]
        observation, _, _, _, info = self.env.last()
        if self._describe is not None:
            seen = self._describe(self.env, agent, observation, info)
        else:
            seen = _told(observation, self.env.observation_space(agent))
        legal = self._legal(seat)
        if legal is not None:
            seen = with_line(seen, f"Legal actions: {', '.join(map(str, legal))}.")
        return [{"role": "user", "content": seen}]

    def move(self, seat: str, message: Message) -> Mapping[str, float]:
        """Plays the action that a reply means.

        Raises:
            IllegalMove: it means none that is legal.
        """
        text, space = text_of(message), self.env.action_space(self._agents[seat])
        try:
            if self._parse is not None:
                action = self._parse(self.env, self._agents[seat], text)
            else:
                action = text if isinstance(space, Text) else parse_action(text, space)
        except ValueError as error:
            raise IllegalMove(str(error)) from error
        legal = self._legal(seat)
        if action not in space or (legal is not None and int(action) not in legal):
            allowed = f"{space!r:.80}" if legal is None else ", ".join(map(str, legal))
            raise IllegalMove(f"{action!r:.80} is not among {allowed}")
        self.env.step(action)
        rewards, owed, self._owed = self._collect(), self._owed, {}
        return {seat: rewards.get(seat, 0.0) + owed.get(seat, 0.0) for seat in (*rewards, *owed)}

    def random_move(self, seat: str, rng: np.random.Generator) -> str:
        """A legal action, or any sample of the action space, in words."""
        legal = self._legal(seat)
        if legal is not None:
            return str(legal[rng.integers(len(legal))])
        space = self.env.action_space(self._agents[seat])
        space.seed(int(rng.integers(2**31)))
        action = space.sample()
        return action if isinstance(action, str) else " ".join(map(str, np.ravel(action)))

    def close(self) -> None:
        """Closes the game."""
        self.env.close()

    def _collect(self) -> dict[str, float]:
        """What the selected agent got since it last moved, and those before it that are out, who leave the game.

        Raises:
            EnvFailure: reason "reward": agents left without a turn to get theirs.
        """
        rewards: dict[str, float] = defaultdict(float)
        while self.env.agents:
            agent = self.env.agent_selection
            _, reward, terminated, truncated, _ = self.env.last(observe=False)
            rewards[str(agent)] += float(reward)
            if not (terminated or truncated):
                break
            self._cut = bool(truncated and not terminated)
            self._owed_last.discard(agent)
            self.env.step(None)
        if not self.env.agents and self._owed_last:
            who = ", ".join(sorted(map(str, self._owed_last)))
            raise EnvFailure("reward", f"{self._name}: {who} left without a turn to get their last rewards; end a game "
                             "by terminations or truncations, and let step(None) remove the agents")
        return rewards

    def _legal(self, seat: str) -> list[int] | None:
        """The actions of a Discrete space that the game's mask leaves; None without one."""
        space, (observation, _, _, _, info) = self.env.action_space(self._agents[seat]), self.env.last()
        mask = observation.get(_ACTION_MASK) if isinstance(observation, Mapping) else None
        mask = info.get(_ACTION_MASK) if mask is None else mask
        if mask is None or not isinstance(space, Discrete):
            return None
        return [int(space.start + action) for action in np.flatnonzero(mask)]


def register_ids() -> None:
    """An id for each of PettingZoo's classic games that can be imported."""
    from pettingzoo import aec_registry

    for spec in aec_registry.values():
        if spec.namespace == "classic" and all(map(find_spec, _IMPORTED_LATE.get(spec.name, ()))):
            with suppress(ImportError):
                importlib.import_module(spec.entry_point.partition(":")[0])
                register(f"pettingzoo/{spec.name}-v{spec.version}", PettingZooEnv, kwargs={"env": spec.id})


def _made(env: str | Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    try:
        import pettingzoo
        from pettingzoo.env_registry.exceptions import PettingZooRegistryError
        from pettingzoo.utils.conversions import parallel_to_aec
    except ModuleNotFoundError as error:
        if error.name != "pettingzoo":
            raise
        raise ConfigError(f"pettingzoo is not installed: {SUITES['pettingzoo'].install}") from error
    if isinstance(env, str) and ":" not in env:
        try:
            kind = "parallel" if env in pettingzoo.parallel_registry and env not in pettingzoo.aec_registry else "aec"
            game = pettingzoo.make(kind, env, **kwargs)
        except (PettingZooRegistryError, ImportError) as error:
            raise ConfigError(f"env: {env!r}: {error}") from error
    else:
        game = named_function(env, "env")(**kwargs)
    game = parallel_to_aec(game) if isinstance(game, pettingzoo.ParallelEnv) else game
    if not isinstance(game, pettingzoo.AECEnv):
        raise ConfigError(f"env: {env!r:.200} made {game!r:.200}; write a function that makes an AECEnv or a "
                          "ParallelEnv of PettingZoo")
    return game


def _told(observation: Any, space: Space) -> str:
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping) and set(observation) == {"observation", _ACTION_MASK}:
        observation, space = observation["observation"], space["observation"]
    if isinstance(observation, np.ndarray) and observation.ndim == 3 and observation.shape[2] == 2 and (
            np.isin(observation, (0, 1)).all()):
        return "\n".join(" ".join("X" if mine else "O" if theirs else "." for mine, theirs in row)
                         for row in observation.tolist())
    return describe_value(observation, space)


def _purpose(env: Any) -> str:
    """What the docstring of the game, or of its module, says first, and of actions and rewards; prose alone."""
    kind = type(env.unwrapped)
    text = inspect.cleandoc(vars(kind).get("__doc__") or sys.modules[kind.__module__].__doc__ or "")
    first, *rest = re.split(r"^#+ *", text, flags=re.MULTILINE)
    sections = [first, *rest[: 0 if first.strip() else 1],
                *(part for part in rest if part.casefold().startswith(("action space", "rewards")))]
    prose = ["\n".join(line for line in section.splitlines() if not _NO_PROSE.match(line)) for section in sections]
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"<[^>]+>|\*\*", "", "\n\n".join(prose))).strip()[:_LONGEST]
