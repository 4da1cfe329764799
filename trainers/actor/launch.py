"""The actor's ranks: the first in this process, the others in processes of their own.

Invariant: the ranks run the same calls in the same order. Commands go through pipes, tensors through the process group;
a rank that dies ends the call with an error instead of a hang, and no rank outlives this process.
"""

import multiprocessing
import socket
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from molt_gym.errors import RunFailed

from .fsdp_actor import ActorSpec, FsdpActor
from .packing import TrainRow

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for each other."""


class LocalActor:
    """An `Actor` of `actor.world_size` ranks on this machine."""

    def __init__(self, spec: ActorSpec) -> None:
        ranks, port = spec.config.actor.world_size, _free_port()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(1, ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, spec, rank, ranks, port), daemon=True,
                                      name=f"molt-gym-actor-{rank}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        _join_group(0, ranks, port)
        self._first = FsdpActor(spec)

    @property
    def updates(self) -> int:
        """Optimizer updates so far."""
        return self._first.updates

    def train(self, windows: Sequence[Sequence[TrainRow]]) -> dict[str, float]:
        """One optimizer update a window."""
        return self._call("train", windows)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters."""
        self._send("weights")
        yield from self._first.weights()
        self._confirm()

    def save(self, folder: Path) -> None:
        """Write a sharded checkpoint."""
        self._call("save", folder)

    def load(self, folder: Path) -> None:
        """Read one."""
        self._call("load", folder)

    def export(self, folder: Path) -> None:
        """Write a folder that transformers loads."""
        self._call("export", folder)

    def close(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._pipes, self._processes = [], []
        if dist.is_initialized():
            dist.destroy_process_group()

    def _call(self, name: str, *arguments: object) -> dict[str, float]:
        self._send(name, *arguments)
        try:
            result = getattr(self._first, name)(*arguments)
        except RuntimeError:
            # The first rank fails with the others' silence; their own words say more.
            self._confirm(timeout=5)
            raise
        self._confirm()
        return result

    def _send(self, name: str, *arguments: object) -> None:
        for pipe in self._pipes:
            pipe.send((name, arguments))

    def _confirm(self, timeout: float = COLLECTIVE_TIMEOUT.total_seconds()) -> None:
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                answer = pipe.recv() if pipe.poll(timeout) else "no answer"
            except (EOFError, ConnectionError):
                answer = "the process died"
            if answer is not None:
                raise RunFailed(f"actor rank {rank} of {len(self._pipes) + 1} failed: {answer}")


def _rank(pipe: Connection, spec: ActorSpec, rank: int, ranks: int, port: int) -> None:
    # Two ranks with a thread a core each would fight over the cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    _join_group(rank, ranks, port)
    actor = FsdpActor(spec)
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
        except Exception:  # noqa: BLE001  the first rank reports it
            pipe.send(traceback.format_exc())


def _join_group(rank: int, ranks: int, port: int) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
                            timeout=COLLECTIVE_TIMEOUT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
