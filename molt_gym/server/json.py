"""JSON in and out: quick for what is common, and right for all the rest."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import WireError

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()


def decode(raw: bytes) -> Any:
    """A JSON value.

    Raises:
        WireError: it is none.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    # msgspec refuses escaped lone surrogates, which JSON allows and models write.
    try:
        return json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise WireError("invalid_request", f"body: is no JSON: {error}", code="invalid_json") from None


def decode_fields(body: bytes) -> Mapping[str, msgspec.Raw]:
    """The top-level fields of a JSON object.

    Raises:
        WireError: it is none.
    """
    try:
        return _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError("invalid_request", f"body: is no JSON object: {error}", code="invalid_json") from None


def encode(value: Any) -> bytes:
    """JSON text; lone surrogates are escaped."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode("ascii")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
