"""The frozen model that a run needs beside the one it trains: the reference of a KL, or a teacher.

Invariant: its tokens are those of the policy, by content; another tokenizer is refused before anything is loaded.
"""

from pathlib import Path

from transformers import AutoTokenizer

from molt_gym.errors import ConfigError

from .algorithms.registry import ESTIMATORS, LOSSES
from .config import Config
from .models import resolve_model
from .progress import Progress
from .rollout.mixture import split


def frozen_model(config: Config, policy: Path, progress: Progress) -> str | None:
    """Its folder, if the configuration names one.

    Raises:
        ConfigError: there is no such model, or its tokens are others than those of the policy in folder `policy`.
    """
    option, name = "algorithm.teacher", config.algorithm.teacher
    if name is None:
        option, name = "algorithm.kl.model", config.algorithm.kl.model
    if name is None:
        return None
    try:
        part = split(config)[0]
        path = resolve_model(name, env=part.env, env_kwargs=dict(part.env_kwargs), seed=config.seed,
                             say=lambda line: progress.message(_about(option, line))).path
    except ConfigError as error:
        raise ConfigError(_about(option, str(error))) from None
    ours, theirs = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (policy, path))
    if ours != theirs:
        token = min(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))[0]
        raise ConfigError(f"{option}: {name} has other tokens than the policy ({token!r} is {theirs.get(token)} there "
                          f"and {ours.get(token)} here), so it cannot score them; name one with the same tokenizer")
    return str(path)


def portable(config: Config) -> Config:
    """With names of estimator and loss that processes which did not import them find as well."""
    names = {"estimator": ESTIMATORS.portable(config.algorithm.estimator),
             "loss": LOSSES.portable(config.algorithm.loss)}
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update=names)})


def _about(option: str, line: str) -> str:
    return f"{option}: {line.removeprefix('model: ')}"
