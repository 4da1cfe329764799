"""The folder of an evaluation: a table of its tasks, from which it goes on after any kind of end.

Invariants: a task is in the table when the attempts at it are over, and on disk before the next one is; tasks with
attempts that failed are played again; scores of different settings never meet in one table.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from molt_gym.errors import ConfigError

from .atomic import atomic_path, recover
from .run_dir import Hold
from .scores import TaskScore


@contextmanager
def eval_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder for evaluations in any number of envs, held by this process within.

    Raises:
        ConfigError: it cannot be made, or a live process is writing to it.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: cannot make {path}: {error.strerror}; choose another folder") from error
    with closing(Hold(folder)):
        recover(folder)
        yield folder


class EvalLog:
    """The table of one env: ENV.jsonl, a JSON object a task in the order in which they ended; see `TaskScore.row`.

    ENV.json has the settings.

    Raises:
        ConfigError: the env was evaluated in this folder with other settings, which are named.
    """

    def __init__(self, folder: Path, env: str, settings: Mapping[str, Any]) -> None:
        name = re.sub(r"[^\w.-]+", "-", env)
        file, self.path = folder / f"{name}.json", folder / f"{name}.jsonl"
        wanted = json.loads(json.dumps(settings))
        if file.exists():
            _compare(dict(_flat(json.loads(file.read_text(encoding="utf-8")))), dict(_flat(wanted)), folder)
        else:
            self.path.unlink(missing_ok=True)
            with atomic_path(file) as temporary:
                temporary.write_text(json.dumps(wanted, indent=2), encoding="utf-8")
        self.tasks: dict[int, TaskScore] = {}
        """By position, those without attempts that failed."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        for score in map(TaskScore.from_row, map(json.loads, lines)):
            if not score.failures:
                self.tasks[score.position] = score
        with atomic_path(self.path) as temporary:
            temporary.write_text("".join(map(_line, self.tasks.values())), encoding="utf-8")

    def add(self, score: TaskScore) -> None:
        """A task is over."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(_line(score))
            stream.flush()
            os.fsync(stream.fileno())


def _line(score: TaskScore) -> str:
    return json.dumps(score.row()) + "\n"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _compare(known: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    differing = [f"{name}: {wanted.get(name)!r}, but the evaluation in {folder} has {known.get(name)!r}"
                 for name in sorted(known.keys() | wanted.keys()) if known.get(name) != wanted.get(name)]
    if differing:
        raise ConfigError("\n".join(differing) + "\nwrite the same to go on with it, or choose another folder (out)")
