"""The actor's ranks: the first in this process, the others in processes of their own.

Invariant: the ranks run the same calls in the same order. Commands go through pipes, tensors through the process group;
a rank that dies ends the call with an error instead of a hang, and no rank outlives this process.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._random as distributed_random

from molt_gym.errors import ConfigError, RunFailed
from molt_gym.images import ImageSpan

from ..interrupts import spared
from ..models.quiet import quiet_libraries
from .actor import ActorLost, ActorSpec
from .admission import admitted
from .fsdp_actor import FsdpActor
from .packing import TrainRow

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for each other."""
LAST_WORDS = 5.0
"""Seconds in which the others may say why this rank's part of a call failed."""


class LocalActor:
    """An `Actor` of `actor.world_size` ranks on this machine.

    Raises:
        ConfigError: the model is of a kind that cannot be trained, or the process has an actor already.
        RunFailed: a rank did not start.
    """

    def __init__(self, spec: ActorSpec) -> None:
        ranks = spec.config.actor.world_size
        if dist.is_initialized():
            raise ConfigError("actor: this process trains already, or has a process group of its own; begin another "
                              "run when that is over, or in another process")
        admitted(spec)
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._lost = False
        # Ranks ignore SIGTERM, with which multiprocessing ends those that are left at exit.
        atexit.register(self.close)
        try:
            store = dist.HashStore()
            if ranks > 1:
                store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
            for rank in range(1, ranks):
                self._ranks.append(_start(spec, rank, ranks, store.port))
            self._confirm()
            with self._together(), spared():
                join_group(store, 0, ranks)
                self._first = FsdpActor(spec)
        except BaseException:
            self.close()
            raise

    @property
    def updates(self) -> int:
        """Optimizer updates so far."""
        return self._first.updates

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of a forward pass."""
        return self._first.micro_batch_tokens

    def train(self, windows: Sequence[Sequence[TrainRow]], kl: float | None = None) -> dict[str, float]:
        """One optimizer update a window."""
        return self._call("train", windows, kl)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters."""
        self._send("weights")
        whole = self._first.weights()
        try:
            with self._together():
                for named in whole:  # noqa: UP028  yield from would close it
                    yield named
        except GeneratorExit:
            # Whoever took them broke off, but the other ranks gather all.
            with self._together():
                for _ in whole:
                    pass
            raise

    def logprobs(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        """Log-probabilities of a text, at temperature 1."""
        return self._call("logprobs", ids, images)

    def score(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Log-probabilities of each row's trained tokens."""
        return self._call("score", rows)

    def begin_save(self, folder: Path) -> "Future[None]":
        """Begin to write a sharded checkpoint."""
        return self._call("begin_save", folder)

    def save(self, folder: Path) -> None:
        """Write a sharded checkpoint."""
        self._call("save", folder)

    def load(self, folder: Path) -> None:
        """Read one."""
        self._call("load", folder)

    def offload(self) -> None:
        """Leave the GPUs, until `onload`."""
        self._call("offload")

    def onload(self) -> None:
        """Come back to the GPUs."""
        self._call("onload")

    def check(self) -> None:
        """Raise ActorLost if a rank has died."""
        for rank, (process, _) in enumerate(self._ranks, start=1):
            if not process.is_alive():
                self._lost = True
                raise ActorLost(f"actor rank {rank} of {len(self._ranks) + 1} failed: the process died (exit code "
                                f"{process.exitcode})")

    def close(self) -> None:
        """End all ranks."""
        atexit.unregister(self.close)
        for _, pipe in self._ranks:
            pipe.close()
        if hasattr(self, "_first"):
            self._first.close(LAST_WORDS)
        if dist.is_initialized():
            dist.destroy_process_group()
        for process, _ in self._ranks:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._ranks = []

    def _call(self, name: str, *arguments: object) -> Any:
        self._send(name, *arguments)
        with self._together(), spared():
            return getattr(self._first, name)(*arguments)

    def _send(self, name: str, *arguments: object) -> None:
        for _, pipe in self._ranks:
            try:
                pipe.send((name, arguments))
            except ConnectionError:
                self._confirm()
                raise

    @contextmanager
    def _together(self) -> Iterator[None]:
        """This rank's part of a call, which is over when the others have done theirs."""
        try:
            yield
        except Exception as error:
            words = self._words(LAST_WORDS)
            # A rank that breaks off leaves the first with a broken connection, which tells nothing.
            if words and (self._lost or not isinstance(error, OSError)):
                raise self._failed(words[0]) from error
            raise
        self._confirm()

    def _confirm(self) -> None:
        timeout = COLLECTIVE_TIMEOUT.total_seconds()
        for word in self._words(timeout, f"no answer within {timeout:g} s"):
            raise self._failed(word)

    def _failed(self, word: str) -> RunFailed:
        return (ActorLost if self._lost else RunFailed)(word)

    def _words(self, timeout: float, silence: str | None = None) -> list[str]:
        """What went wrong in the other ranks."""
        words = []
        for rank, (process, pipe) in enumerate(self._ranks, start=1):
            try:
                answer = silence
                if pipe.poll(timeout):
                    answer = pipe.recv()
                elif silence:
                    self._lost = True
            except (EOFError, ConnectionError):
                process.join(timeout=LAST_WORDS)
                answer, self._lost = f"the process died (exit code {process.exitcode})", True
            if answer is not None:
                words.append(f"actor rank {rank} of {len(self._ranks) + 1} failed: {answer}")
        return words


def _start(spec: ActorSpec, rank: int, ranks: int, port: int) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_rank, args=(theirs, spec, rank, ranks, port), daemon=True,
                              name=f"molt-gym-actor-{rank}")
    with _no_script():
        process.start()
    theirs.close()
    return process, ours


@contextmanager
def _no_script() -> Iterator[None]:
    """What is started does not run the user's script first, which may have no `if __name__ == "__main__"`."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _rank(pipe: Connection, spec: ActorSpec, rank: int, ranks: int, port: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A terminal sends Ctrl-C to all processes, and Slurm SIGTERM; the first one, which still has to save, decides when
    # this one ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    quiet_libraries()
    # Two ranks with a thread a core each would fight over the cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    pipe.send(None)
    join_group(dist.TCPStore("127.0.0.1", port, ranks), rank, ranks)
    actor = FsdpActor(spec)
    pipe.send(None)
    while True:
        try:
            name, arguments = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            result = getattr(actor, name)(*arguments)
            for _ in result if name == "weights" else ():
                pass
            pipe.send(None)
        except (ConfigError, OSError):
            pipe.send(traceback.format_exc())
        except Exception:  # noqa: BLE001  the first rank reports it
            pipe.send(traceback.format_exc())
            # The others may wait for this one, which they do not once it is gone.
            return


def _end_with_parent() -> None:
    """The pipe says the same, but not to a rank that is busy or waits for the others."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def join_group(store: dist.Store, rank: int, ranks: int) -> None:
    """Meet the other ranks in the default process group; waits for all."""
    # Ranks sync their generators at the first random operation on what is sharded; one that remembers doing so with the
    # ranks of an earlier actor would leave these waiting for it.
    distributed_random._rng_tracker = None
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT)
