"""`distill`: on-policy distillation, which is training with a teacher as the only signal.

Invariant: what the user says wins over what is set here, so that a contradiction is refused and never overruled.
"""

import os
from collections.abc import Mapping
from typing import Any

from molt_gym.errors import ConfigError

from .api import TrainResult, train_with

SETTINGS: dict[str, Any] = {"algorithm": {"estimator": "on_policy_distill",
                                          "kl": {"coefficient": 1.0, "use": "reward"}}}
"""What makes a run of `train` a distillation, besides `algorithm.teacher`."""


def distill(
    env: str | Mapping[str, Any],
    student: str | os.PathLike[str] | None = None,
    teacher: str | os.PathLike[str] | None = None,
    **options: Any,
) -> TrainResult:
    """See `molt_gym.distill`."""
    if "model" in options:
        raise ConfigError(f"model: {options['model']!r} in distill, which has a student and a teacher; write student")
    if teacher is not None:
        algorithm = options.get("algorithm")
        named = [name for name in ("algorithm.teacher", "algorithm__teacher") if name in options]
        if named or (isinstance(algorithm, Mapping) and "teacher" in algorithm):
            raise ConfigError(f"algorithm.teacher: is named beside teacher = {os.fspath(teacher)!r}; write one of them")
        options["algorithm.teacher"] = os.fspath(teacher)
    return train_with(SETTINGS, env, student, **options)
