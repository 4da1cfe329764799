"""TaskEnv: what all envs have in common whose observation is a conversation and whose tasks are numbered.

Invariants: the task depends on the seed or on `options={"index": i}` alone, and no global random state is touched; an
observation is a fresh copy that nothing changes later.
"""

import copy
import difflib
import math
import operator
from abc import ABC
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from .errors import EnvFailure
from .images import inline_images
from .messages import Conversation, Message, text_of, validate_conversation
from .spaces import AssistantMessageSpace, ConversationSpace

__all__ = ["TaskEnv", "finite"]

_UNBOUNDED = 2**31


def finite(value: Any, what: str) -> float:
    """A reward or a score as a float.

    Args:
        value: Fraction, bool and numpy scalars are numbers too; a tensor, a string or None is none.
        what: names the value in the error, such as "MyEnv.answer: the reward".

    Raises:
        EnvFailure: reason "reward": it is no finite real number.
    """
    try:
        number = float(value) if isinstance(value, Real | np.bool_) else math.nan
    except OverflowError:
        number = math.inf
    if math.isfinite(number):
        return number
    raise EnvFailure("reward", f"{what} is {value!r:.200} ({type(value).__name__}), no finite real number")


class TaskEnv(gym.Env[Conversation, Message], ABC):
    """Spaces, tasks and rendering of `ChatEnv` and `AgentEnv`.

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
    own_process: ClassVar[bool] = False
    """Whether each env needs a process of its own, as it changes what belongs to a whole one: the working directory,
    `os.environ`, global random states, signal handlers, loaded modules. Training then gives it one, which is killed,
    with all that it started, if it misses a deadline."""

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

    def leave(self) -> None:
        """Frees what an episode holds of others, such as a session on a server; training calls it after each episode,
        which it may have left before its end. Nothing unless an env says otherwise."""

    @property
    def messages(self) -> list[Message]:
        """A copy of the conversation so far; within `answer` its last message is the one to answer."""
        return copy.deepcopy(self._messages)

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

    def _choose(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """The part of `reset` that seeds and chooses the task."""
        if not isinstance(options, Mapping | None):
            raise ValueError(f"{self._name}: reset options are {options!r:.200}; write a dict")
        super().reset(seed=seed)
        self._over = True
        self._index = self._chosen(options or {})
        self._messages, self._reward = [], 0.0

    def _chosen(self, options: dict[str, Any]) -> int:
        for key in options.keys() - set(self._OPTIONS):
            near = difflib.get_close_matches(str(key), self._OPTIONS, n=1, cutoff=0.0)
            raise ValueError(f"{self._name}: unknown reset option {key!r}; did you mean {near[0]!r}?")
        if self.num_tasks is not None and self.num_tasks < 1:
            raise ValueError(f"{self._name}: num_tasks is {self.num_tasks}; there is no task to play")
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

    def _fresh(self, messages: Any) -> Any:
        """A copy with its images in it; what is no list of messages is told later."""
        return copy.deepcopy(inline_images(messages)) if isinstance(messages, list | tuple) else messages

    def _observe(self, source: str, tools: list[dict[str, Any]]) -> Conversation:
        observation = {"messages": self._messages, "tools": tools}
        validate_conversation(observation, f"{self._name}.{source}")
        return copy.deepcopy(observation)


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
