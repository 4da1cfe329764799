"""The protocol of OpenEnv servers: JSON over a WebSocket, behind which the server runs an env for it alone."""

import asyncio
import contextlib
import json
from typing import Any

import aiohttp

from ..errors import EnvFailure
from .remote import BUSY, GONE, to_json, wait_for

__all__ = ["RefusedAction", "Session"]

_LONGEST = 100 * 2**20
_CLOSING = 5.0


class RefusedAction(ValueError):
    """The server says that the action is none; the session goes on."""


class Session:
    """A WebSocket to a server.

    Args:
        url: of the server.
        arguments: of the env's `reset`.
        seconds: for all of it.

    Raises:
        EnvFailure: reason "capacity": all its sessions are taken; "server_error": it cannot start an env or an
            episode, "timeout", "server_gone".
    """

    def __init__(self, url: str, arguments: dict[str, Any], seconds: float) -> None:
        self.url = url
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._client: aiohttp.ClientSession | None = None
        self._reader: asyncio.Task[None] | None = None
        try:
            wait_for(self._open(), seconds, url)
            self.first = self._ask("reset", arguments, seconds)
        except BaseException:
            self.close()
            raise

    def step(self, action: dict[str, Any], seconds: float) -> dict[str, Any]:
        """What the server answers to an action: observation, reward, done.

        Raises:
            RefusedAction: the action does not fit its schema.
            EnvFailure: as of the constructor. The session is of no use then; close it.
        """
        return self._ask("step", action, seconds)

    def close(self) -> None:
        """Ends the session, and with it the env on the server; more than once does no harm."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(EnvFailure):
                wait_for(self._close(client), _CLOSING, self.url)

    def _ask(self, kind: str, data: dict[str, Any], seconds: float) -> dict[str, Any]:
        answer = wait_for(self._exchange(kind, data), seconds, f"{self.url}: {kind}")
        found = answer.get("data")
        if answer.get("type") == "observation" and isinstance(found, dict) and isinstance(found.get("observation"),
                                                                                           dict):
            return found
        found = found if isinstance(found, dict) else {}
        code, words = found.get("code"), str(found.get("message") or answer)[:1000]
        if code == "VALIDATION_ERROR" and kind == "step":
            raise RefusedAction(_problems(found.get("errors")) or words)
        raise EnvFailure(BUSY if code == "CAPACITY_REACHED" else "server_error", f"{self.url}: {kind}: {words}")

    async def _open(self) -> None:
        self._client = aiohttp.ClientSession()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._socket = await self._client.ws_connect(f"{self.url}/ws", max_msg_size=_LONGEST)
        self._reader = asyncio.create_task(self._read(self._socket))

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Reads all the time: servers drop a peer that does not answer their pings, and those come while a policy
        thinks."""
        try:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                self._answers.put_nowait(message.data)
        finally:
            self._answers.put_nowait(None)

    async def _exchange(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        # A server that has no room says why and hangs up; what it said is read even if nothing can be sent.
        with contextlib.suppress(ConnectionError):
            await self._socket.send_str(to_json({"type": kind, "data": data}))
        answer = await self._answers.get()
        if answer is None:
            self._answers.put_nowait(None)
            raise EnvFailure(GONE, f"{self.url}: the server has closed the connection")
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise EnvFailure("server_error", f"{self.url}: {kind}: {answer!r:.200} is no JSON object")
        return found

    async def _close(self, client: aiohttp.ClientSession) -> None:
        try:
            if self._reader is not None:
                self._reader.cancel()
            if self._socket is not None and not self._socket.closed:
                with contextlib.suppress(ConnectionError):
                    await self._socket.send_str('{"type": "close"}')
                await self._socket.close()
        finally:
            await client.close()


def _problems(errors: Any) -> str:
    """What pydantic found wrong with the fields of an action."""
    found = [error for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []
    return "; ".join(f"{'.'.join(map(str, error.get('loc') or ()))}: {error.get('msg')}".lstrip(": ")
                     for error in found)
