"""Envs that a server runs: one loop for the connections of a process, deadlines, and several servers taken in turn.

Invariant: whatever goes wrong between here and a server is an `EnvFailure`, within the deadline.
"""

import asyncio
import concurrent.futures
import itertools
import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from ..errors import ConfigError, EnvFailure
from ..threads import loop_in_thread

__all__ = ["BUSY", "GONE", "Client", "Servers", "checked_timeout", "get_json", "to_json", "wait_for"]

T = TypeVar("T")
BUSY, GONE, LATE = "capacity", "server_gone", "timeout"
"""Reasons of failures: no session is free, no connection (any more), no answer in time."""
_BETWEEN = {502: GONE, 503: BUSY, 504: LATE}
_GRACE = 5.0
_UNLIMITED = aiohttp.ClientTimeout(total=None)
_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)
_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_turns: defaultdict[tuple[str, ...], "itertools.count[int]"] = defaultdict(itertools.count)


def wait_for(work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
    """What `work` returns, which runs in the loop of this process, and is given up after `seconds`.

    Raises:
        EnvFailure: reason "timeout", or "server_gone" where a connection failed or ended; `what` says whose. And
            whatever else `work` raises.
    """
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), _loop())
    try:
        return future.result(seconds + _GRACE)
    except (TimeoutError, concurrent.futures.CancelledError) as error:
        future.cancel()
        raise EnvFailure(LATE, f"{what}: no answer within {seconds:.3g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EnvFailure(GONE, f"{what}: {type(error).__name__}: {error}") from error


class Servers:
    """Servers that run the same env.

    Args:
        url: of one, or of several.

    Raises:
        ConfigError: one of them is no URL.
    """

    def __init__(self, url: str | Sequence[str]) -> None:
        found = [url] if isinstance(url, str) else list(url) if isinstance(url, list | tuple) else [url]
        self.urls = tuple(_checked(one) for one in found)
        if not self.urls:
            raise ConfigError("url: []; write that of a server, 'http://localhost:8000', or a list of them")

    def connect(self, open_: Callable[[str, float], T], seconds: float) -> T:
        """What `open_(url, seconds left)` gives of the first server, from the one whose turn it is, that lets us in.

        Where all are busy or away, they are asked again until `seconds` have passed. Turns go round among all envs of
        this process that have the same servers.

        Raises:
            EnvFailure: of the server that was asked last.
        """
        deadline = time.monotonic() + seconds
        first = next(_turns[self.urls]) % len(self.urls)
        for pause in itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1])):
            waits = False
            for url in self.urls[first:] + self.urls[:first]:
                try:
                    return open_(url, max(deadline - time.monotonic(), 0.1))
                except EnvFailure as error:
                    failure, waits = error, waits or error.reason in (BUSY, GONE)
            if not waits or time.monotonic() + pause >= deadline:
                raise failure
            time.sleep(pause)
        raise AssertionError("pauses do not end")


class Client:
    """Requests that belong together, as they carry the cookies that the server sets.

    Args:
        url: what all paths are below.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._cookies: aiohttp.CookieJar | None = None

    def request(self, path: str, seconds: float, data: Any = None, method: str = "POST") -> tuple[int, str]:
        """Status and text of an answer.

        Raises:
            EnvFailure: as of `wait_for`; and reason "capacity", "server_gone" or "timeout" for what stands between and
                says that by a status of 503, 502 or 504.
        """
        status, text = wait_for(self._request(path, data, method), seconds, f"{self.url}{path}")
        if status in _BETWEEN:
            raise EnvFailure(_BETWEEN[status], f"{self.url}{path}: HTTP {status}: {text:.1000}")
        return status, text

    def ask(self, path: str, seconds: float, data: Any) -> dict[str, Any]:
        """The object that is answered to one that is posted.

        Raises:
            EnvFailure: as of `request`; and reason "server_error" for all other answers.
        """
        status, text = self.request(path, seconds, data)
        found = _decoded(text) if status < 300 else None
        if not isinstance(found, dict):
            raise EnvFailure("server_error", f"{self.url}{path}: HTTP {status}: {text:.1000}")
        return found

    async def _request(self, path: str, data: Any, method: str) -> tuple[int, str]:
        if self._cookies is None:
            # Servers are as often known by a number as by a name.
            self._cookies = aiohttp.CookieJar(unsafe=True)
        body = None if data is None else to_json(data).encode()
        # A connection for each: a server that closes an idle one just as it is used again would fail a request that
        # cannot be repeated.
        async with (
            aiohttp.ClientSession(cookie_jar=self._cookies, timeout=_UNLIMITED) as client,
            client.request(method, f"{self.url}{path}", data=body, allow_redirects=False,
                           headers={"Content-Type": "application/json"}) as response,
        ):
            return response.status, (await response.read()).decode("utf-8", "replace")


def get_json(url: str, seconds: float, *, post: dict[str, Any] | None = None) -> Any:
    """The JSON that is found there; None if there is no such thing (404, 405 or 501).

    Args:
        post: sent to it, if given.

    Raises:
        EnvFailure: as of `Client.ask`.
    """
    status, text = Client(url).request("", seconds, post, "GET" if post is None else "POST")
    found = _decoded(text) if status < 300 else None
    if found is None and status not in (404, 405, 501):
        raise EnvFailure("server_error", f"{url}: HTTP {status}: {text:.1000}")
    return found


def to_json(value: Any) -> str:
    """JSON that all understand: halves of surrogate pairs, which no text should have, become question marks."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()


def checked_timeout(seconds: Any) -> float:
    """The argument `timeout` of an env. Raises ConfigError if it is no number of seconds above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigError(f"timeout: {seconds!r}; write seconds, a number above 0")
    return float(seconds)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _checked(url: Any) -> str:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ConfigError(f"url: {url!r} is none; write that of a server, 'http://localhost:8000', or a list of them")
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    return parts._replace(scheme=scheme, path=parts.path.rstrip("/"), query="", fragment="").geturl()


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process; a forked one has a loop of its own, as no thread lives on in it."""
    with _lock:
        if os.getpid() not in _loops:
            _loops[os.getpid()] = loop_in_thread("molt-gym-remote")
        return _loops[os.getpid()]
