"""What an actor keeps of itself: a sharded state on disk, written while the actor goes on learning.

Invariants: what is written is the state at the moment of the call; states are written one after another; where the
first rank is told that one is written, the files of all ranks are on disk. Nothing here depends on how the state is
sharded: it can be read by any number of ranks.
"""

import pickle
import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from molt_gym.errors import ConfigError
from molt_gym.threads import Worker

WRITE_TIMEOUT = timedelta(hours=1)
"""How long ranks wait for each other's files."""

NAMES = "names"
"""Entry with what turns a weight of nemo_automodel into those of model folders, which an export needs."""
State = Mapping[str, Any]
"""Nested dicts with tensors, sharded or not, as leaves."""


class StateWriter:
    """Writes the states of one rank; all ranks must make one, and call it alike."""

    def __init__(self) -> None:
        # In one group, the collectives of its thread would mix with those of training.
        self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._worker = Worker("molt-gym-checkpoint")
        self._last: Future[None] | None = None

    def begin(self, state: State, folder: Path) -> "Future[None]":
        """Copy the state to the CPU's memory, and write it into a new folder from there.

        The future raises OSError if the disk is full or refuses, for some rank, or a rank is gone.
        """
        self._last = self._worker.submit(partial(_write, _copied(state), folder, self._group))
        return self._last

    def close(self, timeout: float) -> None:
        """Wait for what is being written, but not longer than some seconds."""
        self._worker.stop()
        if self._last is not None:
            wait([self._last], timeout)


class _SharedFolderWriter(dcp.FileSystemWriter):
    """Refuses to make a folder of its own on a node that does not see that of the others."""

    def set_up_storage_writer(self, *arguments: Any, **options: Any) -> None:
        parent = Path(self.path).parent
        if not parent.is_dir():
            raise FileNotFoundError(f"there is no {parent} on {socket.gethostname()}; the run's folder must be on a "
                                    "file system that all nodes share")
        super().set_up_storage_writer(*arguments, **options)


def _write(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    try:
        dcp.save(state, storage_writer=_SharedFolderWriter(folder), process_group=group)
    except (CheckpointException, RuntimeError) as error:
        # Torch's writer loses the reason, which is often a full disk.
        free = f"{shutil.disk_usage(folder.parent).free >> 20} MB are free there" if folder.parent.is_dir() else ""
        raise OSError(f"cannot write {folder}: {_cause(error)}; {free}") from error


def pickled(value: object) -> torch.Tensor:
    """[bytes] uint8."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def read_state(state: State, folder: Path, model: str) -> None:
    """Read into the tensors of `state`, which say what is wanted and how it is sharded; model: what they are of.

    Raises:
        ConfigError: the folder is of another model.
    """
    try:
        held = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        # Torch reads what is asked for, and would leave other trained weights behind without a word.
        wanted = {f"model.{name}" for name in state["model"]}
        if more := [name for name in held if name.startswith("model.") and name not in wanted]:
            raise ValueError(f"it has {more[0]} as well")
        dcp.load({name: value for name, value in state.items() if name != NAMES}, checkpoint_id=folder)
    except (CheckpointException, FileNotFoundError, ValueError) as error:
        raise ConfigError(f"model: {folder} was saved from another one than {model}, or with another actor.lora or "
                          f"actor.optimizer, or without a critic (algorithm.estimator); write what it was, or begin "
                          f"another run ({_cause(error)})") from error


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    return {name: _copied(value) for name, value in state.items()} if isinstance(state, Mapping) else state


def _cause(error: Exception) -> str:
    """What was raised within a checkpoint call, which wraps it in something that is no Exception."""
    failures = getattr(error, "failures", None)
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in failures.values()) if failures else str(error)
