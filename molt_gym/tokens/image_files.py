"""Images of recorded rollouts in files of their own, once each, beside the file of JSON lines that names them.

Invariant: what is put aside comes back as it was, to the byte; a file of an image is there whole or not at all.
"""

import base64
import hashlib
import os
import re
from pathlib import Path

FOLDER = "images"
"""Beside the file of lines."""

# In text, and in the arguments of calls, the quotes of such a string are escaped.
_BEFORE = rb'(?:(?<="url":)|(?<=\d,))'
_INSIDE = re.compile(_BEFORE + rb'"data:image/([\w.+-]+);base64,([A-Za-z0-9+/]+=*)"')
_OUTSIDE = re.compile(_BEFORE + rb'"images/([0-9a-f]{64})\.([\w.+-]+)"')


def put_aside(line: bytes, beside: Path) -> bytes:
    """A line of JSON in which data URIs of images became names of files; those are written unless they are there."""

    def written(found: re.Match[bytes]) -> bytes:
        data = base64.b64decode(found[2])
        if base64.b64encode(data) != found[2]:
            return found[0]
        name = f"{FOLDER}/{hashlib.sha256(data).hexdigest()}.{found[1].decode()}"
        file = beside.parent / name
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            partial = file.with_name(f".{file.name}.{os.getpid()}")
            partial.write_bytes(data)
            partial.replace(file)
        return f'"{name}"'.encode()

    return _INSIDE.sub(written, line) if b'"data:image/' in line else line


def put_back(line: bytes, beside: Path) -> bytes:
    """The line as it was before `put_aside`; the name of an image whose file is gone stays."""

    def read(found: re.Match[bytes]) -> bytes:
        file = beside.parent / found[0].strip(b'"').decode()
        if not file.is_file():
            return found[0]
        return b'"data:image/%b;base64,%b"' % (found[2], base64.b64encode(file.read_bytes()))

    return _OUTSIDE.sub(read, line) if b'"images/' in line else line
