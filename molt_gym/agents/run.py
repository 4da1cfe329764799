"""AgentRun: one run of one agent, in a thread of its own.

Invariants: whatever an agent raises is the end of its run and of nothing else; an agent that blocks holds up nobody,
for an async one has an event loop of its own; when the run has ended, its clients and its loop are closed. Its thread
is a daemon, and so are those of `asyncio.to_thread` on its loop: none keeps the interpreter from ending.
"""

import asyncio
import contextlib
import contextvars
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from ..errors import EnvFailure
from ..judge_calls import metered
from ..rewards import Reward
from ..server.errors import CODE_HEADER, ENGINE_CODES, LIMIT_CODES
from ..threads import call_in_thread
from .agent import ChatAgent, Result, as_result
from .context import AgentContext

__all__ = ["AgentRun", "AgentSession", "ProgramFailed", "agent_rng"]

_LONGEST = 2000


class AgentSession(Protocol):
    """What a run reads of a server's session; see `molt_gym.server.session.Session`."""

    key: str
    url: str
    overflowed: bool
    failure: BaseException | None
    over: asyncio.Event


class ProgramFailed(Exception):
    """A failure of an agent whose message says all, so that no traceback is added."""


def agent_rng(np_random: np.random.Generator) -> np.random.Generator:
    """The generator of a run, drawn from an env's after the task was; equal for equal seeds."""
    return np.random.default_rng(int(np_random.integers(2**63)))


class AgentRun:
    """Starts the agent.

    Whoever waits for `future` waits until `context.deadline` at most, and then calls `cancel`; the session is opened
    and closed by whoever made it.

    Args:
        agent: may be in use by other runs.
        session: where its requests go.
        index: number of the task.
        rng: for the agent, see `agent_rng`.
        max_turns, timeout, model: see `AgentContext`.
    """

    future: "Future[Result]"
    """Holds the result, or an EnvFailure with the reason "generation" if the last request failed on the engine's side,
    "reward", "agent" for whatever the agent raised, "cancelled", or the agent's own."""

    def __init__(
        self, agent: ChatAgent, session: AgentSession, *, index: int, rng: np.random.Generator,
        max_turns: int | None = None, timeout: float = 600.0, model: str = "policy",
    ) -> None:
        self.context = AgentContext(index, rng, url=session.url, key=session.key, tools=agent.tools,
                                    max_turns=max_turns, timeout=timeout, model=model)
        self.future = Future()
        self._agent, self._session = agent, session
        self._lock = threading.Lock()
        # Judges find the run that the env is played in by the context of who plays it.
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._main,),
                                        name=f"molt-gym-agent-{index}", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Ends the run at once: an async agent is cancelled, and a program is killed.

        The future fails, or holds what was reported so far, truncated, if all turns were used up. A sync agent cannot
        be stopped: close the session, and its next request is refused; its thread ends when it does. Idempotent, and
        without effect on a run that has ended.
        """
        outcome: Result | EnvFailure = EnvFailure("cancelled", f"the run of {self._agent} was cancelled")
        if self._session.over.is_set():
            try:
                outcome = self.so_far(truncated=True)
            except EnvFailure as failure:
                outcome = failure
        self._settle(outcome)
        self.context._cancel()

    def so_far(self, *, truncated: bool = False) -> Result:
        """What the agent has reported until now.

        Raises:
            EnvFailure: reason "reward": some of it was no finite number.
        """
        reported = self.context._so_far()
        reported.truncated = reported.truncated or truncated
        return reported

    def join(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the thread; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            self._settle(self._result())
        except EnvFailure as failure:
            self._settle(failure)
        except BaseException as error:  # noqa: BLE001  a waiter must hear of it
            self._settle(EnvFailure("agent", _described(error)))

    def _settle(self, outcome: Result | EnvFailure) -> None:
        with self._lock:
            if self.future.done():
                return
            if isinstance(outcome, Result):
                self.future.set_result(outcome)
            else:
                self.future.set_exception(outcome)

    def _result(self) -> Result:
        try:
            with metered() as counted:
                returned = as_result(self._played(), f"{self._agent}.run")
        except BaseException as error:  # noqa: BLE001  whatever it is, it fails this run alone
            _release(error)
            failure = _env_failure(error)
            if failure is not None:
                raise failure from error.__cause__
            self._check_session()
            # Another conversation of the run may have gone on since, so the session alone does not tell.
            code = _code(error)
            if code in ENGINE_CODES:
                raise EnvFailure("generation", _described(error)) from error
            if code not in LIMIT_CODES and not self._limited:
                raise EnvFailure("agent", _described(error)) from error
            returned = Result(truncated=True)
        self._check_session()
        self.context.add_reward(Reward(0.0, counted))
        self.context.report(reward=returned.reward, score=returned.score, info=returned.info)
        return self.so_far(truncated=returned.truncated or self._limited)

    @property
    def _limited(self) -> bool:
        return self._session.overflowed or self._session.over.is_set()

    def _check_session(self) -> None:
        failure = self._session.failure
        if failure is not None:
            raise EnvFailure("generation", f"{type(failure).__name__}: {failure}") from failure

    def _played(self) -> Any:
        try:
            self.context._begin(self._agent.task(self.context.index, self.context.rng))
            outcome = self._agent.run(self.context)
            if not inspect.isawaitable(outcome):
                return outcome
            with asyncio.Runner() as runner:
                runner.get_loop().set_default_executor(_Threads())
                return runner.run(self._awaited(outcome))
        finally:
            self.context._close()

    async def _awaited(self, outcome: Awaitable[Any]) -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def cancel() -> None:
            # The loop may have been closed in the meantime.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)

        self.context.on_cancel(cancel)
        try:
            return await outcome
        finally:
            await self.context._close_on_loop()


class _Threads(ThreadPoolExecutor):
    """A daemon thread for each call: none waits for a free one, and closing the loop does not wait for any."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return call_in_thread(lambda: fn(*args, **kwargs), "molt-gym-agent-call")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors that a group of them is made of, such as an asyncio.TaskGroup raises; else the error."""
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [leaf for one in inner for leaf in _leaves(one)] or [error]


def _env_failure(error: BaseException) -> EnvFailure | None:
    """The EnvFailure that an error is, or that it groups."""
    return next((leaf for leaf in _leaves(error) if isinstance(leaf, EnvFailure)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and all that it groups or comes of, each once: `raise error from error` ties it to itself."""
    seen: set[int] = set()
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            found += [one.__context__, one.__cause__, *reversed(inner)]


def _code(error: BaseException) -> str | None:
    """Which refusal of the server an SDK's error is, or comes of."""
    headers = (getattr(getattr(one, "response", None), "headers", None) for one in _chain(error))
    return next((code for each in headers if isinstance(each, Mapping) and (code := each.get(CODE_HEADER))), None)


def _described(error: BaseException) -> str:
    """With the first error of a group, and where that was raised."""
    first = _leaves(error)[0]
    if isinstance(first, ProgramFailed):
        return str(first)
    place = traceback.format_tb(first.__traceback__ or error.__traceback__, limit=-4)
    return "\n".join([*dict.fromkeys(map(_summary, (error, first))), "".join(place)]).rstrip()


def _summary(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:_LONGEST]


def _release(error: BaseException) -> None:
    """Lets go of what the agent's frames hold, such as open sockets; the lines of the traceback stay."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
