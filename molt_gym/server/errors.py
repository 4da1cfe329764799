"""What the loopback server refuses, before a wire gives it its own shape."""

from typing import Literal

Kind = Literal["invalid_request", "authentication", "not_found", "too_large", "unsupported", "rate_limit",
               "unavailable", "closed", "internal"]

STATUS: dict[Kind, int] = {
    "invalid_request": 400,
    "authentication": 401,
    "not_found": 404,
    "closed": 410,
    "too_large": 413,
    "unsupported": 422,
    "rate_limit": 429,
    "internal": 500,
    "unavailable": 503,
}


CODE_HEADER = "x-molt-gym-code"
"""Header of an error that has the code of it, whatever the wire."""
LIMIT_CODES = ("context_length_exceeded", "turn_limit")
"""Of errors that end a rollout as a truncation."""
ENGINE_CODES = ("engine_failed", "deadline_exceeded", "aborted")
"""Of errors for which the engine is to blame."""


class WireError(Exception):
    """A request that is refused or failed.

    Args:
        kind: what went wrong; `STATUS` has the HTTP status of each.
        message: names the field and its value, and what to write instead.
        param: the field, such as "messages[2].content".
        code: a slug for programs, such as "context_length_exceeded" or "unsupported_parameter".
        retry: whether the same request may succeed if it is sent again; SDKs are told so.
    """

    def __init__(
        self, kind: Kind, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.kind, self.message, self.param, self.code, self.retry = kind, message, param, code, retry

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.kind]


def invalid(param: str, message: str) -> WireError:
    """A field is wrong; the text begins with its name."""
    return WireError("invalid_request", f"{param}: {message}", param=param, code="invalid_value")


def unsupported(param: str, message: str) -> WireError:
    """A field is right, but a policy that is being trained cannot honour it."""
    return WireError("unsupported", f"{param}: {message}", param=param, code="unsupported_parameter")


def aborted() -> WireError:
    """The engine gave a reply up."""
    return WireError("unavailable", "the reply was aborted", code="aborted", retry=True)
