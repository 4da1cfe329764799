"""What answers of several wires have in common."""

from collections.abc import Iterator
from typing import Any

from .errors import Kind, WireError
from .exchange import Token

_ERRORS: dict[Kind, tuple[str, str | None]] = {
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "rate_limit": ("requests", "rate_limit_exceeded"),
    "unavailable": ("server_error", None),
    "internal": ("server_error", None),
}


def openai_error(error: WireError) -> dict[str, Any]:
    """The JSON body of an error of OpenAI's APIs."""
    kind, code = _ERRORS.get(error.kind, ("invalid_request_error", None))
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code or code}}


def openai_logprob(token: Token, data: bytes | None) -> dict[str, Any]:
    """A sampled token and its bytes, in OpenAI's APIs."""
    known = None if data is None else list(data)
    return {"token": token.text, "logprob": token.logprob, "bytes": known, "top_logprobs": []}


def pieces(text: str, most: int = 64, least: int = 16) -> Iterator[str]:
    """A text cut for a stream; two surrogates that would be one character stay together.

    Args:
        most: pieces.
        least: characters of each but the last.
    """
    size = max(least, -(-len(text) // most))
    start = 0
    while start < len(text):
        end = start + size
        while "\ud800" <= text[end - 1 : end] <= "\udbff":
            end += 1
        yield text[start:end]
        start = end
