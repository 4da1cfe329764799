"""Rows of a dataset: a local JSON Lines or Parquet file, or a name on the hub.

Of a local file each tenth row is held out for the split "test".
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from molt_gym.errors import ConfigError

__all__ = ["load_rows"]

_HELD_OUT_ONE_IN = 10


def load_rows(
    name: str, split: str, rows: str | None, columns: Mapping[str, str], subset: str | None = None
) -> Sequence[Mapping[str, Any]]:
    """The rows of a dataset, read once in a process.

    Args:
        name: a path that ends in .jsonl, .json (JSON Lines too) or .parquet, or the name of a dataset on the hub.
        split: "train" or "test".
        rows: which rows: the name of a split on the hub, default `split` itself; "all" takes all rows of a local file.
        columns: columns that must be there, by the option that names each.
        subset: of a dataset on the hub that has several.

    Raises:
        ConfigError: the dataset cannot be read, is empty, or lacks a column.
    """
    found = _load(name, subset, rows or split)
    if not len(found):
        raise ConfigError(f"dataset: {name!r} has no rows for split {split!r}; try dataset_split='all'")
    for option, column in columns.items():
        if column not in found[0]:
            raise ConfigError(f"{option}: {name!r} has no column {column!r}; choose from {', '.join(found[0])}")
    return found


@functools.lru_cache(maxsize=16)
def _load(name: str, subset: str | None, rows: str) -> Sequence[Mapping[str, Any]]:
    path = Path(name)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        everything = _read(path)
        if rows == "all":
            return everything
        last = _HELD_OUT_ONE_IN - 1
        return [row for n, row in enumerate(everything) if (n % _HELD_OUT_ONE_IN == last) == (rows == "test")]
    datasets = _datasets()
    try:
        return datasets.load_dataset(name, subset, split=rows)
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset: cannot load {name!r}, split {rows!r}: {error}") from error


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"dataset: there is no file {str(path)!r}")
    if path.suffix == ".parquet":
        return _datasets().Dataset.from_parquet(str(path)).to_list()
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"dataset: {path}, line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"dataset: {path}, line {number}: {row!r:.100} is no object")
            rows.append(row)
    return rows


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("dataset: Parquet files and the hub need pip install 'molt-gym[data]'") from error
    return datasets
