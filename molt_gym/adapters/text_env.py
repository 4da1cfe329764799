"""TextEnv: any Gymnasium env whose actions can be written in a reply, as a chat env.

`molt_gym.make("FrozenLake-v1")` and `molt_gym.train("FrozenLake-v1")` use it by themselves.

Invariants: rewards and ends are those of the env; task i is the episode that `reset(seed=i)` starts; an illegal reply
never reaches the env.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator

from ..env import ChatEnv, Turn
from ..errors import ConfigError, NotAChatEnv
from ..messages import Message, text_of
from ..task_env import finite
from .action_text import IllegalReply, is_small, parse_action, words_for
from .env_text import action_names, describe, observation_names, plain_ansi, purpose

__all__ = ["OPTIONS", "TextEnv", "named_function", "text_spec", "with_line"]

Describe = Callable[[gym.Env, Any, dict[str, Any]], Any]
Parse = Callable[[gym.Env, str], Any]
Env = str | EnvSpec | Mapping[str, Any] | Callable[..., gym.Env]
"""A mapping is what JSON makes of a spec."""
OPTIONS = ("describe", "parse", "instructions", "illegal_limit")
"""Arguments of `TextEnv` that do not belong to the env within."""
_ENTRY = f"{__name__}:TextEnv"
_DESCRIBERS = {"minigrid": "molt_gym.adapters.minigrid:describe"}
"""For envs of these packages, what tells their observations unless the user does."""


class TextEnv(ChatEnv):
    """An env of numbers that is played by talking.

    Observations are told by the env's "ansi" rendering, if it has one, else by its observation and the names that its
    docstring gives to the parts. A reply means the action that its last line, or its last <action> tag, names by number
    or by name. **An illegal reply** changes nothing and gives no reward: the policy is told what is legal; after
    `illegal_limit` of them in a row the episode ends.

    Args:
        env: an id or a spec for `gymnasium.make`, or a function that makes an env.
        describe: of the user: (env, observation, info) → text or content parts; or "module:function".
        parse: of the user: (env, reply text) → action, or ValueError with what to write instead; or "module:function".
        instructions: in place of what the docstring says.
        illegal_limit: illegal replies in a row that end the episode.
        render_mode: "ansi" to get the transcript from `render()`.
        **kwargs: for the env.

    Raises:
        ConfigError: an argument makes no sense.
        NotAChatEnv: its actions are none that can be written, and there is no `parse`.
    """

    def __init__(
        self, env: Env, *, describe: str | Describe | None = None,
        parse: str | Parse | None = None, instructions: str | None = None, illegal_limit: int = 3,
        render_mode: str | None = None, **kwargs: Any,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if isinstance(illegal_limit, bool) or not isinstance(illegal_limit, int) or illegal_limit < 1:
            raise ConfigError(f"illegal_limit: {illegal_limit!r}; write an integer from 1 on")
        self.env = _make(env, kwargs)
        package = type(self.env.unwrapped).__module__.partition(".")[0]
        self._describe = named_function(describe or _DESCRIBERS.get(package), "describe")
        self._parse = named_function(parse, "parse")
        if not self._parse and not is_small(self.env.action_space):
            self.env.close()
            raise NotAChatEnv(f"{self.env.unwrapped}: its actions are {self.env.action_space!r:.200}, which a reply "
                              "can hardly name; give parse='module:function', from (env, reply text) to an action")
        self._limit = illegal_limit
        self._actions, self._parts = action_names(self.env), observation_names(self.env)
        shown = self._describe is not None or self._parts or self.env.render_mode == "ansi"
        self._instructions = purpose(self.env, observations=not shown) if instructions is None else instructions

    def begin(self, index: int) -> list[Message]:
        """The instructions, and the first observation of the episode of seed `index`."""
        observation, info = self.env.reset(seed=index)
        self._illegal, self._cut = 0, False
        how = ("Reply with one action: the last line of your reply must be nothing but the action"
               + (f".\nActions: {words_for(self.env.action_space, self._actions)}."
                  if is_small(self.env.action_space) else "."))
        return [{"role": "system", "content": "\n\n".join(filter(None, [self._instructions, how]))},
                {"role": "user", "content": self._seen(observation, info)}]

    def answer(self, message: Message) -> Turn:
        """The next observation; or what is legal, after a reply that names no action."""
        try:
            action = self._action(text_of(message))
        except ValueError as error:
            self._illegal += 1
            over = self._illegal >= self._limit
            words = f"That is no legal reply: {error}."
            return Turn([] if over else [{"role": "user", "content": words}], terminated=over, info={"illegal": True})
        self._illegal = 0
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._cut = bool(truncated and not terminated)
        one = isinstance(reward, np.ndarray) and reward.size == 1
        reward = finite(reward.item() if one else reward, f"{self._name}: the reward of the env within")
        over = bool(terminated or truncated)
        return Turn([] if over else [{"role": "user", "content": self._seen(observation, info, reward)}], reward, over,
                    {"illegal": False})

    def cut(self) -> bool:
        """Whether the env within cut its episode itself."""
        return self._cut

    def close(self) -> None:
        """Closes the env."""
        self.env.close()

    def _action(self, text: str) -> Any:
        if self._parse is None:
            return parse_action(text, self.env.action_space, self._actions)
        action = self._parse(self.env, text)
        if action not in self.env.action_space:
            raise IllegalReply(f"{action!r:.80} is no action of {self.env.action_space!r:.80}")
        return action

    def _seen(self, observation: Any, info: dict[str, Any], reward: float | None = None) -> Any:
        if self._describe is not None:
            seen = self._describe(self.env, observation, info)
        elif self.env.render_mode == "ansi":
            seen = plain_ansi(str(self.env.render()))
        else:
            seen = describe(observation, self.env.observation_space, self._parts)
        mask = info.get("action_mask")
        if mask is not None and is_small(self.env.action_space) and len(mask) == getattr(self.env.action_space, "n", 0):
            first = int(self.env.action_space.start)
            legal = [first + i for i, allowed in enumerate(mask) if allowed]
            words = words_for(self.env.action_space, self._actions, legal)
            seen = with_line(seen, f"Actions that have an effect now: {words}.")
        return seen if reward is None else with_line(seen, f"Last reward: {reward:g}.")


def text_spec(spec: EnvSpec) -> EnvSpec:
    """The spec under which `TextEnv` plays the env of another spec, with the same id and cap on turns."""
    # The spec, not its id, which may mean nothing in another process.
    return EnvSpec(spec.id, entry_point=_ENTRY, max_episode_steps=spec.max_episode_steps,
                   kwargs={"env": spec} | spec.kwargs, nondeterministic=spec.nondeterministic)


def _make(env: Env, kwargs: dict[str, Any]) -> gym.Env:
    if isinstance(env, Mapping):
        fields = {name: value for name, value in env.items() if name not in ("namespace", "name", "version")}
        env = EnvSpec.from_json(json.dumps(fields))
    if not isinstance(env, str | EnvSpec):
        if not callable(env):
            raise ConfigError(f"env: {env!r:.200}; write an id, a spec, or a function that makes an env")
        return env(**kwargs)
    spec = gym.spec(env) if isinstance(env, str) else env
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    if "ansi" in getattr(creator, "metadata", {}).get("render_modes", ()):
        kwargs = {"render_mode": "ansi"} | kwargs
    # The cap on turns is that of the chat env around it; for the checker see `molt_gym.make`.
    return gym.make(spec, max_episode_steps=-1, disable_env_checker=True, **kwargs)


def named_function(given: Any, name: str, write: str = "a function, or its 'module:function'") -> Any:
    """What "module:function" names, or `given` itself if it is no text; None for None.

    Args:
        given: of the user.
        name: of the field, for errors.
        write: what would do, for errors.

    Raises:
        ConfigError: it is nothing that can be called, or has to be awaited.
    """
    function = given
    if isinstance(given, str):
        module, _, attribute = given.partition(":")
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{name}: {given!r} is no module:function ({error}); write the module and the function's "
                              "name in it") from error
    if given is not None and (not callable(function) or inspect.iscoroutinefunction(function)):
        raise ConfigError(f"{name}: {given!r:.200} is no plain function; write {write}")
    return function


def with_line(content: Any, line: str) -> Any:
    """What a `describe` returned, a text or content parts, and a line under it; anything else as it is."""
    if isinstance(content, list | tuple):
        return [*content, {"type": "text", "text": line}]
    return f"{content}\n{line}" if isinstance(content, str) else content
