"""The folder of one run: settings, metrics, transcripts, curve, checkpoints, exported model.

Invariants: a run folder is never shared by two runs or two processes. A file that is read back whole (settings,
transcripts, checkpoints, models) appears under its name only when complete and on disk. Metrics are appended, one JSON
object a line and on disk before `append_metrics` returns, so a crash costs at most the line it cuts.
"""

import errno
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from molt_gym.errors import ConfigError
from molt_gym.tokens.trajectory import Trajectory, write_jsonl

from .atomic import append, atomic_path, recover

MOST_LETTERS = 100
"""Of the name of an env, or of a model, in that of a run's folder."""


def default_path(env: str, model: str, root: str | os.PathLike[str] = "runs") -> Path:
    """A free `root/<env>-<model>-<timestamp>`, model being a name, hub id or folder."""
    stem = f"{_slug(env)}-{_slug(Path(model).name)}-{datetime.now():%Y%m%d-%H%M%S}"
    suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    return next(path for suffix in suffixes if not (path := Path(root) / (stem + suffix)).exists())


def holds_run(path: str | os.PathLike[str]) -> bool:
    """Whether a run has begun in the folder."""
    return (Path(path) / "config.toml").is_file()


def latest_run(env: str | None = None, root: str | os.PathLike[str] = "runs") -> Path | None:
    """The run under `root`, of `env` if given, whose files changed last."""
    runs = filter(holds_run, Path(root).glob("*" if env is None else f"{_slug(env)}-*"))
    return max(runs, key=lambda run: max(file.stat().st_mtime for file in run.iterdir()), default=None)


class RunDir:
    """One run's folder, held by this process until `close`.

    Without `resume` the folder must be new or empty; with it, it must hold a run. The layout is in the properties.

    Raises:
        ConfigError: the folder holds another run (or none, when resuming), or a live process is writing to it.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        # An env may change the working directory.
        self.path = Path(path).absolute()
        self.config_path = self.path / "config.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.rollouts_path = self.path / "rollouts"
        self.checkpoints_path = self.path / "checkpoints"
        self.model_path = self.path / "model"
        self.curve_path = self.path / "curve.png"
        if resume and not holds_run(self.path):
            raise ConfigError(f"resume: {self.path} holds no run (no config.toml); name a folder that train wrote")
        if not resume and _holds_files(self.path):
            raise ConfigError(f"out: {self.path} is in use; choose a new folder, or go on with the run in it "
                              "by --resume or the argument out")
        self._new = not self.path.exists()
        folders = (self.path, self.rollouts_path, self.checkpoints_path)
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"out: cannot make {error.filename}: {error.strerror}; choose another folder") from error
        self._lock = Hold(self.path)
        try:
            for folder in folders:
                recover(folder)
            self._metrics = self.metrics_path.open("ab", buffering=0)
            self.cut_metrics()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Let another process have the folder, or remove one that was made for a run that did not begin. Idempotent."""
        self._metrics.close()
        if self._new and not holds_run(self.path) and not _holds_files(self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        self._new = False
        self._lock.close()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_config(self, toml: str) -> None:
        """Write config.toml, whole."""
        with atomic_path(self.config_path) as temporary:
            temporary.write_text(toml, encoding="utf-8")

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one line and force it to disk; if that fails (disk full) the file is as it was before.

        Values are numbers (also NumPy's and torch's scalars), strings, booleans or None. NaN and infinities are written
        as null, which reads: measured, but no finite number. What was not measured has no key.

        Raises:
            TypeError: a value of another kind; the metric is named.
            OSError: the disk refused.
        """
        line = json.dumps({name: _plain(name, value) for name, value in metrics.items()}, allow_nan=False) + "\n"
        append(self._metrics, line.encode(), flush=True)

    def cut_metrics(self, step: float = math.inf) -> None:
        """Forget what came after `step`: metrics lines (also a half-written one) and transcripts.

        A run resumed from the checkpoint of `step` then leaves the same files as one that was never interrupted.
        """
        lines = [line for line, record in _whole_lines(self.metrics_path) if record.get("step", 0) <= step]
        for file in self.rollouts_path.glob("step-*.jsonl"):
            if (number := file.stem.removeprefix("step-")).isdecimal() and int(number) > step:
                file.unlink()
        with atomic_path(self.metrics_path) as temporary:
            temporary.write_bytes(b"".join(line + b"\n" for line in lines))
        self._metrics.close()
        self._metrics = self.metrics_path.open("ab", buffering=0)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All steps so far, as `read_metrics` gives them."""
        return read_metrics(self.metrics_path)

    def last_step(self) -> dict[str, Any]:
        """The metrics line of the newest step; {} before the first."""
        for line in reversed(self.metrics_path.read_bytes().split(b"\n")):
            if line and "eval/when" not in (record := json.loads(line)):
                return {name: math.nan if value is None else value for name, value in record.items()}
        return {}

    def write_rollouts(self, step: int, trajectories: Iterable[Trajectory]) -> Path:
        """Write the transcripts that `step` trained on to rollouts/step-<6 digits>.jsonl, whole."""
        path = self.rollouts_path / f"step-{step:06d}.jsonl"
        with atomic_path(path) as temporary:
            write_jsonl(temporary, trajectories)
        return path


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl (or of the one in a run folder), null as NaN.

    A last line that a crash cut is dropped, with a warning.

    Raises:
        FileNotFoundError: no such file.
        ConfigError: another line is no JSON object.
    """
    path = Path(path)
    return [{name: math.nan if value is None else value for name, value in record.items()}
            for _, record in _whole_lines(path / "metrics.jsonl" if path.is_dir() else path)]


def _slug(name: str) -> str:
    # File systems take names of up to 255 bytes, and a mixture may have any number of envs.
    return re.sub(r"[^\w.+-]+", "-", "+".join(part.rpartition(":")[2] for part in name.split("+")))[:MOST_LETTERS]


def _holds_files(path: Path) -> bool:
    # A run that was killed before it wrote its settings left empty folders and a lock: that is no run.
    files = path.rglob("*") if path.is_dir() else [path]
    return any(file.is_file() and file.stat().st_size for file in files if not file.name.startswith("."))


def _plain(name: str, value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"metric {name}: {value!r} is no number, string, boolean or None")


def _whole_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Lines, which end at a newline byte and nowhere else, with what they say; ConfigError if one is no JSON object."""
    *lines, rest = path.read_bytes().split(b"\n")
    if rest:
        warnings.warn(f"{path}: dropped the last line, which is cut off", stacklevel=3)
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("no JSON object")
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}; mend that line, or remove it") from error
        found.append((line, record))
    return found


class Hold:
    """A lock on a folder, until `close`.

    Raises:
        ConfigError: another process has it, or another run of this one; or nothing can be written there.
    """

    _here: ClassVar[set[Path]] = set()

    def __init__(self, folder: Path) -> None:
        self._path = folder.resolve()
        # These locks do not keep out their own process, which would give this one up by closing the file once more.
        if self._path in self._here:
            raise ConfigError(f"out: another run of this process is writing to {folder}; choose another folder")
        try:
            self._file = (folder / ".lock").open("wb")
        except OSError as error:
            raise ConfigError(f"out: cannot write to {folder}: {error.strerror}; choose another folder") from error
        # A POSIX record lock: a killed process frees it and forked children do not inherit it, unlike flock.
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Other errors mean that this file system has no locks.
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._file.close()
                raise ConfigError(f"out: another process is writing to {folder}; choose another folder") from None
        self._here.add(self._path)

    def close(self) -> None:
        """Let others have the folder. Idempotent."""
        if not self._file.closed:
            self._file.close()
            self._here.discard(self._path)
