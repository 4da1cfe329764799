"""Answers as streams of server-sent events."""

import asyncio
from collections.abc import Awaitable

from aiohttp import web

from .errors import WireError
from .exchange import Completion, Event, Parsed, Wire
from .json import encode
from .memory import WireMemory

KEEP_ALIVE = 10.0
"""Seconds after which a stream that waits for its reply is told that it is alive, again and again."""


async def stream(
    request: web.BaseRequest, wire: Wire, memory: WireMemory, parsed: Parsed, work: Awaitable[Completion]
) -> web.StreamResponse:
    """Answers with the events of a completion, once `work` has made it; comments keep the connection until then.

    Raises:
        WireError: `work` did, and nothing has been answered yet.
    """
    task = asyncio.ensure_future(work)
    response: web.StreamResponse | None = None
    try:
        while not (await asyncio.wait([task], timeout=KEEP_ALIVE))[0]:
            response = response or await _begin_stream(request, {})
            await response.write(b": the policy is at it\n\n")
        try:
            completion = task.result()
        except WireError as error:
            if response is None:
                raise
            await response.write(b"".join(map(_sse, wire.error_events(error))))
        else:
            events = b"".join(map(_sse, wire.events(parsed, completion, memory)))
            headers = headers_of(completion)
            if response is None:
                response = await _begin_stream(request, headers)
            else:
                # Headers cannot follow what has begun; comments tell as much.
                events = b"".join(f": {name}: {value}\n\n".encode() for name, value in headers.items()) + events
            await response.write(events)
    finally:
        task.cancel()
    await response.write_eof()
    return response


def headers_of(completion: Completion) -> dict[str, str]:
    """Which fields of the request meant nothing here."""
    names = {name for reply in completion.replies for name in reply.ignored}
    return {"x-molt-gym-ignored": ", ".join(sorted(names))} if names else {}


async def _begin_stream(request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
    kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=kind | headers)
    await response.prepare(request)
    return response


def _sse(event: Event) -> bytes:
    name, data = event
    text = data.encode() if isinstance(data, str) else encode(data)
    # Clients that read text by lines, as httpx does, take these for the ends of lines.
    for end in ("\x85", "\u2028", "\u2029"):
        text = text.replace(end.encode(), b"\\u%04x" % ord(end))
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % text
