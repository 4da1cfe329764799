"""What one rollout leaves behind: rows to train on, the transcript, the reward or the reason there is none.

Invariant: the four lists of a row are parallel; a position that was not sampled has mask 0, log-probability 0.0 and
version -1. The file form is JSON lines that survive any text and any crash: a record ends at a newline byte only.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..images import ImageSpan
from .image_files import put_aside, put_back

UNSAMPLED_VERSION = -1

# JSON joins two escaped surrogates into one character. Written raw, they stay two.
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


@dataclass(frozen=True)
class RowStats:
    """What is asked about a row without looking at its tokens.

    tokens: its length. sampled: tokens to be trained. longest_reply: most of these without another one between them.
    oldest, versions: the lowest of their weight versions (-1 without any), and the sum of all.
    """

    tokens: int
    sampled: int
    longest_reply: int
    oldest: int
    versions: int


@dataclass
class Row:
    """One sequence to train on, all lists of one length.

    ids: what the engine saw and sampled, in order. mask: 1 where the id was sampled and is to be trained.
    logprobs, versions: of the sampled ids; 0.0 and -1 elsewhere. experts: [ids, layers, top_k] int16, those that the
    engine sent each id to, -1 where unknown; None where nothing is known. The file form leaves them out. images: those
    whose tokens are among the ids, in their order. top: [sampled, k] of dtype `generation.TOP`, the tokens that were
    likeliest in the place of each sampled id, or None; not in the file form either.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    images: list[ImageSpan] = field(default_factory=list, repr=False)
    top: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.images = [ImageSpan(*image) for image in self.images]
        for name in ("mask", "logprobs", "versions", "experts"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.ids):
                raise ValueError(f"row.{name}: {len(values)} values for {len(self.ids)} ids")

    @property
    def stats(self) -> RowStats:
        """Computed at each call, as a row may still grow."""
        versions = [version for version, bit in zip(self.versions, self.mask, strict=True) if bit]
        longest = max((len(list(run)) for bit, run in groupby(self.mask) if bit), default=0)
        return RowStats(len(self.ids), len(versions), longest, min(versions, default=UNSAMPLED_VERSION), sum(versions))


@dataclass(frozen=True)
class RowRef:
    """A row that lies elsewhere: number `number` of the rows that `source` refers to, for instance a Ray ObjectRef."""

    source: Any
    number: int
    stats: RowStats


@dataclass
class Failure:
    """Why a rollout has no reward: a short reason that metrics count by, and what was raised."""

    reason: str
    message: str
    traceback: str


@dataclass
class Trajectory:
    """One rollout: `rollout` of `group` plays task `index` of `env` and is the unit of reward, whatever its rows.

    seat: of a game, that which the policy played here; "" elsewhere. others: the rollouts of further seats of the same
    game, until they are set apart.
    tools_offered: turns in which tools could have been called. malformed_calls: replies that began a call which could
    not be read. reply_tokens: of replies without rows, as far as an endpoint told. record: of a rollout played
    elsewhere, whose rows are references and whose messages stayed there, reads its line of JSON; None if that was lost.
    """

    env: str
    index: int
    group: int = 0
    rollout: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] | list[RowRef] = field(default_factory=list)
    reward: float | None = None
    turns: int = 0
    terminated: bool = False
    truncated: bool = False
    length_limited: bool = False
    forks: int = 0
    tools_offered: int = 0
    tool_calls: int = 0
    malformed_calls: int = 0
    reply_tokens: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
    step: int = 0
    seat: str = ""
    others: list["Trajectory"] = field(default_factory=list, init=False, repr=False, compare=False)
    record: Callable[[], bytes | None] | None = field(default=None, init=False, repr=False, compare=False)

    def to_json(self) -> str:
        """One line of JSON, of what is here. NumPy numbers and arrays become plain ones.

        Raises:
            ValueError: a number is NaN or infinite.
            TypeError: `info` or a message holds something JSON has no form for.
        """
        record = vars(self) | {
            "rows": [_record(row) for row in self.rows if isinstance(row, Row)],
            "failure": self.failure and vars(self.failure),
        }
        for name in ("record", "others"):
            record.pop(name, None)
        text = _dumps(record, ensure_ascii=False)
        return text if text.isascii() or _SURROGATE_PAIR.search(text) else _dumps(record, ensure_ascii=True)

    def fetched(self) -> "Trajectory":
        """With messages and rows, wherever it was played; as it is where they are lost."""
        line = self.record() if self.record is not None else None
        return self if line is None else Trajectory.from_json(line.decode("utf-8", "surrogatepass"))

    @classmethod
    def from_json(cls, text: str) -> "Trajectory":
        """Read what `to_json` wrote.

        Raises:
            ValueError: no JSON, a NaN in it, or fields that are missing, unknown or not parallel.
        """
        record = json.loads(text, parse_constant=_refuse_constant)
        try:
            rows = [Row(**row) for row in record.pop("rows")]
            failure = record.pop("failure")
            return cls(**record, rows=rows, failure=failure and Failure(**failure))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no trajectory record: {error}") from error


def json_line(trajectory: Trajectory) -> bytes:
    """The record, from elsewhere if it is there, with its newline. Raises as `Trajectory.to_json` does."""
    elsewhere = trajectory.record() if trajectory.record is not None else None
    return elsewhere or trajectory.to_json().encode("utf-8", "surrogatepass") + b"\n"


def write_jsonl(path: str | PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Write one record a line, replacing what was there, and images into files beside it. Raises as `to_json` does."""
    with open(path, "wb") as file:
        for trajectory in trajectories:
            file.write(put_aside(json_line(trajectory), Path(path)))


def read_jsonl(path: str | PathLike[str]) -> list[Trajectory]:
    """Read what `write_jsonl` wrote.

    A last line without its newline that cannot be read was cut by a crash: it is dropped with a warning.

    Raises:
        ValueError: any other line that is no record; file and line number are named.
    """
    trajectories = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                whole = put_back(line, Path(path))
                trajectories.append(Trajectory.from_json(whole.decode("utf-8", "surrogatepass")))
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}:{number}: {error}") from error
                warnings.warn(f"{path}:{number}: dropped the last record, which is cut off", stacklevel=2)
    return trajectories


def _dumps(record: dict[str, Any], *, ensure_ascii: bool) -> str:
    return json.dumps(record, ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"), default=_plain)


def _record(row: Row) -> dict[str, Any]:
    # Experts and likeliest tokens are many numbers a token, and only of use to the update that follows.
    return {name: value for name, value in vars(row).items() 
            if name not in ("experts", "top") and (name != "images" or value)}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"trajectory: {value!r} has no JSON form; put plain numbers, text, lists and dicts into info")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
