"""What an agent is: code that talks to a model through a stock SDK, and says in the end how well it went."""

import difflib
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import gymnasium as gym
import numpy as np

from ..registry import register
from ..rewards import Reward, parts_of
from ..task_env import finite

if TYPE_CHECKING:
    from .context import AgentContext

__all__ = ["AgentLike", "ChatAgent", "Result", "as_result", "load_agent", "register_agent"]

A = TypeVar("A")


@dataclass
class Result:
    """How a run of an agent ended.

    Args:
        reward: is added to what `AgentContext.add_reward` was given; a finite real number, or what a `Rewards` gives.
        score: what evaluation reports, where that is something else than the reward.
        info: for people and metrics; nothing volatile such as time stamps, as equal seeds must give equal info.
        truncated: whether a limit cut the run off, rather than the agent having come to its end.
    """

    reward: float = 0.0
    score: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False


class ChatAgent(ABC):
    """An agent: implement `run`, and register the class with `register_agent`.

    One object may run several tasks at the same time, so what belongs to a run goes into local variables.
    """

    num_tasks: int | None = None
    """How many tasks there are; None: unbounded, any index from 0 on is one."""
    tools: list[dict[str, Any]] = []
    """Schemas in the OpenAI form, for `AgentContext.tools`; what the model sees is what the agent's requests offer."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings of `molt_gym.train` that suit this agent, by the name of the model ("" for any), below the user's."""
    own_process: ClassVar[bool] = False
    """Whether runs at the same time need a process each; see `TaskEnv.own_process`."""

    def task(self, index: int, rng: np.random.Generator) -> Any:
        """Task number `index`, by default the number; `rng` is the run's, and the only randomness to use.

        A mapping with "messages" or "prompt", or a string, also gives `AgentContext.messages`.
        """
        return index

    @abstractmethod
    def run(self, ctx: "AgentContext") -> Any:
        """Plays `ctx.task`; `async def`, or a plain `def`, which may block: each run has a thread of its own.

        Returns:
            A `Result`, a reward as a number, or None for what `ctx.add_reward` and `ctx.report` were given.

        Raises:
            EnvFailure: not the policy failed but something that the agent needs. Any other exception is a failure of
                the agent, unless the model's context or the limit on turns was used up: that is a truncation. A run
                that failed is left out of the training, so catch what the policy is to blame for, such as a
                framework's error about a call of no such tool, and return a reward.
        """

    def __str__(self) -> str:
        return type(self).__name__


AgentLike = str | type[ChatAgent] | ChatAgent | Callable[..., Any]
"""What `load_agent` takes."""


class _FunctionAgent(ChatAgent):
    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._function, self._arguments = function, arguments

    def run(self, ctx: "AgentContext") -> Any:
        return self._function(ctx, **self._arguments)

    def __str__(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))


def load_agent(agent: AgentLike, **kwargs: Any) -> ChatAgent:
    """An agent.

    Args:
        agent: "package.module:Name" of a class, a function `run(ctx)` or an agent; or one of these.
        **kwargs: arguments of the class, or further ones of the function.

    Raises:
        ValueError, ModuleNotFoundError, AttributeError: the string names nothing.
        TypeError: it is no agent, or the arguments do not fit.
    """
    found = find_agent(agent)
    name = agent if isinstance(agent, str) else getattr(agent, "__qualname__", type(agent).__name__)
    if isinstance(found, ChatAgent):
        if kwargs:
            raise TypeError(f"agent {name!r} is an object already; leave out {sorted(kwargs)} or name its class")
        return found
    if inspect.isclass(found) and issubclass(found, ChatAgent):
        _check(name, found, kwargs)
        return found(**kwargs)
    if callable(found) and not inspect.isclass(found):
        _check(name, found, kwargs, None)
        return _FunctionAgent(found, kwargs)
    raise TypeError(
        f"agent {name!r} is {found!r:.200}; write a class that derives from molt_gym.ChatAgent, or a function run(ctx)"
    )


def find_agent(agent: AgentLike) -> Any:
    """The class, function or object that `load_agent` would make an agent of. Raises as it does."""
    return _imported(agent) if isinstance(agent, str) else agent


def register_agent(
    id: str, *, max_turns: int | None = None, kwargs: Mapping[str, Any] | None = None, **spec: Any
) -> Callable[[A], A]:
    """A decorator that makes an env id of a `ChatAgent` class or of a function `run(ctx)`.

    Args:
        id: "[namespace/]Name-v0".
        max_turns: replies that a run may get, those of sub-agents too; one that wants more is truncated.
        kwargs: arguments for the agent and for `AgentEnv`, in JSON.
        **spec: as for `molt_gym.register`.

    Raises:
        ValueError: another id is that of another agent with the same name in the same module.
    """

    def decorate(agent: A) -> A:
        arguments = {"agent": _importable(agent, id) or agent, **(kwargs or {})}
        register(id, "molt_gym.agents:AgentEnv", max_episode_steps=max_turns, kwargs=arguments, **spec)
        return agent

    return decorate


_named: dict[str, Any] = {}
"""Agents by the name under which they were last registered."""


def _importable(agent: Any, id: str) -> str | None:
    """The name by which other processes can import an agent, if they can."""
    module, qualname = getattr(agent, "__module__", "__main__"), getattr(agent, "__qualname__", "<no name>")
    # Inner functions and lambdas have brackets in their names; a method's leaves out its object.
    if module == "__main__" or "<" in qualname or inspect.ismethod(agent):
        return None
    name = f"{module}:{qualname}"
    ids = [spec.id for spec in gym.registry.values() if spec.kwargs.get("agent") == name]
    if ids and id not in ids and _named.get(name) is not agent:
        raise ValueError(f"register_agent({id!r}): {name!r} is already the name of another agent, that of {ids[0]!r}; "
                         "give each a name of its own, or register one with different kwargs")
    _named[name] = agent
    return name


def as_result(value: Any, what: str) -> Result:
    """What `run` returned, checked.

    Raises:
        EnvFailure: reason "reward": the reward or score is no finite real number.
        TypeError: another field of the result is wrong.
    """
    if not isinstance(value, Result):
        return Result() if value is None else Result(_reward(value, what))
    if not isinstance(value.info, Mapping):
        raise TypeError(f"{what}: Result.info is {value.info!r:.200}; write a dict")
    if not isinstance(value.truncated, bool | np.bool_):
        raise TypeError(f"{what}: Result.truncated is {value.truncated!r:.200}; write True or False")
    score = None if value.score is None else finite(value.score, f"{what}: the score")
    return Result(_reward(value.reward, what), score, dict(value.info), bool(value.truncated))


def _reward(value: Any, what: str) -> Reward:
    return Reward(finite(value, f"{what}: the reward"), parts_of(value))


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"agent {path!r}: write 'package.module:Name'")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ModuleNotFoundError(f"agent {path!r}: there is no module {module!r}; install it or put it on PYTHONPATH",
                                  name=error.name) from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, vars(found), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"agent {path!r}: {found!r:.100} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def _check(name: str, function: Callable[..., Any], kwargs: dict[str, Any], *args: Any) -> None:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        call = ", ".join([*("ctx" for _ in args), *(f"{key}={value!r:.50}" for key, value in kwargs.items())])
        raise TypeError(f"agent {name!r} cannot be called with ({call}): {error}") from None
