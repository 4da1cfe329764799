"""The global generators of `random` and NumPy, lent to code of others that draws from nothing else."""

import random
from types import TracebackType
from typing import Any

import numpy as np

__all__ = ["GlobalRandom"]


class GlobalRandom:
    """Within `with`, the global generators are in a state of its own, which it keeps for the next time.

    Those of the caller are back afterwards, so that neither side is moved by the other. Not for threads at the same
    time: the generators are the process's.
    """

    def __init__(self) -> None:
        self._own: Any = None
        self._callers: Any = None

    def seed(self, seed: int) -> None:
        """Seeds its own state; seed: any integer from 0 on."""
        with self:
            random.seed(seed)
            np.random.seed(seed % 2**32)

    def __enter__(self) -> None:
        self._callers = random.getstate(), np.random.get_state()
        if self._own is not None:
            _set(self._own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = random.getstate(), np.random.get_state()
        _set(self._callers)


def _set(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
