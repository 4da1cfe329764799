"""The games here as environments of PettingZoo. Importing this module imports PettingZoo."""

import inspect
from typing import Any

import numpy as np
from pettingzoo import ParallelEnv

from ..errors import ConfigError
from ..messages import Conversation, Message
from ..multi_agent import GameEnv
from ..registry import creators, find_spec, make
from ..spaces import AssistantMessageSpace, ConversationSpace

__all__ = ["GameParallelEnv"]


class GameParallelEnv(ParallelEnv[str, Conversation, Message]):
    """A `GameEnv` whose agents are its seats, each with its own conversation.

    All live agents act in each step, as PettingZoo wants it; the message of the one whose turn it is counts
    (`infos[agent]["turn"]`), those of others are ignored.

    Args:
        env_id: of the game.
        **kwargs: for it, and for `molt_gym.make`; all seats are agents, so that there is no `opponent`.

    Raises:
        ConfigError: the id is no game, or an opponent is given.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "is_parallelizable": True}

    def __init__(self, env_id: str, **kwargs: Any) -> None:
        spec = find_spec(env_id)
        creator = creators(spec)[0]
        if not (inspect.isclass(creator) and issubclass(creator, GameEnv)):
            raise ConfigError(f"{env_id} has no seats; write the id of a GameEnv, such as 'TicTacToe-v0'")
        if kwargs.get("opponent", "self") != "self":
            raise ConfigError(f"opponent: {kwargs['opponent']!r:.200}; all seats are agents here, leave it out")
        self._env = make(spec, **kwargs | {"opponent": "self"})
        self.game: GameEnv = self._env.unwrapped
        self.render_mode = self.game.render_mode
        self.metadata = {**self.metadata, "name": spec.id}
        self.possible_agents, self.agents = list(self.game.seats), []
        self.observation_spaces = {agent: ConversationSpace() for agent in self.possible_agents}
        self.action_spaces = {agent: AssistantMessageSpace() for agent in self.possible_agents}
        self._turn = ""

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Conversation], dict[str, dict[str, Any]]]:
        """Starts a game; options: `index` chooses the task.

        Raises:
            ValueError: an option is unknown.
        """
        # PettingZoo's own test gives one of this name.
        chosen = {key: value for key, value in (options or {}).items() if key != "options"}
        _, info = self._env.reset(seed=seed, options=chosen)
        self.agents, self._turn = list(self.possible_agents), info["seat"]
        return self._observations(), self._infos()

    def step(self, actions: dict[str, Message]) -> tuple[
        dict[str, Conversation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]
    ]:
        """Plays the message of the agent whose turn it is.

        Raises:
            ValueError: there is none, or it is no message.
        """
        if not self.agents:
            return {}, {}, {}, {}, {}
        if self._turn not in actions:
            raise ValueError(f"actions: there is none for {self._turn!r}, whose turn it is")
        _, _, terminated, truncated, info = self._env.step(actions[self._turn])
        self._turn = "" if terminated or truncated else info["seat"]
        observations, infos = self._observations(), self._infos()
        for agent, result in info.get("results", {}).items():
            infos[agent]["result"] = result
        ends = [dict.fromkeys(self.agents, end) for end in (terminated, truncated)]
        if not self._turn:
            self.agents = []
        return observations, dict(info["rewards"]), *ends, infos

    def render(self) -> str | np.ndarray | list[Any] | None:
        """The conversations of all, with `render_mode="ansi"`."""
        return self.game.render()

    def close(self) -> None:
        """Closes the game."""
        self._env.close()

    def observation_space(self, agent: str) -> ConversationSpace:
        """That of all conversations."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> AssistantMessageSpace:
        """That of all assistant messages."""
        return self.action_spaces[agent]

    def _observations(self) -> dict[str, Conversation]:
        return {agent: self.game.conversation(agent) for agent in self.agents}

    def _infos(self) -> dict[str, dict[str, Any]]:
        return {agent: {"turn": agent == self._turn} for agent in self.agents}
