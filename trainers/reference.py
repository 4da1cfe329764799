"""The frozen model that a run needs beside the one it trains: the reference of a KL, or a teacher.

Invariant: its tokens are those of the policy, by content; another tokenizer is refused before anything is loaded.
"""

from pathlib import Path

from transformers import AutoConfig

from molt_gym.errors import ConfigError

from .algorithms.registry import ESTIMATORS, LOSSES
from .architecture import check_architecture
from .config import Config
from .models import resolve_model
from .progress import Progress
from .rollout.mixture import split
from .same_tokenizer import difference, load_tokenizer


def frozen_model(config: Config, policy: Path, progress: Progress) -> tuple[Config, str | None]:
    """The configuration with its name as it is known anywhere, and its folder, if the configuration names one.

    Raises:
        ConfigError: there is no such model, it cannot be run here, or its tokens are others than those of the policy
            in folder `policy`.
    """
    option, name = "algorithm.teacher", config.algorithm.teacher
    if name is None:
        option, name = "algorithm.kl.model", config.algorithm.kl.model
    if name is None:
        return config, None
    try:
        part = split(config)[0]
        found = resolve_model(name, env=part.env, env_kwargs=dict(part.env_kwargs), seed=config.seed,
                              say=lambda line: progress.message(_about(option, line)))
        path = found.path
        # An engine has to sample a token behind what it scores.
        check_architecture(theirs := AutoConfig.from_pretrained(path),
                           config.rollout.max_context + (config.algorithm.teacher_engine == "vllm"))
    except ConfigError as error:
        raise ConfigError(_about(option, str(error))) from None
    if differs := difference(*map(load_tokenizer, (policy, path))):
        raise ConfigError(f"{option}: {name} has another tokenizer than the policy ({differs}), so it cannot score its "
                          "tokens; name a model with the same one")
    sizes = [model.get_text_config().vocab_size for model in (AutoConfig.from_pretrained(policy), theirs)]
    if sizes[1] < sizes[0]:
        raise ConfigError(f"{option}: {name} has {sizes[1]} ids and the policy {sizes[0]}, of which it can sample all; "
                          "name a model with at least as many")
    algorithm = config.algorithm
    named = ({"kl": algorithm.kl.model_copy(update={"model": found.name})} if algorithm.teacher is None else
             {"teacher": found.name})
    return config.model_copy(update={"algorithm": algorithm.model_copy(update=named)}), str(path)


def portable(config: Config) -> Config:
    """With names of estimator and loss that processes which did not import them find as well."""
    names = {"estimator": ESTIMATORS.portable(config.algorithm.estimator),
             "loss": LOSSES.portable(config.algorithm.loss)}
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update=names)})


def _about(option: str, line: str) -> str:
    return f"{option}: {line.removeprefix('model: ')}"
