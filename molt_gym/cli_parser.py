"""The words that each command of `molt-gym` takes, and its help."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .cli_words import numbers

__all__ = ["make_parser"]


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of these words, which leaves settings over; `verb` of what it returns is the command's name."""
    parser = argparse.ArgumentParser(
        prog="molt-gym", description="Train language-model agents with reinforcement learning.", allow_abbrev=False,
        epilog="Begin with: molt-gym train CodeExec-v0. `molt-gym COMMAND --help` has the options of each."
    )
    parser.add_argument("--version", action="version", version=f"molt-gym {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)

    def verb(name: str, help: str, usage: str, overridable: bool = False) -> argparse.ArgumentParser:
        wants_help = name in arguments[:1] and {"-h", "--help"} & set(arguments)
        return verbs.add_parser(
            name, help=help, description=help, usage=f"molt-gym {name} {usage}", allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=_settings(name) if overridable and wants_help else "")

    train = verb("train", "train a model in an env", "ENV [--model M] [options] [--SETTING VALUE ...]\n"
                 "       molt-gym train ENV=WEIGHT ENV=WEIGHT ... [options]", True)
    train.add_argument("--model", help="hub name, local folder, smollm2-135m (default) or tiny")
    distill = verb("distill", "train a student to act as its teacher would",
                   "ENV --student M --teacher M [options] [--SETTING VALUE ...]", True)
    distill.add_argument("--student", metavar="M", help="what is trained, as --model of train")
    distill.add_argument("--teacher", metavar="M", help="hub name or local folder with the same tokenizer")
    for trains in (train, distill):
        trains.add_argument("--out", metavar="DIR", help="folder of the run; without it, a new one under runs/")
        trains.add_argument("--steps", type=int, metavar="N", help="training steps (default 40, or a preset's)")
        trains.add_argument("--seed", type=int, metavar="S", help="fixes tasks, sampling and order (default 0)")
        trains.add_argument("--resume", metavar="DIR",
                            help="go on with this run; auto: with --out or the latest one of ENV")
    _plan(verb)
    evaluate = verb("eval", "score a model on held-out tasks",
                    "ENV [ENV ...] [--model M | --endpoint URL --endpoint-model NAME] [options]", True)
    evaluate.add_argument("--model", help="as for train; a run's model is in RUN/model")
    evaluate.add_argument("--endpoint", metavar="URL", help="OpenAI-compatible API to ask, key in OPENAI_API_KEY")
    evaluate.add_argument("--endpoint-model", metavar="NAME", help="the model's name there")
    evaluate.add_argument("--out", metavar="DIR", help="folder for a table of the tasks; goes on with what it has")
    evaluate.add_argument("--episodes", type=int, metavar="N", help="tasks (default 64)")
    evaluate.add_argument("--k", type=numbers, metavar="K[,K...]",
                          help="attempts at each task, for pass@k; of several, the largest (default 1)")
    evaluate.add_argument("--seed", type=int, metavar="S", help="fixes tasks and sampling (default 0)")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    rollout = verb("rollout", "play episodes and print them", "ENV [--model M | --human] [options]", True)
    rollout.add_argument("--model", help="as for train; a run's model is in RUN/model")
    rollout.add_argument("--human", action="store_true", help="you are the policy")
    rollout.add_argument("-n", type=int, default=1, metavar="N", help="episodes (default 1)")
    rollout.add_argument("--seed", type=int, metavar="S", help="fixes tasks and sampling (default 0)")
    rollout.add_argument("--out", metavar="FILE", help="also write the trajectories as JSON lines")
    serve = _serve(verb)
    sft = verb("sft", "train a model on conversations, or on the rollouts of a run",
               "DATA [DATA ...] [--model M] [options] [--SETTING VALUE ...]", True)
    sft.add_argument("--model", help="hub name, local folder, smollm2-135m (default) or tiny")
    sft.add_argument("--out", metavar="DIR", help="folder of the run; without it, a new one under runs/")
    sft.add_argument("--epochs", type=int, metavar="N", help="passes over the data (default 1)")
    sft.add_argument("--steps", type=int, metavar="N", help="optimizer updates, in place of epochs")
    sft.add_argument("--seed", type=int, metavar="S", help="fixes the order and what is held out (default 0)")
    sft.add_argument("--resume", metavar="DIR", help="go on with this run; auto: with --out or the latest one")
    _export(verb)
    for overridable in (train, sft, distill, evaluate, rollout, serve):
        overridable.add_argument(
            "--config", metavar="FILE", help="TOML file with settings, such as a run's config.toml"
        )
    _verbs_about_envs(verb)
    return parser


def _plan(verb: Any) -> None:
    planned = verb("plan", "say what a run needs and how fast it may be, without starting any of it",
                   "CONFIG [options] [--SETTING VALUE ...]")
    planned.add_argument("settings", metavar="CONFIG", help="TOML file of settings for train, distill or sft")
    planned.add_argument("--gpus", metavar="KIND:COUNT", help="of a node; without it, as the file's #SBATCH lines say")
    planned.add_argument("--nodes", type=int, metavar="N", help="of the cluster; without it, as the file says, or 1")
    planned.add_argument("--memory", type=float, metavar="GIB", help="of a GPU of another kind")
    planned.add_argument("--rates", type=Path, metavar="FILE", help="TOML file of rates in place of the usual ones")


def _serve(verb: Any) -> argparse.ArgumentParser:
    serve = verb("serve", "answer OpenAI and Anthropic SDKs with a model, and record what it samples",
                 "[ENV] [--model M] [options]", True)
    serve.add_argument("--model", help="as for train, tiny if there is an ENV; a run's model is in RUN/model")
    serve.add_argument("--seed", type=int, metavar="S", help="fixes sampling (default 0)")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="0 for a free one (default 8000)")
    serve.add_argument("--public-url", metavar="URL", help="how clients reach it, if not by host and port")
    serve.add_argument("--out", metavar="FILE", help="append each session's trajectory as a line of JSON")
    serve.add_argument("--idle-timeout", type=float, default=3600.0, metavar="SECONDS",
                       help="ends a session that is asked for nothing (default 3600)")
    return serve


def _export(verb: Any) -> None:
    export = verb("export", "write the model of a checkpoint as a folder for transformers and vLLM",
                  "RUN_OR_CHECKPOINT --out DIR [--dtype T] [--step N|best] [--model DIR]")
    export.add_argument("source", help="folder of a run or of a checkpoint")
    export.add_argument("--out", metavar="DIR", required=True, help="a new folder")
    export.add_argument("--dtype", help="of the weights, such as float32; without it, the one in which each came")
    export.add_argument("--step", metavar="N|best", help="of a run, which checkpoint; without it, the newest")
    export.add_argument("--model", metavar="DIR", help="where the model is now with which training began")


def _verbs_about_envs(verb: Any) -> None:
    for name, help in (("envs", "list the envs"), ("doctor", "check this machine")):
        added = verb(name, help, "[SUITE] [--json | --markdown]" if name == "envs" else "[--json]")
        added.add_argument("--json", action="store_true", help="print JSON")
        if name == "envs":
            added.add_argument("suite", nargs="?", metavar="SUITE", help="list the envs of this suite of others")
            added.add_argument("--markdown", action="store_true", help="print tables; those of docs/envs.md")
    checked = verb("check-env", "check that an env keeps to what chat envs must",
                   "ENV [--json] [--env-kwargs.NAME VALUE ...]")
    checked.add_argument("--json", action="store_true", help="print JSON")
    for kind, what in (("env", "an env"), ("agent", "an agent")):
        new = verb(f"new-{kind}", f"write a small package with {what} of your own", "NAME [--out DIR]")
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
