"""ChatEnv: the base class of environments whose observation is a conversation and whose action is the reply to it.

Invariants: an observation is a fresh copy that nothing changes later; each one extends the last by the assistant
message and what the env says to it; a message that is refused or fails adds nothing that a policy could see. The task
depends on the seed or on `options={"index": i}` alone, and no global random state is touched.
"""

import copy
import difflib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded

from .errors import EnvFailure
from .messages import Conversation, Message, text_of, validate_conversation
from .spaces import AssistantMessageSpace, ConversationSpace

__all__ = ["ChatEnv", "Turn"]

_UNBOUNDED = 2**31


@dataclass
class Turn:
    """What `ChatEnv.answer` returns.

    Args:
        messages: what the env says to the reply (user and tool messages); [] to end, or to let the policy go on.
        reward: of this turn, a finite real number.
        terminated: whether the episode is over. A cap on turns is no business of the env: register it with
            `max_episode_steps`, and Gymnasium reports it as truncation.
        info: for people and metrics; nothing volatile such as time stamps, as equal seeds must give equal info.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    terminated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class ChatEnv(gym.Env[Conversation, Message], ABC):
    """A Gymnasium env that is talked to: implement `begin` and `answer`, and register the class.

    Args:
        render_mode: "ansi" to get the transcript from `render()`.
    """

    observation_space: ConversationSpace
    action_space: AssistantMessageSpace
    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}
    num_tasks: int | None = None
    """How many tasks there are; None: unbounded, any index from 0 on is one."""
    tools: list[dict[str, Any]] = []
    """Schemas of the tools that the policy may call; an env may set its own in `__init__` or `begin`."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings of `molt_gym.train` that suit this env, by the name of the model ("" for any), below the user's own."""

    _OPTIONS: ClassVar[tuple[str, ...]] = ("index",)

    def __init__(self, *, render_mode: str | None = None) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode: {render_mode!r}; write one of {self.metadata['render_modes']} or None")
        self.render_mode = render_mode
        self.observation_space = ConversationSpace()
        self.action_space = AssistantMessageSpace()
        self._messages: list[Message] = []
        self._reward = 0.0
        self._index = -1
        self._over = True

    @abstractmethod
    def begin(self, index: int) -> list[Message]:
        """The messages that open the episode of task `index`; may use `self.np_random`, and no other randomness."""

    @abstractmethod
    def answer(self, message: Message) -> Turn:
        """What the env makes of the policy's reply, whatever it says: nonsense scores low, it never raises.

        Raises:
            EnvFailure: the env itself cannot go on (sandbox died, judge unreachable).
        """

    @property
    def messages(self) -> list[Message]:
        """A copy of the conversation so far; within `answer` its last message is the one to answer."""
        return copy.deepcopy(self._messages)

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
        super().reset(seed=seed)
        self._over = True
        self._index = self._choose_task(options or {})
        self._messages, self._reward = [], 0.0
        self._messages = copy.deepcopy(self.begin(self._index))
        observation = self._observe("begin")
        self._over = False
        return observation, {"task_index": self._index}

    def step(self, action: Message) -> tuple[Conversation, float, bool, bool, dict[str, Any]]:
        """Answers an assistant message.

        Returns:
            observation, reward, terminated, truncated (always false here, `TimeLimit` sets it) and info. As always with
            `TimeLimit`, an env that was truncated can be stepped on, and each such step is truncated again.

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
        reward = self._checked_reward(turn.reward)
        if not isinstance(turn.terminated, bool | np.bool_):
            raise TypeError(f"{self._name}.answer: Turn.terminated is {turn.terminated!r:.200}; write True or False")
        if not isinstance(turn.messages, list | tuple):
            raise TypeError(f"{self._name}.answer: Turn.messages is {turn.messages!r:.200}; write a list of messages")
        self._messages += copy.deepcopy(list(turn.messages))
        observation = self._observe("answer")
        self._reward += reward
        self._over = bool(turn.terminated)
        return observation, reward, self._over, False, {**copy.deepcopy(turn.info), "task_index": self._index}

    def render(self) -> str | None:
        """The transcript with `render_mode="ansi"`: each message under its role, then the reward so far."""
        if self.render_mode is None:
            gym.logger.warn('render() shows nothing unless the env is made with render_mode="ansi"')
            return None
        total = [f"[reward] {self._reward:g}" + (" (episode over)" if self._over else "")]
        return "\n\n".join([_rendered(message) for message in self._messages] + total)

    @property
    def _name(self) -> str:
        return self.spec.id if self.spec is not None else type(self).__name__

    def _choose_task(self, options: dict[str, Any]) -> int:
        for key in options.keys() - set(self._OPTIONS):
            near = difflib.get_close_matches(str(key), self._OPTIONS, n=1, cutoff=0.0)
            raise ValueError(f"{self._name}: unknown reset option {key!r}; did you mean {near[0]!r}?")
        if self.num_tasks == 0:
            raise ValueError(f"{self._name}: num_tasks is 0; there is no task to play")
        # Drawn even if it is given, so that a chosen task finds the generator in the same state as a drawn one.
        drawn = int(self.np_random.integers(self.num_tasks or _UNBOUNDED))
        if options.get("index") is None:
            return drawn
        try:
            index = -1 if isinstance(options["index"], bool) else operator.index(options["index"])
        except TypeError:
            index = -1
        if index < 0 or (self.num_tasks is not None and index >= self.num_tasks):
            bound = "an integer from 0 on" if self.num_tasks is None else f"an integer from 0 to {self.num_tasks - 1}"
            raise ValueError(f"{self._name}: reset option 'index' is {options['index']!r}; write {bound}")
        return index

    def _observe(self, source: str) -> Conversation:
        observation = {"messages": copy.deepcopy(self._messages), "tools": copy.deepcopy(self.tools)}
        validate_conversation(observation, f"{self._name}.{source}")
        return observation

    def _checked_reward(self, reward: Any) -> float:
        # Fraction and numpy scalars are numbers too; a tensor, a string or None is none.
        try:
            value = float(reward) if isinstance(reward, Real | np.bool_) else math.nan
        except OverflowError:
            value = math.inf
        if math.isfinite(value):
            return value
        raise EnvFailure("reward", f"{self._name}.answer: the reward is {reward!r:.200}, no finite real number")


def _rendered(message: Message) -> str:
    lines = [f"[{message['role']}]"]
    if message.get("reasoning_content"):
        lines.append(f"(thinks) {message['reasoning_content']}")
    if text_of(message):
        lines.append(text_of(message))
    for part in message["content"] if isinstance(message.get("content"), list) else ():
        if part["type"] != "text":
            lines.append(f"({part['type']})")
    for call in message.get("tool_calls") or ():
        lines.append(f"(calls) {call['function']['name']}({call['function']['arguments']})")
    return "\n".join(lines)
