"""ChatEnv: the base class of environments whose observation is a conversation and whose action is the reply to it.

Invariants: an observation is a fresh copy that nothing changes later; each one extends the last by the assistant
message and what the env says to it; a message that is refused or fails adds nothing that a policy could see. The task
depends on the seed or on `options={"index": i}` alone, and no global random state is touched.
"""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded

from .messages import Conversation, Message
from .rewards import parts_of
from .task_env import TaskEnv, finite

__all__ = ["ChatEnv", "Turn"]

_FIELDS = (("terminated", (bool, np.bool_), "True or False"), ("messages", (list, tuple), "a list of messages"),
           ("info", Mapping, "a dict"))


@dataclass
class Turn:
    """What `ChatEnv.answer` returns.

    Args:
        messages: what the env says to the reply (user and tool messages); [] to end, or to let the policy go on.
        reward: of this turn, a finite real number; of several parts, what a `Rewards` gives.
        terminated: whether the episode is over. A cap on turns is no business of the env: register it with
            `max_episode_steps`, and Gymnasium reports it as truncation.
        info: for people and metrics; nothing volatile such as time stamps, as equal seeds must give equal info.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    terminated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class ChatEnv(TaskEnv):
    """A Gymnasium env that is talked to: implement `begin` and `answer`, and register the class.

    Args:
        render_mode: "ansi" to get the transcript from `render()`.
    """

    @abstractmethod
    def begin(self, index: int) -> list[Message]:
        """The messages that open the episode of task `index`; may use `self.np_random`, and no other randomness."""

    @abstractmethod
    def answer(self, message: Message) -> Turn:
        """What the env makes of the policy's reply, whatever it says: nonsense scores low, it never raises.

        Raises:
            EnvFailure: the env itself cannot go on (sandbox died, judge unreachable).
        """

    def cut(self) -> bool:
        """Whether the episode that is over was cut, by a limit of its own on its length."""
        return False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Conversation, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: seeds `self.np_random`, which draws the task; None goes on with the random state at hand.
            options: `{"index": i}` to choose the task, 0 <= i < `num_tasks`.

        Returns:
            The first observation, and an info whose `task_index` names the task. With the same seed, passing this index
            plays the very same episode again.

        Raises:
            ValueError: an option is unknown or out of range, or `begin` returned no legal messages.
        """
        self._choose(seed, options)
        self._messages = self._fresh(self.begin(self._index))
        observation = self._observe("begin", self.tools)
        self._over = False
        return observation, {"task_index": self._index}

    def step(self, action: Message) -> tuple[Conversation, float, bool, bool, dict[str, Any]]:
        """Answers an assistant message.

        Returns:
            observation, reward, terminated, truncated (at the end what `cut` says; also set by `TimeLimit`) and info.
            As always with `TimeLimit`, an env that it truncated can be stepped on, each time with the same end.

        Raises:
            ResetNeeded: before `reset`, after the end of an episode, and after `answer` raised.
            ValueError: `action` is not in the action space (the episode goes on as if it had not been sent), or
                `answer` returned messages that are no messages.
            EnvFailure: from `answer`; with reason "reward" if the reward is no finite real number.
        """
        if self._over:
            raise ResetNeeded(f"{self._name}: no episode is running; call reset() before step()")
        self.action_space.validate(action)
        self._over = True
        self._messages.append(copy.deepcopy(action))
        turn = self.answer(copy.deepcopy(action))
        if not isinstance(turn, Turn):
            raise TypeError(f"{self._name}.answer returned {turn!r:.200}; return a molt_gym.Turn")
        reward = finite(turn.reward, f"{self._name}.answer: the reward")
        for name, kinds, write in _FIELDS:
            if not isinstance(value := getattr(turn, name), kinds):
                raise TypeError(f"{self._name}.answer: Turn.{name} is {value!r:.200}; write {write}")
        self._messages += self._fresh(turn.messages)
        observation = self._observe("answer", self.tools)
        self._reward += reward
        self._over = bool(turn.terminated)
        cut = self._over and self.cut()
        info = {**parts_of(turn.reward), **copy.deepcopy(turn.info), "task_index": self._index}
        return observation, reward, self._over and not cut, cut, info
