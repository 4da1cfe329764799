"""Plays one rollout, from reset to the reward.

Invariants: a rollout ends with a finite reward or with a `Failure` that says why not, never with an exception (but for
cancellation); every wait has a deadline; an env whose state is unknown is not used again.
"""

import asyncio
import math
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from molt_gym.errors import EnvFailure, PromptTooLong
from molt_gym.messages import Message, validate_conversation
from molt_gym.tokens import Failure, Trajectory

from .env_worker import DeadlinePassed, EnvPool, EnvWorker, choose_task
from .seats import ContextFull, Seat
from .ticket import Ticket

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds, and the caps on a rollout."""

    reset_timeout: float = 60.0
    step_timeout: float = 60.0
    generate_timeout: float = 600.0
    episode_timeout: float = 1800.0
    retries: int = 1


class _Failed(Exception):
    def __init__(self, reason: str, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.reason, self.retry = reason, retry


class Runner:
    """Plays tickets.

    Args:
        env_id: for the record.
        make: makes one env; called in the env's thread.
        seat: whom to ask in attempt number `attempt` at a ticket.
        live: entered while a rollout goes on, such as `Gate.rollout`.
        done: called with each trajectory, as it ends.
    """

    def __init__(
        self,
        env_id: str,
        make: Callable[[], gym.Env],
        seat: Callable[[Ticket, int], Seat],
        limits: Limits,
        *,
        live: Callable[[], AbstractContextManager[None]] = nullcontext,
        done: Callable[[Trajectory], None] = lambda _: None,
    ) -> None:
        self.env_id, self.limits = env_id, limits
        self._envs = EnvPool(make)
        self._seat, self._live, self._done = seat, live, done

    async def play(self, ticket: Ticket) -> Trajectory:
        """The rollout, played again up to `retries` times if the env failed."""
        with self._live():
            for attempt in range(self.limits.retries + 1):
                trajectory, retry = await self._attempt(ticket, attempt)
                if not retry:
                    break
        self._done(trajectory)
        return trajectory

    def close(self) -> None:
        """Close the envs that no rollout holds."""
        self._envs.close()

    async def _attempt(self, ticket: Ticket, attempt: int) -> tuple[Trajectory, bool]:
        started, retry = time.perf_counter(), False
        trajectory = Trajectory(env=self.env_id, index=ticket.index, group=ticket.group, rollout=ticket.rollout,
                                step=ticket.step)
        seat, worker = self._seat(ticket, attempt), self._envs.take()
        try:
            async with asyncio.timeout(self.limits.episode_timeout):
                await self._episode(trajectory, seat, worker, ticket.derive(attempt) % 2**31)
        except _Failed as error:
            retry = error.retry
            trajectory.failure = _failure(error.reason, error)
        except TimeoutError as error:
            trajectory.failure = _failure("episode_timeout", error)
        finally:
            self._envs.give_back(worker)
        if trajectory.failure is not None:
            trajectory.reward = None
        seat.record(trajectory)
        trajectory.seconds = time.perf_counter() - started
        return trajectory, retry

    async def _episode(self, trajectory: Trajectory, seat: Seat, worker: EnvWorker, seed: int) -> None:
        observation, _ = await self._env("reset", worker, lambda env: env.reset(
            **choose_task(env, trajectory.index, seed)), self.limits.reset_timeout)
        total, over = 0.0, False
        while not over:
            self._check(observation)
            trajectory.messages, trajectory.tools = observation["messages"], observation["tools"]
            try:
                reply = await self._reply(seat, observation)
            except ContextFull:
                trajectory.truncated = trajectory.length_limited = True
                break
            observation, reward, terminated, truncated, info = await self._env(
                "step", worker, lambda env, reply=reply: env.step(reply), self.limits.step_timeout)
            total += _finite(reward)
            trajectory.terminated, trajectory.truncated = bool(terminated), bool(truncated)
            over, trajectory.info = bool(terminated or truncated), _plain(info)
        trajectory.messages = observation["messages"]
        trajectory.reward = total

    def _check(self, observation: Any) -> None:
        try:
            validate_conversation(observation, "observation")
        except ValueError as error:
            raise _Failed("observation", f"{self.env_id}: {error}") from error

    async def _reply(self, seat: Seat, observation: Any) -> Message:
        limit = asyncio.timeout(self.limits.generate_timeout)
        try:
            async with limit:
                return await seat.reply(observation)
        except TimeoutError as error:
            if not limit.expired():
                raise _Failed("policy_error", f"the policy raised {type(error).__name__}: {error}") from error
            raise _Failed("generate_timeout", f"no reply within {self.limits.generate_timeout:g} s "
                          "(rollout.generate_timeout)") from error
        except PromptTooLong as error:
            raise _Failed("prompt_too_long", str(error)) from error
        except ContextFull:
            raise
        except Exception as error:  # noqa: BLE001  a reply that fails, fails this rollout alone
            raise _Failed("policy_error", f"the policy raised {type(error).__name__}: {error}") from error

    async def _env(self, name: str, worker: EnvWorker, work: Callable[[gym.Env], T], timeout: float) -> T:
        try:
            return await worker.call(work, timeout)
        except EnvFailure as error:
            raise _Failed(error.reason, str(error), retry=True) from error
        except DeadlinePassed as error:
            raise _Failed(f"{name}_timeout", f"{self.env_id}: {name} took more than {timeout:g} s "
                          f"(rollout.{name}_timeout)") from error
        except Exception as error:  # noqa: BLE001  whatever a user's env raises fails this rollout alone
            raise _Failed(f"{name}_error", f"{self.env_id}: {name} raised {type(error).__name__}: {error}") from error


def _finite(reward: Any) -> float:
    try:
        value = float(reward) if isinstance(reward, Real | np.bool_) else math.nan
    except OverflowError:
        value = math.inf
    if math.isfinite(value):
        return value
    raise _Failed("reward", f"the reward is {reward!r:.200} ({type(reward).__name__}); return a finite number")


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    """The numbers and texts of `info`, which is all that metrics and transcripts take."""
    return {str(key): value for key, value in info.items() if isinstance(value, bool | int | float | str)
            and not (isinstance(value, float) and not math.isfinite(value))}


def _failure(reason: str, error: BaseException) -> Failure:
    return Failure(reason, str(error) or type(error).__name__, "".join(traceback.format_exception(error)))
