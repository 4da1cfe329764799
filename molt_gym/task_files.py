"""Rows of a dataset as they stand: of a local file, of a folder that `datasets` saved, or of a name on the hub.

Invariants: a row keeps its number, whatever is chosen of the dataset; what has no splits of its own holds every tenth
row out for "test".
"""

import csv
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError

__all__ = ["column", "columns", "read"]

_FILES = (".jsonl", ".json", ".csv", ".parquet")
_HELD_OUT_ONE_IN = 10
_OWN = ("train", "test", "all")


def read(name: str, subset: str | None, split: str) -> tuple[Sequence[Any], Sequence[int]]:
    """The rows, read once in a process as long as they do not change, and the numbers of those that are in the split.

    Args:
        name: a path that ends in .jsonl, .json (lines or one list), .csv (with a header; all values are texts) or
            .parquet, a folder that `Dataset.save_to_disk` wrote, or else what `datasets.load_dataset` takes.
        subset: of a dataset on the hub that has several.
        split: "train" or "test", "all" for both, or any split that the dataset has itself.

    Raises:
        ConfigError: it cannot be read, or has no such split.
    """
    path = Path(name)
    if path.is_file() and path.suffix not in _FILES:
        raise ConfigError(f"dataset: {name!r} is a file of a kind that is not read; write one that ends in "
                          f"{', '.join(_FILES)}")
    undivided = path.suffix in _FILES or (path / "state.json").is_file()
    rows = _read(name, subset, None if undivided else split, _stamp(path))
    if not undivided:
        return rows, range(len(rows))
    if subset is not None:
        raise ConfigError(f"dataset_subset: {subset!r}; {name!r} has none, leave it out")
    if split not in _OWN:
        raise ConfigError(f"dataset_split: {split!r}; {name!r} has no splits of its own, so write one of "
                          f"{', '.join(map(repr, _OWN))}")
    last = _HELD_OUT_ONE_IN - 1
    return rows, [n for n in range(len(rows)) if split == "all" or (n % _HELD_OUT_ONE_IN == last) == (split == "test")]


def columns(rows: Sequence[Any]) -> list[str]:
    """The names that any row has."""
    return list(dict.fromkeys(name for row in rows for name in row)) if isinstance(rows, list) else rows.column_names


def column(rows: Sequence[Any], name: str) -> list[Any]:
    """The values of all rows; None where a row has none."""
    return [row.get(name) for row in rows] if isinstance(rows, list) else list(rows[name])


@functools.lru_cache(maxsize=16)
def _read(name: str, subset: str | None, split: str | None, stamp: tuple[int, ...]) -> Sequence[Any]:
    """All rows, or those of a split that the dataset has. stamp: tells a file from a later one of the same name."""
    path = Path(name)
    if path.suffix == ".parquet":
        return _ask(repr(name), lambda datasets: datasets.Dataset.from_parquet(name))
    if path.suffix in _FILES:
        return list(_csv(path) if path.suffix == ".csv" else _json(path))
    if split is None:
        return _ask(repr(name), lambda datasets: datasets.load_from_disk(name))
    if (path / "dataset_dict.json").is_file():
        parts = _ask(repr(name), lambda datasets: datasets.load_from_disk(name))
        if split not in parts:
            raise ConfigError(f"dataset_split: {name!r} has no {split!r}; write one of {', '.join(parts)}")
        return parts[split]
    return _ask(f"{name!r}, split {split!r}", lambda datasets: datasets.load_dataset(name, subset, split=split))


def _stamp(path: Path) -> tuple[int, ...]:
    if path.suffix in _FILES and not path.is_file():
        raise ConfigError(f"dataset: there is no file {str(path)!r}")
    found = path.stat() if path.exists() else None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else ()


def _ask(what: str, load: Any) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("dataset: Parquet files, saved folders and the hub need pip install 'molt-gym[data]'"
                          ) from error
    try:
        return load(datasets)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"dataset: cannot load {what}: {error}") from error


def _json(path: Path) -> Iterator[dict[str, Any]]:
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    whole = path.suffix == ".json" and data.lstrip()[:1] == b"["
    texts = [(f"{path}", data)] if whole else [
        (f"{path}, line {number}", line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    for where, text in texts:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"dataset: {where}: {error}") from error
        for number, row in enumerate(found if whole else [found]):
            if not isinstance(row, dict):
                raise ConfigError(f"dataset: {where}{f', row {number}' * whole}: {row!r:.100} is no object")
            yield row


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or ()
            if twice := sorted({name for name in names if name and names.count(name) > 1}):
                raise ConfigError(f"dataset: {path}: the header has {', '.join(twice)} more than once")
            for number, row in enumerate(reader):
                if None in row or None in row.values():
                    raise ConfigError(f"dataset: {path}, row {number}: not {len(names)} values, as "
                                      "the header has; put quotes around one with commas or line breaks")
                yield row
    except (csv.Error, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"dataset: {path}: {error}; longer values, and other encodings than UTF-8, are for .jsonl"
                          ) from error
