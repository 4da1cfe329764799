"""Files and folders that appear under their name only when they are complete and on disk.

Invariants: work in progress carries a name of its own (`.partial-…`) that no reader looks for; a folder that is being
replaced survives under `.old-…` until its successor is in place.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

_PARTIAL, _OLD = ".partial-", ".old-"


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary sibling to write as a file or folder, then publish it as `path`, whole and on disk.

    If the block raises, what it wrote is removed and `path` stays as it was. A file is replaced in one stroke. A folder
    that exists is moved aside first; a crash in between is mended by `recover`.
    """
    path = Path(path)
    temporary = path.with_name(f"{_PARTIAL}{path.name}-{secrets.token_hex(4)}")
    try:
        yield temporary
        _flush(temporary)
        if temporary.is_dir() and path.exists():
            _replace_folder(temporary, path)
        else:
            os.replace(temporary, path)
        _flush(path.parent, deep=False)
    except BaseException:
        _remove(temporary)
        raise


def append(file: FileIO, data: bytes, *, flush: bool = False) -> None:
    """Write all of it at the end of a file, on disk if `flush`; where that raises OSError, the file is as before."""
    size = os.fstat(file.fileno()).st_size
    try:
        while data:
            data = data[file.write(data) :]
        if flush:
            os.fsync(file)
    except OSError:
        with suppress(OSError):
            file.truncate(size)
        raise


def recover(folder: str | os.PathLike[str]) -> None:
    """After a crash: remove what was being written in `folder`, put back what had been moved aside but not replaced."""
    for partial in Path(folder).glob(f"{_PARTIAL}*"):
        _remove(partial)
    for aside in Path(folder).glob(f"{_OLD}*"):
        original = aside.with_name(aside.name.removeprefix(_OLD))
        if original.exists():
            _remove(aside)
        else:
            os.rename(aside, original)


def _replace_folder(temporary: Path, path: Path) -> None:
    aside = path.with_name(f"{_OLD}{path.name}")
    _remove(aside)
    os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        os.rename(aside, path)
        raise
    _remove(aside)


def _flush(path: Path, *, deep: bool = True) -> None:
    if deep and path.is_dir():
        for child in path.iterdir():
            _flush(child)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # There are file systems that cannot do it with folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
