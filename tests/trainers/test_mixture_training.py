"""Runs in several envs at the same time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import molt_gym
from molt_gym import ConfigError, RunFailed
from molt_gym.tokens.trajectory import read_jsonl
from molt_gym.trainers.checkpoint import load_state, newest_checkpoint
from molt_gym.trainers.config import load_config

Train = Callable[..., Any]
LETTERS, COIN = "toy_envs:Letters-v0", "toy_envs:Coin-v0"
BOTH = {LETTERS: 0.5, COIN: 0.5}


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))} for line in lines]


def played(folder: Path) -> list[tuple[Any, ...]]:
    return [(t.env, t.index, t.group, t.rollout, t.reward, t.rows)
            for file in sorted((folder / "rollouts").iterdir()) for t in read_jsonl(file)]


def steps(result: Any) -> list[dict[str, Any]]:
    return [line for line in result.metrics if "eval/when" not in line]


def by_reward(line: dict[str, Any]) -> dict[str, float] | None:
    """Only one env from the second step on, both again from the fourth on."""
    return {1: {COIN: 0}, 3: {COIN: 4.0, LETTERS: 1.0}}.get(line["step"])


def test_each_env_has_its_own_metrics_and_its_own_evaluation(train: Train, tmp_path: Path) -> None:
    result = train(tmp_path / "run", env=BOTH, steps=3, rollout__groups_per_step=6)
    for line in steps(result):
        assert line[f"mixture/{COIN}"] == 0.5
        counts = [line[f"rollout/count/{env}"] for env in BOTH]
        assert sum(counts) == line["rollout/count"] == 24 and min(counts) > 0
        mean = sum(count * line[f"reward/{env}"] for env, count in zip(BOTH, counts, strict=True)) / 24
        assert line["reward/mean"] == pytest.approx(mean)
        passed = sum(count * line[f"pass/{env}"] for env, count in zip(BOTH, counts, strict=True)) / 24
        assert line["pass/at_1"] == pytest.approx(passed)
    ends = [line for line in result.metrics if "eval/when" in line]
    assert [line["eval/when"] for line in ends] == ["before", "after"]
    assert all(line[f"eval/{env}/episodes"] == 2 for line in ends for env in BOTH)
    assert result.best is not None
    config = load_config(file=result.run_dir / "config.toml")
    assert (config.env, list(config.mixture)) == (f"{LETTERS}+{COIN}", [LETTERS, COIN])


def test_equal_seeds_give_equal_runs(train: Train, tmp_path: Path) -> None:
    first, second = [train(tmp_path / name, env=BOTH, steps=3) for name in ("one", "two")]
    assert untimed(first.metrics) == untimed(second.metrics)
    assert played(first.run_dir) == played(second.run_dir)
    other = train(tmp_path / "three", env=BOTH, steps=3, seed=2)
    assert played(other.run_dir) != played(first.run_dir)


class Level:
    """A curriculum with a state of its own."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, line: dict[str, Any]) -> None:
        self.steps += 1


def test_an_object_can_be_the_curriculum_and_arguments_join_a_bare_weight(train: Train, tmp_path: Path) -> None:
    level, few = Level(), {"eval__before": False, "eval__after": False}
    result = train(tmp_path / "run", env=BOTH, steps=2, curriculum=level, **few,
                   **{f"mixture.{LETTERS}.env_kwargs.num_tasks": 7})
    assert level.steps == 1
    assert load_config(file=result.run_dir / "config.toml").mixture[LETTERS] == {
        "weight": 0.5, "env_kwargs": {"num_tasks": 7}}


def test_an_env_alone_and_as_a_mixture_of_one_are_the_same_run(train: Train, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", env=COIN, steps=2)
    mixed = train(tmp_path / "mixed", env={COIN: {"weight": 3}}, steps=2)
    assert untimed(alone.metrics) == untimed(mixed.metrics)
    assert played(alone.run_dir) == played(mixed.run_dir)


def test_a_mixture_with_a_curriculum_goes_on_as_if_it_had_not_ended(train: Train, tmp_path: Path) -> None:
    options = {"env": BOTH, "curriculum": by_reward, "rollout__groups_per_step": 4, "eval__after": False}
    straight = train(tmp_path / "straight", steps=6, **options)
    for last in (2, 3, 6):
        parts = train(tmp_path / "parts", steps=last, **options)
    assert untimed(parts.metrics) == untimed(straight.metrics)
    assert played(parts.run_dir) == played(straight.run_dir)
    weights = [(line[f"mixture/{LETTERS}"], line[f"mixture/{COIN}"]) for line in steps(straight)]
    assert weights == [(0.5, 0.5), (0.5, 0), (0.5, 0), (1, 4), (1, 4), (1, 4)]
    assert [line[f"rollout/count/{COIN}"] for line in steps(straight)][1:3] == [0, 0]
    state = load_state(newest_checkpoint(straight.run_dir / "checkpoints"))["pool"]["mixture"]
    assert state == [[0, {LETTERS: 0.5, COIN: 0.5}], [4, {LETTERS: 0.5, COIN: 0}], [12, {LETTERS: 1, COIN: 4}]]


def test_a_curriculum_by_name_is_found_and_remembered_and_one_that_fails_keeps_the_last_step(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan_of_envs.py").write_text(
        "def plan(line):\n    return {'toy_envs:Coin-v0': 0} if line['step'] < 3 else {'Nowhere-v0': 1}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RunFailed, match="curriculum: ValueError: 'Nowhere-v0' is not in the mixture"):
        train(tmp_path / "run", env=BOTH, steps=5, curriculum="plan_of_envs:plan")
    path = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert path is not None and path.name == "step-000003"
    assert load_config(file=tmp_path / "run" / "config.toml").curriculum == "plan_of_envs:plan"
    with pytest.raises(RunFailed, match="Nowhere-v0"):
        train(tmp_path / "run", env=BOTH, steps=5)


def test_envs_have_arguments_and_turns_of_their_own(train: Train, tmp_path: Path) -> None:
    mixture = {LETTERS: {"weight": 1, "env_kwargs": {"num_tasks": 2}, "max_turns": 1}, COIN: 1}
    result = train(tmp_path / "run", env=mixture, steps=2, rollout__groups_per_step=6)
    letters = [t for file in (result.run_dir / "rollouts").iterdir() for t in read_jsonl(file) if t.env == LETTERS]
    assert {t.index for t in letters} == {0, 1} and {(t.turns, t.truncated) for t in letters} == {(1, True)}


def test_weights_of_a_run_that_goes_on_may_change_but_not_its_envs(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", env=BOTH, steps=1)
    result = train(tmp_path / "run", env={LETTERS: 1, COIN: 0}, steps=3)
    assert [line[f"mixture/{COIN}"] for line in steps(result)] == [0.5, 0, 0]
    for others in ({LETTERS: 1}, {COIN: 1, LETTERS: 1}, COIN):
        with pytest.raises(ConfigError, match="env: "):
            train(tmp_path / "run", env=others, steps=4)


def test_asynchronous_runs_take_mixtures_too(train: Train, tmp_path: Path) -> None:
    result = train(tmp_path / "run", env=BOTH, steps=4, rollout__max_staleness=1, curriculum=by_reward)
    assert [line["rollout/count"] > 0 for line in steps(result)] == [True] * 4
    assert {env for env, *_ in played(result.run_dir)} == set(BOTH)


@molt_gym.register_agent("MixedAsker-v0", max_turns=2)
async def _ask(ctx: Any) -> float:
    reply = await ctx.openai().chat.completions.create(
        model=ctx.model, messages=[{"role": "user", "content": f"toss {ctx.index}"}])
    return float(len(reply.choices[0].message.content or "") % 2 == 0)


def test_agents_and_chat_envs_mix(train: Train, tmp_path: Path) -> None:
    result = train(tmp_path / "run", env={"MixedAsker-v0": 1, COIN: 1}, steps=2, rollout__groups_per_step=6)
    for line in steps(result):
        assert line["rollout/count/MixedAsker-v0"] > 0 and line[f"rollout/count/{COIN}"] > 0
        assert not [name for name in line if name.startswith("rollout/failed")]
    assert {env for env, *_, rows in played(result.run_dir) if rows} == {"MixedAsker-v0", COIN}


def test_one_env_of_a_mixture_is_evaluated_with_its_own_settings_from_the_runs_file(
    train: Train, tiny_path: Path, tmp_path: Path
) -> None:
    mixture = {LETTERS: {"weight": 1, "max_turns": 1}, COIN: 1}
    run = train(tmp_path / "run", env=mixture, steps=1, eval__before=False, eval__after=False).run_dir
    result = molt_gym.evaluate(LETTERS, run / "model", episodes=2, config=run / "config.toml")
    assert {t.turns for t in result.trajectories} == {1}
    with pytest.raises(ConfigError, match="is a mixture, and one env is needed here"):
        molt_gym.rollout(f"{LETTERS}+{COIN}", lambda observation: "a", 1, config=run / "config.toml")


@pytest.mark.parametrize(("wrong", "error", "words"), [
    ({}, ConfigError, "env"), ({COIN: 1, "Nowhere-v0": 1}, molt_gym.UnknownEnv, "Nowhere-v0"),
    ({COIN: -1}, ConfigError, "mixture.toy_envs:Coin-v0.weight: got -1"),
    ({COIN: 1, LETTERS: {"weight": 1, "env_kwargs": {"num_tasks": 0}}}, ConfigError,
     "Letters-v0 has no tasks .*leave it out")])
def test_a_wrong_mixture_is_refused_before_anything_is_written(
    train: Train, tmp_path: Path, wrong: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        train(tmp_path / "run", env=wrong)
    assert not (tmp_path / "run").exists()
