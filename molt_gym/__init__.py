"""Train language-model agents with reinforcement learning, as a Gymnasium plug-in.

    import gymnasium as gym
    import molt_gym

    gym.register("MyAgent-v0", entry_point="my_pkg:MyAgentEnv")
    molt_gym.train("MyAgent-v0", model="Qwen/Qwen3-4B")

Importing registers the ids of the envs that come with it, takes under a second, and loads no torch: `train`, `evaluate`
and `rollout` import the trainer when they are called.
"""

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import gymnasium as _gym

from .agents import AgentContext, AgentEnv, ChatAgent, CommandAgent, Result, register_agent
from .env import ChatEnv, Turn
from .errors import ConfigError, EnvFailure, NotAChatEnv, PromptTooLong, RunFailed, UnknownEnv
from .messages import text_of
from .policy import Policy, PolicyFunction, as_policy
from .registry import EnvInfo, list_envs, make, register
from .spaces import AssistantMessageSpace as AssistantMessage
from .spaces import ConversationSpace as Conversation

if TYPE_CHECKING:
    from .tokens.trajectory import Trajectory
    from .trainers.api import EvalResult, TrainResult

__all__ = [
    "AgentContext",
    "AgentEnv",
    "AssistantMessage",
    "ChatAgent",
    "ChatEnv",
    "CommandAgent",
    "ConfigError",
    "Conversation",
    "EnvFailure",
    "EnvInfo",
    "NotAChatEnv",
    "Policy",
    "PromptTooLong",
    "Result",
    "RunFailed",
    "Turn",
    "UnknownEnv",
    "as_policy",
    "evaluate",
    "list_envs",
    "make",
    "register",
    "register_agent",
    "rollout",
    "text_of",
    "train",
]


def train(
    env: str,
    model: str | PathLike[str] | None = None,
    *,
    out: str | PathLike[str] | None = None,
    steps: int | None = None,
    seed: int = 0,
    config: str | PathLike[str] | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> "TrainResult":
    """Trains a model to act in an env.

    Args:
        env: an env id, such as "CodeExec-v0" or "my_module:MyAgent-v0".
        model: a hub name or a local Hugging Face folder; None takes SmolLM2-135M, "tiny" a toy that is made here.
        out: the folder of the run; None makes a new one under `runs/`.
        steps: how many optimizer steps; None takes what the configuration says.
        seed: fixes tasks, sampling and order.
        config: a TOML file, or nested settings as a mapping.
        **overrides: further settings, as `rollout={"group_size": 8}` or `rollout__group_size=8`.

    Returns:
        The folder of the run, its metrics, and its last checkpoint.

    Raises:
        ConfigError: a setting is unknown or contradicts another one.
        UnknownEnv, NotAChatEnv: `env` cannot be trained in.
        RunFailed: too many rollouts failed; nothing is exported.
    """
    from .trainers import api

    return api.train(env, model, out=out, steps=steps, seed=seed, config=config, **overrides)


def evaluate(
    env: str,
    model: str | PathLike[str] | Policy | PolicyFunction | None = None,
    *,
    episodes: int = 64,
    k: int = 1,
    seed: int = 0,
    config: str | PathLike[str] | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> "EvalResult":
    """Scores a model on the held-out tasks of an env.

    Args:
        env: an env id.
        model: as for `train`, or anything that `as_policy` takes.
        episodes: how many tasks.
        k: how many attempts at each task.
        seed: fixes tasks and sampling.
        config: a TOML file, or nested settings as a mapping.
        **overrides: further settings, as for `train`.
    """
    from .trainers import api

    return api.evaluate(env, model, episodes=episodes, k=k, seed=seed, config=config, **overrides)


def rollout(
    env: str,
    policy: str | PathLike[str] | Policy | PolicyFunction | None,
    n: int,
    *,
    seed: int = 0,
    config: str | PathLike[str] | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> "list[Trajectory]":
    """Plays `n` episodes.

    Args:
        env: an env id.
        policy: a function from an observation to an assistant message or its text, a `Policy`, or a model as for
            `train`.
        n: how many episodes.
        seed: fixes tasks and sampling.
        config: a TOML file, or nested settings as a mapping.
        **overrides: further settings, as for `train`.

    Returns:
        The trajectories, also of episodes that failed: these have `failure` set and no reward.
    """
    from .trainers import api

    return api.rollout(env, policy, n, seed=seed, config=config, **overrides)


if "CodeExec-v0" not in _gym.registry:
    register("CodeExec-v0", "molt_gym.envs.code_exec:CodeExecEnv", max_episode_steps=3, nondeterministic=True)
    register(
        "AgentCodeExec-v0",
        "molt_gym:AgentEnv",
        max_episode_steps=3,
        nondeterministic=True,
        kwargs={"agent": "molt_gym.envs.code_exec:CodeExecAgent"},
    )
    register(
        "ToolUse-v0",
        "molt_gym:AgentEnv",
        max_episode_steps=6,
        kwargs={"agent": "molt_gym.envs.tool_use:ToolUseAgent"},
    )
    register("Math-v0", "molt_gym.envs.math:MathEnv", nondeterministic=True)
