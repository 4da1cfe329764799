"""A file to which served sessions are appended, line by line, whole or not at all."""

import os
from io import FileIO
from pathlib import Path

from molt_gym.errors import ConfigError
from molt_gym.tokens import Trajectory
from molt_gym.tokens.image_files import put_aside
from molt_gym.tokens.trajectory import json_line

from .atomic import append


class Recorder:
    """Appends whole lines to a file, or does nothing without one; `molt_gym.tokens.read_jsonl` reads them.

    Raises:
        ConfigError: the file cannot be opened, or ends in the middle of a line.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._file: FileIO | None = None
        if path is None:
            return
        self._path = Path(path)
        try:
            if self._path.is_file() and _last_byte(self._path) not in (b"", b"\n"):
                raise ConfigError(f"--out {path}: its last line is cut off, as by a crash; remove that line, or write "
                                  "another file")
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--out {path}: {error.strerror}; write a file that can be written") from None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def __call__(self, trajectory: Trajectory) -> None:
        """Raises OSError if there is no room; the file is as before then."""
        if self._file is None:
            return
        append(self._file, put_aside(json_line(trajectory), self._path))


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read(1)
