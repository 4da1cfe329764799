"""The actor's ranks as Ray actors, on whichever nodes their options place them.

Invariants: the ranks run the same calls in the same order; a rank that dies, or breaks off while others wait for it,
ends the call and the actor with an error that names it; rows and weights do not pass the controller, unless it iterates
over the weights itself.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from molt_gym.errors import ConfigError, RunFailed
from molt_gym.images import ImageSpan
from molt_gym.threads import call_in_thread

from ..actor.actor import ActorLost, ActorSpec
from ..actor.launch import COLLECTIVE_TIMEOUT, LAST_WORDS
from ..actor.packing import AnyRow
from ..rollout.vllm_spec import Backend
from ..rollout.vllm_transfer import unpack
from .ray_rank import Rank


class RayActor:
    """An `Actor` of one rank for each dict of `options`, which are those of Ray actors.

    Folders are given to all ranks by their paths and must be on a file system that all nodes share. Calls block.

    Raises:
        ConfigError: the model is of a kind that cannot be trained.
        RunFailed: a rank did not start, or got no place within `ray.start_timeout`.
    """

    def __init__(self, spec: ActorSpec, options: Sequence[dict[str, Any]]) -> None:
        self.updates = 0
        self._lost: ActorLost | None = None
        self._numbers = 0
        spec = replace(spec, path=str(Path(spec.path).absolute()),
                       reference=spec.reference and str(Path(spec.reference).absolute()))
        self._ranks = [ray.remote(Rank).options(**chosen).remote() for chosen in options]
        count, timeout = len(self._ranks), spec.config.ray.start_timeout
        try:
            _, absent = ray.wait([rank.__ray_ready__.remote() for rank in self._ranks], num_returns=count,
                                 timeout=timeout)
            if absent:
                raise RunFailed(f"{len(absent)} of {count} actor ranks got no place in the cluster within "
                                f"ray.start_timeout = {timeout:g} s; write a longer one or free resources")
            (meeting,) = self._answers([self._ranks[0].call.remote("open", count)])
            self._answers([rank.call.remote("start", spec, number, count, *meeting[0], list(sys.path))
                           for number, rank in enumerate(self._ranks)])
        except BaseException:
            self.close()
            raise

    def train(self, windows: Sequence[Sequence[AnyRow]], kl: float | None = None) -> dict[str, float]:
        """One optimizer update a window.

        Raises:
            RunFailed: rows are lost; see `lost`.
        """
        return self._call("train", ray.put(windows), kl)[0]

    def lost(self, sources: Sequence[Any]) -> list[bool]:
        """Which of these sources of rows are lost with their nodes. The ranks take the others over, for `train`."""
        answers = self._call("fetch", list(sources))
        return [any(column) for column in zip(*answers, strict=True)]

    def weights(self) -> "RankWeights":
        """Whole parameters, which leave the ranks only where this is iterated over."""
        return RankWeights(self)

    def logprobs(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        """Log-probabilities of a text, at temperature 1."""
        return self._call("logprobs", list(ids), list(images))[0]

    def begin_save(self, folder: Path) -> "Future[None]":
        """Begin to write a sharded checkpoint."""
        self._call("begin_save", folder.absolute())
        written = [rank.written.remote() for rank in self._ranks]
        return call_in_thread(lambda: self._answers(written)[0])

    def save(self, folder: Path) -> None:
        """Write a sharded checkpoint."""
        self.begin_save(folder).result()

    def load(self, folder: Path) -> None:
        """Read one."""
        self._call("load", folder.absolute())

    def offload(self) -> None:
        """Leave the GPUs, until `onload`."""
        self._call("offload")

    def onload(self) -> None:
        """Come back."""
        self._call("onload")

    def check(self) -> None:
        """Raise ActorLost if a rank has died, or does not answer at all."""
        self._require()
        self._answers([rank.__ray_ready__.remote() for rank in self._ranks], 2 * LAST_WORDS)

    def close(self) -> None:
        """End all ranks."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks if ray.is_initialized() else ():
            ray.kill(rank)

    def sender(self, backend: Backend, workers: int, timeout: float) -> "RemoteSender":
        """What sends the buckets of this actor to an engine of so many workers."""
        self._require()
        self._numbers += 1
        sender = RemoteSender(self._ranks[0], self._numbers, timeout)
        device = torch.device("cuda" if backend in ("ipc", "nccl") else "cpu")
        sender.ask("open", backend, device, workers, timeout)
        return sender

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        self._require()
        answers = self._answers([rank.call.remote(name, *arguments) for rank in self._ranks])
        self.updates = answers[0][1]
        return [result for result, _ in answers]

    def _require(self) -> None:
        if self._lost is not None:
            raise self._lost
        if not self._ranks:
            raise RuntimeError("the actor was closed")

    def _answers(self, refs: Sequence[Any], timeout: float = float("inf")) -> list[Any]:
        """What the ranks return, as soon as all have, or one has died, or the others have waited for it in vain."""
        answers: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        waiting = {ref: rank for rank, ref in enumerate(refs)}
        limit = time.monotonic() + timeout
        while waiting and (left := limit - time.monotonic()) > 0:
            done, _ = ray.wait(list(waiting), timeout=None if left == float("inf") else left)
            for ref in done:
                rank = waiting.pop(ref)
                try:
                    answers[rank] = ray.get(ref)
                    patience = COLLECTIVE_TIMEOUT.total_seconds()
                except RayError as error:
                    failures[rank] = error
                    patience = LAST_WORDS if isinstance(error, RayTaskError) else 0.0
                limit = min(limit, time.monotonic() + patience)
        if failures or waiting:
            raise self._failure(failures, list(waiting.values()))
        return [answers[rank] for rank in range(len(refs))]

    def _failure(self, failures: dict[int, Exception], silent: Sequence[int]) -> Exception:
        """What to raise; the actor is lost unless every rank has come to an end of its call."""
        dead = [rank for rank, error in failures.items() if not isinstance(error, RayTaskError)]
        rank = min(dead or failures or silent)
        error = failures.get(rank)
        what = f"actor rank {rank} of {len(self._ranks)} "
        cause = None if dead else getattr(error, "cause", None)
        telling = cause if isinstance(cause, (OSError, ConfigError)) else None
        if not dead and not silent:
            return telling or RunFailed(f"{what}failed: {error}")
        what += f"died: {error}" if dead else f"failed: {error}" if error else "does not answer"
        self._lost = ActorLost(what)
        self.close()
        return telling or self._lost


@dataclass(frozen=True)
class RemoteBucket:
    """A bucket in the ranks of `source`; announcement: of memory that engines share, else empty."""

    source: RayActor
    announcement: dict[str, Any]


class RankWeights:
    """The weights of a `RayActor`: parameters for who iterates, buckets that stay in the ranks for Ray's engines."""

    def __init__(self, actor: RayActor) -> None:
        self._actor = actor

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters in float32, on the CPU."""
        for _ in self.buckets(torch.float32, "gloo"):
            bucket = self._actor._call("bucket")[0]
            yield from unpack(bucket.flat, bucket.names, bucket.shapes)

    def buckets(self, dtype: torch.dtype, backend: Backend) -> Iterator[RemoteBucket]:
        """One after another: each replaces the last, which all engines must have by then."""
        self._actor._call("pack", dtype, backend)
        while (parts := self._actor._call("next_bucket"))[0] is not None:
            yield RemoteBucket(self._actor, _merged(parts))


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One announcement with the memory of every rank's device."""
    handles = {name: handle for part in parts for name, handle in (part.get("handles") or {}).items()}
    return parts[0] | {"handles": handles} if handles else parts[0]


class RemoteSender:
    """A `Sender` in the first rank, for one engine."""

    def __init__(self, rank: Any, number: int, timeout: float) -> None:
        self._rank, self._number, self._timeout = rank, number, timeout

    def invitation(self) -> dict[str, Any]:
        """What workers need to join."""
        return self.ask("invitation")

    def join(self) -> None:
        """Wait until the workers have joined."""
        self.ask("join")

    def announcement(self, bucket: RemoteBucket) -> dict[str, Any]:
        """What workers must be told before `send`."""
        return bucket.announcement or self.ask("announcement")

    def send(self, bucket: RemoteBucket) -> None:
        """Hand the numbers over."""
        self.ask("send")

    def discard(self) -> None:
        """Remove what was written of a bucket."""
        self._rank.transfer.remote(self._number, "discard")

    def close(self) -> None:
        """Leave the group."""
        self._rank.transfer.remote(self._number, "close")

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call the sender in its rank."""
        try:
            return ray.get(self._rank.transfer.remote(self._number, name, *arguments),
                           timeout=self._timeout + LAST_WORDS)
        except GetTimeoutError:
            raise RunFailed(f"actor rank 0 did not answer within {self._timeout:g} s ({name})") from None
        except RayTaskError as error:
            raise RunFailed(f"actor rank 0 failed: {error}") from error
        except RayError as error:
            raise ActorLost(f"actor rank 0 died: {error}") from error
