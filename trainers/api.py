"""`train` and `rollout`: what `molt_gym` offers under the same names. `evaluate` is in `evaluation`."""

import asyncio
import os
import tomllib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from molt_gym.errors import ConfigError
from molt_gym.policy import Policy, PolicyFunction, as_policy
from molt_gym.tokens import Trajectory

from .checkpoint import best_checkpoint
from .config import Config, load_config
from .export import about, export_checkpoint
from .interrupts import retake, run
from .league import League, wants_league
from .loop import Loop
from .models import ResolvedModel, resolve_model
from .placement.placement import place
from .progress import Progress, make_progress
from .reference import frozen_model, portable
from .rollout.mixture import Curriculum, MixedPool, Mixture, Player, load_curriculum, split
from .rollout.pool import Plan, Pool, TaskStream
from .rollout.vllm_spec import check_engine_args
from .run_dir import RunDir, default_path, holds_run
from .session import (
    Sampler,
    count_tasks,
    env_maker,
    merge,
    mixed_preset,
    policy_runner,
    seed_everything,
    with_adapters,
    with_own_turns,
)
from .teacher import TeacherEngine

Settings = str | os.PathLike[str] | Mapping[str, Any] | None


@dataclass(frozen=True)
class TrainResult:
    """Where a run left its files, its metrics (one dict a line of metrics.jsonl), and its last checkpoint.

    best: the checkpoint with the highest held-out score, if one was evaluated.
    """

    run_dir: Path
    metrics: list[dict[str, Any]]
    checkpoint: Path
    best: Path | None


def train_with(
    default: Mapping[str, Any],
    /,
    env: str | Mapping[str, Any],
    model: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    curriculum: str | Curriculum | None = None,
    config: Settings = None,
    **overrides: Any,
) -> TrainResult:
    """See `molt_gym.train`; settings in `default` lie below all others."""
    if isinstance(env, Mapping):
        weights = {name: entry if isinstance(entry, Mapping) else {"weight": entry} for name, entry in env.items()}
        env, overrides = "+".join(env), {"mixture": weights, **overrides}
    if curriculum is not None:
        # An object without a name is none that can be imported.
        overrides["curriculum"] = curriculum if isinstance(curriculum, str) else (
            f"{curriculum.__module__}:{getattr(curriculum, '__qualname__', repr(curriculum))}")
    given = with_seed(seed, overrides) | ({} if steps is None else {"steps": steps})
    given |= {} if out is None else {"out": (out := os.path.expanduser(out))}
    earlier = _earlier(Path(out)) if out is not None and holds_run(out) else None
    with make_progress() as progress:
        settings, resolved = configure(env, model, config, given, progress, earlier=earlier, default=default)
        if earlier is not None:
            _keep_schedule(earlier, settings, Path(out))
        if not settings.eval.before and (settings.eval.after or settings.eval.every):
            # Rather than when all is trained.
            for part in split(settings):
                count_tasks(env_maker(part, held_out=True))
        settings, frozen = frozen_model(settings, resolved.path, progress)
        if settings.curriculum and not callable(curriculum):
            curriculum = load_curriculum(settings.curriculum)
        path = Path(settings.out) if settings.out else default_path(env, resolved.name)
        resume = earlier is not None and settings.checkpoint.resume == "auto"
        with RunDir(path, resume=resume) as run_dir:
            seed_everything(settings.seed)
            return run(_train(settings, resolved, frozen, run_dir, progress, curriculum, resume=resume))


def with_seed(seed: int | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a call gives; None leaves the seed to its configuration."""
    return dict(overrides) if seed is None else {"seed": seed, **overrides}


def _earlier(folder: Path) -> Config:
    """The settings of the run that is gone on with."""
    file = folder / "config.toml"
    if "env" not in tomllib.loads(file.read_text(encoding="utf-8")):
        raise ConfigError(f"out: {folder} holds a run of sft; choose another folder")
    return load_config(file=file).model_copy(update={"out": str(folder)})


def _check_same(kept: Config, config: Config) -> None:
    for name in ("env", "seed"):
        value, known = getattr(config, name), getattr(kept, name)
        if value != known:
            raise ConfigError(f"{name}: {value!r}, but the run in {kept.out} has {known!r}; write that to go on with "
                              "it, or choose another folder")


def _keep_schedule(kept: Config, config: Config, folder: Path) -> None:
    totals = [settings.steps * settings.algorithm.updates_per_batch for settings in (kept, config)]
    if config.actor.schedule != "constant" and totals[0] != totals[1]:
        raise ConfigError(f"steps: the learning rate of the run in {folder} falls over {totals[0]} updates and would "
                          f"jump if there were {totals[1]}; write steps = {kept.steps}, or actor.schedule = 'constant' "
                          f"to train on at actor.lr, or begin a new run with what `molt-gym export {folder}` writes")


async def _train(
    config: Config, model: ResolvedModel, frozen: str | None, run_dir: RunDir, progress: Progress,
    curriculum: Curriculum | None, *, resume: bool,
) -> TrainResult:
    from .actor.fsdp_actor import ActorSpec

    total, written = config.steps * config.algorithm.updates_per_batch, config.to_toml()
    config = config.model_copy(update={"out": str(run_dir.path)})
    async with AsyncExitStack() as stack:
        stack.callback(draw_curve, run_dir, progress)
        placement = await asyncio.to_thread(place, config, config.actor.world_size, progress.message)
        retake()
        stack.callback(placement.close)
        config = placement.config
        sampler = placement.sampler(model.path, _Counter(progress, config.rollouts_per_step))
        stack.push_async_callback(sampler.aclose)
        spec = ActorSpec(str(model.path), portable(config), getattr(torch, config.actor.dtype), total, frozen)
        actor = partial(placement.actor, spec)
        runner, pool, counts = _pool(config, sampler, curriculum, run_dir)
        stack.push_async_callback(runner.aclose)
        stack.push_async_callback(pool.close)
        teacher = None
        if config.algorithm.teacher_engine == "vllm":
            teacher = await asyncio.to_thread(TeacherEngine, config, frozen, sampler.renderer)
            stack.push_async_callback(teacher.close)
        league = League(config, model.path) if wants_league(config) else None
        kept = about(model.path, config.actor) | {"tasks": counts}
        loop = Loop(config, sampler, actor, pool, run_dir, progress, teacher, kept, league)
        stack.push_async_callback(loop.close)
        resumed = await loop.start(resume=resume)
        # Settings that do not fit the checkpoint must not take the place of those that do.
        run_dir.write_config(written)
        progress.start(config, run_dir.path, run_dir.read_metrics() if resumed else ())
        checkpoint = await loop.run(partial(export_checkpoint, base=model.path, out=run_dir.model_path,
                                            adapter=run_dir.path / "adapter"))
        progress.finish(_summary(run_dir, len(loop.losses)))
    return TrainResult(run_dir.path, run_dir.read_metrics(), checkpoint, best_checkpoint(run_dir.checkpoints_path))


def _pool(
    config: Config, sampler: Sampler, curriculum: Curriculum | None, run_dir: RunDir
) -> tuple[Player, Pool, list[int | None]]:
    """What plays in the env, or in those of the mixture, the groups that it is given, and the tasks of each env."""
    rollout, seed = config.rollout, config.seed
    plan = Plan(rollout.groups_per_step, rollout.group_size, rollout.max_staleness, rollout.dynamic_filter)
    makers = [env_maker(part) for part in split(config)]
    counts = [maker.num_tasks() for maker in makers]
    tasks = [TaskStream(count, seed) for count in counts]
    options: Any = {"temperature": rollout.temperature, "ordered": rollout.max_staleness == 0}
    if not config.mixture:
        runner = sampler.runner(makers[0], **options)
        return runner, Pool(runner, tasks[0], plan, seed=seed), counts
    mixture = Mixture({env: entry["weight"] for env, entry in config.mixture.items()}, tasks, seed)
    mixed = sampler.mixed_runner(makers, **options)
    pool = MixedPool(mixed, mixture, plan, seed=seed, curriculum=curriculum, last_line=run_dir.last_step)
    return mixed, pool, counts


def rollout(
    env: str,
    policy: str | os.PathLike[str] | Policy | PolicyFunction | None,
    n: int,
    *,
    seed: int | None = None,
    config: Settings = None,
    **overrides: Any,
) -> list[Trajectory]:
    """See `molt_gym.rollout`."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError(f"n: {n!r}; write a number of rollouts from 1 on")
    given = with_seed(seed, overrides)

    async def play(settings: Config, runner: Any) -> list[Trajectory]:
        tasks = TaskStream(count_tasks(env_maker(settings)), settings.seed)
        pool = Pool(runner, tasks, Plan(n, 1), seed=settings.seed)
        try:
            return [trajectory.fetched() for trajectory in (await pool.next_batch(0)).played]
        finally:
            await pool.close()
            await runner.aclose()

    if policy is None or isinstance(policy, str | os.PathLike):
        with make_progress() as progress:
            settings, resolved = configure(env, policy, config, given, progress)
        return run(_with_sampler(resolved, settings, lambda sampler: play(settings, sampler.runner(
            env_maker(settings), settings.rollout.temperature, ordered=True))))
    settings = load(env, None, config, given)
    return run(play(settings, policy_runner(as_policy(policy), env_maker(settings), settings)))


async def open_sampler(stack: AsyncExitStack, model: ResolvedModel, config: Config) -> Sampler:
    """What plays with a model that nothing trains, until `stack` closes."""
    placement = await asyncio.to_thread(place, config, 0, lambda _: None)
    retake()
    stack.callback(placement.close)
    sampler = placement.sampler(model.path, lambda _: None)
    stack.push_async_callback(sampler.aclose)
    return sampler


async def _with_sampler(model: ResolvedModel, config: Config, use: Any) -> Any:
    async with AsyncExitStack() as stack:
        return await use(await open_sampler(stack, model, config))


def configure(
    env: str, model: str | os.PathLike[str] | None, config: Settings, overrides: Mapping[str, Any], progress: Progress,
    *, earlier: Config | None = None, default: Mapping[str, Any] | None = None, held_out: bool = False,
) -> tuple[Config, ResolvedModel]:
    """The run's configuration and its model, whose preset lies below the user's settings.

    `earlier` is that of the run that is resumed; it lies below them too. `default` lies below everything. Of the envs,
    those of training or of evaluation are looked at.
    """
    draft = load(env, model, config, overrides, preset=default, earlier=earlier)
    if earlier is not None:
        _check_same(earlier, draft)
    parts = split(draft)
    for part in parts:
        count_tasks(env_maker(part, held_out=held_out))
    if draft.rollout.engine == "vllm":
        check_engine_args(draft.rollout.engine_args)
    resolved = resolve_model(draft.model, env=parts[0].env, env_kwargs=dict(parts[0].env_kwargs), seed=draft.seed,
                             say=progress.message)
    preset = merge(default or {}, merge(resolved.preset, mixed_preset(parts, resolved.name)))
    settings = load(env, resolved.name, config, overrides, preset=preset, earlier=earlier)
    settings = with_adapters(settings, draft.actor, resolved.path, progress.message)
    return with_own_turns(settings, resolved.name), resolved


def load(
    env: str, model: str | os.PathLike[str] | None, config: Settings, overrides: Mapping[str, Any],
    *, preset: Mapping[str, Any] | None = None, earlier: Config | None = None,
) -> Config:
    """The configuration, for a model that needs none of ours or whose preset is known."""
    if earlier is not None:
        preset = earlier.model_dump(exclude_none=True)
    loaded = load_config(env, model=model, file=config, preset=preset, overrides=overrides)
    return split(loaded)[0] if loaded.env in loaded.mixture else loaded


def _summary(run_dir: RunDir, actor_restarts: int) -> dict[str, Any]:
    """What a user wants to know at the end."""
    metrics = run_dir.read_metrics()
    steps = [line for line in metrics if "perf/step_over_parts" in line]
    summary: dict[str, Any] = {}
    for name in sorted({name for line in metrics for name in line if name.startswith("eval/") and "/pass_at_" in name}):
        scores = [line[name] for line in metrics if name in line]
        summary[name.removeprefix("eval/")] = f"{scores[0]:.3f} → {scores[-1]:.3f}"
    if steps:
        alone = sum(line["time/step"] / line["perf/step_over_parts"] for line in steps)
        total = sum(line["time/step"] for line in steps)
        summary["training"] = (f"{len(steps)} steps in {total:.0f} s, {total / alone:.2f} × (generation + training "
                               "alone)")
    if actor_restarts:
        summary["actor restarts"] = actor_restarts
    if best := best_checkpoint(run_dir.checkpoints_path):
        summary["best checkpoint"] = best
    return summary | {"model": run_dir.model_path, "run": run_dir.path}


class _Counter:
    """Tells the progress display how many rollouts of the step have ended."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._step = progress, total, 0
        self._trained = self._evaluated = 0

    def __call__(self, trajectory: Trajectory) -> None:
        if not trajectory.step:
            self._evaluated += 1
            self._progress.rollout_done(self._evaluated, self._evaluated, "evaluated")
            return
        # An evaluation may go on at the same time.
        if trajectory.step != self._step:
            self._step, self._trained, self._evaluated = trajectory.step, 0, 0
        self._trained += 1
        self._progress.rollout_done(self._trained, self._total)


def draw_curve(run_dir: RunDir, progress: Progress) -> None:
    """Draw curve.png, or say why there is none, of a run that got as far as a step."""
    from .curve import draw

    if not run_dir.last_step():
        return
    try:
        draw(run_dir.path)
    except (ValueError, OSError) as error:
        progress.message(f"no curve.png: {error}")
