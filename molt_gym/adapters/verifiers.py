"""Environments of verifiers as agents: `verifiers/Taskset-v0` for any taskset, `verifiers/NAME-v0` for installed ones.

Invariants: verifiers plays a whole episode and this server answers its requests, so nothing is a turn that it did not
make; the reward is the one that it records; a trace with an error is a failure, not a reward of 0.
"""

import importlib.util
import itertools
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import distributions
from typing import Any

import numpy as np

from ..agents import AgentContext, ChatAgent, Result
from ..errors import ConfigError
from ..registry import register
from .global_random import GlobalRandom

__all__ = ["VerifiersAgent", "VerifiersError", "register_ids"]

TURNS = 32
"""Cap on turns of the ids."""
_CHAT = "molt_gym_chat"


class VerifiersError(RuntimeError):
    """Verifiers recorded an error; the message is its own."""


class VerifiersAgent(ChatAgent):
    """An environment of verifiers, whose seats talk to the policy.

    Reward: that of the trace; the mean over the traces of those seats that are to be trained, if there are more.
    `info` has verifiers' "rewards", "metrics" and "stop" condition. Seats without a harness of their own, or of the
    taskset, get one that talks in this process; programs run on this machine unless `env` says otherwise.

    Args:
        taskset: id of an installed taskset.
        tasks: how many of its tasks there are, the first ones; needed where they never end.
        env: further settings of the environment, as in the `[env]` table of verifiers' own configuration.
        **settings: of the taskset.

    Raises:
        ConfigError: verifiers has no such taskset, or refuses a setting.
    """

    own_process = True
    presets = {"": {"rollout": {"max_tokens": 1024}}}

    def __init__(
        self, *, taskset: str, tasks: int | None = None, env: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        if tasks is not None and tasks < 1:
            raise ConfigError(f"tasks: {tasks!r}; write a number from 1 on, or None for all")
        self._taskset = taskset
        with _verifiers() as vf:
            try:
                data = {**(env or {}), "taskset": {"id": taskset, **settings}}
                self._config = vf.resolve_env_config(_with_defaults(vf, data))
                loaded = vf.load_environment(self._config).taskset
                if not loaded.bounded and tasks is None:
                    raise ConfigError(f"tasks: {taskset!r} has no end; write how many of its tasks there are")
                self._tasks = list(itertools.islice(loaded, tasks))
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"taskset: {taskset!r} cannot be loaded: {error}") from error
        self.num_tasks = len(self._tasks)

    def task(self, index: int, rng: np.random.Generator) -> Any:
        """Verifiers' task of this number."""
        return self._tasks[index]

    async def run(self, ctx: AgentContext) -> Result:
        """Has verifiers play an episode.

        Raises:
            VerifiersError: it recorded an error.
        """
        import verifiers.v1 as vf

        # An environment holds what serves one episode at a time.
        env = vf.load_environment(_limited(self._config, ctx.max_turns))
        # Its clients read their keys from the environment alone.
        variable = f"MOLT_GYM_RUN_{secrets.token_hex(8).upper()}"
        os.environ[variable] = ctx.api_key
        try:
            async with env.serving():
                endpoint = vf.EvalClientConfig(base_url=ctx.base_url, api_key_var=variable)
                episode = await env.run_episode(ctx.task, vf.ModelContext(model=ctx.model, client=endpoint))
        finally:
            del os.environ[variable]
        return _result(episode)

    def __str__(self) -> str:
        return f"verifiers {self._taskset}"


def register_ids() -> None:
    """An id for any taskset, and one for each that comes in an installed package that needs verifiers."""
    _register("verifiers/Taskset-v0")
    for name in sorted(_installed()):
        versioned = name if re.search(r"-v\d+$", name) else f"{name}-v0"
        _register(f"verifiers/{versioned}", taskset=name)


def _register(env_id: str, **settings: Any) -> None:
    # Nothing is known of what tasksets of others do.
    register(env_id, "molt_gym.agents:AgentEnv", max_episode_steps=TURNS, nondeterministic=True,
             kwargs={"agent": "molt_gym.adapters.verifiers:VerifiersAgent", **settings})


def _installed() -> Iterator[str]:
    for distribution in distributions():
        needed = [line for line in distribution.requires or () if "extra ==" not in line]
        if any(re.match(r"verifiers\b(?!-)", line) for line in needed):
            name = distribution.metadata["Name"]
            if importlib.util.find_spec(re.sub(r"[-.]", "_", name).lower()):
                yield name


def _with_defaults(vf: Any, data: dict[str, Any]) -> dict[str, Any]:
    """The settings with a local runtime and a harness for each seat whose author chose none."""
    taskset, env_id = data["taskset"]["id"], data.get("id", "")
    own = vf.default_harness_id(taskset) != "bash"
    for name, field in vf.env_config_type(taskset, env_id).model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            seat = dict(data.get(name) or {})
            # Its own default is a sandbox that one pays for.
            if "runtime" not in field.default.model_fields_set:
                seat.setdefault("runtime", {"type": "subprocess"})
            if not own and field.default.harness is None:
                seat.setdefault("harness", {"id": _CHAT})
            data[name] = seat
    return data


def _limited(config: Any, max_turns: int | None) -> Any:
    """The configuration with the run's cap on turns for each seat, at which verifiers stops and scores."""
    import verifiers.v1 as vf

    seats = {name: seat.model_copy(update={"max_turns": seat.max_turns or max_turns})
             for name, seat in config if isinstance(seat, vf.AgentConfig)}
    return config.model_copy(update=seats)


def _result(episode: Any) -> Result:
    for error in (episode.last_error, *(trace.last_error for trace in episode.traces)):
        if error is not None and not episode.ok:
            raise VerifiersError(f"{error.type}: {error.message}")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise VerifiersError("no seat of the episode is to be trained")
    info = {"rewards": {name: reward.value for trace in traces for name, reward in trace.rewards.items() if reward},
            "metrics": {name: value for trace in traces for name, value in trace.metrics.items()},
            "stop": traces[0].stop_condition}
    return Result(sum(trace.reward for trace in traces) / len(traces), info=info,
                  truncated=any(trace.stop_condition == "max_turns" for trace in traces))


_importing = threading.Lock()


@contextmanager
def _verifiers() -> Iterator[Any]:
    """The package, with our harness among its own; importing it draws from global generators."""
    with _importing, GlobalRandom():
        import verifiers.v1 as vf

        from . import verifiers_chat

        # It finds harnesses as modules of a package of its own.
        sys.modules.setdefault(f"verifiers.v1.harnesses.{_CHAT}", verifiers_chat)
        yield vf
