"""JSON in and out: quick for what is common, and right for all the rest."""

import json
import math
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
        return json.loads(raw, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise WireError("invalid_request", f"body: is no JSON: {error}", code="invalid_json") from None


def decode_fields(body: bytes) -> Mapping[str, msgspec.Raw]:
    """The top-level fields of a JSON object.

    Raises:
        WireError: it is none.
    """
    try:
        return _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = decode(body)
    if not isinstance(value, dict):
        raise WireError("invalid_request", "body: is no JSON object", code="invalid_json")
    return {name: msgspec.Raw(json.dumps(field).encode("ascii")) for name, field in value.items()}


def encode(value: Any) -> bytes:
    """JSON text; lone surrogates are escaped."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode("ascii")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
