"""What every chat env must keep to, as checks that `molt-gym check-env ID` runs on any of them.

Invariant: a check that fails says what was done and what came of it; the others go on.
"""

import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from .agents import AgentEnv
from .errors import EnvFailure
from .messages import Message
from .registry import find_spec, make
from .task_env import TaskEnv

__all__ = ["CHECKS", "Finding", "check"]

_STEPS = 300
"""Replies after which an episode that still goes on is left alone."""
_LONE = "\ud800 \udfff"
_TEXTS = ["", " \n\t", "\x00\x07\x1b[31m", "e\u0301 \u202eRTL \u200b \U0001f9d1\u200d\U0001f680", _LONE,
          "<|im_end|>\n<|im_start|>system", "```python\nprint(1)\n", "<tool_call>{", "</think>",
          "-1e999 NaN Infinity 0x10 \u0663", "x" * 100_000, "[" * 5_000]
_CALL = {"id": "call_1", "type": "function", "function": {"name": "no such tool", "arguments": "{\"a\":"}}


@dataclass(frozen=True)
class Finding:
    """name: of the check. problem: what is wrong; None if nothing is."""

    name: str
    problem: str | None


class _Wrong(Exception):
    pass


def check(env_id: str, **kwargs: Any) -> list[Finding]:
    """Runs all checks.

    Args:
        env_id: as for `molt_gym.make`.
        **kwargs: as for `molt_gym.make`.

    Raises:
        UnknownEnv, NotAChatEnv: there is nothing to check.
    """
    def fresh() -> gym.Env:
        return make(env_id, **kwargs)

    fresh().close()
    findings = []
    for name, run in CHECKS.items():
        try:
            run(fresh)
            findings.append(Finding(name, None))
        except _Wrong as error:
            findings.append(Finding(name, str(error)))
        except Exception as error:  # noqa: BLE001  whatever an env raises is what is looked for
            findings.append(Finding(name, f"{type(error).__name__}: {error}"))
    return findings


def _gymnasium(fresh: Callable[[], gym.Env]) -> None:
    env = fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=True)
    env.close()


def _seeding(fresh: Callable[[], gym.Env]) -> None:
    first, second = fresh(), fresh()
    fixed = not (first.spec and first.spec.nondeterministic)
    for seed in (0, 1, 2**31):
        ours, theirs = first.reset(seed=seed), second.reset(seed=seed)
        if ours != theirs:
            raise _Wrong(f"reset(seed={seed}) of two envs gave different observations or infos")
        for text in ("0", "no", "1"):
            outcomes = [env.step(_say(text)) for env in (first, second)]
            if fixed and outcomes[0] != outcomes[1]:
                raise _Wrong(f"after reset(seed={seed}) the same replies had different outcomes; if that must be so, "
                             "register the env with nondeterministic=True")
            if any(outcomes[0][2:4]) or any(outcomes[1][2:4]):
                break
    first.close()
    second.close()


def _global_state(fresh: Callable[[], gym.Env]) -> None:
    env = fresh()
    before = random.getstate(), np.random.get_state()[1].tobytes(), np.random.get_state()[2]
    env.reset(seed=7)
    env.step(_say("1"))
    after = random.getstate(), np.random.get_state()[1].tobytes(), np.random.get_state()[2]
    env.close()
    if before != after and not getattr(type(env.unwrapped), "own_process", False):
        raise _Wrong("reset or step drew from a global generator, which other envs share; draw from self.np_random, or "
                     "set own_process = True")


def _tasks(fresh: Callable[[], gym.Env]) -> None:
    env = fresh()
    if not isinstance(env.unwrapped, TaskEnv):
        return
    for index in {0, 1, (env.unwrapped.num_tasks or 1000) - 1} - {env.unwrapped.num_tasks}:
        first, info = env.reset(seed=1, options={"index": index})
        if info["task_index"] != index or first != env.reset(seed=1, options={"index": index})[0]:
            raise _Wrong(f"reset(options={{'index': {index}}}) gave another task, or two different ones")
    for index in (-1, "0", *([env.unwrapped.num_tasks] if env.unwrapped.num_tasks else ())):
        try:
            env.reset(options={"index": index})
        except ValueError:
            continue
        raise _Wrong(f"reset(options={{'index': {index!r}}}) was taken")
    env.close()


def _replies(fresh: Callable[[], gym.Env]) -> None:
    env = fresh()
    for reply in _odd_replies():
        if isinstance(env.unwrapped, AgentEnv) and reply["content"] == _LONE:
            continue  # SDKs cannot send it back.
        env.reset(seed=3)
        given = copy.deepcopy(reply)
        try:
            observation, reward, terminated, truncated, _ = env.step(reply)
        except EnvFailure as error:
            raise _Wrong(f"the reply {_short(reply)} was taken for a failure of the env ({error}); nonsense scores low"
                         ) from error
        if reply != given:
            raise _Wrong(f"step changed the reply {_short(given)} that it was given")
        if not math.isfinite(reward):
            raise _Wrong(f"the reply {_short(reply)} was rewarded with {reward}")
        if not (isinstance(terminated, bool) and isinstance(truncated, bool)):
            raise _Wrong(f"terminated or truncated is no bool after the reply {_short(reply)}")
        if observation not in env.observation_space:
            raise _Wrong(f"the observation after the reply {_short(reply)} is not in the observation space")
    env.close()


def _end(fresh: Callable[[], gym.Env]) -> None:
    env = fresh()
    try:
        env.unwrapped.step(_say("x"))
        raise _Wrong("step before reset did not raise ResetNeeded")
    except ResetNeeded:
        pass
    env.reset(seed=0)
    for _ in range(_STEPS):
        _, _, terminated, truncated, _ = env.step(_say("x"))
        if terminated:
            try:
                env.step(_say("x"))
            except ResetNeeded:
                break
            raise _Wrong("step after the end of an episode did not raise ResetNeeded")
        if truncated:
            break
    env.reset(seed=0)
    env.close()
    env.close()


def _spec(fresh: Callable[[], gym.Env]) -> None:
    env = fresh()
    spec, env_id = env.spec, env.spec.id if env.spec else None
    env.close()
    if spec is None:
        raise _Wrong("it has no spec; make it by an id")
    try:
        again = EnvSpec.from_json(spec.to_json())
    except (TypeError, ValueError) as error:
        raise _Wrong(f"its spec has no JSON form ({error}); register it by strings and plain values") from error
    for copied in (again, pickle.loads(pickle.dumps(spec))):  # noqa: S301  what was pickled here
        if copied.id != env_id:
            raise _Wrong(f"a copy of its spec is of {copied.id}")
    find_spec(env_id)


CHECKS: dict[str, Callable[[Callable[[], gym.Env]], None]] = {
    "Gymnasium's own checks": _gymnasium,
    "equal seeds, equal episodes": _seeding,
    "global generators stay as they are": _global_state,
    "tasks by their index": _tasks,
    "any reply is taken": _replies,
    "an end is an end": _end,
    "its spec can be sent": _spec,
}


def _odd_replies() -> Iterator[Message]:
    yield from map(_say, _TEXTS)
    yield {"role": "assistant", "content": None, "tool_calls": [_CALL]}
    yield {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [_CALL, _CALL | {"id": "2"}]}


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _short(reply: Message) -> str:
    return f"{reply.get('content')!r:.60}" + " with tool calls" * ("tool_calls" in reply)
