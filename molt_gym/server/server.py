"""The loopback server: HTTP on the running event loop, for the SDKs of the agents that run here.

Invariants: nothing but `/health` answers without the secret of an open session, or the admin's under `/sessions`; a
session's secret opens that session alone; a client that goes away takes its request with it; every answer, errors
included, has the shape of the wire that asked. A request never makes the server read a file or open a connection.
"""

import asyncio
import hashlib
import logging
import resource
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .anthropic_messages import AnthropicMessages
from .chat_completions import ChatCompletions
from .errors import CODE_HEADER, WireError
from .exchange import Respondent, Wire
from .json import decode_fields, encode
from .responses import Responses
from .session import Identity, Session
from .streaming import headers_of, stream

if TYPE_CHECKING:
    from .admin import Admin

_log = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20
"""Bytes of the largest request body."""
MODEL = "policy"
"""The name that /v1/models lists; requests may send any."""
BODY_TIMEOUT = 60.0
"""Seconds that a body may take to arrive."""
OPEN_FILES = 65_536
"""How many open files the process is allowed by itself, if the system lets it."""
SHUTDOWN_TIMEOUT = 2.0
"""Seconds that answers under way get when the server closes."""

_CHAT, _RESPONSES, _MESSAGES = ChatCompletions(), Responses(), AnthropicMessages()
_WIRES: dict[str, Wire] = {"/v1/chat/completions": _CHAT, "/v1/responses": _RESPONSES, "/v1/messages": _MESSAGES}
_COUNT = "/v1/messages/count_tokens"


class LoopbackServer:
    """Serves sessions. Use it as an async context manager, on one event loop.

    Args:
        host: address to bind; 127.0.0.1 keeps it on this machine. For containers, bind what they reach, and say with
            `public_url` how they reach it.
        port: 0 takes a free one.
        public_url: what clients are told, such as "http://host.docker.internal:8000"; by default made of host and port.
        timeout: seconds for one answer; None for no end. Less than the 600 s after which SDKs give up and ask again.
    """

    threads: ThreadPoolExecutor
    """Where long texts are encoded; no agent ever runs there."""
    admin: "Admin | None" = None
    """Answers what is asked under /sessions, for those who have its key."""

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, public_url: str | None = None, timeout: float | None = 570.0,
    ) -> None:
        self._host, self._bound, self._port, self._public_url = host, host, port, public_url
        self._timeout = timeout
        self._sessions: dict[str, Session] = {}
        self._runner: web.ServerRunner | None = None
        self.threads = ThreadPoolExecutor(2, "molt-gym-encode")

    async def __aenter__(self) -> "LoopbackServer":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be bound.
        """
        _allow_open_files()
        # With cancellation, a client that goes away ends the wait for its reply, and with it the engine's work.
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_TIMEOUT)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, backlog=1024).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        # A name may stand for an IPv4 and an IPv6 address, which get ports of their own.
        self._bound, self._port = runner.addresses[0][:2]

    async def close(self) -> None:
        """Close all sessions and stop listening. Idempotent."""
        for session in list(self._sessions.values()):
            session.close()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
        self.threads.shutdown(wait=False)

    @property
    def url(self) -> str:
        """Where it is reached. An Anthropic SDK takes this as its base URL, an OpenAI SDK `url + "/v1"`."""
        if self._public_url is not None:
            return self._public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._bound, self._bound)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._sessions)

    def open(
        self, respondent: Respondent, *, max_turns: int | None = None, key: str | None = None, remember: bool = True
    ) -> Session:
        """A new session; close it when its rollout is over.

        Args:
            respondent: who answers.
            max_turns: replies that it may get.
            key: its secret; by default a fresh one, which is what you want.
            remember: see `Session`.
        """
        key = key or f"sk-molt-{secrets.token_urlsafe(24)}"
        if key in self._sessions:
            raise ValueError("key: another open session has it; leave it out to get a fresh one")
        session = Session(key, self.url, respondent, max_turns=max_turns, timeout=self._timeout, closed=self._forget,
                          remember=remember)
        self._sessions[key] = session
        return session

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.key, None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path.rstrip("/") or "/"
        wire = _WIRES.get(path) or (_MESSAGES if path == _COUNT or "anthropic-version" in request.headers else _CHAT)
        try:
            if path == "/health":
                return _json({"status": "ok"})
            if self.admin is not None and f"{path}/".startswith("/sessions/"):
                self.admin.authenticate(_keys(request))
                return _json(self.admin.answer(request.method, path, await self._body(request)))
            session = self._session(request)
            if path in _WIRES and request.method == "POST":
                return await self._complete(request, wire, session, path)
            if path == _COUNT and request.method == "POST":
                fields = decode_fields(await self._body(request))
                call = _MESSAGES.parse_count(fields, session.memory("/v1/messages")).call
                return _json(_MESSAGES.count(await session.count(call)))
            if f"{path}/".startswith("/v1/models/") and request.method == "GET":
                return _json(_models(path.removeprefix("/v1/models").lstrip("/"), wire is _MESSAGES))
            raise _no_such_route(request.method, path)
        except WireError as error:
            return _error(wire, error)
        except Exception as error:  # noqa: BLE001  the client is told in the shape that it can read
            if isinstance(error, ConnectionError) or request.writer.output_size:
                raise
            _log.exception("%s %s", request.method, path)
            return _error(wire, WireError("internal", f"the server failed: {type(error).__name__}: {error}"))

    def _session(self, request: web.BaseRequest) -> Session:
        keys = _keys(request)
        session = next((self._sessions[key] for key in keys if key in self._sessions), None)
        if session is None:
            what = "is the secret of no open session; it may be over" if keys else "is missing"
            raise WireError("authentication", f"api key: {what}. Send the key that the agent was given, as a bearer "
                            "token or as x-api-key", code="invalid_api_key")
        return session

    async def _body(self, request: web.BaseRequest) -> bytes:
        if (request.content_length or 0) > MAX_BODY:
            raise _too_large()
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        if request.content.is_eof() and request.content.total_bytes <= MAX_BODY:
            return request.content.read_nowait()
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for part in request.content.iter_any():
                    size += len(part)
                    if size > MAX_BODY:
                        raise _too_large()
                    parts.append(part)
        except TimeoutError:
            raise WireError("invalid_request", f"body: did not arrive within {BODY_TIMEOUT:g} s") from None
        except web.RequestPayloadError as error:
            raise WireError("invalid_request", "body: cannot be read: " + " ".join(str(error).split())) from None
        return b"".join(parts)

    async def _complete(self, request: web.BaseRequest, wire: Wire, session: Session, path: str) -> web.StreamResponse:
        body = await self._body(request)
        identity = Identity(
            hashlib.blake2b(body, digest_size=16, person=path.encode()[-16:]).digest(), _attempt(request),
            request.headers.get("Idempotency-Key") or None)
        memory = session.memory(path)
        parsed = wire.parse(decode_fields(body), memory)
        work = session.complete(parsed.call, identity)
        if parsed.stream:
            return await stream(request, wire, memory, parsed, work)
        completion = await work
        return _json(wire.reply(parsed, completion, memory), headers_of(completion))


def _allow_open_files() -> None:
    """A few hundred agents have more sockets open than the usual soft limit of 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def _models(name: str, anthropic: bool) -> dict[str, Any]:
    if name not in ("", MODEL):
        raise WireError("not_found", f"model {name!r}: there is one, {MODEL!r}", code="model_not_found")
    if anthropic:
        entry = {"type": "model", "id": MODEL, "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
        page = {"data": [entry], "has_more": False, "first_id": MODEL, "last_id": MODEL}
    else:
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "molt-gym"}
        page = {"object": "list", "data": [entry]}
    return entry if name else page


def _keys(request: web.BaseRequest) -> list[str]:
    """The api key and the bearer token: an SDK sends both if its environment has a key of another service."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    keys = (request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else "")
    return [key for key in keys if key]


def _attempt(request: web.BaseRequest) -> int | None:
    text = request.headers.get("x-stainless-retry-count")
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None


def _json(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, headers=headers, content_type="application/json")


def _error(wire: Wire, error: WireError) -> web.Response:
    headers = {"x-should-retry": "true" if error.retry else "false"} | ({CODE_HEADER: error.code} if error.code else {})
    return _json(wire.error(error), headers, error.status)


def _too_large() -> WireError:
    return WireError("too_large", f"body: has more than {MAX_BODY} bytes; send less", code="request_too_large")


def _no_such_route(method: str, path: str) -> WireError:
    routes = ", ".join(f"POST {route}" for route in (*_WIRES, _COUNT))
    return WireError("not_found", f"{method} {path}: no such route; there are {routes}, GET /v1/models, GET /health",
                     code="unknown_url")
