"""What every chat env must keep to, as checks that `molt-gym check-env ID` runs on any of them.

Invariant: a check that fails says what was done and what came of it; the others go on.
"""

import copy
import json
import math
import os
import pickle
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from .agents import AgentEnv
from .errors import EnvFailure
from .footprint import footprint
from .judge_calls import rehearsal
from .messages import Message
from .registry import find_spec
from .task_env import TaskEnv

__all__ = ["CHECKS", "Finding", "check", "some_turns"]

_STEPS = 300
"""Replies after which an episode that still goes on is left alone."""
_ROUNDS = 4
"""Envs that are made, played and closed to see whether each of them leaves something."""
_SETTLES = 5.0
"""Seconds in which what is ending has to end."""
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


Maker = Callable[[], gym.Env]


def check(env_id: str, **kwargs: Any) -> list[Finding]:
    """Runs all checks.

    Args:
        env_id: as for `molt_gym.make`.
        **kwargs: as for `molt_gym.make`.

    Raises:
        UnknownEnv, NotAChatEnv: there is nothing to check.
    """
    from .trainers.rollout.env_maker import EnvMaker

    fresh = EnvMaker.of(env_id, kwargs)
    fresh().close()
    findings = []
    for name, run in CHECKS.items():
        try:
            with rehearsal():
                run(fresh)
            findings.append(Finding(name, None))
        except _Wrong as error:
            findings.append(Finding(name, str(error)))
        except Exception as error:  # noqa: BLE001  whatever an env raises is what is looked for
            findings.append(Finding(name, f"{type(error).__name__}: {error}"))
    return findings


@rehearsal()
def some_turns(env: gym.Env) -> list[Any]:
    """What a reset and some replies to it bring about: observations, rewards, ends and infos."""
    said: list[Any] = [env.reset(seed=5)]
    for text in ("0", "no", "1"):
        said.append(env.step(_say(text)))
        if any(said[-1][2:4]):
            break
    return said


def _gymnasium(fresh: Maker) -> None:
    with closing(fresh()) as env, warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=True)


def _seeding(fresh: Maker) -> None:
    with closing(fresh()) as first, closing(fresh()) as second:
        fixed = _fixed(first)
        for seed in (0, 1, 2**31):
            ours, theirs = first.reset(seed=seed), second.reset(seed=seed)
            if ours != theirs:
                raise _Wrong(f"reset(seed={seed}) of two envs gave different observations or infos")
            for text in ("0", "no", "1"):
                outcomes = [env.step(_say(text)) for env in (first, second)]
                if fixed and outcomes[0] != outcomes[1]:
                    raise _Wrong(f"after reset(seed={seed}) the same replies had different outcomes; if that must be "
                                 "so, register the env with nondeterministic=True")
                if any(outcomes[0][2:4]) or any(outcomes[1][2:4]):
                    break


def _global_state(fresh: Maker) -> None:
    before = _state()
    with closing(fresh()) as env:
        env.reset(seed=7)
        env.step(_say("1"))
        changed = [name for name, value in _state().items() if value != before[name]]
        alone = getattr(fresh, "own_process", False)
        if getattr(type(env.unwrapped), "own_process", False) and not alone:
            raise _Wrong("own_process is not seen where a function or a wrapper makes the env; register the class")
        if changed and not alone:
            raise _Wrong(f"making, reset or step changed {' and '.join(changed)}, which other envs share; draw from "
                         "self.np_random, and leave the rest as it is, or set own_process = True")


def _state() -> dict[str, Any]:
    return {"Python's global generator": random.getstate(),
            "numpy's global generator": (np.random.get_state()[1].tobytes(), np.random.get_state()[2]),
            "the working directory": os.getcwd(), "os.environ": dict(os.environ)}


def _tasks(fresh: Maker) -> None:
    with closing(fresh()) as env:
        count = getattr(env.unwrapped, "num_tasks", None)
        if not isinstance(env.unwrapped, TaskEnv):
            return
        for index in {0, 1, (count or 1000) - 1} - {count}:
            first, info = env.reset(seed=1, options={"index": index})
            if info["task_index"] != index or first != env.reset(seed=1, options={"index": index})[0]:
                raise _Wrong(f"reset(options={{'index': {index}}}) gave another task, or two different ones")
        for index in (-1, "0", *([count] if count else ())):
            try:
                env.reset(options={"index": index})
            except ValueError:
                continue
            raise _Wrong(f"reset(options={{'index': {index!r}}}) was taken")


def _replies(fresh: Maker) -> None:
    with closing(fresh()) as env:
        for reply in _odd_replies():
            if isinstance(env.unwrapped, AgentEnv) and reply["content"] == _LONE:
                continue  # SDKs cannot send it back.
            env.reset(seed=3)
            given = copy.deepcopy(reply)
            try:
                observation, reward, terminated, truncated, _ = env.step(reply)
            except EnvFailure as error:
                raise _Wrong(f"the reply {_short(reply)} was taken for a failure of the env ({error}); nonsense scores "
                             "low") from error
            if reply != given:
                raise _Wrong(f"step changed the reply {_short(given)} that it was given")
            if not math.isfinite(reward):
                raise _Wrong(f"the reply {_short(reply)} was rewarded with {reward}")
            if not (isinstance(terminated, bool) and isinstance(truncated, bool)):
                raise _Wrong(f"terminated or truncated is no bool after the reply {_short(reply)}")
            if observation not in env.observation_space:
                raise _Wrong(f"the observation after the reply {_short(reply)} is not in the observation space")


def _end(fresh: Maker) -> None:
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


def _leftovers(fresh: Maker) -> None:
    _begun_and_closed(fresh)
    before = footprint()
    if before is None:
        return
    for _ in range(_ROUNDS):
        _begun_and_closed(fresh)
    until = time.monotonic() + _SETTLES
    while max((grown := footprint() - before).files, grown.threads, grown.processes) >= _ROUNDS:
        if time.monotonic() > until:
            raise _Wrong(f"{_ROUNDS} envs that were played and closed left {grown.files} open files, {grown.threads} "
                         f"threads and {grown.processes} processes; end them in close()")
        time.sleep(0.05)


def _begun_and_closed(fresh: Maker) -> None:
    with closing(fresh()) as env:
        some_turns(env)
        env.reset(seed=6)


def _spec(fresh: Maker) -> None:
    with closing(fresh()) as env:
        spec, env_id = env.spec, env.spec.id if env.spec else None
        if spec is None:
            raise _Wrong("it has no spec; make it by an id")
        for space in (env.observation_space, env.action_space):
            if pickle.loads(pickle.dumps(space)) != space:  # noqa: S301
                raise _Wrong(f"a copy of {space!r:.100} is not equal to it")
    try:
        again = EnvSpec.from_json(spec.to_json())
    except (TypeError, ValueError) as error:
        raise _Wrong(f"its spec has no JSON form ({error}); register it by strings and plain values") from error
    for copied in (again, pickle.loads(pickle.dumps(spec))):  # noqa: S301
        if copied.id != env_id:
            raise _Wrong(f"a copy of its spec is of {copied.id}")
    find_spec(env_id)


def _elsewhere(fresh: Maker) -> None:
    from .trainers.rollout.env_process import EnvProcess

    with closing(fresh()) as env, closing(EnvProcess(fresh)) as process:
        # One that always has a process of its own is nowhere else.
        fixed, here = _fixed(env), process.run(some_turns) if getattr(fresh, "own_process", False) else some_turns(env)
    for observation, *_ in here:
        json.dumps(observation)
    if pickle.loads(pickle.dumps(here)) != here:  # noqa: S301
        raise _Wrong("what it says is not equal to a copy that was sent; give infos plain values")
    with closing(EnvProcess(fresh)) as process:
        there = process.run(some_turns)
    if there[0] != here[0] or (fixed and there != here):
        raise _Wrong("the same seed and replies had different outcomes in another process; nothing may depend on "
                     "hashes, on time, or on what else this process did")


def _fixed(env: gym.Env) -> bool:
    return not (env.spec and env.spec.nondeterministic)


CHECKS: dict[str, Callable[[Maker], None]] = {
    "Gymnasium's own checks": _gymnasium,
    "equal seeds, equal episodes": _seeding,
    "what all envs share stays as it is": _global_state,
    "tasks by their index": _tasks,
    "any reply is taken": _replies,
    "an end is an end": _end,
    "its spec and spaces can be sent": _spec,
    "it plays in another process": _elsewhere,
    "what is closed leaves nothing": _leftovers,
}


def _odd_replies() -> Iterator[Message]:
    yield from map(_say, _TEXTS)
    yield {"role": "assistant", "content": None, "tool_calls": [_CALL]}
    yield {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [_CALL, _CALL | {"id": "2"}]}


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _short(reply: Message) -> str:
    return f"{reply.get('content')!r:.60}" + " with tool calls" * ("tool_calls" in reply)
