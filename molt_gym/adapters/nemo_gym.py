"""NeMo Gym: tasks of a resources server of it as chat envs, in either of its protocols.

Invariants: rewards and ends are the server's; each episode has a session of its own there, which its cookies carry; a
reply reaches no path of the server but those of the tools that its task offers.
"""

import json
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..env import ChatEnv, Turn
from ..errors import ConfigError, EnvFailure
from ..messages import Message, arguments_of
from ..registry import register
from ..task_env import finite
from ..tasks import load_tasks
from .nemo_gym_wire import conversation_of, filled, items_of, response_of
from .remote import Client, Servers, checked_timeout, get_json

__all__ = ["NemoGym", "register_ids"]

_ASKED = "responses_create_params"
_STARTS = {"classic": "/seed_session", "gymnasium": "/reset"}


class NemoGym(ChatEnv):
    """Tasks of a NeMo Gym resources server, reached by its URL.

    In the classic protocol the policy calls the tools of its task, each a path of the server, until a reply calls none;
    then, or after the last of `turns` replies, the server verifies them all. In the gymnasium protocol the server
    answers each reply. What a task says of sampling is left to the trainer.

    Args:
        url: of the server, or of several of the same kind.
        dataset: the rows, with `responses_create_params` and whatever else the server asks for; a .jsonl file, for one.
        protocol: "classic", "gymnasium", or "auto" to ask the server.
        split: "train" or "test"; each tenth row of a file is for "test".
        turns: most replies of a policy before the classic protocol verifies them. A smaller `max_episode_steps` (64)
            would cut an episode without a verdict.
        timeout: seconds for each answer, and for waiting until a server lets us in.
        render_mode: None or "ansi".
        **tasks: the other keywords of `molt_gym.load_tasks`.

    Raises:
        ConfigError: an argument cannot be. EnvFailure: no server answers.
    """

    def __init__(
        self, *, url: str | Sequence[str], dataset: str, protocol: str = "auto", split: str = "train", turns: int = 16,
        timeout: float = 25.0, render_mode: str | None = None, **tasks: Any,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self._servers, self._timeout = Servers(url), checked_timeout(timeout)
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
            raise ConfigError(f"turns: {turns!r}; write an integer from 1 on")
        if protocol not in ("auto", *_STARTS):
            raise ConfigError(f"protocol: {protocol!r}; write 'auto', {' or '.join(map(repr, _STARTS))}")
        self._tasks = load_tasks(dataset, split, fields=[_ASKED], **tasks)
        self.num_tasks = len(self._tasks)
        self._protocol = self._servers.connect(_spoken, self._timeout) if protocol == "auto" else protocol
        self._limit, self._server = turns, None
        self._closes = self._truncated = False

    def begin(self, index: int) -> list[Message]:
        """The messages of row `index`, and what the server adds to them."""
        self.close()
        task = self._tasks[index]
        asked = filled(task.get(_ASKED))
        try:
            messages, self.tools = conversation_of(asked)
        except ValueError as error:
            raise task.refused(_ASKED, "what a request to the Responses API takes", str(error)) from error
        self._row, self._items, self._turn, self._truncated = task.values | {_ASKED: asked}, [], 0, False
        self._server, first = self._servers.connect(self._started, self._timeout)
        self._info = first.get("info") or {}
        self._closes = self._info.get("supports_explicit_close") is True
        seen = first.get("observation")
        return [*messages, {"role": "user", "content": seen}] if seen else messages

    def answer(self, message: Message) -> Turn:
        """What the server makes of it."""
        self._turn += 1
        try:
            turn = self._stepped(message) if self._protocol == "gymnasium" else self._called(message)
        except EnvFailure:
            self.close()
            raise
        if turn.terminated:
            self.close()
        return turn

    def cut(self) -> bool:
        """Whether the server cut the episode."""
        return self._truncated

    def leave(self) -> None:
        """Ends the session on the server."""
        self.close()

    def close(self) -> None:
        """Ends the session on the server, if it can be ended, and with it the episode."""
        self._over = True
        server, self._server = self._server, None
        if server is not None and self._closes:
            with suppress(EnvFailure):
                server.ask("/close", self._timeout, {})

    def _started(self, url: str, seconds: float) -> tuple[Client, dict[str, Any]]:
        server = Client(url)
        return server, server.ask(_STARTS[self._protocol], seconds, self._row)

    def _stepped(self, message: Message) -> Turn:
        """A turn of the gymnasium protocol."""
        asked = response_of(self._row, list(items_of(self._turn, message, [])))
        if self._info.get("supports_step_idempotency") is True:
            asked["_ng_step_request_id"] = uuid.uuid4().hex
        result = self._server.ask("/step", self._timeout, asked)
        info, seen = result.get("info") or {}, result.get("observation")
        messages = [{"role": "tool", "tool_call_id": given["call_id"], "content": given["output"]}
                    for given in info.get("tool_outputs") or ()]
        messages += [{"role": "user", "content": seen}] if seen else []
        self._truncated = bool(result.get("truncated")) and not result.get("terminated")
        over = bool(result.get("terminated") or self._truncated)
        told = {name: value for name, value in info.items() if isinstance(value, bool | int | float | str)}
        return Turn([] if over else messages, finite(result.get("reward", 0.0), "the reward of the server"), over, told)

    def _called(self, message: Message) -> Turn:
        """A turn of the classic protocol."""
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self._result(call)}
                   for call in message.get("tool_calls") or ()]
        self._items += items_of(self._turn, message, results)
        if results and self._turn < self._limit:
            return Turn(results)
        verdict = self._server.ask("/verify", self._timeout, response_of(self._row, self._items))
        if verdict.get("mask_sample") is True:
            raise EnvFailure(str(verdict.get("failure_kind") or "masked"), str(verdict.get("failure_reason") or ""))
        parts = verdict.get("reward_components") or {}
        return Turn(reward=finite(verdict.get("reward"), "the reward of the server"), terminated=True,
                    info={f"reward/{name}": value for name, value in parts.items()})

    def _result(self, call: dict[str, Any]) -> str:
        """What a tool says, its errors too: they are the policy's to read."""
        name, arguments = call["function"]["name"], arguments_of(call)
        if name not in {tool["function"]["name"] for tool in self.tools}:
            return json.dumps({"error": f"There is no tool {name!r:.80}"})
        if isinstance(arguments, str):
            return json.dumps({"error": "Invalid tool call arguments: no JSON object"})
        return self._server.request(f"/{name}", self._timeout, arguments)[1]


def register_ids() -> None:
    """The id for all of them."""
    register("nemo_gym/Remote-v0", NemoGym, max_episode_steps=64, nondeterministic=True)


def _spoken(url: str, seconds: float) -> str:
    """The protocol of a server."""
    found = get_json(f"{url}/openapi.json", seconds)
    paths = found.get("paths") if isinstance(found, dict) else None
    for protocol, path in _STARTS.items():
        if path in (paths or ()):
            return protocol
    raise ConfigError(f"protocol: {url} does not say which it speaks; write 'classic' or 'gymnasium'")
