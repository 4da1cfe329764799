"""Train language-model agents with reinforcement learning, as a Gymnasium plug-in.

    import gymnasium as gym
    import molt_gym

    gym.register("MyAgent-v0", entry_point="my_pkg:MyAgentEnv")
    molt_gym.train("MyAgent-v0", model="Qwen/Qwen3-4B")

Importing registers the ids of the envs that come with it, takes under a second, and loads no torch: `train`, `sft`,
`distill`, `evaluate` and `rollout` import the trainer when they are called.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as _gym

from .adapters.pettingzoo import PettingZooEnv
from .adapters.text_env import TextEnv
from .agents import AgentContext, AgentEnv, ChatAgent, CommandAgent, Result, register_agent
from .env import ChatEnv, Turn
from .errors import ConfigError, EnvFailure, NotAChatEnv, PromptTooLong, RunFailed, UnknownEnv
from .images import image_part
from .judge import Judge
from .messages import text_of
from .multi_agent import GameEnv, IllegalMove
from .policy import Policy, PolicyFunction, as_policy
from .registry import EnvInfo, list_envs, make, register
from .rewards import Rewards
from .spaces import AssistantMessageSpace as AssistantMessage
from .spaces import ConversationSpace as Conversation
from .tasks import load_tasks

if TYPE_CHECKING:
    from .adapters.pettingzoo_parallel import GameParallelEnv
    from .tokens.trajectory import Trajectory
    from .trainers.api import TrainResult
    from .trainers.evaluate import EvalResult

__version__ = "0.1.0"
__all__ = [
    "AgentContext", "AgentEnv", "AssistantMessage", "ChatAgent", "ChatEnv", "CommandAgent", "ConfigError",
    "Conversation", "EnvFailure", "EnvInfo", "GameEnv", "IllegalMove", "Judge", "NotAChatEnv", "PettingZooEnv",
    "Policy", "PromptTooLong", "Result", "Rewards", "RunFailed", "TextEnv", "Turn", "UnknownEnv", "as_policy",
    "distill", "evaluate", "export", "image_part", "list_envs", "load_tasks", "make", "parallel_env", "register",
    "register_agent", "rollout", "sft", "text_of", "train",
]


def train(
    env: str | Mapping[str, Any],
    model: str | PathLike[str] | None = None,
    *,
    out: str | PathLike[str] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    curriculum: str | Callable[[dict[str, Any]], Mapping[str, float] | None] | None = None,
    config: str | PathLike[str] | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> "TrainResult":
    """Trains a model to act in an env.

    Args:
        env: an env id, such as "CodeExec-v0" or "my_module:MyAgent-v0"; or several, with the weights in proportion to
            which groups are drawn from them: {"CodeExec-v0": 0.7, "Math-v0": 0.3}. In place of a weight there may be a
            table of `weight`, `env_kwargs` and `max_turns`.
        model: a hub name or a local Hugging Face folder; None takes SmolLM2-135M, "tiny" a toy that is made here.
        out: the folder of the run; None makes a new one under `runs/`.
        steps: how many optimizer steps; None takes what the configuration says.
        seed: fixes tasks, sampling and order; None takes what the configuration says, or the run that is gone on with.
        curriculum: called with the metrics of each step, before the next one; it returns new weights by env id, or
            None. A function, or "module:function".
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

    return api.train_with({}, env, model, out=out, steps=steps, seed=seed, curriculum=curriculum, config=config,
                          **overrides)


def sft(
    data: str | PathLike[str] | Iterable[Any] | None,
    model: str | PathLike[str] | None = None,
    *,
    out: str | PathLike[str] | None = None,
    config: str | PathLike[str] | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> "TrainResult":
    """Trains a model on conversations that others wrote, or on rollouts that were recorded.

    Only what the assistant says is learnt, up to the stop token, in the context in which the model would say it.

    Args:
        data: chat rows such as {"messages": [...], "tools": [...]}, or trajectories: a JSON-lines or Parquet file, the
            folder of a run, the name of a dataset, a list of these, or anything that gives rows, such as a list or a
            `datasets.Dataset`. None takes what the run that is resumed was given by name.
        model: as for `train`.
        out: the folder of the run; None makes a new one under `runs/`. One that holds a run is gone on with.
        config: a TOML file, or nested settings as a mapping.
        **overrides: further settings, such as `epochs=3`, `batch_size=32`, `actor__lr=1e-5`, `eval__share=0.05` or
            `rollouts__min_reward=1.0`.

    Returns:
        The folder of the run, its metrics, and its last checkpoint; the best one has the lowest held-out loss.

    Raises:
        ConfigError: a setting is unknown or contradicts another one, or a row cannot be learnt from; it is named.
        RunFailed: the loss is not finite; nothing is exported.
    """
    from .trainers import sft

    return sft.sft(data, model, out=out, config=config, **overrides)


def distill(
    env: str | Mapping[str, Any],
    student: str | PathLike[str] | None = None,
    teacher: str | PathLike[str] | None = None,
    *,
    out: str | PathLike[str] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    curriculum: str | Callable[[dict[str, Any]], Mapping[str, float] | None] | None = None,
    config: str | PathLike[str] | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> "TrainResult":
    """Trains a student to act in an env as its teacher would: on-policy distillation.

    The student plays, and the teacher says how likely it would have been to sample each token, in the same context.
    What is minimised is the reverse KL(student ‖ teacher) on the student's own samples; rewards are reported and change
    nothing. It is `train` with `algorithm.estimator = "on_policy_distill"`, a KL of coefficient 1 in the place of the
    reward, and `algorithm.teacher`, in any env that `train` takes.

    Args:
        env: as for `train`.
        student: the model that is trained, as `model` of `train`.
        teacher: a hub name or a local folder, such as RUN/model, with the same tokenizer; it is never changed. None
            takes what the configuration says, or the run that is gone on with.
        out: as for `train`.
        steps: as for `train`.
        seed: as for `train`.
        curriculum: as for `train`.
        config: as for `train`.
        **overrides: further settings, as for `train`. `algorithm__teacher_engine="vllm"` gives the teacher an engine.

    Returns:
        The folder of the run with the student, its metrics (policy/kl_ref is the divergence, in nats per token), and
        its last checkpoint.

    Raises:
        ConfigError: a setting is unknown or contradicts another one, or the tokenizers differ.
        UnknownEnv, NotAChatEnv: `env` cannot be trained in.
        RunFailed: too many rollouts failed; nothing is exported.
    """
    from .trainers import distill

    return distill.distill(env, student, teacher, out=out, steps=steps, seed=seed, curriculum=curriculum, config=config,
                           **overrides)


def evaluate(
    env: str | Sequence[str],
    model: str | PathLike[str] | Policy | PolicyFunction | None = None,
    *,
    episodes: int | None = None,
    k: int | Sequence[int] | None = None,
    seed: int | None = None,
    endpoint: str | None = None,
    endpoint_model: str | None = None,
    out: str | PathLike[str] | None = None,
    config: str | PathLike[str] | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> "EvalResult | dict[str, EvalResult]":
    """Scores a model on the held-out tasks of an env, or of several.

    Args:
        env: an env id, or several.
        model: as for `train`, a checkpoint, a run's folder, or anything that `as_policy` takes.
        episodes: how many tasks; None takes what the configuration says, or else 64.
        k: how many attempts at each task, or the k of several pass@k, of which the largest is how many; None takes what
            the configuration says, or else 1.
        seed: fixes tasks and sampling; None takes what the configuration says, or else 0.
        endpoint: URL of an OpenAI-compatible API to ask instead, with the key in OPENAI_API_KEY.
        endpoint_model: the model's name there.
        out: a folder for a table of the tasks of each env. What is in it is not played again.
        config: a TOML file, or nested settings as a mapping.
        **overrides: further settings, as for `train`.

    Returns:
        The scores; by env id if `env` is a list.

    Raises:
        ConfigError: a setting is wrong, or `out` has scores of other settings.
        RunFailed: no attempt ended.
    """
    from .trainers import evaluation

    return evaluation.evaluate(env, model, episodes=episodes, k=k, seed=seed, endpoint=endpoint,
                               endpoint_model=endpoint_model, out=out, config=config, **overrides)


def export(
    source: str | PathLike[str],
    out: str | PathLike[str],
    *,
    dtype: str | None = None,
    step: int | str | None = None,
    model: str | PathLike[str] | None = None,
) -> Path:
    """Writes the model of a checkpoint as a folder that transformers and vLLM load, without a GPU.

    Args:
        source: the folder of a run or of a checkpoint.
        out: a new folder.
        dtype: of the weights, such as "float32"; None keeps the one in which each came.
        step: of a run, which checkpoint; "best" the one with the highest held-out score, None the newest.
        model: the folder of the model with which training began, if it was moved.

    Returns:
        `out`.

    Raises:
        ConfigError: there is no such checkpoint, it is not whole, or `out` is in use.
    """
    from .trainers.export import export

    return export(source, out, dtype=dtype, step=step, model=model)


def parallel_env(env_id: str, **kwargs: Any) -> "GameParallelEnv":
    """A game as an environment of PettingZoo, whose agents are its seats.

    Args:
        env_id: of a `GameEnv`, such as "TicTacToe-v0".
        **kwargs: for it.

    Raises:
        ConfigError: PettingZoo is not installed, or the id is no game.
    """
    try:
        from .adapters.pettingzoo_parallel import GameParallelEnv
    except ModuleNotFoundError as error:
        if error.name != "pettingzoo":
            raise
        raise ConfigError("pettingzoo is not installed: pip install 'molt-gym[pettingzoo]'") from error
    return GameParallelEnv(env_id, **kwargs)


def rollout(
    env: str,
    policy: str | PathLike[str] | Policy | PolicyFunction | None,
    n: int,
    *,
    seed: int | None = None,
    config: str | PathLike[str] | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> "list[Trajectory]":
    """Plays `n` episodes.

    Args:
        env: an env id.
        policy: a function from an observation to an assistant message or its text, a `Policy`, or a model as for
            `train`.
        n: how many episodes.
        seed: fixes tasks and sampling; None takes what the configuration says, or else 0.
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
    register("Geo3k-v0", "molt_gym.envs.geo3k:Geo3kEnv", nondeterministic=True)
    register("Judge-v0", "molt_gym.envs.judge:JudgeEnv", nondeterministic=True)
    register("TicTacToe-v0", "molt_gym.envs.games:TicTacToe")
    register("ConnectFour-v0", "molt_gym.envs.games:ConnectFour")
    register("Negotiation-v0", "molt_gym.envs.games:Negotiation")
    register(
        "Geo3kAgent-v0",
        "molt_gym:AgentEnv",
        nondeterministic=True,
        kwargs={"agent": "molt_gym.envs.geo3k:Geo3kAgent"},
    )
