"""Images in messages: what may stand for one, and the one form that all inside work with, a data URI.

Invariants: nothing is fetched; equal images are one string in memory; of an image nothing is used before all of it was
decoded; where an image stands in a sequence is known from who put it there, never from the value of an id.
"""

import base64
import hashlib
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .messages import Message

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageSpan", "image_digest", "image_part", "images_of", "inline_images", "keyed", "open_image",
           "with_images"]

MAX_BYTES = 20 << 20
"""Of an image file."""
MAX_PIXELS = 1 << 26
"""Of an image once it is decoded, 64 million, as small files can hold huge ones."""
FORMATS = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}
"""What is decoded, as Pillow and as media types name it; of a moving picture the first frame."""
KINDS = ("image_url", "image", "input_image")
"""Types of parts that are images."""

_KNOWN = 4096
_sound: set[str] = set()
_URI = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE | re.ASCII)
_FETCHED = re.compile(r"(?!data:|file:)[A-Za-z][A-Za-z0-9+.-]*:(?=//)")


class ImageSpan(NamedTuple):
    """An image in a sequence: the position of its first token, how many it has, and its data URI."""

    start: int
    count: int
    uri: str


def image_part(image: Any) -> dict[str, Any]:
    """A part of a message's content that is an image.

    Args:
        image: a PIL image, an array [height, width, 3] of bytes, the bytes of an image file, the path of one, or a data
            URI.

    Raises:
        ValueError: it is none of these, an address that would have to be fetched, too large, or cannot be decoded.
    """
    return {"type": "image_url", "image_url": {"url": _data_uri(image, "image")}}


def inline_images(messages: Sequence[Message], where: str = "messages") -> list[Message]:
    """Messages in which every image is a part as `image_part` makes it; a PIL image or a path may stand for one.

    Raises:
        ValueError: as `image_part`; the part is named.
    """
    return [_inlined(message, f"{where}[{number}]") for number, message in enumerate(messages)]


def with_images(messages: Sequence[Message], images: Sequence[Any]) -> list[Message]:
    """Messages whose parts `{"type": "image"}` are filled from a column of images, in their order.

    Where there are no such parts, the images are the beginning of the first user message.

    Raises:
        ValueError: there are more images than parts, or fewer.
    """
    empty = sum(source_of(part) is None for message in messages for part in _parts(message))
    if not empty:
        first = next((number for number, message in enumerate(messages) if message.get("role") == "user"), None)
        if first is None:
            raise ValueError(f"images: {len(images)}, and no user message that could show them")
        content = messages[first].get("content")
        text = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        shown = {**messages[first], "content": [{"type": "image"} for _ in images] + text}
        messages, empty = [*messages[:first], shown, *messages[first + 1 :]], len(images)
    if empty != len(images):
        raise ValueError(f"images: {len(images)} for {empty} parts of type 'image' in the messages; give one each")
    rest = iter(images)

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image", "image": next(rest)} if part.get("type") in KINDS and source_of(part) is None else part

    return [{**message, "content": [filled(part) for part in message["content"]]} if _parts(message) else message
            for message in messages]


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """The data URIs of all images, in the order in which they are read."""
    return [sys.intern(source_of(part)) for message in messages for part in _parts(message)]


def open_image(uri: str, where: str = "image") -> "Image":
    """The image itself in RGB, upright, on white where it is transparent, and decoded to its end.

    Raises:
        ValueError: it is no data URI, no image of a known format, cut off, or too large.
    """
    return _opened(_bytes(uri, where), where)[0]


def image_digest(uri: str) -> str:
    """A name for the contents of an image: 64 hexadecimal digits (SHA-256 of the data URI)."""
    return hashlib.sha256(uri.encode()).hexdigest()


def is_data_uri(source: Any) -> bool:
    """Whether it begins as a data URI of an image does."""
    return isinstance(source, str) and _URI.match(source) is not None


def keyed(ids: Sequence[int], images: Sequence[ImageSpan]) -> list[int]:
    """Ids in which the tokens of an image are a negative number of its own, so that equal prefixes look alike."""
    keys = list(ids)
    for start, count, uri in images:
        keys[start : start + count] = [-1 - int(image_digest(uri)[:15], 16)] * count
    return keys


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if part.get("type") in KINDS] if isinstance(content, list) else []


def source_of(part: Mapping[str, Any]) -> Any:
    """What stands for the image of a part, in whichever of the usual spellings."""
    value = next((part[name] for name in ("image_url", "image", "url", "path") if part.get(name) is not None), None)
    return value["url"] if isinstance(value, dict) and "url" in value else value


def _inlined(message: Message, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    content = []
    for number, part in enumerate(message["content"]):
        if isinstance(part, dict) and part.get("type") in KINDS:
            part = {"type": "image_url", "image_url": {"url": _data_uri(source_of(part), f"{where}.content[{number}]")}}
        content.append(part)
    return {**message, "content": content}


def _data_uri(image: Any, where: str) -> str:
    if isinstance(image, dict):
        # As a column of a dataset holds them.
        image = image.get("bytes") or image.get("path")
    if is_data_uri(image):
        _check(image, where)
        return sys.intern(image)
    if isinstance(image, str) and _FETCHED.match(image):
        raise ValueError(f"{where}: {image[:100]!r} would have to be fetched, which is not done; load it yourself and "
                         "write molt_gym.image_part(bytes)")
    if isinstance(image, str | PathLike):
        path = Path(str(image).removeprefix("file://"))
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"{where}: {path} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are taken")
            image = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{where}: {path} cannot be read ({error.strerror})") from error
    if not isinstance(image, bytes):
        image = _encoded(image, where)
    kind = FORMATS[_opened(image, where)[1]]
    return sys.intern(f"data:image/{kind};base64,{base64.b64encode(image).decode()}")


def _check(uri: str, where: str) -> None:
    """Decodes an image unless it was seen before: those of a task come again with each rollout."""
    name = image_digest(uri)
    if name not in _sound:
        open_image(uri, where)
        if len(_sound) >= _KNOWN:
            _sound.clear()
        _sound.add(name)


def _encoded(image: Any, where: str) -> bytes:
    from PIL import Image

    try:
        picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
        if picture.mode in ("F", "I"):
            raise ValueError(f"of mode {picture.mode}, which has no white; convert it to one of 8 or 16 bits")
        if picture.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            picture = picture.convert("RGB")
        file = io.BytesIO()
        picture.save(file, "PNG")
    except (AttributeError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"{where}: {str(image)[:100]!r} is no image ({error}); give a PIL image, the bytes or the "
                         "path of an image file, or a data URI") from error
    return file.getvalue()


def _bytes(uri: Any, where: str) -> bytes:
    found = _URI.match(uri) if isinstance(uri, str) else None
    if found is None:
        raise ValueError(f"{where}: {str(uri)[:60]!r} is no image in base64; write a data URI, "
                         "'data:image/png;base64,...', as molt_gym.image_part makes it")
    if (len(uri) - found.end()) * 3 // 4 > MAX_BYTES + 2:
        raise ValueError(f"{where}: an image file of more than {MAX_BYTES:,} bytes; at most that are taken")
    text = re.sub(r"\s", "", uri[found.end() :]).replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError as error:
        raise ValueError(f"{where}: its base64 cannot be decoded ({error})") from error


def _opened(data: bytes, where: str) -> tuple["Image", str]:
    """The image itself, and its format as Pillow names it."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=list(FORMATS)) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels, and at most {MAX_PIXELS:,} are taken; "
                                 "scale it down")
            picture.load()
            return _in_rgb(ImageOps.exif_transpose(picture)), picture.format or ""
    except Image.UnidentifiedImageError:
        raise ValueError(f"{where}: {len(data)} bytes that are no {', '.join(FORMATS)} image") from None
    except (OSError, SyntaxError, ValueError, EOFError, MemoryError, Image.DecompressionBombError,
            Image.DecompressionBombWarning) as error:
        raise ValueError(f"{where}: cannot be decoded: {error}") from error


def _in_rgb(picture: "Image") -> "Image":
    """On white where it is transparent, as most pictures are looked at; of 16 bits the upper 8."""
    from PIL import Image

    if picture.mode.startswith("I"):
        picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")
