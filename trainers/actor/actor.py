"""The contract between the loop and whatever holds the weights that learn."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from molt_gym.errors import RunFailed
from molt_gym.images import ImageSpan

from ..config import Config
from .packing import AnyRow


class ActorLost(RunFailed):
    """A rank died, or left the others in the middle of a call: the actor is gone, but not its checkpoints."""


@dataclass(frozen=True)
class ActorSpec:
    """What a rank needs: the model folder, the run's options, its compute dtype, and how many updates are planned.

    reference: folder of the frozen model that a KL or a teacher needs; without it, `path`.
    """

    path: str
    config: Config
    dtype: torch.dtype
    total_updates: int
    reference: str | None = None


class Actor(Protocol):
    """Model, optimizer and their state, on one process or many.

    Invariant: the update depends on the rows alone, not on how they are cut into micro-batches or dealt to ranks.
    """

    updates: int
    """Optimizer updates so far, skipped ones included."""

    def train(self, windows: Sequence[Sequence[AnyRow]], kl: float | None = None) -> dict[str, float]:
        """One optimizer update a window; returns metrics by name. kl: coefficient now, if it changes."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters by their names in the checkpoint, tied ones once."""
        ...

    def logprobs(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        """Log-probability of each id but the first after those before it, at temperature 1; images: among the ids."""
        ...

    def begin_save(self, folder: Path) -> "Future[None]":
        """Begin to write weights, optimizer state and `updates`, as they are now, into a new folder.

        Meanwhile the actor may go on learning. The future ends when all is on disk; OSError: it cannot be written.
        """
        ...

    def save(self, folder: Path) -> None:
        """Do so, and wait for the end."""
        ...

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote, also with another number of ranks."""
        ...

    def check(self) -> None:
        """Raise ActorLost if a rank has died."""
        ...

    def offload(self) -> None:
        """Leave the GPUs' memory to others. Until `onload` nothing but `close` may be called."""
        ...

    def onload(self) -> None:
        """Come back."""
        ...

    def close(self) -> None:
        """End the other ranks and free the memory. Idempotent."""
        ...
