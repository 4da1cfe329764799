"""One rank of the actor, as a Ray actor holds it.

Invariants: what takes part in collectives runs in one thread, in the order in which it was asked for; sends to an
engine have a thread of their own, so that one that hangs holds up nothing else; at most one bucket of weights is kept.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, ObjectLostError

from molt_gym.errors import RunFailed
from molt_gym.tokens import Row

from ..actor.actor import ActorSpec
from ..actor.fsdp_actor import FsdpActor
from ..actor.launch import join_group
from ..actor.packing import AnyRow, RemoteRow
from ..models.quiet import quiet_libraries
from ..rollout.vllm_spec import Backend
from ..rollout.vllm_transfer import Bucket, Sender, buckets

FETCH_TIMEOUT = 300.0
"""Seconds in which rows must arrive, else they are taken for lost."""


class Rank:
    """One rank. Remote callers use `call` and `transfer` alone."""

    def __init__(self) -> None:
        quiet_libraries()
        self._thread = ThreadPoolExecutor(1)
        self._senders: dict[int, tuple[Sender, ThreadPoolExecutor]] = {}
        self._rows: dict[ray.ObjectRef, list[Row] | None] = {}
        self._bucket: Bucket | None = None

    async def call(self, name: str, *arguments: Any) -> tuple[Any, int]:
        """A method of this class or of `FsdpActor`, in the thread of the collectives; and the updates so far."""
        method = getattr(self if hasattr(self, name) else self._actor, name)
        result = await asyncio.get_running_loop().run_in_executor(self._thread, method, *arguments)
        return result, self._actor.updates if hasattr(self, "_actor") else 0

    def open(self, ranks: int) -> tuple[str, int]:
        """Where the ranks meet: address and port of a store in this process."""
        address = ray.util.get_node_ip_address()
        self._store: dist.Store = dist.TCPStore(address, 0, ranks, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def start(self, spec: ActorSpec, rank: int, ranks: int, address: str, port: int, paths: Sequence[str] = ()) -> None:
        """Join the others and load the model; paths: where modules are found, the user's own with their losses too."""
        sys.path += [path for path in paths if path not in sys.path]
        if name := _interface(ray.util.get_node_ip_address()):
            # Else gloo takes the one that the host's name resolves to, which is often the loopback.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if rank:
            self._store = dist.TCPStore(address, port, ranks)
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
        join_group(self._store, rank, ranks)
        self._address, self._actor = address, FsdpActor(spec)

    def fetch(self, sources: Sequence[ray.ObjectRef]) -> list[bool]:
        """Take rows over, for the next `train`; tells which of them are lost."""
        missing = [source for source in dict.fromkeys(sources) if source not in self._rows]
        here = set(ray.wait(missing, num_returns=len(missing), timeout=FETCH_TIMEOUT)[0] if missing else ())
        for source in missing:
            try:
                # Also what is here takes a while on a machine that is busy.
                self._rows[source] = ray.get(source, timeout=FETCH_TIMEOUT if source in here else 0)
            except (ObjectLostError, GetTimeoutError):
                self._rows[source] = None
        return [self._rows[source] is None for source in sources]

    def train(self, windows: Sequence[Sequence[AnyRow]], kl: float | None = None) -> dict[str, float]:
        """`FsdpActor.train`, once the rows are here."""
        try:
            lost = self.fetch([row.source for window in windows for row in window if isinstance(row, RemoteRow)])
            if any(lost):
                raise RunFailed(f"{sum(lost)} rows are lost with the nodes that had them; call lost() before train()")
            return self._actor.train([[row.fetched(self._rows[row.source] or []) if isinstance(row, RemoteRow) else row
                                       for row in window] for window in windows], kl)
        finally:
            self._rows.clear()

    def begin_save(self, folder: Path) -> None:
        """`FsdpActor.begin_save`; `written` tells when it is done."""
        self._written = self._actor.begin_save(folder)

    async def written(self) -> None:
        """Wait for what was begun, while the thread of the collectives goes on; raises as it does."""
        await asyncio.wrap_future(self._written)

    def pack(self, dtype: torch.dtype, backend: Backend) -> None:
        """Begin to gather the weights, a bucket at a time."""
        own = torch.device("cuda", torch.cuda.current_device()) if backend in ("ipc", "nccl") else torch.device("cpu")
        self._sharing = Sender("ipc", own, 0) if backend == "ipc" else None
        self._packed = buckets(self._actor.weights(), dtype, own)

    def next_bucket(self) -> dict[str, Any] | None:
        """Gather the next one in place of the last, and what is to be announced of it if engines share the memory."""
        self._bucket = None
        self._bucket = next(self._packed, None)
        if self._bucket is None:
            return None
        if self._bucket.flat.is_cuda:
            torch.cuda.synchronize(self._bucket.flat.device)
        return self._sharing.announcement(self._bucket) if self._sharing else {}

    def bucket(self) -> Bucket | None:
        """The one gathered last."""
        return self._bucket

    async def transfer(self, number: int, name: str, *arguments: Any) -> Any:
        """Make the sender of an engine, named by a number, or call it; each has a thread of its own."""
        if name == "open":
            *arguments, timeout = arguments
            self._senders[number] = Sender(*arguments, self._address, timeout), ThreadPoolExecutor(1)
            return None
        sender, thread = self._senders[number]
        if name == "close":
            # Not in its thread, in which it may be stuck with an engine that died.
            del self._senders[number]
            thread.shutdown(wait=False)
            return await asyncio.to_thread(sender.close)
        bucket = [self._bucket] if name in ("announcement", "send") else []
        method = _send if name == "send" else getattr(type(sender), name)
        return await asyncio.get_running_loop().run_in_executor(thread, method, sender, *bucket)


def _send(sender: Sender, bucket: Bucket) -> None:
    if not bucket.flat.is_cuda:
        return sender.send(bucket)
    # On a stream of its own, so that an engine that died does not hold up training.
    with torch.cuda.stream(torch.cuda.Stream(bucket.flat.device)):
        return sender.send(bucket)


def _interface(address: str) -> str | None:
    """The network interface that has an address."""
    return next((name for name, found in psutil.net_if_addrs().items()
                 if any(one.address == address for one in found)), None)
