"""The command `molt-gym`: train, sft, distill, plan, eval, rollout, serve, export, envs, doctor.

Exit codes: 0 done; 1 the run failed or something essential is broken; 2 the command or a setting is wrong (one message,
no traceback); 130 interrupted. Heavy modules are imported by the commands that need them, so help and `envs` are quick.
"""

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .cli_parser import make_parser
from .cli_words import (
    env_and_overrides,
    envs_and_overrides,
    mixture_of,
    read_toml,
    refuse,
    run_to_resume,
)
from .errors import ConfigError, EnvFailure, NotAChatEnv, PromptTooLong, RunFailed

__all__ = ["main"]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # As `python -m` does, so that an env of a module in this folder is found.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    options, rest = make_parser(arguments).parse_known_args(arguments)
    try:
        code = _COMMANDS[options.verb](options, rest)
        sys.stdout.flush()
        return code
    except (ConfigError, NotAChatEnv, PromptTooLong) as error:
        return _complain(options.verb, error, USAGE)
    except (RunFailed, EnvFailure) as error:
        return _complain(options.verb, error, FAILED)
    except KeyboardInterrupt:
        return _complain(options.verb, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone; without this the interpreter complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except EOFError:
        return _complain(options.verb, "the input ended before the episode did", FAILED)
    except OSError as error:
        return _complain(options.verb, error, FAILED)


def _train(options: argparse.Namespace, rest: list[str]) -> int:
    import molt_gym

    words, overrides = envs_and_overrides(options, rest, env_needed=options.resume is None and options.config is None)
    env: Any = mixture_of(words) if "=" in words[0] else words[0]
    if isinstance(env, str) and len(words) > 1:
        raise ConfigError(f"{words[1]!r} is no option; write --NAME VALUE, or ENV=WEIGHT for each env of a mixture")
    out, config = options.out, options.config
    if options.resume is not None:
        out = run_to_resume(options.resume, env if isinstance(env, str) else "+".join(env), out)
    # What the command does not say comes from the file, or from the run that is resumed.
    file = read_toml(config) if config else read_toml(Path(out) / "config.toml") if out else {}
    env = env or file.get("env", "") or "+".join(file.get("mixture", {}))
    if not env:
        command = f"molt-gym {options.verb}"
        raise ConfigError(f"env: missing; write {command} ENV, such as {command} CodeExec-v0")
    learn = partial(molt_gym.distill, env, options.student, options.teacher) if options.verb == "distill" else (
        partial(molt_gym.train, env, options.model))
    learn(out=out, steps=options.steps, seed=options.seed, config=config, **overrides)
    return OK


def _sft(options: argparse.Namespace, rest: list[str]) -> int:
    import molt_gym

    from .trainers.config import parse_cli
    from .trainers.sft_config import SftConfig

    end = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
    data, overrides = rest[:end], parse_cli(rest[end:], SftConfig)
    data += [overrides.pop("data")] if "data" in overrides else []
    overrides |= {name: value for name in ("epochs", "steps", "seed") if (value := getattr(options, name)) is not None}
    out = options.out if options.resume is None else run_to_resume(options.resume, "sft", options.out)
    molt_gym.sft((data[0] if len(data) == 1 else data) or None, options.model, out=out, config=options.config,
                 **overrides)
    return OK


def _plan(options: argparse.Namespace, rest: list[str]) -> int:
    from .trainers.config import parse_cli
    from .trainers.plan import plan, schema_of

    path = Path(options.settings)
    print(plan(path, parse_cli(rest, schema_of(path)), gpus=options.gpus, nodes=options.nodes, memory=options.memory,
               rates=options.rates))
    return OK


def _eval(options: argparse.Namespace, rest: list[str]) -> int:
    import molt_gym

    from .score_table import print_scores

    envs, overrides = envs_and_overrides(options, rest)
    # What is said along the way must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        found = molt_gym.evaluate(
            envs[0] if len(envs) == 1 else envs,
            options.model,
            episodes=options.episodes,
            k=options.k,
            seed=options.seed,
            endpoint=options.endpoint,
            endpoint_model=options.endpoint_model,
            out=options.out,
            config=options.config,
            **overrides,
        )
    results = list(found.values()) if isinstance(found, dict) else [found]
    told = [{"env": result.env, **result.metrics(), "intervals": result.intervals, "failures": result.failures}
            for result in results]
    if options.json:
        print(json.dumps(told if isinstance(found, dict) else told[0], indent=2))
    else:
        print_scores(told)
    return OK


def _rollout(options: argparse.Namespace, rest: list[str]) -> int:
    from rich.console import Console

    from .tokens.trajectory import write_jsonl
    from .transcript import play, print_trajectory

    env, overrides = env_and_overrides(options, rest)
    console = Console(highlight=False)
    if options.n < 1:
        raise ConfigError(f"-n {options.n}: write how many episodes, from 1 on")
    if options.human:
        for name in ("model", "out", "config"):
            if (value := getattr(options, name)) is not None:
                raise ConfigError(f"--{name} {value} has no effect with --human; leave one of the two out")
        kwargs = _env_kwargs(env, overrides, "--human")
        for episode in range(options.n):
            play(env, seed=(options.seed or 0) + episode, env_kwargs=kwargs, console=console)
        return OK
    if options.out is not None:
        # Now, rather than when all is played.
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).open("ab").close()
    import molt_gym

    trajectories = molt_gym.rollout(
        env, options.model, options.n, seed=options.seed, config=options.config, **overrides
    )
    if options.out is not None:
        write_jsonl(options.out, trajectories)
    for trajectory in trajectories:
        print_trajectory(console, trajectory)
    failed = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
    if trajectories and len(failed) == len(trajectories):
        counts = {reason: sum(f.reason == reason for f in failed) for reason in sorted({f.reason for f in failed})}
        raise RunFailed("every rollout failed: " + ", ".join(f"{reason} {n}" for reason, n in counts.items()))
    return OK


def _serve(options: argparse.Namespace, rest: list[str]) -> int:
    env, overrides = env_and_overrides(options, rest, env_needed=False)
    from .trainers.serve import KEY_VARIABLE, Endpoint, serve_until_stopped

    endpoint = Endpoint(options.host, options.port, options.public_url, options.out,
                        os.environ.get(KEY_VARIABLE) or None, options.idle_timeout)
    overrides |= {} if options.seed is None else {"seed": options.seed}
    serve_until_stopped(endpoint, options.model, env=env or None, config=options.config, overrides=overrides)
    return OK


def _export(options: argparse.Namespace, rest: list[str]) -> int:
    refuse(rest)
    import molt_gym

    print(molt_gym.export(options.source, options.out, dtype=options.dtype, step=options.step, model=options.model))
    return OK


def _envs(options: argparse.Namespace, rest: list[str]) -> int:
    refuse(rest)
    from .listing import as_json, as_markdown, as_text, listing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = listing(options.suite)
        print(json.dumps(as_json(found), indent=2) if options.json else
              as_markdown(found) if options.markdown else as_text(found))
    for problem in found.problems:
        print(problem, file=sys.stderr)
    return FAILED if options.suite and not found.envs else OK


def _env_kwargs(env: str, overrides: dict[str, Any], where: str) -> dict[str, Any]:
    for name in overrides:
        if not name.startswith("env_kwargs."):
            raise ConfigError(f"--{name} has no effect with {where}; only --env-kwargs.NAME has")
    from .trainers.config import load_config

    return dict(load_config(env, overrides=overrides).env_kwargs)


def _check_env(options: argparse.Namespace, rest: list[str]) -> int:
    from .conformance import check

    env, overrides = env_and_overrides(options, rest)
    findings = check(env, **_env_kwargs(env, overrides, "check-env"))
    if options.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    for finding in () if options.json else findings:
        print(f"ok      {finding.name}" if finding.problem is None else f"WRONG   {finding.name}: {finding.problem}")
    return FAILED if any(finding.problem for finding in findings) else OK


def _new(options: argparse.Namespace, rest: list[str]) -> int:
    refuse(rest)
    from .scaffold import create

    folder = Path(options.out or options.name)
    for path in create(options.kind, options.name, folder):
        print(path)
    print(f"next: pip install -e {folder}; its README.md says what then")
    return OK


def _doctor(options: argparse.Namespace, rest: list[str]) -> int:
    refuse(rest)
    from .doctor import as_json, check_machine, report

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checks = check_machine()
    print(json.dumps(as_json(checks), indent=2) if options.json else report(checks))
    return FAILED if any(check.status == "broken" for check in checks) else OK


def _complain(verb: str, error: object, code: int) -> int:
    sys.stdout.flush()
    print(f"molt-gym {verb}: {error}", file=sys.stderr)
    return code


_COMMANDS = {"train": _train, "distill": _train, "plan": _plan, "sft": _sft, "eval": _eval, "rollout": _rollout,
             "serve": _serve, "export": _export, "envs": _envs, "check-env": _check_env, "new-env": _new,
             "new-agent": _new, "doctor": _doctor}
