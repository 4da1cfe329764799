"""Envs that a server runs: one loop for the connections of a process, deadlines, and several servers taken in turn.

Invariant: whatever goes wrong between here and a server is an `EnvFailure`, within the deadline.
"""

import asyncio
import concurrent.futures
import itertools
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

__all__ = ["Servers", "checked_timeout", "wait_for"]

T = TypeVar("T")
BUSY, GONE, LATE = "capacity", "server_gone", "timeout"
"""Reasons of failures: no session is free, no connection (any more), no answer in time."""
_GRACE = 5.0
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


def checked_timeout(seconds: Any) -> float:
    """The argument `timeout` of an env. Raises ConfigError if it is no number of seconds above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigError(f"timeout: {seconds!r}; write seconds, a number above 0")
    return float(seconds)


def _checked(url: Any) -> str:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ConfigError(f"url: {url!r} is none; write that of a server, 'http://localhost:8000', or a list of them")
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    return parts._replace(scheme=scheme, path=parts.path.rstrip("/"), query="", fragment="").geturl()


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process; a forked one has a loop of its own, as no thread lives on in it."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="molt-gym-remote", daemon=True).start()
    return loop
