"""AgentContext: what a run of an agent is given, and where it says how it goes.

Invariants: the reward of a run is the sum of what was added and of what `run` returned; a reward that is no finite
number fails the run, also where the agent catches the error; every method may be called from any thread.
"""

import asyncio
import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from ..errors import EnvFailure
from ..messages import Message
from ..rewards import Reward, add_parts, parts_of
from ..task_env import finite
from .agent import Result

if TYPE_CHECKING:
    import anthropic
    import openai

__all__ = ["AgentContext"]


class AgentContext:
    """Made by `AgentRun`.

    Args:
        index: number of the task.
        rng: the only randomness that the agent should use.
        url: of the server, without a path.
        key: the secret of this run.
        tools: the agent's.
        max_turns: replies that the run may get; None: no limit is known.
        timeout: seconds that the run may take.
        model: a name to send.
    """

    task: Any
    """What `ChatAgent.task` gave."""
    messages: list[Message]
    """The opening: the task's "messages", or its "prompt" as a message of the user; [] where it has neither."""
    base_url: str
    """For OpenAI clients; ends with "/v1"."""
    anthropic_base_url: str
    deadline: float
    """On the clock of `time.monotonic`."""

    def __init__(
        self, index: int, rng: np.random.Generator, *, url: str, key: str, tools: list[dict[str, Any]],
        max_turns: int | None, timeout: float, model: str,
    ) -> None:
        self.index, self.rng, self.model, self.max_turns = index, rng, model, max_turns
        self.tools = copy.deepcopy(tools)
        self.task, self.messages = None, []
        self.base_url, self.anthropic_base_url, self.api_key = f"{url}/v1", url, key
        self.deadline = time.monotonic() + timeout
        self._lock = threading.Lock()
        self._reported = Result()
        self._since = Reward()
        self._broken: EnvFailure | None = None
        self._cancelled = False
        self._on_cancel: list[Callable[[], None]] = []
        self._clients: list[tuple[asyncio.AbstractEventLoop | None, Any]] = []

    def remaining(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    def openai(self, *, asynchronous: bool | None = None, **kwargs: Any) -> "openai.OpenAI | openai.AsyncOpenAI":
        """A new client of OpenAI's SDK, which is closed after the run; one does for all its requests.

        Args:
            asynchronous: None: `AsyncOpenAI` if called in a coroutine, else `OpenAI`.
            **kwargs: for the client, such as `max_retries` (2) and `timeout` (what is left of the run).
        """
        import openai

        return self._client(openai, "OpenAI", self.base_url, asynchronous, kwargs)

    def anthropic(
        self, *, asynchronous: bool | None = None, **kwargs: Any
    ) -> "anthropic.Anthropic | anthropic.AsyncAnthropic":
        """A client of Anthropic's SDK; as `openai`."""
        import anthropic

        return self._client(anthropic, "Anthropic", self.anthropic_base_url, asynchronous, kwargs)

    def environment(self) -> dict[str, str]:
        """The variables from which the SDKs in another process find the server, and past any proxy."""
        host = urlsplit(self.base_url).hostname or ""
        direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), host]))
        return {
            "NO_PROXY": direct,
            "no_proxy": direct,
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    def add_reward(self, reward: float) -> None:
        """Adds to the reward of the run.

        Raises:
            EnvFailure: reason "reward": it is no finite real number.
        """
        self.report(reward=reward)

    def report(
        self, *, reward: float = 0.0, score: float | None = None, info: Mapping[str, Any] | None = None,
        truncated: bool | None = None,
    ) -> None:
        """Says how it goes: the reward is added, part by part, the score replaces the last one, and info is merged.

        Raises:
            EnvFailure: reason "reward": the reward or the score is no finite real number.
        """
        parts = parts_of(reward)
        try:
            reward = finite(reward, f"task {self.index}: the reward")
            score = None if score is None else finite(score, f"task {self.index}: the score")
        except EnvFailure as failure:
            self._broken = failure
            raise
        with self._lock:
            self._reported.reward += reward
            self._since = Reward(self._since + reward, add_parts(self._since.info, parts))
            self._reported.score = self._reported.score if score is None else score
            told = self._reported.info
            self._reported.info = {**told, **(info or {}), **add_parts(told, parts)}
            self._reported.truncated = self._reported.truncated if truncated is None else bool(truncated)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Has `callback` called if the run is cancelled, at once if it already was: to stop what a sync agent began."""
        with self._lock:
            if not self._cancelled:
                self._on_cancel.append(callback)
                return
        callback()

    def _begin(self, task: Any) -> None:
        self.task = task
        opening = task if isinstance(task, Mapping) else {"prompt": task} if isinstance(task, str) else {}
        if "messages" in opening:
            self.messages = copy.deepcopy(list(opening["messages"]))
        elif "prompt" in opening:
            self.messages = [{"role": "user", "content": opening["prompt"]}]

    def _so_far(self) -> Result:
        """All that was reported."""
        if self._broken is not None:
            raise self._broken
        with self._lock:
            return copy.deepcopy(self._reported)

    def _drain(self) -> Reward:
        """The reward since the last call."""
        with self._lock:
            since, self._since = self._since, Reward()
            return since

    def _cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            callbacks, self._on_cancel = self._on_cancel, []
        for callback in callbacks:
            callback()

    def _client(self, sdk: Any, name: str, base_url: str, asynchronous: bool | None, kwargs: dict[str, Any]) -> Any:
        loop = _running_loop()
        if asynchronous is None:
            asynchronous = loop is not None
        if "http_client" not in kwargs:
            # The server speaks plain HTTP on this machine: no proxies, and no 25 ms to load certificates. A public
            # URL may be another's, with TLS.
            make = sdk.DefaultAsyncHttpxClient if asynchronous else sdk.DefaultHttpxClient
            # Anthropic's SDK before 2.14 heeds `mounts` alone.
            direct = dict.fromkeys(("http://", "https://", "all://"))
            kwargs["http_client"] = make(trust_env=False, mounts=direct, verify=base_url.startswith("https:"))
        defaults = {"base_url": base_url, "api_key": self.api_key, "max_retries": 2, "timeout": self.remaining()}
        client = getattr(sdk, f"Async{name}" if asynchronous else name)(**{**defaults, **kwargs})
        if loop is not None or not asynchronous:
            with self._lock:
                self._clients.append((loop if asynchronous else None, client))
        return client

    async def _close_on_loop(self) -> None:
        """Closes the clients of the running loop."""
        for client in self._take_clients(_running_loop()):
            with contextlib.suppress(Exception):
                await client.close()

    def _close(self) -> None:
        """Closes the sync clients; async ones that were made outside of the run's loop are left to their owner."""
        for client in self._take_clients(None):
            with contextlib.suppress(Exception):
                client.close()

    def _take_clients(self, loop: asyncio.AbstractEventLoop | None) -> list[Any]:
        with self._lock:
            mine = [client for owner, client in self._clients if owner is loop]
            self._clients = [(owner, client) for owner, client in self._clients if owner is not loop]
            return mine


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
