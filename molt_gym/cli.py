"""The command `molt-gym`: train, sft, distill, plan, eval, rollout, serve, export, envs, doctor.

Exit codes: 0 done; 1 the run failed or something essential is broken; 2 the command or a setting is wrong (one message,
no traceback); 130 interrupted. Heavy modules are imported by the commands that need them, so help and `envs` are quick.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .cli_words import (
    env_and_overrides,
    envs_and_overrides,
    mixture_of,
    numbers,
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
    options, rest = _parser(arguments).parse_known_args(arguments)
    try:
        code = options.command(options, rest)
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
    seed = options.seed if options.seed is not None else file.get("seed", 0)
    learn = partial(molt_gym.distill, env, options.student, options.teacher) if options.verb == "distill" else (
        partial(molt_gym.train, env, options.model))
    learn(out=out, steps=options.steps, seed=seed, config=config, **overrides)
    return OK


def _sft(options: argparse.Namespace, rest: list[str]) -> int:
    import molt_gym

    from .trainers.config import parse_cli
    from .trainers.sft_config import SftConfig

    end = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
    data, overrides = rest[:end], parse_cli(rest[end:], SftConfig)
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
            k=options.k[0] if len(options.k) == 1 else options.k,
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
    if options.human:
        kwargs = _env_kwargs(env, overrides, "--human")
        for episode in range(options.n):
            play(env, seed=options.seed + episode, env_kwargs=kwargs, console=console)
        return OK
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

    step = options.step if options.step in (None, "best") else numbers(options.step)[0]
    print(molt_gym.export(options.source, options.out, dtype=options.dtype, step=step, model=options.model))
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
    return OK


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


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="molt-gym", description="Train language-model agents with reinforcement learning.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)

    def verb(name: str, command: Any, help: str, usage: str, overridable: bool = False) -> argparse.ArgumentParser:
        wants_help = name in arguments[:1] and {"-h", "--help"} & set(arguments)
        epilog = _settings(name) if overridable and wants_help else ""
        layout = argparse.RawDescriptionHelpFormatter
        added = verbs.add_parser(
            name,
            help=help,
            description=help,
            usage=f"molt-gym {name} {usage}",
            allow_abbrev=False,
            formatter_class=layout,
            epilog=epilog,
        )
        added.set_defaults(command=command)
        return added

    train = verb("train", _train, "train a model in an env", "ENV [--model M] [options] [--SETTING VALUE ...]\n"
                 "       molt-gym train ENV=WEIGHT ENV=WEIGHT ... [options]", True)
    train.add_argument("--model", help="hub name, local folder, smollm2-135m (default) or tiny")
    distill = verb("distill", _train, "train a student to act as its teacher would",
                   "ENV --student M --teacher M [options] [--SETTING VALUE ...]", True)
    distill.add_argument("--student", metavar="M", help="what is trained, as --model of train")
    distill.add_argument("--teacher", metavar="M", help="hub name or local folder with the same tokenizer")
    for trains in (train, distill):
        trains.add_argument("--out", metavar="DIR", help="folder of the run; without it, a new one under runs/")
        trains.add_argument("--steps", type=int, metavar="N", help="training steps")
        trains.add_argument("--seed", type=int, metavar="S", help="fixes tasks, sampling and order (default 0)")
        trains.add_argument("--resume", metavar="DIR",
                            help="go on with this run; auto: with --out or the latest one of ENV")
    planned = verb("plan", _plan, "say what a run needs and how fast it may be, without starting any of it",
                   "CONFIG [options] [--SETTING VALUE ...]")
    planned.add_argument("settings", metavar="CONFIG", help="TOML file of settings for train, distill or sft")
    planned.add_argument("--gpus", metavar="KIND:COUNT", help="of a node; without it, as the file's #SBATCH lines say")
    planned.add_argument("--nodes", type=int, metavar="N", help="of the cluster; without it, as the file says, or 1")
    planned.add_argument("--memory", type=float, metavar="GIB", help="of a GPU of another kind")
    planned.add_argument("--rates", type=Path, metavar="FILE", help="TOML file of rates in place of the usual ones")
    evaluate = verb("eval", _eval, "score a model on held-out tasks",
                    "ENV [ENV ...] [--model M | --endpoint URL --endpoint-model NAME] [options]", True)
    evaluate.add_argument("--model", help="as for train; a run's model is in RUN/model")
    evaluate.add_argument("--endpoint", metavar="URL", help="OpenAI-compatible API to ask, key in OPENAI_API_KEY")
    evaluate.add_argument("--endpoint-model", metavar="NAME", help="the model's name there")
    evaluate.add_argument("--out", metavar="DIR", help="folder for a table of the tasks; goes on with what it has")
    evaluate.add_argument("--episodes", type=int, default=64, metavar="N", help="tasks (default 64)")
    evaluate.add_argument("--k", type=numbers, default=[1], metavar="K[,K...]",
                          help="attempts at each task, for pass@k; of several, the largest (default 1)")
    evaluate.add_argument("--seed", type=int, default=0, metavar="S", help="fixes tasks and sampling (default 0)")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    rollout = verb("rollout", _rollout, "play episodes and print them", "ENV [--model M | --human] [options]", True)
    rollout.add_argument("--model", help="as for train; a run's model is in RUN/model")
    rollout.add_argument("--human", action="store_true", help="you are the policy")
    rollout.add_argument("-n", type=int, default=1, metavar="N", help="episodes (default 1)")
    rollout.add_argument("--seed", type=int, default=0, metavar="S", help="fixes tasks and sampling (default 0)")
    rollout.add_argument("--out", metavar="FILE", help="also write the trajectories as JSON lines")
    serve = verb("serve", _serve, "answer OpenAI and Anthropic SDKs with a model, and record what it samples",
                 "[ENV] [--model M] [options]", True)
    serve.add_argument("--model", help="as for train, tiny if there is an ENV; a run's model is in RUN/model")
    serve.add_argument("--seed", type=int, metavar="S", help="fixes sampling (default 0)")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="0 for a free one (default 8000)")
    serve.add_argument("--public-url", metavar="URL", help="how clients reach it, if not by host and port")
    serve.add_argument("--out", metavar="FILE", help="append each session's trajectory as a line of JSON")
    serve.add_argument("--idle-timeout", type=float, default=3600.0, metavar="SECONDS",
                       help="ends a session that is asked for nothing (default 3600)")
    sft = verb("sft", _sft, "train a model on conversations, or on the rollouts of a run",
               "DATA [DATA ...] [--model M] [options] [--SETTING VALUE ...]", True)
    sft.add_argument("--model", help="hub name, local folder, smollm2-135m (default) or tiny")
    sft.add_argument("--out", metavar="DIR", help="folder of the run; without it, a new one under runs/")
    sft.add_argument("--epochs", type=int, metavar="N", help="passes over the data (default 1)")
    sft.add_argument("--steps", type=int, metavar="N", help="optimizer updates, in place of epochs")
    sft.add_argument("--seed", type=int, metavar="S", help="fixes the order and what is held out (default 0)")
    sft.add_argument("--resume", metavar="DIR", help="go on with this run; auto: with --out or the latest one")
    export = verb("export", _export, "write the model of a checkpoint as a folder for transformers and vLLM",
                  "RUN_OR_CHECKPOINT --out DIR [--dtype T] [--step N|best] [--model DIR]")
    export.add_argument("source", help="folder of a run or of a checkpoint")
    export.add_argument("--out", metavar="DIR", required=True, help="a new folder")
    export.add_argument("--dtype", help="of the weights, such as float32; without it, the one in which each came")
    export.add_argument("--step", metavar="N|best", help="of a run, which checkpoint; without it, the newest")
    export.add_argument("--model", metavar="DIR", help="where the model is now with which training began")
    for overridable in (train, sft, distill, evaluate, rollout, serve):
        overridable.add_argument(
            "--config", metavar="FILE", help="TOML file with settings, such as a run's config.toml"
        )
    _verbs_about_envs(verb)
    return parser


def _verbs_about_envs(verb: Any) -> None:
    for name, command, help in (("envs", _envs, "list the envs"), ("doctor", _doctor, "check this machine")):
        added = verb(name, command, help, "[SUITE] [--json | --markdown]" if name == "envs" else "[--json]")
        added.add_argument("--json", action="store_true", help="print JSON")
        if name == "envs":
            added.add_argument("suite", nargs="?", metavar="SUITE", help="list the envs of this suite of others")
            added.add_argument("--markdown", action="store_true", help="print tables; those of docs/envs.md")
    checked = verb("check-env", _check_env, "check that an env keeps to what chat envs must",
                   "ENV [--json] [--env-kwargs.NAME VALUE ...]")
    checked.add_argument("--json", action="store_true", help="print JSON")
    for kind, what in (("env", "an env"), ("agent", "an agent")):
        new = verb(f"new-{kind}", _new, f"write a small package with {what} of your own", "NAME [--out DIR]")
        new.add_argument("name", metavar="NAME", help="such as Larger; the id is then Larger-v0")
        new.add_argument("--out", metavar="DIR", help="a new folder; without it, NAME")
        new.set_defaults(kind=kind)


def _settings(verb: str) -> str:
    from .trainers.config import Config, field_help
    from .trainers.sft_config import SftConfig

    described = ("  --model:", "  --out:", "  --epochs:", "  --steps:", "  --seed:", "  --data:")
    options = field_help(SftConfig if verb == "sft" else Config)
    settings = [entry for entry in re.split(r"\n(?=  --)", options) if not entry.startswith(described)]
    return "settings, which a TOML file can hold as well:\n" + "\n".join(settings)


def _complain(verb: str, error: object, code: int) -> int:
    sys.stdout.flush()
    print(f"molt-gym {verb}: {error}", file=sys.stderr)
    return code
