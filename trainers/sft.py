"""`sft`: supervised fine-tuning on conversations and recorded rollouts.

Invariant: a run that is refused, for its settings, its data or its folder, changes nothing.
"""

import asyncio
import math
import os
import random
import tomllib
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from molt_gym.errors import ConfigError
from molt_gym.tokens import Renderer
from molt_gym.tokens.vision import Vision

from .actor.fsdp_actor import ActorSpec
from .actor.launch import LocalActor
from .api import Settings, TrainResult, draw_curve
from .checkpoint import best_checkpoint
from .config import load_settings
from .export import about, export_checkpoint
from .interrupts import run
from .models import ResolvedModel, resolve_model
from .progress import Progress, make_progress
from .run_dir import RunDir, default_path, holds_run
from .same_tokenizer import load_tokenizer
from .session import merge, pick_dtype, seed_everything, with_adapters
from .sft_config import SftConfig
from .sft_data import Data, Example, check_files, load_examples
from .sft_loop import SftLoop, actor_config

_TINY_ENV = "CodeExec-v0"


def sft(
    data: Data | None,
    model: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    config: Settings = None,
    **overrides: Any,
) -> TrainResult:
    """See `molt_gym.sft`."""
    given = {name: os.fspath(value) for name, value in (("model", model), ("out", out)) if value is not None}
    if isinstance(data, str | os.PathLike):
        # The run may go on from another working directory.
        path = Path(data).expanduser()
        given["data"] = str(path.absolute()) if os.fspath(data) and path.exists() else os.fspath(data)
    with make_progress() as progress:
        settings = _load(config, overrides, given)
        earlier = Path(settings.out) / "config.toml" if settings.out and holds_run(settings.out) else None
        if earlier is not None and "env" in tomllib.loads(earlier.read_text(encoding="utf-8")):
            raise ConfigError(f"out: {settings.out} holds a run of train; choose another folder, and this one as data "
                              "to learn from its rollouts")
        resume = earlier is not None and settings.checkpoint.resume == "auto"
        settings = _load(config, overrides, given, earlier=earlier if resume else None)
        if (data := settings.data if data is None else data) is None:
            raise ConfigError("data: missing; write a file, the folder of a run, a dataset or a list of chat rows")
        for named in (data, settings.eval.data):
            if named is not None:
                check_files(named)
        resolved = resolve_model(settings.model, env=_TINY_ENV, seed=settings.seed, say=progress.message)
        said = settings.actor
        settings = _load(config, overrides, {**given, "model": resolved.name}, resolved.preset,
                         earlier if resume else None)
        settings = with_adapters(settings, said, resolved.path, progress.message)
        actor_config(settings)
        training, held_out, settings = _examples(data, settings, resolved, progress)
        path = Path(settings.out) if settings.out else default_path("sft", resolved.name)
        with RunDir(path, resume=resume) as run_dir:
            seed_everything(settings.seed)
            return run(_train(settings, resolved, training, held_out, run_dir, progress, resume))


def _load(
    config: Settings, overrides: Mapping[str, Any], given: Mapping[str, Any], preset: Mapping[str, Any] | None = None,
    earlier: Path | None = None,
) -> SftConfig:
    """`preset`: of the model; only what it says of the actor is meant for this, too."""
    below = {"actor": (preset or {}).get("actor", {})}
    if earlier is not None:
        below = merge(below, load_settings(SftConfig, {}, file=earlier).model_dump(exclude_none=True))
    return load_settings(SftConfig, given, file=config, preset=below, overrides=overrides)


def _examples(
    data: Data, config: SftConfig, model: ResolvedModel, progress: Progress
) -> tuple[list[Example], list[Example], SftConfig]:
    """What is trained on and what is held out, and the configuration with its context."""
    positions = AutoConfig.from_pretrained(model.path).get_text_config().max_position_embeddings
    limit = config.max_context or positions
    if limit > positions:
        raise ConfigError(f"max_context: {limit} is more than the model's {positions} positions; write at most that")
    renderer = Renderer(load_tokenizer(model.path), template_kwargs=dict(config.template_kwargs),
                        vision=Vision.of(model.path, max_pixels=config.actor.max_pixels))
    left_out: Counter[str] = Counter()
    training, held_out = load_examples(data, config, renderer, limit, left_out), []
    if config.eval.data is not None:
        split = config.eval.split or config.dataset.split
        plain = config.model_copy(update={"rollouts": type(config.rollouts)(),
                                          "dataset": config.dataset.model_copy(update={"split": split})})
        held_out = load_examples(config.eval.data, plain, renderer, limit, left_out)
    elif config.eval.share:
        count = max(1, round(config.eval.share * len(training)))
        if count >= len(training):
            raise ConfigError(f"eval.share: {config.eval.share} of {len(training)} rows leaves none to train on; write "
                              "a smaller share")
        chosen = set(random.Random(config.seed).sample(range(len(training)), count))
        held_out = [example for place, example in enumerate(training) if place in chosen]
        training = [example for place, example in enumerate(training) if place not in chosen]
    counts = "".join(f", {reason} {count}" for reason, count in sorted(left_out.items()) if count)
    progress.message(f"sft: {len(training)} conversations with {sum(e.trained for e in training):,} tokens to train, "
                     f"{len(held_out)} held out{counts}")
    return training, held_out, config.model_copy(update={"max_context": limit})


async def _train(
    config: SftConfig, model: ResolvedModel, training: list[Example], held_out: list[Example], run_dir: RunDir,
    progress: Progress, resume: bool,
) -> TrainResult:
    total = config.steps or config.epochs * math.ceil(len(training) / config.batch_size)
    dtype = pick_dtype(config.actor.dtype, torch.cuda.is_available())
    actor = await asyncio.to_thread(LocalActor, ActorSpec(str(model.path), actor_config(config), dtype, total))
    loop = SftLoop(config, actor, training, held_out, run_dir, progress, total, about=about(model.path, config.actor))
    try:
        if resume:
            loop.load()
        run_dir.write_config(config.to_toml())
        progress.message(f"sft · {os.path.basename(model.name)} · seed {config.seed} · {total} steps"
                         + (f", resumed after step {loop.step}" if loop.step else "") + f" → {run_dir.path}")
        checkpoint = await loop.run(partial(export_checkpoint, base=model.path, out=run_dir.model_path,
                                            adapter=run_dir.path / "adapter"))
    finally:
        draw_curve(run_dir, progress)
        await asyncio.to_thread(actor.close)
    progress.finish(loop.summary() | {"model": run_dir.model_path, "run": run_dir.path})
    return TrainResult(run_dir.path, run_dir.read_metrics(), checkpoint, best_checkpoint(run_dir.checkpoints_path))
