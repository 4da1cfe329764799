"""`evaluate`, as `molt_gym` offers it: a model, an endpoint or a function on the held-out tasks of one env or several.

Invariants: an env is evaluated with the settings that it would have alone; an engine that suits the next env too is not
started again.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

from molt_gym.errors import ConfigError
from molt_gym.policy import EndpointPolicy, Policy, PolicyFunction, as_policy

from .api import Settings, configure, load, open_sampler
from .checkpoint import STATE
from .config import Config, EvalConfig
from .eval_log import EvalLog, eval_folder
from .evaluate import EvalResult
from .export import export, find_checkpoint
from .interrupts import run
from .models import ResolvedModel
from .progress import make_progress
from .run_dir import holds_run
from .session import Sampler, env_maker, env_preset, evaluate_with, merge, policy_runner


@dataclass(frozen=True)
class _Part:
    """One env's evaluation, by a model of ours or by whatever else answers."""

    config: Config
    player: ResolvedModel | Policy
    log: EvalLog | None


@dataclass(frozen=True)
class _Endpoint:
    url: str
    model: str


def evaluate(
    env: str | Sequence[str],
    model: str | os.PathLike[str] | Policy | PolicyFunction | None = None,
    *,
    episodes: int | None = None,
    k: int | Sequence[int] | None = None,
    seed: int | None = None,
    endpoint: str | None = None,
    endpoint_model: str | None = None,
    out: str | os.PathLike[str] | None = None,
    config: Settings = None,
    **overrides: Any,
) -> EvalResult | dict[str, EvalResult]:
    """See `molt_gym.evaluate`."""
    sizes = [] if k is None else list(k) if isinstance(k, Sequence) else [k]
    wrong = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < 1]
    if wrong or (k is not None and not sizes):
        raise ConfigError(f"k: {k!r}; write a number of attempts from 1 on, or a list of them")
    ids = [env] if isinstance(env, str) else list(dict.fromkeys(env if isinstance(env, Iterable) else ()))
    if not ids:
        raise ConfigError(f"env: got {env!r}; write the id of an env, or a list of those to evaluate")
    who: Any = model if endpoint is None and endpoint_model is None else _endpoint(model, endpoint, endpoint_model)
    given = {name: value for name, value in (("eval.episodes", episodes), ("eval.k", max(sizes, default=None)),
                                             ("seed", seed)) if value is not None} | overrides
    with ExitStack() as stack:
        saved = None
        if isinstance(who, str | os.PathLike) and (saved := _checkpoint(Path(who).expanduser())) is not None:
            who = export(saved, Path(stack.enter_context(TemporaryDirectory(prefix="molt-gym-")), "model"))
        folder = stack.enter_context(eval_folder(out)) if out is not None else None
        parts = [_part(name, who, saved, config, given, folder) for name in ids]
        results = run(_play(parts, sizes))
    return results[0] if isinstance(env, str) else dict(zip(ids, results, strict=True))


def _endpoint(model: Any, url: str | None, name: str | None) -> _Endpoint:
    if model is not None:
        raise ConfigError(f"model: {model!r} with an endpoint, which has a model of its own; leave model out, and name "
                          "that one as endpoint_model")
    if not url or not name:
        raise ConfigError(f"endpoint: {url!r} with endpoint_model = {name!r}; write both, such as endpoint = "
                          "'http://localhost:8000/v1' and endpoint_model = 'Qwen/Qwen3-4B'")
    return _Endpoint(url, name)


def _checkpoint(path: Path) -> Path | None:
    """The checkpoint that a folder is, or of a run the newest; None for another folder, or a name."""
    return find_checkpoint(path, None) if (path / STATE).is_file() or holds_run(path) else None


def _part(
    env: str, who: Any, saved: Path | None, config: Settings, given: Mapping[str, Any], folder: Path | None
) -> _Part:
    """saved: the checkpoint whose model `who` is."""
    # Greedy attempts are all the same.
    sampled = {"eval": {"temperature": 1.0}}
    default = sampled if load(env, None, config, given, preset=sampled).eval.k > 1 else {}
    player: ResolvedModel | Policy
    if who is None or isinstance(who, str | os.PathLike):
        with make_progress() as progress:
            settings, player = configure(env, who, config, given, progress, default=default, held_out=True)
        source = saved or player.path
        told: dict[str, Any] = {"model": str(source.absolute()), "weights": _fingerprint(source)}
    else:
        settings = load(env, None, config, given, preset=merge(default, env_preset(env, "")))
        player = endpoint_policy(who, settings) if isinstance(who, _Endpoint) else as_policy(who)
        told = ({"endpoint": who.url, "endpoint_model": who.model} if isinstance(who, _Endpoint)
                else {"policy": getattr(who, "__qualname__", type(who).__qualname__)})
    return _Part(settings, player, EvalLog(folder, env, _settings(settings) | told) if folder else None)


def endpoint_policy(endpoint: _Endpoint, config: Config) -> EndpointPolicy:
    """A policy that samples as the run's evaluation would."""
    rollout = config.rollout
    return EndpointPolicy(
        endpoint.url, endpoint.model, concurrency=rollout.max_concurrency, timeout=rollout.generate_timeout,
        max_tokens=rollout.max_tokens, temperature=config.eval.temperature, top_p=rollout.top_p, top_k=rollout.top_k)


def _settings(config: Config) -> dict[str, Any]:
    """What decides over scores, or may."""
    others = {"out", "steps", "algorithm", "actor", "checkpoint", "failures", "ray"}
    told = config.model_dump(mode="json", exclude=others)
    del told["eval"]["episodes"]
    return told | {"actor.dtype": config.actor.dtype}


def _fingerprint(path: Path) -> int:
    """Differs where the files of a model folder, or of a checkpoint, were written again."""
    found = sorted(file for file in path.rglob("*") if file.suffix in (".safetensors", ".distcp"))
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in found]
    return crc32(repr(files).encode())


async def _play(parts: Sequence[_Part], sizes: Sequence[int]) -> list[EvalResult]:
    results: list[EvalResult] = []
    async with AsyncExitStack() as stack:
        known: Any = None
        sampler: Sampler
        for part in parts:
            options = {"log": part.log, "sizes": sizes}
            if not isinstance(part.player, ResolvedModel):
                results.append(await _with_policy(part, options))
                continue
            if known != (wanted := (part.player.path, _engine(part.config))):
                await stack.aclose()
                sampler, known = await open_sampler(stack, part.player, part.config), wanted
            result = await sampler.score(part.config, **options)
            fetched = [trajectory.fetched() for trajectory in result.trajectories]
            results.append(replace(result, trajectories=fetched))
    return results


def _engine(config: Config) -> Config:
    """The settings that an engine and its runners are made of: all but those of the env and its evaluation."""
    rollout = config.rollout.model_copy(update={"max_turns": None})
    return config.model_copy(update={"env": "", "env_kwargs": {}, "rollout": rollout, "eval": EvalConfig()})


async def _with_policy(part: _Part, options: Mapping[str, Any]) -> EvalResult:
    runner = policy_runner(part.player, env_maker(part.config, held_out=True), part.config)
    try:
        return await evaluate_with(runner, part.config, rolling=True, **options)
    finally:
        await runner.aclose()
        if isinstance(part.player, EndpointPolicy):
            await part.player.aclose()
