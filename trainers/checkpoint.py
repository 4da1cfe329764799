"""Checkpoints that are whole or not there.

Invariants: a checkpoint is published by renaming a complete, flushed folder, and older ones are deleted only after
that; it is read only if every file has the size and checksum that its manifest names, so the newest whole one is
found whatever happened to the others; the best one stays until there is a better one.
"""

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .actor.actor import Actor
from .atomic import atomic_path

MANIFEST, STATE, BEST = "manifest.json", "trainer.json", "best"


def save_checkpoint(folder: Path, step: int, actor: Actor, state: dict[str, Any], keep: int) -> Path:
    """Write `folder`/step-<6 digits>, then delete all but the newest `keep` up to this step, and the best one.

    Raises:
        OSError: the disk is full or refuses; what was there before still is.
    """
    path = checkpoint_path(folder, step)
    with atomic_path(path) as temporary:
        temporary.mkdir()
        actor.save(temporary / "actor")
        (temporary / STATE).write_text(json.dumps({"step": step, **state}), encoding="utf-8")
        manifest = {str(file.relative_to(temporary)): [file.stat().st_size, _checksum(file)]
                    for file in sorted(temporary.rglob("*")) if file.is_file()}
        (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    # Later ones are not whole, or this run would have gone on from them: they must not take the place of one that is.
    best = best_checkpoint(folder)
    for old in sorted(other for other in folder.glob("step-*") if other.name <= path.name)[:-keep]:
        if old != best:
            shutil.rmtree(old, ignore_errors=True)
    return path


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, if there is one."""
    return folder / f"step-{step:06d}"


def mark_best(folder: Path, scores: Mapping[int, Any]) -> Path | None:
    """Let the link `folder`/best lead to the checkpoint with the highest of the scores by step, and return it.

    A score without a checkpoint does not count; of equal ones the newest does. Without any there is no link.
    """
    link, there = folder / BEST, [step for step in scores if checkpoint_path(folder, step).is_dir()]
    if not there:
        link.unlink(missing_ok=True)
        return None
    best = checkpoint_path(folder, max(there, key=lambda step: (scores[step], step)))
    # A name that `recover` removes. A link that exists cannot be changed, only replaced.
    temporary = folder / f".partial-{BEST}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(best.name)
    os.replace(temporary, link)
    return best


def best_checkpoint(folder: Path) -> Path | None:
    """The one that `mark_best` marked."""
    link = folder / BEST
    return folder / os.readlink(link) if link.is_dir() else None


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint; each broken one that is newer is named in a warning."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        problem = _problem(path)
        if problem is None:
            return path
        warnings.warn(f"checkpoint {path} is not whole ({problem}); trying an older one", stacklevel=2)
    return None


def load_state(path: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given as `state`, and the step."""
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def _problem(path: Path) -> str | None:
    """Why the checkpoint cannot be used."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, checksum) in manifest.items():
            if (path / name).stat().st_size != size or _checksum(path / name) != checksum:
                return f"{name} is damaged"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return str(error)
    return None if STATE in manifest else f"{MANIFEST} does not name {STATE}"


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
