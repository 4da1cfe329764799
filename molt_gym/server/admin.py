"""Sessions over HTTP, for programs that run many episodes from outside, with the admin key:

    POST /sessions                 {max_turns?, env?, index?, metadata?} -> id, api_key and the base URLs of the SDKs
    GET  /sessions/ID              -> open, turns, sampled tokens
    POST /sessions/ID/end          {reward?, info?, truncated?} -> turns, rows, trained tokens
    GET  /sessions/ID/trajectory   -> what is recorded so far

Invariants: the admin key opens no model, and a session's key opens nothing here; a session that ends is handed on
before its key stops working, and stays open if that fails; one that is left alone ends by itself. There is always a
session called "default": when it ends, the next one takes over its key.
"""

import asyncio
import hmac
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from ..tokens.trajectory import Failure, Trajectory
from .errors import WireError, invalid
from .json import decode, decode_fields
from .recorded import RecordedSession, Seat

if TYPE_CHECKING:
    from .server import LoopbackServer

__all__ = ["KEPT", "Admin", "RecordedSession", "Seat"]

KEPT = 64
"""The latest sessions that have ended whose trajectories can still be fetched."""

_DEFAULT = "default"
_ROUTES = "POST /sessions, GET /sessions/ID, POST /sessions/ID/end, GET /sessions/ID/trajectory"

T = TypeVar("T")


class _Opening(msgspec.Struct, forbid_unknown_fields=True):
    max_turns: Annotated[int, msgspec.Meta(ge=1)] | None = None
    env: str | None = None
    index: Annotated[int, msgspec.Meta(ge=0)] | None = None
    metadata: dict[str, Any] | None = None


class _Ending(msgspec.Struct, forbid_unknown_fields=True):
    reward: float | None = None
    info: dict[str, Any] | None = None
    truncated: bool | None = None


class Admin:
    """Opens and ends sessions of a server that has started; set it as the server's `admin`.

    Args:
        key: what requests carry as bearer token or x-api-key.
        seat: makes who answers session number n.
        ended: is given the trajectory of each session that ends; not of a default session that was never used.
        env: what trajectories say where a session says nothing.
        idle_timeout: seconds after which a session that nobody asks for anything ends.
    """

    default: RecordedSession
    """The one whose key is there from the start."""

    def __init__(
        self, server: "LoopbackServer", key: str, seat: Callable[[int], Seat], *,
        ended: Callable[[Trajectory], None] = lambda trajectory: None, env: str = "", idle_timeout: float = 3600.0,
    ) -> None:
        self.key = key
        self._server, self._seat, self._when_ended, self._env = server, seat, ended, env
        self._idle_timeout = idle_timeout
        self._opened = 0
        self._open: dict[str, RecordedSession] = {}
        self._ended: dict[str, tuple[Trajectory, _Ending | None]] = {}
        self.default = self.open()

    @property
    def url(self) -> str:
        """Of the server."""
        return self._server.url

    def authenticate(self, keys: Sequence[str]) -> None:
        """Raises WireError unless the admin key is among those that a request sent."""
        ours = self.key.encode()
        if not any(hmac.compare_digest(key.encode("utf-8", "surrogateescape"), ours) for key in keys):
            what = "is another one" if keys else "is missing"
            raise WireError("authentication", f"admin key: {what}. Send the one that the server was started with, as a "
                            "bearer token or as x-api-key; a session's own key opens /v1 alone", code="invalid_api_key")

    def answer(self, method: str, path: str, body: bytes) -> Any:
        """The JSON of the answer to a request whose key was checked.

        Raises:
            WireError: refused, or the trajectory could not be handed on.
        """
        match method, path.split("/")[2:]:
            case "POST", []:
                asked = _read(body, _Opening)
                recorded = self.open(asked.max_turns, env=asked.env, index=asked.index or 0, metadata=asked.metadata)
                return {"id": recorded.id, "api_key": recorded.session.key, "openai_base_url": f"{self.url}/v1",
                        "anthropic_base_url": self.url}
            case "GET", [name]:
                id, trajectory = self._find(name)
                return {"id": id, "open": id in self._open, "turns": trajectory.turns, "tokens": _trained(trajectory)}
            case "GET", [name, "trajectory"]:
                return decode(self._find(name)[1].to_json().encode("utf-8", "surrogatepass"))
            case "POST", [name, "end"]:
                return self._end_as_asked(name, _read(body, _Ending))
        raise WireError("not_found", f"{method} {path}: no such route; there are {_ROUTES}", code="unknown_url")

    def open(
        self, max_turns: int | None = None, *, env: str | None = None, index: int = 0,
        metadata: dict[str, Any] | None = None, key: str | None = None,
    ) -> RecordedSession:
        """A new session.

        Args:
            max_turns: replies that it may get.
            env, index, metadata: for its trajectory.
            key: its secret; by default a fresh one.
        """
        id = secrets.token_hex(8)
        info = {"session": id} | ({} if metadata is None else {"metadata": metadata})
        trajectory = Trajectory(self._env if env is None else env, index, group=self._opened, info=info)
        recorded = RecordedSession(id, self._seat(self._opened), trajectory)
        recorded.session = self._server.open(recorded, max_turns=max_turns, key=key)
        self._opened += 1
        self._open[id] = recorded
        self._watch(recorded, self._idle_timeout)
        return recorded

    def end(self, recorded: RecordedSession, **outcome: Any) -> Trajectory:
        """Hand on what a session recorded, then close it. `outcome` are fields of the trajectory.

        Raises:
            Exception: what `ended` raised; the session is still open.
        """
        trajectory = self._hand_on(recorded, outcome)
        self._remove(recorded)
        self._ended[recorded.id] = trajectory, None
        if len(self._ended) > KEPT:
            del self._ended[next(iter(self._ended))]
        if recorded is self.default:
            self.default = self.open(key=recorded.session.key)
        return trajectory

    def close(self) -> None:
        """End all sessions. Idempotent.

        Raises:
            Exception: the first that `ended` raised; the other sessions have ended all the same.
        """
        errors = []
        for recorded in list(self._open.values()):
            try:
                self._hand_on(recorded, self._left_alone(recorded, "shutdown", "the server was stopped"))
            except Exception as error:  # noqa: BLE001  the other sessions are handed on first
                errors.append(error)
            self._remove(recorded)
        if errors:
            raise errors[0]

    def _hand_on(self, recorded: RecordedSession, outcome: dict[str, Any]) -> Trajectory:
        trajectory = recorded.so_far(**outcome)
        if trajectory.turns or recorded is not self.default:
            self._when_ended(trajectory)
        return trajectory

    def _remove(self, recorded: RecordedSession) -> None:
        recorded.timer.cancel()
        recorded.session.close()
        del self._open[recorded.id]

    def _end_as_asked(self, name: str, ending: _Ending) -> dict[str, Any]:
        recorded = self._named(name)
        if recorded is None:
            id, trajectory = self._find(name)
            # The answer to the first attempt may have been lost on its way.
            if ending != self._ended[id][1]:
                raise WireError("closed", f"session {id}: has ended already, {self._how_it_ended(id)}; its record "
                                "stays as it is", code="session_closed")
        else:
            id, session = recorded.id, recorded.session
            if recorded is self.default and not session.turns:
                raise invalid("id", f"{id} is the default session, and has no replies that could be recorded yet")
            limited = bool(ending.truncated) or session.over.is_set() or session.overflowed
            try:
                trajectory = self.end(recorded, reward=ending.reward, truncated=limited, terminated=not limited,
                                      info=recorded.trajectory.info | (ending.info or {}))
            except OSError as error:
                raise WireError("unavailable", f"session {id}: cannot be recorded, and stays open: {error}",
                                code="not_recorded", retry=True) from error
            except (RecursionError, ValueError) as error:
                raise invalid("info", f"cannot be written ({error}); write numbers, text, lists and objects that are "
                              "not nested deeply") from error
            self._ended[id] = trajectory, ending
        return {"id": id, "turns": trajectory.turns, "rows": len(trajectory.rows),
                "trained_tokens": _trained(trajectory)}

    def _how_it_ended(self, id: str) -> str:
        failure = self._ended[id][0].failure
        return "with another reward, info or truncated" if failure is None else f"because {failure.message}"

    def _named(self, name: str) -> RecordedSession | None:
        return self.default if name == _DEFAULT else self._open.get(name)

    def _find(self, name: str) -> tuple[str, Trajectory]:
        recorded = self._named(name)
        if recorded is not None:
            recorded.seen = time.monotonic()
            return recorded.id, recorded.so_far()
        if name not in self._ended:
            raise WireError("not_found", f"session {name!r}: there is none, or {KEPT} others have ended since it did",
                            param="id", code="session_not_found")
        return name, self._ended[name][0]

    def _left_alone(self, recorded: RecordedSession, reason: str, message: str) -> dict[str, Any]:
        """The outcome of a session that nobody ended; that is no failure of the default one."""
        return {} if recorded is self.default else {"failure": Failure(reason, message, "")}

    def _watch(self, recorded: RecordedSession, seconds: float) -> None:
        recorded.timer = asyncio.get_running_loop().call_later(seconds, self._check, recorded)

    def _check(self, recorded: RecordedSession) -> None:
        left = self._idle_timeout - recorded.quiet()
        if left > 0 or (recorded is self.default and not recorded.session.turns):
            self._watch(recorded, left if left > 0 else self._idle_timeout)
            return
        try:
            self.end(recorded, **self._left_alone(
                recorded, "idle", f"nobody asked it for anything in {self._idle_timeout:g} s"))
        except Exception as error:  # noqa: BLE001  nobody waits who could be told
            warnings.warn(f"session {recorded.id}: cannot be recorded, and stays open: {error}", stacklevel=1)
            self._watch(recorded, self._idle_timeout)


def _trained(trajectory: Trajectory) -> int:
    return sum(sum(row.mask) for row in trajectory.rows)


def _read(body: bytes, kind: type[T]) -> T:
    """A body, which may be empty, as a struct."""
    fields = {name: decode(bytes(raw)) for name, raw in decode_fields(body or b"{}").items()}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        unknown = next((name for name in fields if name not in kind.__struct_fields__), None)
        if unknown is not None:
            raise invalid(unknown, f"is no field; there are {', '.join(kind.__struct_fields__)}") from None
        what, _, path = str(error).rpartition(" - at ")
        name = path.strip("`").removeprefix("$.")
        raise invalid(name, f"{fields[name]!r:.100} is wrong: {what}") from None
