"""AgentEnv: an agent as a Gymnasium env; its next request is the observation, and the reply is the action.

Invariants: an observation is a fresh copy; requests that are under way at the same time become observations one after
the other, in the order of their arrival; `reset` and `close` end the agent that was running; every wait ends at the
deadline of the run.
"""

import copy
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import gymnasium as gym
from gymnasium.error import ResetNeeded

from ..errors import EnvFailure
from ..messages import Conversation, Message, text_of
from ..rewards import SUMMED
from ..server.exchange import Call, Reply
from ..task_env import TaskEnv
from .agent import AgentLike, Result, load_agent
from .background import Question, QueueRespondent, background
from .run import AgentRun, AgentSession, agent_rng

__all__ = ["AgentEnv"]

RUN_TIMEOUT = 600.0
"""Seconds that a run may take by default."""
_END_SECONDS = 2.0


class AgentEnv(TaskEnv):
    """Steps through the requests that an agent makes with its own SDK.

    Args:
        agent: what `load_agent` takes: "package.module:Name", a `ChatAgent` or a function `run(ctx)`.
        render_mode: "ansi" to get the transcript of the last request from `render()`.
        run_timeout: seconds that a run may take, including the time in which its requests wait for `step`; None: 600,
            or in training, without a wrapper of yours around the env, `rollout.episode_timeout`.
        **agent_kwargs: arguments of the agent.
    """

    _episode: "_Episode | None" = None

    def __init__(
        self, agent: AgentLike, *, render_mode: str | None = None, run_timeout: float | None = None, **agent_kwargs: Any
    ) -> None:
        super().__init__(render_mode=render_mode)
        if run_timeout is not None and not 0 < run_timeout <= 1e9:
            raise ValueError(f"run_timeout: {run_timeout!r}; write a positive number of seconds")
        self.run_timeout = run_timeout
        self.agent = load_agent(agent, **agent_kwargs)
        self.num_tasks, self.tools, self.presets = self.agent.num_tasks, self.agent.tools, self.agent.presets

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Conversation, dict[str, Any]]:
        """Starts the agent, and waits for its first request.

        Args:
            seed: seeds `self.np_random`, which draws the task and seeds the agent's `rng`; None goes on with the random
                state at hand.
            options: `{"index": i}` to choose the task, 0 <= i < `num_tasks`.

        Returns:
            The first request as an observation, and an info whose `task_index` names the task. With the same seed,
            passing this index plays the very same episode again, if the agent uses no other randomness.

        Raises:
            ValueError: an option is unknown or out of range.
            EnvFailure: the agent failed, or ended without a request.
        """
        self._end()
        self._choose(seed, options)
        # The cap is in a wrapper, which an env cannot see: what was registered is the best guess.
        registered = gym.registry.get(self.spec.id) if self.spec is not None else None
        max_turns = registered.max_episode_steps if registered is not None else None
        self._episode = _Episode(lambda session: self._launch(session, max_turns))
        result = self._proceed()
        if result is not None:
            raise EnvFailure("agent", f"{self._name}: the agent ended with {result} before its first request; it has "
                             "to send one to ctx.base_url, for instance with ctx.openai()")
        return self._observe("reset", self._tools), self._info()

    def step(self, action: Message) -> tuple[Conversation, float, bool, bool, dict[str, Any]]:
        """Answers the request, and waits for the next one or for the end of the agent.

        Returns:
            observation: the next request; at the end the last one with its reply. Then the reward that the agent
            reported since the last step, with the one that it returned at the end; terminated, when it came to its end;
            truncated, when a limit of its own cut it off (`TimeLimit` adds another); and its info, with "task_index",
            and "score" if it reported one.

        Raises:
            ResetNeeded: before `reset`, after the end of an episode, and after a failure.
            ValueError: `action` is not in the action space; the request is still to be answered.
            EnvFailure: the agent failed, or has not ended after `run_timeout` seconds (reason "timeout").
        """
        if self._over:
            raise ResetNeeded(f"{self._name}: no episode is running; call reset() before step()")
        self.action_space.validate(action)
        self._over = True
        self._messages.append(copy.deepcopy(action))
        self._episode.answer(_reply(action))
        result = self._proceed()
        reward = self._episode.run.context._drain()
        self._reward += reward
        truncated = result is not None and result.truncated
        terminated = result is not None and not truncated
        return self._observe("step", self._tools), float(reward), terminated, truncated, self._info(reward.info)

    def launch(
        self, session: AgentSession, *, index: int, seed: int | None = None, max_turns: int | None = None,
        timeout: float = RUN_TIMEOUT,
    ) -> AgentRun:
        """Starts the agent on task `index`, as `reset` does, to be answered by whoever opened the session.

        Its requests are no observations, and the run is none of this env's: cancel it yourself.

        Args:
            max_turns: what the agent is told about the session's limit.
            timeout: seconds that it may take, unless the env has a `run_timeout`.

        Raises:
            ValueError: the index is out of range.
        """
        self._end()
        self._choose(seed, {"index": index})
        return self._launch(session, max_turns, timeout)

    def close(self) -> None:
        """Ends the agent, if one is running."""
        self._over = True
        self._end()
        super().close()

    def __del__(self) -> None:
        # The interpreter may be ending: do not wait.
        if self._episode is not None:
            self._episode.stop()

    def _launch(self, session: AgentSession, max_turns: int | None, timeout: float = RUN_TIMEOUT) -> AgentRun:
        return AgentRun(self.agent, session, index=self._index, rng=agent_rng(self.np_random), max_turns=max_turns,
                        timeout=self.run_timeout or timeout)

    def _proceed(self) -> Result | None:
        """Waits for the next request, or for the result."""
        try:
            call = self._episode.next()
            self._reported = self._episode.run.so_far()
            result = self._episode.run.future.result(timeout=0) if call is None else None
        except BaseException as error:
            self._end()
            if isinstance(error, queue.Empty):
                limit = self.run_timeout or RUN_TIMEOUT
                raise EnvFailure("timeout", f"{self._name}: the agent has not ended after {limit:g} s (run_timeout)"
                                 ) from None
            raise
        if call is None:
            self._end()
        else:
            self._over = False
            self._messages, self._tools = copy.deepcopy(list(call.messages)), copy.deepcopy(list(call.tools))
        return result

    def _info(self, parts: Mapping[str, float] = MappingProxyType({})) -> dict[str, Any]:
        """parts: of the reward since the last step, as the others were told."""
        score = {} if self._reported.score is None else {"score": self._reported.score}
        info = {name: value for name, value in self._reported.info.items() if not name.startswith(SUMMED)}
        return {**info, **parts, **score, "task_index": self._index}

    def _end(self) -> None:
        if self._episode is not None:
            self._episode.stop()
            self._episode.run.join(_END_SECONDS)


class _Episode:
    """One run, and the requests that wait for their reply."""

    def __init__(self, launch: Callable[[AgentSession], AgentRun]) -> None:
        inbox: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._inbox = inbox
        self._wanted: Future[Reply] | None = None
        self._session = background().open(QueueRespondent(inbox.put))
        self.run = launch(self._session)
        self.run.future.add_done_callback(lambda _: inbox.put(None))

    def next(self) -> Call | None:
        """The next request, None at the end of the run; raises queue.Empty at the deadline."""
        while not self.run.future.done():
            question = self._inbox.get(timeout=self.run.context.remaining())
            if question is not None and not question[1].done() and not self.run.future.done():
                call, self._wanted = question
                return call
        return None

    def answer(self, reply: Reply) -> None:
        """Answers the last request; in vain if its sender has gone."""
        with suppress(InvalidStateError):
            self._wanted.set_result(reply)

    def stop(self) -> None:
        """Ends the run; does not wait."""
        background().close(self._session)
        self.run.cancel()


def _reply(action: Message) -> Reply:
    message = {key: copy.deepcopy(value) for key, value in action.items() if value} | {"content": text_of(action)}
    return Reply(message, "tool_calls" if message.get("tool_calls") else "stop")
