"""Random episodes over all ids, and what is left of them: processes, open files, threads, memory.

    python benchmarks/random_episodes.py --episodes 10000 [--only reasoning_gym CodeExec-v0] [--result NAME]

Every round makes each env, plays it with seeds of its own, and closes it, so what grows from round to round leaks.
Replies are drawn from what a policy might say: words of the observation, numbers, tags, programs, calls of tools,
noise. An episode is left in its middle after `--turns` replies, and abandoned after `--seconds`. Envs that training
gives processes of their own are played in this one, where nothing would hide what they leave. Where there is no hub,
HF_HUB_OFFLINE=1 makes those that need it fail at once. Nobody is asked to judge: there is no model here.
"""

import argparse
import importlib
import json
import os
import platform
import random
import shlex
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import gymnasium as gym

import molt_gym
from molt_gym.adapters.suites import SUITES
from molt_gym.footprint import Footprint, footprint
from molt_gym.judge_calls import rehearsal
from molt_gym.messages import Conversation, Message, text_of

IMPORTED = ("minigrid",)
"""Packages whose import registers ids with Gymnasium."""
SETTLES = 10.0
"""Seconds in which what is ending has to end."""
NOISE = ("", " ", "\x00\x1b[31m", "e\u0301 \u202eRTL \U0001f9d1\u200d\U0001f680", "<|im_end|>", "x" * 3000, "[" * 200,
         "```python\nwhile True:\n    pass\n", "-1e999 NaN", "</think>")


class TooLong(Exception):
    """An episode took longer than it may."""


@dataclass
class Score:
    """Of the episodes of one source."""

    ids: set[str] = field(default_factory=set)
    episodes: int = 0
    turns: int = 0
    reward: float = 0.0
    seconds: float = 0.0
    failures: Counter = field(default_factory=Counter)


def ids_by_source(only: list[str] | None = None) -> dict[str, list[str]]:
    """All ids, or those of some suites or of these names, by where they are from."""
    found = defaultdict(list)
    wanted = {name.partition("/")[0] for name in only or (*SUITES, *IMPORTED)}
    for suite in (None, *(name for name, suite in SUITES.items() if suite.installed and name in wanted)):
        for env in molt_gym.list_envs(suite):
            if not env.needs and (suite or env.source not in SUITES):
                found[suite or env.source].append(env.id)
    for package in wanted.intersection(IMPORTED):
        before = set(gym.registry)
        importlib.import_module(package)
        found[package] += sorted(set(gym.registry) - before)
    chosen = {source: [env_id for env_id in ids if only is None or {source, env_id} & set(only)]
              for source, ids in found.items()}
    return {source: ids for source, ids in chosen.items() if ids}


def shares(by_source: dict[str, list[str]], episodes: float) -> dict[str, int]:
    """How many episodes of each id a round has: as many of each source, and one of each id at least."""
    return {env_id: max(1, round(episodes / len(by_source) / len(ids))) for ids in by_source.values() for env_id in ids}


def random_reply(rng: random.Random, observation: Conversation) -> Message:
    """What some policy might say next."""
    if observation["tools"] and rng.random() < 0.5:
        return {"role": "assistant", "content": rng.choice(("", "so")), "tool_calls": [
            _call(rng, number, rng.choice(observation["tools"])["function"]) for number in range(rng.randint(1, 2))]}
    words = text_of(observation["messages"][-1]).split() or ["hm"]
    word = rng.choice([rng.choice(words), rng.choice(words).strip("[](){}'\".,:*`"), str(rng.randrange(10)),
                       f"{rng.randrange(-50, 200)}", "yes", "[" + str(rng.randrange(9)) + "]"])
    form = rng.choice(("{}", "{}", "<answer>{}</answer>", "<action>{}</action>", "\\boxed{{{}}}", "[{}]", "I say\n{}",
                       "```python\nprint({!r})\n```", "```python\nimport sys\nprint(sys.stdin.read() or {})\n```"))
    return {"role": "assistant", "content": rng.choice(NOISE) if rng.random() < 0.05 else form.format(word)}


def _call(rng: random.Random, number: int, function: dict[str, Any]) -> dict[str, Any]:
    named = function.get("parameters", {}).get("properties", {})
    arguments = json.dumps({name: rng.choice([1, "2 + 3", "x", "print(4)"]) for name in named})
    name = function["name"] if rng.random() < 0.9 else "no_such_tool"
    return {"id": f"call_{number}", "type": "function",
            "function": {"name": name, "arguments": arguments if rng.random() < 0.9 else arguments[:-1]}}


def play(env_id: str, episodes: int, first_seed: int, turns: int, seconds: float, score: Score) -> None:
    """Plays an env's share, and adds it to the score."""
    score.ids.add(env_id)
    begin = time.perf_counter()
    with failures_counted(env_id, score):
        with deadline(seconds):
            env = molt_gym.make(env_id)
        for seed in range(first_seed, first_seed + episodes):
            with failures_counted(env_id, score), deadline(seconds), rehearsal():
                play_one(env, random.Random(f"{env_id}/{seed}"), seed, turns, score)
            score.episodes += 1
        with deadline(seconds):
            env.close()
    score.seconds += time.perf_counter() - begin


def play_one(env: gym.Env, rng: random.Random, seed: int, turns: int, score: Score) -> None:
    """Plays an episode to its end, or until it has had its turns."""
    observation, _ = env.reset(seed=seed)
    for _ in range(turns):
        observation, reward, terminated, truncated, _ = env.step(random_reply(rng, observation))
        score.turns, score.reward = score.turns + 1, score.reward + reward
        if terminated or truncated:
            return


@contextmanager
def failures_counted(env_id: str, score: Score) -> Iterator[None]:
    """Counts what is raised."""
    try:
        yield
    except molt_gym.EnvFailure as failure:
        score.failures[failure.reason, env_id] += 1
    except Exception as error:  # noqa: BLE001  whatever it is, it is told
        print(f"{env_id}: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
        score.failures[type(error).__name__, env_id] += 1


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises TooLong in the main thread when the time is up."""
    def ring(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def settled(least: Footprint | None = None) -> Footprint:
    """What there is, once what is ending has ended, for which there is some time."""
    until = time.monotonic() + SETTLES
    while True:
        now = footprint()
        if now is None:
            raise SystemExit("random_episodes: only where there is /proc")
        grown = least and now - least
        if not grown or max(grown.files, grown.threads, grown.processes) <= 0 or time.monotonic() > until:
            return now
        time.sleep(0.1)


def measure(options: argparse.Namespace) -> tuple[dict[str, Score], list[tuple[int, Footprint]]]:
    """Plays all; the scores by source, and what was held after each round with the number of episodes until then."""
    scores: dict[str, Score] = defaultdict(Score)
    by_source = ids_by_source(options.only)
    share = shares(by_source, options.episodes / options.rounds)
    held, begin = [(0, settled())], time.monotonic()
    for number in range(options.rounds):
        for source, ids in by_source.items():
            for env_id in ids:
                first_seed = number * share[env_id]
                play(env_id, share[env_id], first_seed, options.turns, options.seconds, scores[source])
        held.append((sum(score.episodes for score in scores.values()), settled(held[-1][1])))
        print(f"{held[-1][0]} episodes, {time.monotonic() - begin:.0f} s, {held[-1][1]}", file=sys.stderr, flush=True)
        if time.monotonic() - begin > 60 * options.minutes:
            break
    return scores, held


def report(scores: dict[str, Score], held: list[tuple[int, Footprint]], turns: int) -> Iterator[str]:
    """The tables."""
    yield "| from | ids | episodes | turns | reward an episode | episodes/s | failures |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for source, score in scores.items():
        yield (f"| {source} | {len(score.ids)} | {score.episodes} | {score.turns} "
               f"| {score.reward / max(score.episodes, 1):.3f} | {score.episodes / score.seconds:.1f} "
               f"| {'; '.join(reasons(score.failures)) or 'none'} |")
    yield ""
    yield f"An episode that went on after {turns} turns was left there."
    yield ""
    yield "| after episodes | MiB resident, children included | open files | threads | processes |"
    yield "|---:|---:|---:|---:|---:|"
    for played, now in held:
        yield f"| {played} | {now.memory:.0f} | {now.files} | {now.threads} | {now.processes} |"
    grown = held[-1][1] - half(held)
    yield (f"| grown in the second half | {grown.memory:+.0f} | {grown.files:+d} | {grown.threads:+d} "
           f"| {grown.processes:+d} |")


def describe(words: list[str]) -> Iterator[str]:
    """The command, the machine and versions."""
    yield from ("```", shlex.join(["python", "benchmarks/random_episodes.py", *words]), "```", "")
    distributions = packages_distributions()
    packages = ("molt_gym", "gymnasium", *(suite.package for suite in SUITES.values()), *IMPORTED)
    names = [distributions[package][0] for package in packages if package in distributions]
    versions = [f"{name} {version(name)}" for name in names]
    yield f"{date.today()}, {os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}, load " \
          f"{os.getloadavg()[1]:.0f}, {', '.join(versions)}"
    yield ""


def half(held: list[tuple[int, Footprint]]) -> Footprint:
    """What was held half-way, after the first round at least."""
    return held[max(1, (len(held) - 1) // 2)][1]


def reasons(failures: Counter) -> Iterator[str]:
    """Each reason with how often it came up, and in which of the ids."""
    ids = defaultdict(dict)
    for (reason, env_id), count in failures.items():
        ids[reason][env_id] = count
    for reason, counts in ids.items():
        yield f"{sum(counts.values())} {reason}: {', '.join(sorted(counts)[:9])}{', ...' * (len(counts) > 9)}"


def main(words: list[str] | None = None) -> int:
    """Prints the tables; 1 if something is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after the round in which they are over")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", metavar="SUITE_OR_ID")
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.md")
    words = sys.argv[1:] if words is None else words
    options = parser.parse_args(words)
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    scores, held = measure(options)
    lines = [*report(scores, held, options.turns), "", f"{time.perf_counter() - begin:.0f} s in all."]
    print("\n".join(lines))
    if options.result:
        text = ["# Random episodes, and what is left of them", "", *describe(words), *lines]
        Path(__file__).with_name("results").joinpath(f"{options.result}.md").write_text("\n".join(text) + "\n")
    grown = held[-1][1] - half(held)
    return int(max(grown.files, grown.threads, grown.processes) > 0)


if __name__ == "__main__":
    sys.exit(main())
