"""Which rollout to play."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ticket:
    """Rollout number `rollout` of group `group` plays task `index` of env number `env`, of several in a mixture.

    `seed` is the run's, `step` is for the record, `seat` tells the seats of a game apart.
    """

    index: int
    group: int
    rollout: int = 0
    seed: int = 0
    step: int = 0
    env: int = 0
    seat: int = 0

    @property
    def env_seed(self) -> int:
        """For `reset`; all rollouts of a group have the same, so that they play the same task."""
        return int(np.random.SeedSequence([self.seed, self.group]).generate_state(1)[0])

    def derive(self, *more: int) -> int:
        """A seed that depends on all of the ticket but `step`, and on `more`."""
        entropy = (self.seed, self.group, self.rollout, *more)
        seats = (self.seat,) if self.seat else ()
        return int(np.random.SeedSequence(list(entropy), spawn_key=seats).generate_state(1, np.uint64)[0])
