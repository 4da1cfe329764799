"""Plays one rollout, from reset to the reward.

Invariants: a rollout ends with a finite reward or with a `Failure` that says why not, never with an exception (but for
cancellation, and a setting that cannot be: an address where the server for agents cannot listen); every wait has a
deadline; an env whose state is unknown is not used again.
"""

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import gymnasium as gym

from molt_gym.agents import Result
from molt_gym.errors import ConfigError, EnvFailure, PromptTooLong, RunFailed
from molt_gym.messages import Conversation, Message
from molt_gym.rewards import add_parts
from molt_gym.server.session import Session
from molt_gym.task_env import finite
from molt_gym.tokens import Failure, Trajectory

from .agent_episode import AgentServer, info_of, outcome, play_agent, state_of
from .env_calls import plain, reset, run_agent, step, turn_limit
from .env_worker import DeadlinePassed, EnvPool, EnvWorker
from .seats import Seat
from .stage import Live, Stage
from .table import Others, Table
from .ticket import Ticket

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds, and the caps on a rollout."""

    reset_timeout: float = 60.0
    step_timeout: float = 60.0
    generate_timeout: float = 570.0
    episode_timeout: float = 1800.0
    retries: int = 1


class _Failed(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Runner:
    """Plays tickets.

    Args:
        env_id: for the record.
        make: makes one env; called in the env's thread or process.
        seat: whom to ask in attempt number `attempt` at a ticket, of a game for each seat that the policy has.
        others: whom to ask for further players of a game.
        live: entered while a rollout goes on, such as `Gate.rollout`.
        stage: where all envs that share a limit are in play; by default there is none.
        done: called with each trajectory, as it ends.
        server: for agents, which other runners may share; by default one of its own.
        own_process: whether each env gets a process of its own.
    """

    def __init__(
        self,
        env_id: str,
        make: Callable[[], gym.Env],
        seat: Callable[[Ticket, int], Seat],
        limits: Limits,
        *,
        live: Live = nullcontext,
        stage: Stage | None = None,
        done: Callable[[Trajectory], None] = lambda _: None,
        server: AgentServer | None = None,
        own_process: bool = False,
        others: Others | None = None,
    ) -> None:
        self.env_id, self.limits, self._others = env_id, limits, others
        self._envs = EnvPool(make, own_process=own_process)
        self._phases: dict[int, tuple[str, float]] = {}
        self._seat, self._live, self._done, self._server = seat, live, done, server or AgentServer()
        self._stage = stage or Stage()
        self.retried: Counter[str] = Counter()
        """Failures by reason that a new attempt followed; for the reader to clear."""

    async def play(self, ticket: Ticket) -> Trajectory:
        """The rollout, played again up to `retries` times if the env failed, but not if the policy did.

        That of a game is the one of the first seat, and has those of others; a game that failed is one rollout.
        """
        async with self._stage.place(self._live):
            for attempt in range(self.limits.retries + 1):
                trajectory, retry = await self._attempt(ticket, attempt)
                if trajectory.failure is None or not retry:
                    break
                if attempt < self.limits.retries:
                    self.retried[trajectory.failure.reason] += 1
        self._done(trajectory)
        return trajectory

    def pending(self) -> list[tuple[str, float]]:
        """Each rollout that goes on with what it waits for, and for how many seconds already."""
        now = time.monotonic()
        return [(what, now - since) for what, since in self._phases.values()]

    def close(self) -> None:
        """Close the envs that no rollout holds."""
        self._envs.close()

    async def aclose(self) -> None:
        """`close`, and stop the server for agents, unless others use it."""
        self._envs.close()
        await self._server.release(self)

    async def _attempt(self, ticket: Ticket, attempt: int) -> tuple[Trajectory, bool]:
        started, retry = time.perf_counter(), False
        trajectory = Trajectory(env=self.env_id, index=ticket.index, group=ticket.group, rollout=ticket.rollout,
                                step=ticket.step)
        table, worker = Table(ticket, attempt, self._seat, self._others), self._envs.take()
        try:
            async with asyncio.timeout(self.limits.episode_timeout):
                await self._episode(trajectory, table, worker, ticket)
        except (EnvFailure, _Failed) as error:
            # SDKs have sent a request that failed again already: two budgets of retries would multiply.
            retry = isinstance(error, EnvFailure) and error.reason != "generation"
            trajectory.failure = _failure(error.reason, str(error), error)
        except TimeoutError as error:
            message = f"no end within {self.limits.episode_timeout:g} s (rollout.episode_timeout)"
            trajectory.failure = _failure("episode_timeout", message, error)
        except (ConfigError, RunFailed):
            raise
        except Exception as error:  # noqa: BLE001  whatever goes wrong in one rollout is not the end of all
            trajectory.failure = _failure("error", f"{type(error).__name__}: {error}", error)
        finally:
            self._phases.pop(id(trajectory), None)
            self._envs.give_back(worker)
        if not trajectory.seat:
            table.first.record(trajectory)
        for own in (trajectory, *trajectory.others):
            own.seconds = time.perf_counter() - started
        return trajectory, retry

    async def _episode(self, trajectory: Trajectory, table: Table, worker: EnvWorker, ticket: Ticket) -> None:
        self._enter(trajectory, "reset")
        begun = await self._env("reset", worker, partial(reset, ticket=ticket), self.limits.reset_timeout)
        if begun is None:
            self._enter(trajectory, "agent")
            await self._agent_episode(trajectory, table.first, worker, ticket)
            return
        (observation, info), over = begun, False
        while not over:
            trajectory.messages, trajectory.tools = observation["messages"], observation["tools"]
            self._enter(trajectory, "reply")
            reply = await self._reply(table.turn(info), observation)
            if reply is None:
                trajectory.truncated = trajectory.length_limited = True
                break
            self._enter(trajectory, "step")
            observation, reward, trajectory.terminated, trajectory.truncated, info = await self._env(
                "step", worker, partial(step, reply=reply), self.limits.step_timeout)
            table.earn(reward, info)
            trajectory.info = add_parts(trajectory.info, info)
            over = trajectory.terminated or trajectory.truncated
        # Envs that are not ours may go on with the same list in the next episode.
        trajectory.messages = [dict(message) for message in observation["messages"]]
        table.finish(trajectory)

    def _enter(self, trajectory: Trajectory, phase: str) -> None:
        self._phases[id(trajectory)] = described(phase, self.env_id, trajectory), time.monotonic()

    async def _agent_episode(self, trajectory: Trajectory, seat: Seat, worker: EnvWorker, ticket: Ticket) -> None:
        server = await self._server.get(self)
        timeout = self.limits.episode_timeout
        max_turns = await self._env("reset", worker, turn_limit, self.limits.reset_timeout)
        options = {"index": ticket.index, "seed": ticket.env_seed, "max_turns": max_turns, "timeout": timeout}

        async def run(session: Session) -> Result:
            if not worker.own_process:
                return await outcome(await self._env("reset", worker, lambda env: env.unwrapped.launch(
                    session, **options), self.limits.reset_timeout), session)
            work = partial(run_agent, key=session.key, url=session.url, **options)
            result, ended = await self._env("reset", worker, work, timeout, lambda: state_of(session))
            worker.usable = worker.usable and ended
            return result

        result = await play_agent(server, seat, run, max_turns)
        trajectory.info, trajectory.truncated = plain(info_of(result)), result.truncated
        trajectory.terminated = not result.truncated
        trajectory.reward = finite(result.reward, "the reward of the agent")

    async def _reply(self, seat: Seat, observation: Conversation) -> Message | None:
        limit = asyncio.timeout(self.limits.generate_timeout)
        try:
            async with limit:
                return await seat.reply(observation)
        except PromptTooLong as error:
            raise _Failed("prompt_too_long", str(error)) from error
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  a reply that fails, fails this rollout alone
            # Something within the policy may be cancelled, too.
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise
            if limit.expired():
                raise _Failed("generate_timeout", f"no reply within {self.limits.generate_timeout:g} s "
                              "(rollout.generate_timeout)") from error
            raise _Failed("policy_error", f"the policy raised {type(error).__name__}: {error}") from error

    async def _env(
        self, name: str, worker: EnvWorker, work: Callable[[gym.Env], T], timeout: float,
        answer: Callable[[], Any] | None = None,
    ) -> T:
        try:
            return await worker.call(work, timeout, answer)
        except EnvFailure:
            raise
        except DeadlinePassed as error:
            raise _Failed(f"{name}_timeout", f"{self.env_id}: {name} took more than {timeout:g} s "
                          f"(rollout.{name}_timeout)") from error
        except Exception as error:  # noqa: BLE001  whatever a user's env raises fails this rollout alone
            raise _Failed(f"{name}_error", f"{self.env_id}: {name} raised {type(error).__name__}: {error}") from error


def described(phase: str, env_id: str, rollout: Trajectory | Ticket) -> str:
    """What a rollout waits for."""
    return f"{phase} of rollout {rollout.rollout} of group {rollout.group} ({env_id} {rollout.index})"


def _failure(reason: str, message: str, error: BaseException) -> Failure:
    return Failure(reason, message, "".join(traceback.format_exception(error)))
