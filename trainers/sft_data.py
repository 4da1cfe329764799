"""What supervised fine-tuning learns from: chat rows and recorded rollouts, from files, lists and datasets.

Invariants: nothing is left out without being counted; what cannot be learnt from is refused by its place in the data
and its field; rollouts are trained in the ids that were sampled, and are never rendered again.
"""

import json
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molt_gym.errors import ConfigError
from molt_gym.messages import text_of
from molt_gym.tokens import Renderer, Row, Trajectory
from molt_gym.tokens.image_files import put_back

from .algorithms.shaping import ROUNDING
from .run_dir import holds_run
from .sft_chats import chat_rows
from .sft_config import DatasetConfig, RolloutsConfig, SftConfig

__all__ = ["Data", "Example", "check_files", "load_examples"]

Data = str | os.PathLike[str] | Iterable[Any]
_RECORD = {"env", "index", "rows", "reward"}
_FILES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Example:
    """What is learnt from one conversation or rollout: rows with their masks, and how many tokens are trained."""

    rows: list[Row]
    trained: int


def check_files(data: Data) -> None:
    """Raise ConfigError for what are no data, and for a file that is not there, before a model is fetched for them."""
    nothing = isinstance(data, str) and not data
    if nothing or isinstance(data, Mapping) or not isinstance(data, Iterable | os.PathLike):
        raise ConfigError(f"data: got {data!r:.60} ({type(data).__name__}); write a file, a list of rows or a dataset")
    named = [data] if isinstance(data, str | os.PathLike) else data if isinstance(data, list | tuple) else []
    for path in (Path(item).expanduser() for item in named if isinstance(item, str | os.PathLike)):
        if path.suffix in _FILES and not path.exists():
            raise ConfigError(f"data: there is no file {path}")


def load_examples(
    data: Data, config: SftConfig, renderer: Renderer, max_context: int, left_out: Counter[str]
) -> list[Example]:
    """All of the data, as rows.

    Args:
        data: a file (.jsonl, .json, .parquet), a run's folder, the name of a dataset, a list of these, or anything that
            gives chat rows or trajectories, such as a list or a `datasets.Dataset`.
        max_context: most tokens of a row.
        left_out: counts, by reason, what is not among the result.

    Raises:
        ConfigError: there are no such data, or a row of them cannot be learnt from.
    """
    check_files(data)
    chats, rollouts = [], []
    for where, record in _records(data, config.dataset):
        (rollouts if isinstance(record, Trajectory) else chats).append((where, record))
    options = config.rollouts
    if not rollouts and (given := [name for name, value in options if value is not None]):
        raise ConfigError(f"rollouts.{given[0]}: the data hold no rollouts; leave it out")
    kept = _best(rollouts, options, left_out)
    if kept:
        _check_tokenizer(kept[0][0], kept[0][1], renderer)
    sources = [(where, trajectory.rows) for where, trajectory in kept]
    examples = [_example(where, rows, config, max_context, left_out) for where, rows in sources]
    examples += [_example(where, chat_rows(where, record, config.dataset, renderer), config, max_context, left_out)
                 for where, record in chats]
    found = [example for example in examples if example is not None]
    if not found:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(left_out.items()) if count)
        raise ConfigError(f"data: nothing to learn from{f' (left out: {counts})' if counts else ''}; give some rows")
    return found


def _example(
    where: str, rows: Sequence[Row], config: SftConfig, max_context: int, left_out: Counter[str]
) -> Example | None:
    longest = max((len(row.ids) for row in rows), default=0)
    if longest > max_context:
        if config.too_long == "refuse":
            raise ConfigError(f"{where}: {longest} tokens are more than max_context = {max_context}; write "
                              "too_long = 'drop' or 'cut', or a larger max_context")
        left_out["too long"] += config.too_long == "drop"
        left_out["cut"] += config.too_long == "cut"
        if config.too_long == "drop":
            return None
        rows = [_cut(row, max_context) for row in rows]
    # The first id has no predecessor that could score it.
    rows = [row for row in rows if any(row.mask[1:])]
    if not rows:
        left_out["nothing to train"] += 1
        return None
    return Example(rows, sum(sum(row.mask[1:]) for row in rows))


def _cut(row: Row, limit: int) -> Row:
    """The beginning of a row, which never ends within an image."""
    limit = min([limit, *(image.start for image in row.images if image.start + image.count > limit)])
    return Row(row.ids[:limit], row.mask[:limit], row.logprobs[:limit], row.versions[:limit],
               images=[image for image in row.images if image.start < limit])


# Rollouts


def _best(
    rollouts: Sequence[tuple[str, Trajectory]], options: RolloutsConfig, left_out: Counter[str]
) -> list[tuple[str, Trajectory]]:
    """Rejection sampling: rollouts that are good enough, and the best of each task, in their order."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, (where, trajectory) in enumerate(rollouts):
        if trajectory.failure is not None:
            left_out["failed"] += 1
        elif trajectory.reward is None and (options.min_reward, options.best_of_group) != (None, None):
            left_out["no reward"] += 1
        elif options.min_reward is not None and trajectory.reward < options.min_reward - ROUNDING:
            left_out["reward too low"] += 1
        else:
            source = where.rpartition(":")[0]
            key = source, trajectory.env, trajectory.step, trajectory.group, trajectory.index, trajectory.seat
            groups[key].append(place)
    kept = []
    for places in groups.values():
        best = sorted(places, key=lambda place: -(rollouts[place][1].reward or 0.0))[: options.best_of_group]
        left_out["not among the best"] += len(places) - len(best)
        kept += best
    return [rollouts[place] for place in sorted(kept)]


def _check_tokenizer(where: str, trajectory: Trajectory, renderer: Renderer) -> None:
    """Refuse rollouts of a model with another tokenizer, whose ids would mean other text here."""
    texts = [text for message in trajectory.messages if (text := text_of(message).strip()) and "\ufffd" not in text]
    try:
        spelled = [renderer.decode(row.ids) for row in trajectory.rows]
    except (OverflowError, IndexError):
        spelled = []
    if texts and not any(text in row for text in texts for row in spelled):
        raise ConfigError(f"{where}: its ids do not spell its messages with this model's tokenizer; give the model "
                          "that played, or one that was trained from it")


# Sources


def _records(data: Data, options: DatasetConfig) -> Iterator[tuple[str, Mapping[str, Any] | Trajectory]]:
    """Everything in the data and where it was, such as "data[3]" or "chats.jsonl:4"."""
    if isinstance(data, str | os.PathLike):
        yield from _named(os.fspath(data), options)
        return
    for number, item in enumerate(data):
        # What a table of another library gives first are the names of its columns.
        if isinstance(item, str | os.PathLike) and isinstance(data, list | tuple):
            yield from _named(os.fspath(item), options)
        else:
            yield _record(f"data[{number}]", item)


def _record(where: str, item: Any) -> tuple[str, Mapping[str, Any] | Trajectory]:
    if isinstance(item, Trajectory):
        return where, item.fetched()
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where}: got {item!r:.60} ({type(item).__name__}); write {{'messages': [...]}}")
    return where, item


def _named(name: str, options: DatasetConfig) -> Iterator[tuple[str, Mapping[str, Any] | Trajectory]]:
    path = Path(name).expanduser()
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    if files := sorted(folder.glob("*.jsonl")):
        for file in files:
            yield from _lines(file)
    elif folder != path and holds_run(path):
        raise ConfigError(f"data: the run in {path} has no rollouts; name one of train, or other data")
    elif path.is_file() and path.suffix != ".parquet":
        yield from _lines(path)
    else:
        for number, row in enumerate(_dataset(name, path, options)):
            yield _record(f"{name}[{number}]", row)


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | Trajectory]]:
    """Lines end at a newline byte and nowhere else; a last one that a crash cut is dropped with a warning."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                text = put_back(line, path).decode("utf-8", "surrogatepass")
                record = json.loads(text)
                if isinstance(record, dict) and record.keys() >= _RECORD:
                    record = Trajectory.from_json(text)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ConfigError(f"{where}: {error}; write one JSON object a line") from error
                warnings.warn(f"{where}: dropped the last row, which is cut off", stacklevel=2)
                return
            yield _record(where, record)


def _dataset(name: str, path: Path, options: DatasetConfig) -> Iterable[Any]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data: {name!r} is no file or run here; Parquet files and datasets by name need "
                          "pip install 'molt-gym[data]'") from None
    try:
        if path.is_file():
            if options.split != "train" or options.subset:
                raise ConfigError(f"dataset.split: {options.split!r} (subset {options.subset!r}) of the file {path}, "
                                  "which has none; leave both out")
            return datasets.Dataset.from_parquet(str(path))
        return datasets.load_dataset(name, options.subset, split=options.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"data: {name!r} is no file or run here, and cannot be loaded as a dataset (split "
                          f"{options.split!r}): {error}") from error
