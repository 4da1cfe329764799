"""Checkpoints that are whole or not there, written while training goes on.

Invariants: a checkpoint is published by renaming a complete, flushed folder, and older ones are deleted only after
that; one is written at a time, and the next one and the end of the run wait for it; it is read only if every file has
the size and checksum that its manifest names, so the newest whole one is found whatever happened to the others; the
best one stays until there is a better one.
"""

import json
import os
import random
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from molt_gym.threads import call_in_thread

from .actor.actor import Actor
from .atomic import atomic_path

MANIFEST, STATE, BEST = "manifest.json", "trainer.json", "best"
_READERS = 8


class Checkpoints:
    """Those of a run.

    Args:
        folder: where they are.
        keep: how many of the newest stay, beside the best.
        asynchronous: whether `begin` returns as soon as the state is copied.
        say: told what became of each, in any thread.
        mark: called when one is there, before older ones are deleted, in any thread; may mark it as the best.
        about: of what they are, for `export`: the model folder with which training began, for instance.
    """

    def __init__(
        self, folder: Path, keep: int, *, asynchronous: bool = True, say: Callable[[str], None] = lambda _: None,
        mark: Callable[[], None] = lambda: None, about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._folder, self._keep, self._asynchronous, self._about = folder, keep, asynchronous, about
        self._say, self._mark = say, mark
        self._writing: Future[Path] | None = None
        self._last: Path | None = None
        self.step: int | None = None
        """Of the state that is saved or being written, the last one; None if it could not be written."""

    def newest(self) -> Path | None:
        """See `newest_checkpoint`, once all is written; its step counts as saved."""
        self.settle()
        path = self._last = newest_checkpoint(self._folder)
        self.step, self._writing = None if path is None else load_state(path)["step"], None
        return path

    def begin(self, step: int, actor: Actor, state: Mapping[str, Any]) -> None:
        """Copy the state and begin to write step-<6 digits>, unless that was done; the one before ends first.

        Raises:
            OSError, RunFailed: the state could not be copied. If it is not asynchronous, also what `finish` raises.
        """
        self.settle()
        if step == self.step:
            return
        copied: Future[None] = Future()
        state = {"step": step, **self._about, **state, "generators": _generators()}
        # Before the thread may take it back.
        self.step = step
        self._writing = call_in_thread(partial(self._write, step, actor, state, copied), "molt-gym-checkpoints")
        wait([copied, self._writing], return_when=FIRST_COMPLETED)
        if not copied.done() or not self._asynchronous:
            self.finish()

    def finish(self) -> Path:
        """The newest one, once it is on disk.

        Raises:
            OSError: the disk was full or refused; what was there before still is.
            RunFailed: the actor failed.
        """
        return self._last if self._writing is None else self._writing.result()

    def last(self) -> Path | None:
        """The newest one, once none is being written; None if there is none."""
        self.settle()
        return self._last

    def settle(self) -> None:
        """Wait for what is being written, whatever becomes of it."""
        if self._writing is not None:
            wait([self._writing])

    def _write(self, step: int, actor: Actor, state: dict[str, Any], copied: "Future[None]") -> Path:
        path = checkpoint_path(self._folder, step)
        try:
            with atomic_path(path) as temporary:
                temporary.mkdir()
                written = actor.begin_save(temporary / "actor")
                copied.set_result(None)
                _ended(written, actor)
                (temporary / STATE).write_text(json.dumps(state), encoding="utf-8")
                files = sorted(file for file in temporary.rglob("*") if file.is_file())
                manifest = {str(file.relative_to(temporary)): [file.stat().st_size, checksum]
                            for file, checksum in zip(files, _checksums(files), strict=True)}
                (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        except Exception as error:
            self.step = None
            self._say(f"step {step} not saved ({error}); older checkpoints are as they were")
            raise
        self._last = path
        self._mark()
        self._prune(path)
        self._say(f"step {step} saved as {path}")
        return path

    def _prune(self, path: Path) -> None:
        # Later ones are not whole, or this run would have gone on from them: they must not take the place of one that
        # is.
        best = best_checkpoint(self._folder)
        for old in [other for other in by_step(self._folder) if step_of(other) <= step_of(path)][: -self._keep]:
            if old != best:
                shutil.rmtree(old, ignore_errors=True)


def restore_generators(state: Mapping[str, Any]) -> None:
    """Let what draws from the global generators go on as at the checkpoint whose state this is."""
    if (kept := state.get("generators")) is None:
        return
    version, numbers, gauss = kept["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(kept["numpy"])
    torch.set_rng_state(torch.tensor(kept["torch"], dtype=torch.uint8))


def _generators() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest], "torch": torch.get_rng_state().tolist()}


def _ended(written: "Future[None]", actor: Actor) -> None:
    """Wait for the actor's part; if it broke off because a rank died, that is what is raised."""
    try:
        written.result()
    except OSError:
        actor.check()
        raise


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, if there is one."""
    return folder / f"step-{step:06d}"


def by_step(folder: Path) -> list[Path]:
    """What has the name of a checkpoint, the oldest first."""
    return sorted((path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()), key=step_of)


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint tells."""
    return int(path.name.removeprefix("step-"))


def mark_best(folder: Path, scores: Mapping[int, Any]) -> Path | None:
    """Let the link `folder`/best lead to the checkpoint with the highest of the scores by step, and return it.

    A score without a checkpoint does not count, nor does NaN; of equal ones the newest does. Without any there is no
    link.
    """
    link = folder / BEST
    there = [step for step, score in scores.items()
             if not np.isnan(score).any() and checkpoint_path(folder, step).is_dir()]
    if not there:
        link.unlink(missing_ok=True)
        return None
    best = checkpoint_path(folder, max(there, key=lambda step: (scores[step], step)))
    # A name that `recover` removes. A link that exists cannot be changed, only replaced.
    temporary = folder / f".partial-{BEST}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(best.name)
    if link.is_dir() and not link.is_symlink():
        # What copied the run has followed the link.
        shutil.rmtree(link)
    os.replace(temporary, link)
    return best


def best_checkpoint(folder: Path) -> Path | None:
    """The one that `mark_best` marked."""
    link = folder / BEST
    return folder / os.readlink(link) if link.is_symlink() and link.is_dir() else None


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint; each broken one that is newer is named in a warning."""
    for path in reversed(by_step(folder)):
        trouble = problem(path)
        if trouble is None:
            return path
        warnings.warn(f"checkpoint {path} is not whole ({trouble}); trying an older one", stacklevel=2)
    return None


def load_state(path: Path) -> dict[str, Any]:
    """What `Checkpoints.begin` was given as `state`, the step, and the `generators`."""
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def problem(path: Path) -> str | None:
    """Why the checkpoint cannot be used."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = [path / name for name in manifest]
        for (name, (size, checksum)), file, found in zip(manifest.items(), files, _checksums(files), strict=True):
            if file.stat().st_size != size or found != checksum:
                return f"{name} is damaged"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return str(error)
    return None if STATE in manifest else f"{MANIFEST} does not name {STATE}"


def _checksums(files: Sequence[Path]) -> Iterator[int]:
    """Of some files at a time, which takes one core each."""
    with ThreadPoolExecutor(_READERS) as pool:
        yield from pool.map(_checksum, files)


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
