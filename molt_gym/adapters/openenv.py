"""OpenEnv: envs that a server of it runs, as chat envs.

Invariants: rewards and ends are the server's; each episode has a session, and with it an env, of its own on the server,
which ends with the episode; an action that the server refuses changes nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..env import ChatEnv, Turn
from ..errors import ConfigError, EnvFailure
from ..messages import Message
from ..registry import register
from ..task_env import finite
from .openenv_actions import Actions, Wanted, actions_of, describe, tool_text, tools_of
from .openenv_session import RefusedAction, Session
from .remote import Servers, checked_timeout, get_json
from .text_env import named_function

__all__ = ["OpenEnv", "register_ids"]

T = TypeVar("T")
_ILLEGAL_LIMIT = 3
_TEST_SEEDS = 10**9


class OpenEnv(ChatEnv):
    """An env that an OpenEnv server runs, reached by its URL.

    A reply is what the server's action schema asks for: the text of its only field, the arguments of a tool, or calls
    of the MCP tools that the server lists. **A reply that holds no legal action** changes nothing and gives no reward:
    the policy is told what is wrong; after three of them in a row the episode ends. Where actions are MCP calls, a
    reply without any is the policy's last.

    Args:
        url: of the server, or of several that run the same env.
        split: of the tasks that the server lists; if it lists none, "train" or "test", which have no seeds in common.
        reset: more arguments for the env's `reset`; the server ignores those that it does not know.
        action: "auto", "text", "tool", "mcp", or a function of yours, reply text → action (ValueError: what is wrong),
            by its "module:function".
        describe: a function of yours, observation → text or content parts; or its "module:function".
        system: what the system message says; None: there is none.
        timeout: seconds for each answer, and for waiting until a session is free.
        render_mode: None or "ansi".

    Raises:
        ConfigError: an argument cannot be. EnvFailure: no server answers.
    """

    def __init__(
        self, *, url: str | Sequence[str], split: str = "train", reset: dict[str, Any] | None = None,
        action: str | Callable[[str], dict[str, Any]] = "auto",
        describe: str | Callable[[dict[str, Any]], Any] | None = None, system: str | None = None,
        timeout: float = 25.0, render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self._servers, self._timeout = Servers(url), checked_timeout(timeout)
        if not isinstance(reset, dict | None):
            raise ConfigError(f"reset: {reset!r}; write a table of arguments, such as {{'level': 2}}")
        self._split, self._arguments, self._system = split, reset or {}, system
        self._describe = named_function(describe, "describe")
        if callable(action) or ":" in str(action):
            self._actions = Actions("text", parse=named_function(action, "action"))
        else:
            self._actions = actions_of(self._asked(_schema), action)
        self.num_tasks = self._asked(_count, split)
        if self.num_tasks is None and split not in ("train", "test"):
            raise ConfigError(f"split: {split!r}; the server lists no tasks, so write 'train' or 'test'")
        self._session: Session | None = None

    def begin(self, index: int) -> list[Message]:
        """The first observation of the episode of seed or task `index`."""
        self.close()
        arguments = ({"seed": index + _TEST_SEEDS * (self._split == "test")} if self.num_tasks is None
                     else {"seed": index, "split": self._split, "index": index}) | self._arguments
        self._session = self._servers.connect(lambda url, left: Session(url, arguments, left), self._timeout)
        self._illegal = 0
        if self._session.first.get("done"):
            raise self._failed(EnvFailure("server_error", f"{self._session.url}: the episode is over from the start"))
        self.tools = list(self._actions.tools) or self._listed()
        seen = (self._describe or describe)(self._session.first["observation"])
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": seen}]

    def answer(self, message: Message) -> Turn:
        """What the server makes of it, action by action; or what is wrong with it."""
        messages: list[Message] = []
        wanted = list(self._actions.of(message))
        said_all = not wanted and self._actions.kind == "mcp"
        reward, over, legal = 0.0, said_all, said_all
        for want in wanted:
            result, problem = self._done(want)
            if result is None:
                messages.append(want.answered(problem))
                continue
            legal = True
            reward += finite(result.get("reward") or 0.0, "the reward of the server")
            if over := bool(result.get("done")):
                break
            messages.append(want.answered(self._seen(result["observation"])))
        if not wanted and self._actions.kind == "tool":
            messages = [{"role": "user", "content": f"Call {self._actions.tools[0]['function']['name']}."}]
        self._illegal = 0 if legal else self._illegal + 1
        over = over or self._illegal >= _ILLEGAL_LIMIT
        if over:
            self.close()
        return Turn([] if over else messages, reward, over, {"illegal": not legal})

    def leave(self) -> None:
        """Ends the session on the server."""
        self.close()

    def close(self) -> None:
        """Ends the session on the server, and with it the episode."""
        self._over = True
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _asked(self, ask: Callable[..., T], *arguments: Any) -> T:
        return self._servers.connect(lambda url, _: ask(url, *arguments, self._timeout), self._timeout)

    def _done(self, want: Wanted) -> tuple[dict[str, Any] | None, str]:
        """What the server answers; or None, and why."""
        if want.action is None:
            return None, want.problem
        try:
            return self._session.step(want.action, self._timeout), ""
        except RefusedAction as error:
            return None, f"That is no legal action: {error}."
        except EnvFailure as error:
            raise self._failed(error) from error

    def _listed(self) -> list[dict[str, Any]]:
        if self._actions.kind != "mcp":
            return []
        result, problem = self._done(Wanted({"type": "list_tools"}))
        found = tools_of(result["observation"]) if result else []
        if not found:
            words = f"{self._session.url}: it lists no tools: {problem or result}"
            raise self._failed(EnvFailure("server_error", words))
        return found

    def _seen(self, observation: dict[str, Any]) -> Any:
        return (self._describe or (tool_text if self._actions.kind == "mcp" else describe))(observation)

    def _failed(self, error: EnvFailure) -> EnvFailure:
        self.close()
        return error


def register_ids() -> None:
    """The id for all of them."""
    register("openenv/Remote-v0", OpenEnv, max_episode_steps=64, nondeterministic=True)


# A question about tasks makes the server make an env, so each is asked once in a process.
@functools.lru_cache(maxsize=64)
def _schema(url: str, seconds: float) -> dict[str, Any]:
    found = get_json(f"{url}/schema", seconds)
    if not isinstance(found, dict) or not isinstance(found.get("action"), dict):
        raise EnvFailure("server_error", f"{url}/schema has no schema of actions; is it an OpenEnv server?")
    return found["action"]


@functools.lru_cache(maxsize=64)
def _count(url: str, split: str, seconds: float) -> int | None:
    """How many tasks the server lists in a split; None if it lists none at all."""
    names = get_json(f"{url}/list_environments", seconds)
    splits = get_json(f"{url}/{names[0]}/splits", seconds) if names else None
    if not splits:
        return None
    there = [one["name"] for one in splits]
    if split not in there:
        raise ConfigError(f"split: {split!r}; the server has {', '.join(map(repr, there))}")
    return int(get_json(f"{url}/{names[0]}/num_tasks", seconds, post={"split": split})["num_tasks"])
