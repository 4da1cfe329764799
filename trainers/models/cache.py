"""The cache of models that are made here, once.

Invariants: a folder of the cache appears under its name when it is whole and on disk; of several processes that want
the same one, one makes it and the others wait for it.
"""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from molt_gym.errors import ConfigError

from ..atomic import atomic_path, recover

__all__ = ["cache_root", "cached_folder", "is_cached"]

_PATIENCE = 600.0


def cache_root() -> Path:
    """$MOLT_GYM_CACHE, or ~/.cache/molt-gym."""
    return Path(os.environ.get("MOLT_GYM_CACHE") or Path.home() / ".cache" / "molt-gym").expanduser().absolute()


def is_cached(name: str) -> bool:
    """Whether `cached_folder` would return at once."""
    return _folder(name).is_dir()


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """The folder called `name`, made by `build(folder)` if the cache lacks it.

    Args:
        name: a file name that stands for all that the contents depend on.
        build: fills an empty folder, whose path is a temporary one.

    Raises:
        ConfigError: the cache cannot be written to.
        TimeoutError: another process has been making it for ten minutes.
    """
    folder = _folder(name)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / "lock", timeout=_PATIENCE)
        lock.acquire()
    except Timeout:
        raise TimeoutError(f"{folder.parent}: another process has been making this model for {_PATIENCE:.0f} s; end it "
                           "or set MOLT_GYM_CACHE to another folder") from None
    except OSError as error:
        raise ConfigError(f"cache folder {cache_root()}: cannot be written ({error.strerror}); set MOLT_GYM_CACHE to a "
                          "folder that can") from error
    with lock:
        lock.release()
        if not folder.is_dir():
            recover(folder.parent)
            with atomic_path(folder) as partial:
                partial.mkdir()
                build(partial)
    return folder


def _folder(name: str) -> Path:
    return cache_root() / name / "model"
