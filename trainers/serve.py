"""`molt-gym serve`: a model, or any policy, behind an endpoint for the SDKs of OpenAI and Anthropic, which records.

Invariants: what a request says about temperature, top_p and top_k is done, as nothing is trained; a session's
trajectory is written when the one who ended it hears of it; wrong addresses and files are refused before the model is
loaded.
"""

import asyncio
import errno
import ipaddress
import math
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from molt_gym.errors import ConfigError
from molt_gym.policy import Policy, PolicyFunction, as_policy
from molt_gym.server.admin import Admin
from molt_gym.server.respond import Rules, TokenRespondent
from molt_gym.server.server import LoopbackServer
from molt_gym.tokens import Renderer, Sampling

from .api import configure
from .config import Config, load_config
from .models import SMOLLM2, TINY, resolve_model
from .progress import Progress
from .recorder import Recorder
from .rollout.gate import Gate, OpenGate
from .rollout.seats import PolicySeat, Seat, TokenSeat
from .rollout.ticket import Ticket
from .session import Sampler

__all__ = ["KEY_VARIABLE", "Endpoint", "Player", "load", "serve", "serve_until_stopped"]

KEY_VARIABLE = "MOLT_GYM_SERVE_KEY"
"""Environment variable with the admin key; without it, the key is made up and printed."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_NO_ENV = "serve"
"""What trajectories have as their env where there is none."""


@dataclass(frozen=True)
class Player:
    """Who answers.

    seat: for session number n; gets the threads where long texts are encoded.
    timeout: seconds for one reply.
    env: the name in the trajectories.
    close: frees what it holds.
    """

    seat: Callable[[int, ThreadPoolExecutor], Seat]
    timeout: float
    env: str
    close: Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """Where it is served, and where it is recorded.

    host, port: to bind; port 0 takes a free one.
    public_url: what clients are told; by default made of host and port.
    out: a file to which each session's trajectory is appended as a line of JSON.
    key: the admin key; by default a fresh one.
    idle_timeout: seconds after which a session that is asked for nothing ends.
    """

    host: str = "127.0.0.1"
    port: int = 0
    public_url: str | None = None
    out: str | os.PathLike[str] | None = None
    key: str | None = None
    idle_timeout: float = 3600.0

    async def check(self) -> bool:
        """Whether only programs of this machine reach it.

        Raises:
            ConfigError: a field is wrong, or the address cannot be had.
        """
        if not self.host:
            raise ConfigError("--host '': write an address, such as 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: write 0 (a free one) to 65535")
        if not 0 < self.idle_timeout < math.inf:
            raise ConfigError(f"--idle-timeout {self.idle_timeout:g}: write a number of seconds above 0")
        if self.public_url is not None and not self.public_url.lower().startswith(("http://", "https://")):
            raise ConfigError(f"--public-url {self.public_url!r}: write what begins with http:// or https://, such as "
                              "http://host.docker.internal:8000")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable() and " " not in self.key):
            raise ConfigError(f"{KEY_VARIABLE}: holds blanks or characters other than ASCII, and cannot be sent in a "
                              "header; write letters and digits")
        with self._bound():
            async with LoopbackServer(host=self.host, port=self.port):
                addresses = {str(found[4][0]) for found in socket.getaddrinfo(self.host, None)}
        return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)

    @contextmanager
    def _bound(self) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:
            why = os.strerror(error.errno) if getattr(error, "errno", 0) in errno.errorcode else error
            raise ConfigError(f"--host {self.host} --port {self.port}: {why}; write an address of this machine and a "
                              "port that is free, or --port 0 for any") from None

    @asynccontextmanager
    async def serve(self, player: Player) -> AsyncIterator[Admin]:
        """Answers, until the block is left; then all sessions have ended and are recorded."""
        with Recorder(self.out) as record:
            server = LoopbackServer(host=self.host, port=self.port, public_url=self.public_url, timeout=player.timeout)
            try:
                with self._bound():
                    await server.start()
                admin = server.admin = Admin(
                    server, self.key or f"sk-molt-admin-{secrets.token_urlsafe(24)}",
                    lambda number: player.seat(number, server.threads), ended=record, env=player.env,
                    idle_timeout=self.idle_timeout)
                try:
                    yield admin
                finally:
                    server.admin = None
                    admin.close()
            finally:
                await server.close()
                await player.close()


@asynccontextmanager
async def serve(
    model: str | os.PathLike[str] | Policy | PolicyFunction | None = None, *, env: str | None = None,
    endpoint: Endpoint = Endpoint(), config: str | os.PathLike[str] | None = None, **overrides: Any,
) -> AsyncIterator[Admin]:
    """Serves on the running event loop, which loading the model holds up; `admin.default.session` has key and URL.

    Args:
        model, env, config, **overrides: see `load`.
        endpoint: where.

    Raises:
        ConfigError: a setting is wrong, the address is taken, or there is no such model.
    """
    await endpoint.check()
    async with endpoint.serve(load(model, env=env, config=config, **overrides)) as admin:
        yield admin


def load(
    model: str | os.PathLike[str] | Policy | PolicyFunction | None = None, *, env: str | None = None,
    config: str | os.PathLike[str] | None = None, **overrides: Any,
) -> Player:
    """Who answers: a model, loaded here, or a policy.

    Args:
        model: as for `molt_gym.evaluate`; "tiny" needs an env, whose demonstrations it is made of.
        env: names the trajectories, and its recommended settings hold.
        config, **overrides: settings; those under rollout matter.
    """
    if model is not None and not isinstance(model, str | os.PathLike):
        policy = as_policy(model)
        settings = load_config(env, file=config, preset={"env": _NO_ENV}, overrides=overrides)
        return Player(lambda number, threads: PolicySeat(policy), settings.rollout.generate_timeout, settings.env,
                      _nothing)
    settings, path = _configure(env, model, config, overrides)
    if settings.placement != "local":
        raise ConfigError(f"placement: {settings.placement!r}; molt-gym serve runs on this machine, write 'local'")
    sampler, rollout = Sampler(path, settings), settings.rollout
    gate = OpenGate(sampler.engine)
    sampling = Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k)

    def seat(number: int, threads: ThreadPoolExecutor) -> Seat:
        ticket = Ticket(0, number, seed=settings.seed)
        return _FreeSeat(sampler.renderer, rollout.history, sampling, rollout.max_context, ticket, gate, threads)

    return Player(seat, rollout.generate_timeout, settings.env, sampler.engine.close)


def serve_until_stopped(
    endpoint: Endpoint, model: str | None = None, *, env: str | None = None, config: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Prints how to reach it, and serves until a signal ends it; another one, a second later, does not wait."""
    local = asyncio.run(endpoint.check())
    with Recorder(endpoint.out):
        player = load(model, env=env, config=config, **overrides or {})
    if not local:
        print(f"warning: --host {endpoint.host} is not this machine alone: who reaches it and has a key can use the "
              "model, and keys and texts go over plain http", file=sys.stderr)
    asyncio.run(_serve_until_stopped(endpoint, player))


async def _serve_until_stopped(endpoint: Endpoint, player: Player) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    async with endpoint.serve(player) as admin:
        print(_directions(admin, endpoint), flush=True)
        await stopped.wait()
        # Shells and programs around it may pass the same signal on twice.
        loop.call_later(1.0, lambda: [loop.remove_signal_handler(number) for number in _SIGNALS])


def _directions(admin: Admin, endpoint: Endpoint) -> str:
    """Lines to paste into a shell."""
    key = admin.default.session.key
    variables = {"OPENAI_BASE_URL": f"{admin.url}/v1", "OPENAI_API_KEY": key,
                 "ANTHROPIC_BASE_URL": admin.url, "ANTHROPIC_API_KEY": key}
    body = '{"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}'
    return "\n".join([
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        f"# curl $OPENAI_BASE_URL/chat/completions -H \"Authorization: Bearer $OPENAI_API_KEY\" -d '{body}'",
        f"# admin key, for {admin.url}/sessions: " + (f"that in {KEY_VARIABLE}" if endpoint.key else admin.key),
        f"# recorded in {endpoint.out}" if endpoint.out else "# not recorded in a file; --out FILE.jsonl does that",
        "# Ctrl-C ends it"])


def _configure(
    env: str | None, model: str | os.PathLike[str] | None, config: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
) -> tuple[Config, Path]:
    """Settings, and the folder of the model."""
    progress = Progress(sys.stderr)
    name = None if model is None else os.fspath(model)
    draft = load_config(env, model=name, file=config, preset={"env": _NO_ENV}, overrides=overrides)
    if draft.env != _NO_ENV:
        settings, resolved = configure(draft.env, model, config, overrides, progress)
        return settings, resolved.path
    if draft.model == TINY:
        raise ConfigError("env: missing, and the model 'tiny' is made of an env's demonstrations; write it first, such "
                          "as molt-gym serve CodeExec-v0 --model tiny")
    resolved = resolve_model(draft.model or SMOLLM2, env=_NO_ENV, say=progress.message)
    preset = {**resolved.preset, "env": _NO_ENV}
    return load_config(model=name, file=config, preset=preset, overrides=overrides), resolved.path


class _FreeSeat(TokenSeat):
    """Requests choose how they are sampled; a seed means the same in all sessions."""

    def __init__(
        self, renderer: Renderer, history: Literal["keep", "rerender"], sampling: Sampling, max_context: int,
        ticket: Ticket, gate: Gate, threads: ThreadPoolExecutor,
    ) -> None:
        super().__init__(renderer, history, sampling, max_context, ticket, 0, gate, threads)
        rules = Rules(sampling, max_context, free=True, seed=self._seed)
        self.respondent = TokenRespondent(renderer, self._generate, rules, history=history, threads=threads)

    def _seed(self, number: int, seed: int | None, sample: int) -> int:
        if seed is None:
            return super()._seed(number, None, sample)
        return Ticket(0, 0).derive(sample, abs(seed), int(seed < 0))


async def _nothing() -> None:
    pass
