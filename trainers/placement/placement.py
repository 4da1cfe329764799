"""Where the parts of a run are: the same loop is given them from this process and its children, or from a cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from molt_gym.errors import ConfigError
from molt_gym.tokens import Trajectory

from ..actor.actor import Actor
from ..config import Config
from ..session import Sampler, with_dtypes

if TYPE_CHECKING:
    from ..actor.actor import ActorSpec


class Placement(Protocol):
    """Makes the parts of a run."""

    config: Config
    """The run's, with the precisions that auto stands for there."""

    def sampler(self, path: Path, done: Callable[[Trajectory], None]) -> Sampler:
        """What plays; path: model folder; done: called with each trajectory of training."""
        ...

    def actor(self, spec: "ActorSpec") -> Actor:
        """What learns; call it off the event loop."""
        ...

    def close(self) -> None:
        """Give up what was reserved, after the parts were closed."""
        ...


class LocalPlacement:
    """This process and its children."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._say = say
        self.config = with_dtypes(config, torch.cuda.is_available())

    def sampler(self, path: Path, done: Callable[[Trajectory], None]) -> Sampler:
        """What plays."""
        return Sampler(path, self.config, done)

    def actor(self, spec: "ActorSpec") -> Actor:
        """What learns."""
        from ..actor.admission import describe
        from ..actor.launch import LocalActor

        if torch.cuda.is_available():
            self._say(describe(spec))
        return LocalActor(spec)

    def close(self) -> None:
        """Nothing was reserved."""


def place(config: Config, ranks: int, say: Callable[[str], None]) -> Placement:
    """The placement that `config.placement` names, for an actor of so many ranks; call it off the event loop.

    Raises:
        ConfigError: Ray is not installed, or the run does not fit into the cluster.
    """
    if config.placement == "local":
        return LocalPlacement(config, say)
    try:
        from .ray_placement import RayPlacement
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("placement: 'ray' needs Ray, which is not installed; pip install 'molt-gym[ray]', or on a "
                          "machine without a GPU: pip install --no-deps -r cpu-engines.lock") from None
    return RayPlacement(config, ranks, say)
