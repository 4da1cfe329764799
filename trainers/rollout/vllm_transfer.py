"""Weights from the trainer to the workers of an engine, bucket by bucket.

Used on both sides; needs torch alone. Invariants: a bucket holds whole parameters in the engine's dtype and at most
`BUCKET_BYTES`, unless one parameter is larger; nothing is sent before the receivers were told what comes; every wait
has a deadline.

"gloo" and "file" run in the tests, "ipc" (memory of a GPU that both share is mapped, not copied) and "nccl" (trainer
and engine on GPUs of their own) in benchmarks/several_gpus.py. "file", the last resort, needs no network: each bucket
is a safetensors file in a folder under TMPDIR, which both sides must reach by the same path.
"""

import pickle
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .vllm_spec import Backend

BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""By the kind of device where buckets are made, of which up to four are there at once. On a GPU the messages for one
take longer, some 5 ms, than its bytes.
"""
TIMEOUT = 300.0
"""Seconds for one bucket, and for all to join, unless told otherwise."""
BUCKET_FILE = "bucket.safetensors"
GROUPS = ("gloo", "nccl")
"""Backends for which trainer and workers form a process group."""


@dataclass(frozen=True)
class Bucket:
    """Parameters one behind the other; flat: [sum of their sizes]."""

    names: list[str]
    shapes: list[list[int]]
    flat: Tensor


def buckets(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device,
            limit: int | None = None) -> Iterator[Bucket]:
    """Pack parameters as they come; limit: in bytes, instead of `BUCKET_BYTES`."""
    limit = BUCKET_BYTES[device.type] if limit is None else limit
    names: list[str] = []
    shapes: list[list[int]] = []
    parts: list[Tensor] = []
    size = 0
    for name, tensor in weights:
        part = tensor.detach().to(device, dtype).flatten()
        if parts and (size + part.numel()) * dtype.itemsize > limit:
            yield Bucket(names, shapes, torch.cat(parts))
            names, shapes, parts, size = [], [], [], 0
        names.append(name)
        shapes.append(list(tensor.shape))
        parts.append(part)
        size += part.numel()
    if parts:
        yield Bucket(names, shapes, torch.cat(parts))


def unpack(flat: Tensor, names: list[str], shapes: list[list[int]]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a bucket, as views of it."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    for name, part, shape in zip(names, flat.split(sizes), shapes, strict=True):
        yield name, part.view(shape)


class Sender:
    """The trainer's side.

    Args:
        backend: "gloo" for CPUs, "ipc" for a GPU that both share, "nccl" across GPUs, "file" for anything else.
        device: where the buckets are made.
        workers: of all engines that receive.
        address: of this machine, as the workers reach it.
        timeout: seconds for one bucket, and for all to join.
    """

    def __init__(self, backend: Backend, device: torch.device, workers: int, address: str = "127.0.0.1",
                 timeout: float = TIMEOUT) -> None:
        self.device, self._backend, self._ranks, self._address = device, backend, workers + 1, address
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._store: dist.TCPStore | None = None
        self._folder: Path | None = None
        if backend in GROUPS:
            self._store = dist.TCPStore(address, 0, self._ranks, is_master=True, wait_for_workers=False,
                                        timeout=timedelta(seconds=timeout))

    def invitation(self, first_rank: int = 1) -> dict[str, Any]:
        """What workers need for `join`; `first_rank` is that of the engine's first one."""
        return {"backend": self._backend, "address": self._address, "port": self._store.port if self._store else 0,
                "ranks": self._ranks, "first_rank": first_rank, "timeout": self._timeout}

    def join(self) -> None:
        """Wait until the workers have joined."""
        if self._store is not None:
            self._group = join(self._backend, self._store, self._address, 0, self._ranks, self._timeout)

    def announcement(self, bucket: Bucket) -> dict[str, Any]:
        """What workers must be told before `send`.

        Raises:
            OSError: a file cannot be written.
        """
        handles = None
        if self._backend == "ipc":
            from torch.multiprocessing.reductions import reduce_tensor

            torch.cuda.synchronize(self.device)
            handles = {device_id(self.device): pickle.dumps(reduce_tensor(bucket.flat)[1])}
        return {"names": bucket.names, "shapes": bucket.shapes, "handles": handles, "file": self._file(bucket)}

    def _file(self, bucket: Bucket) -> str | None:
        if self._backend != "file":
            return None
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="molt-gym-weights-"))
        self.discard()
        path = self._folder / BUCKET_FILE
        try:
            save_file(dict(unpack(bucket.flat, bucket.names, bucket.shapes)), path)
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error
        return str(path)

    def send(self, bucket: Bucket) -> None:
        """Hand the numbers over."""
        if self._group is not None:
            broadcast(self._group, bucket.flat)

    def discard(self) -> None:
        """Remove what was written of a bucket that all have taken; workers may still have it mapped."""
        if self._folder is not None:
            (self._folder / BUCKET_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the group and remove what was written."""
        if self._group is not None and self._backend == "nccl":
            # A transfer to an engine that died would hang, and torch would end this process after the timeout.
            self._group.abort()
        self._group = self._store = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def join(backend: Backend, store: dist.Store, address: str, rank: int, ranks: int,
         timeout: float) -> dist.ProcessGroup:
    """A group of its own, apart from torch's default one; waits for all ranks. timeout: seconds for each operation."""
    deadline = timedelta(seconds=timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = deadline
        return dist.ProcessGroupNCCL(store, rank, ranks, options)
    options = dist.ProcessGroupGloo._Options()
    # The address by which this machine reaches the trainer's; a host name need not resolve.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(address))]
    options._timeout = deadline
    return dist.ProcessGroupGloo(store, rank, ranks, options)


def _own_address(peer: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return probe.getsockname()[0]


def device_id(device: torch.device) -> str:
    """A GPU's number in the world, as processes that see different ones number them differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


def broadcast(group: dist.ProcessGroup, flat: Tensor) -> None:
    """From rank 0 to all others, and wait until it is there."""
    group.broadcast([flat], dist.BroadcastOptions()).wait()
    if flat.is_cuda:
        # Not the whole device, on which a transfer to an engine that died may hang.
        torch.cuda.current_stream(flat.device).synchronize()
