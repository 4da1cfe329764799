"""What is done with an env where it lives, in a thread of the trainer's process or in a process of its own.

Invariant: importing this module loads neither torch nor a server, as every env's process does it.
"""

import concurrent.futures
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any, TypeVar

import cloudpickle
import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from molt_gym.agents import AgentEnv, AgentRun, Result
from molt_gym.errors import EnvFailure
from molt_gym.judge import Judge
from molt_gym.judge_calls import metered
from molt_gym.judge_source import is_local
from molt_gym.messages import Conversation, Message, validate_conversation
from molt_gym.multi_agent import GameEnv
from molt_gym.task_env import TaskEnv, finite

from .ticket import Ticket

T = TypeVar("T")

END_TIMEOUT = 5.0
"""Seconds that an agent whose turns are used up may take to end."""
_ASK_EVERY = 1.0
_PLAIN = (OrderEnforcing, PassiveEnvChecker, TimeLimit)


class GameInfo(dict[str, Any]):
    """The info of a game, whose keys of seats mean what `GameEnv` says; another env may have such keys of its own."""


def _told(env: gym.Env, info: dict[str, Any]) -> dict[str, Any]:
    return GameInfo(plain(info)) if isinstance(env.unwrapped, GameEnv) else plain(info)


def reset(env: gym.Env, ticket: Ticket) -> tuple[Conversation, dict[str, Any]] | None:
    """The first observation and its info; None if the env is an agent that plays by itself."""
    if plays_itself(env):
        return None
    observation, info = env.reset(**choose_task(env, ticket.index, ticket.env_seed))
    validate_conversation(observation, "observation")
    return observation, _told(env, info)


def step(env: gym.Env, reply: Message) -> tuple[Conversation, float, bool, bool, dict[str, Any]]:
    """What `env.step` returns, checked; of the info of a game also the rewards and results of its seats."""
    with metered() as counted:
        observation, reward, terminated, truncated, info = env.step(reply)
    info = {**info, **counted}
    validate_conversation(observation, "observation")
    told = _told(env, info)
    if isinstance(score := info.get("score"), Real):
        # One that is not finite is not among what is told, so that the reward would count in its place.
        finite(score, "the score")
    if isinstance(told, GameInfo):
        rewards = {seat: finite(value, f"the reward of {seat}") for seat, value in info["rewards"].items()}
        told |= {"rewards": rewards, "results": dict(info.get("results", {}))}
    # TimeLimit says of every episode that ends at its limit that it was cut.
    cut = bool(truncated) and not terminated
    return observation, finite(reward, "the reward"), bool(terminated), cut, told


def leave(env: gym.Env) -> None:
    """Free what an episode holds, whether or not it came to its end."""
    if isinstance(env.unwrapped, TaskEnv):
        env.unwrapped.leave()


def turn_limit(env: gym.Env) -> int | None:
    """The cap on turns that the env was made with."""
    return env.spec.max_episode_steps if env.spec else None


def survey(env: gym.Env) -> tuple[int | None, set[str]]:
    """How many tasks there are, None for no end of them; and which local models judge."""
    owners = (env.unwrapped, getattr(env.unwrapped, "agent", None))
    held = [value for owner in owners for value in getattr(owner, "__dict__", {}).values() if isinstance(value, Judge)]
    return getattr(env.unwrapped, "num_tasks", None), {judge.source for judge in held if is_local(judge.source)}


def choose_task(env: gym.Env, index: int, seed: int) -> dict[str, Any]:
    """The keywords for `reset` that play task `index`: our envs take it as an option, others as the seed."""
    if isinstance(env.unwrapped, TaskEnv):
        return {"seed": seed, "options": {"index": index}}
    return {"seed": index}


def plays_itself(env: gym.Env) -> bool:
    """Whether the env is an agent with nothing around it but what `gymnasium.make` puts there."""
    while isinstance(env, gym.Wrapper):
        if type(env) not in _PLAIN:
            return False
        env = env.env
    return isinstance(env, AgentEnv)


def plain(info: dict[str, Any]) -> dict[str, Any]:
    """The finite numbers and the texts of `info`, which is all that transcripts take."""
    values = {str(key): value.item() if getattr(value, "ndim", None) == 0 else value for key, value in info.items()}
    return {key: value for key, value in values.items()
            if isinstance(value, str) or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)}


def run_agent(env: gym.Env, key: str, url: str, **options: Any) -> tuple[Result, bool]:
    """Run the agent of an env in its own process, on a session that is open in the trainer's.

    Args:
        **options: for `AgentEnv.launch`.

    Returns:
        What came of it, and whether its thread has ended.

    Raises:
        EnvFailure: from the agent, or with the reason "timeout".
    """
    session = _Session(key, url)
    run = env.unwrapped.launch(session, **options)
    try:
        result = _outcome(run, session)
    finally:
        run.cancel()
    return replace(result, info=plain(result.info)), run.join(_ASK_EVERY)


def _outcome(run: AgentRun, session: "_Session") -> Result:
    while not concurrent.futures.wait([run.future], min(_ASK_EVERY, run.context.remaining())).done:
        if not run.context.remaining():
            raise deadline_passed()
        if session.is_set():
            concurrent.futures.wait([run.future], END_TIMEOUT)
            return run.future.result() if run.future.done() else run.so_far(truncated=True)
    return run.future.result()


def deadline_passed() -> EnvFailure:
    """For an agent."""
    return EnvFailure("timeout", "the agent has not ended before its deadline (run_timeout)")


class _Session:
    """What a run reads of its session, asked from the trainer's process."""

    def __init__(self, key: str, url: str) -> None:
        self.key, self.url, self.over = key, url, self

    def is_set(self) -> bool:
        return _ask()[0]

    @property
    def overflowed(self) -> bool:
        return _ask()[1]

    @property
    def failure(self) -> Exception | None:
        name, text = _ask()[2:]
        return type(name, (Exception,), {})(text) if name else None


_trainer: Connection
_asking = threading.Lock()


def _ask() -> tuple[bool, bool, str, str]:
    with _asking:
        _trainer.send_bytes(cloudpickle.dumps(("ask", None)))
        return pickle.loads(_trainer.recv_bytes())


def serve(connection: Connection) -> None:
    """Make the env that is sent first, and do with it what is sent next, until an empty message ends it."""
    global _trainer
    _trainer = connection
    make, env = connection.recv_bytes(), None
    while work := connection.recv_bytes():
        try:
            env = env if env is not None else pickle.loads(make)()
            answer = cloudpickle.dumps(("done", pickle.loads(work)(env)))
        except BaseException as error:  # noqa: BLE001  the trainer's process raises it
            answer = cloudpickle.dumps(("raised", _portable(error)))
        connection.send_bytes(answer)
    if env is not None:
        env.close()


def _portable(error: BaseException) -> tuple[Exception, str]:
    """An error in a form that can be read elsewhere, and its traceback."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, EnvFailure):
        # One of a class of a user's own may not be made from what it holds; its reason must not be lost.
        return EnvFailure(error.reason, error.detail), text
    try:
        return storable(pickle.loads(cloudpickle.dumps(error))), text
    except Exception:  # noqa: BLE001  errors may have constructors of any kind
        return RuntimeError(f"{type(error).__name__}: {error}"), text


def carried(call: Callable[..., T], *arguments: Any) -> T:
    """What a user's code returns; what it raises is made `storable`."""
    try:
        return call(*arguments)
    except BaseException as error:
        if (found := storable(error)) is error:
            raise
        raise found from error


def storable(error: BaseException) -> Exception:
    """The error, or one that a future can carry and that does not end the run, as that of an env that calls exit()."""
    # asyncio takes the cancellation of a future within the env for one of whoever waits for the env.
    if isinstance(error, Exception) and not isinstance(error, StopIteration | concurrent.futures.CancelledError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
