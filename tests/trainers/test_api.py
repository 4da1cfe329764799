"""`train`, `evaluate` and `rollout` as users call them, rightly and wrongly."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import molt_gym
from molt_gym import ConfigError, NotAChatEnv, UnknownEnv, cli
from molt_gym.messages import Message
from molt_gym.trainers.config import load_config
from molt_gym.trainers.sft_config import SftConfig

Train = Callable[..., Any]


def test_train_runs_where_an_event_loop_is_running_already(train: Train, tmp_path: Path) -> None:
    async def cell() -> Any:
        return train(tmp_path / "run", steps=1)

    assert asyncio.run(cell()).metrics[-1]["step"] == 1


def test_nested_and_dunder_overrides_and_a_mapping_say_the_same(train: Train, tmp_path: Path) -> None:
    few = {"steps": 1, "eval__before": False, "eval__after": False}
    ways = [{"rollout__max_tokens": 5}, {"rollout": {"max_tokens": 5}}, {"config": {"rollout": {"max_tokens": 5}}}]
    for number, way in enumerate(ways):
        result = train(tmp_path / f"{number}", defaults=False, rollout__group_size=2, rollout__groups_per_step=1,
                       rollout__max_context=128, **few, **way)
        settings = load_config(file=result.run_dir / "config.toml").rollout
        assert (settings.max_tokens, settings.group_size) == (5, 2)


def test_a_run_goes_on_for_more_steps_in_its_own_folder_with_its_own_seed(train: Train, tmp_path: Path) -> None:
    first = train(tmp_path / "run", steps=2, seed=5, eval__after=False)
    again = train(tmp_path / "run", steps=4, seed=None, eval__after=False)
    straight = train(tmp_path / "straight", steps=4, seed=5, eval__after=False)
    assert again.metrics[: len(first.metrics)] == first.metrics
    rewards = [[line.get("reward/mean") for line in result.metrics] for result in (again, straight)]
    assert rewards[0] == rewards[1]
    assert load_config(file=tmp_path / "run" / "config.toml").steps == 4


def test_seed_and_sizes_of_a_configuration_hold_unless_a_call_names_them(toys: Path) -> None:
    played = [molt_gym.rollout("toy_envs:Coin-v0", lambda _: "ab", 2, **options)[0].index
              for options in ({"config": {"seed": 9}}, {"seed": 9}, {"seed": 3, "config": {"seed": 9}}, {"seed": 3})]
    assert played[0] == played[1] != played[2] == played[3]
    config = {"eval": {"episodes": 3, "k": 2}}
    result = molt_gym.evaluate("toy_envs:Coin-v0", lambda _: "ab", config=config)
    assert (result.episodes, result.k, set(result.pass_at)) == (3, 2, {1, 2})
    assert molt_gym.evaluate("toy_envs:Coin-v0", lambda _: "ab", config=config, k=1).k == 1


def test_a_run_takes_the_seed_of_its_configuration(train: Train, tmp_path: Path) -> None:
    result = train(tmp_path / "run", steps=1, seed=None, config={"seed": 9}, eval__before=False, eval__after=False)
    assert load_config(file=result.run_dir / "config.toml").seed == 9
    with pytest.raises(ConfigError, match="seed: 0, but the run in .* has 9"):
        train(tmp_path / "run", steps=2, seed=0)


def test_a_finished_run_is_finished(train: Train, tmp_path: Path) -> None:
    first = train(tmp_path / "run", steps=2)
    assert train(tmp_path / "run", steps=2).metrics == first.metrics


@pytest.mark.parametrize(("changed", "name"), [({"seed": 3}, "seed: 3.*has 1"), ({"env": "toy_envs:Coin-v0"}, "env: ")])
def test_a_run_does_not_go_on_as_another_one(
    train: Train, tmp_path: Path, changed: dict[str, Any], name: str
) -> None:
    train(tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match=name):
        train(tmp_path / "run", steps=2, **changed)


def test_other_tasks_and_another_model_than_before_are_gone_on_with_and_told(
    train: Train, tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved, few = shutil.copytree(tiny_path, tmp_path / "moved"), {"eval__before": False, "eval__after": False}
    for steps, tasks, model in ((1, 20, tiny_path), (2, 20, tiny_path), (3, 21, moved)):
        train(tmp_path / "run", steps=steps, env_kwargs={"num_tasks": tasks}, model=model, **few)
        said = capsys.readouterr().out
        assert ("goes on with other tasks than before: [21] in place of [20]" in said) == (tasks == 21)
        assert (f"goes on with other model than before: {moved} in place of {tiny_path}" in said) == (model == moved)


def test_settings_that_do_not_fit_the_checkpoint_leave_those_that_do(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", steps=1, eval__before=False, eval__after=False)
    settings = (tmp_path / "run" / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match="another actor.lora"):
        train(tmp_path / "run", steps=2, actor__lora__rank=4)
    assert (tmp_path / "run" / "config.toml").read_bytes() == settings


def test_a_run_goes_on_from_another_working_directory_than_its_model_was_named_in(
    train: Train, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_path, tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    few = {"eval__before": False, "eval__after": False}
    monkeypatch.chdir(tmp_path)
    train(Path("run"), model=Path("model"), steps=1, **few)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert train(Path("..") / "run", model=None, steps=2, **few).metrics[-1]["step"] == 2


def test_the_folder_of_an_sft_run_is_refused_also_in_the_home_folder(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    SftConfig(data="chats.jsonl").to_toml(tmp_path / "config.toml")
    for out in (tmp_path, "~"):
        with pytest.raises(ConfigError, match=f"out: {tmp_path} holds a run of sft; choose another folder"):
            train(out)


def test_a_folder_in_use_is_refused_if_the_run_may_not_go_on(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="in use"):
        train(tmp_path / "run", steps=2, checkpoint__resume="never")


@pytest.mark.parametrize(("wrong", "error", "words"), [
    ({"env": "toy_envs:Lettres-v0"}, UnknownEnv, "Letters-v0"),
    ({"env": "toy_envs:Pixels-v0"}, NotAChatEnv, "parse="),
    ({"rollout__grup_size": 4}, ConfigError, "rollout.group_size"),
    ({"rollout__group_size": 1}, ConfigError, "group_size"),
    ({"rollout__top_p": 0.9}, ConfigError, "top_p"),
    ({"env_kwargs": {"no_such": 1}}, Exception, "no_such"),
    ({"env_kwargs": {"num_tasks": -1}}, ConfigError, "num_tasks is -1; write"),
    ({"env_kwargs": {"num_tasks": 0}}, ConfigError, "env: toy_envs:Letters-v0 has no tasks with the arguments"),
    ({"eval__env_kwargs": {"num_tasks": 0}, "eval__before": False}, ConfigError, "has no tasks .*'split': 'test'"),
    ({"env": None}, ConfigError, "env: missing"), ({"env": ["Math-v0"]}, ConfigError, "env.*: got .'Math-v0'"),
    ({"model": 5}, ConfigError, "model: got 5"),
    ({"seed": 2**64}, ConfigError, "seed"),
    ({"rollout__max_context": 4096}, ConfigError, "4096 .* 1024"),
    ({"algorithm__updates_per_batch": 3}, ConfigError, "divide"),
    ({"model": "no/such/folder"}, ConfigError, "no/such/folder"),
])
def test_wrong_settings_are_refused_in_words_before_anything_is_written(
    train: Train, tmp_path: Path, wrong: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        train(tmp_path / "run", **wrong)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or "max_context" in str(wrong)
    assert not (tmp_path / "run" / "model").exists()


def test_a_model_folder_without_a_chat_template_is_refused(train: Train, tiny_path: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_path, tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="chat template"):
        train(tmp_path / "run", model=tmp_path / "bare")


def test_functions_and_models_are_evaluated_on_the_same_held_out_tasks(toys: Path, tiny_path: Path) -> None:
    seen: list[str] = []

    def reply(observation: dict[str, Any]) -> str:
        seen.append(observation["messages"][0]["content"])
        return "abc"

    ours = molt_gym.evaluate("toy_envs:Letters-v0", reply, episodes=6)
    assert (ours.reward_mean, ours.pass_at, ours.episodes) == (1.0, {1: 1.0}, 6)
    assert len(set(seen)) == 6
    small = {"rollout": {"max_tokens": 4, "max_context": 128}}
    theirs = molt_gym.evaluate("toy_envs:Letters-v0", tiny_path, episodes=6, **small)
    assert {t.index for t in theirs.trajectories} == {t.index for t in ours.trajectories}
    assert theirs.reward_mean < 1
    assert molt_gym.evaluate("toy_envs:Letters-v0", tiny_path, episodes=6, **small).reward_mean == theirs.reward_mean


def test_several_attempts_are_sampled_unless_told_otherwise(toys: Path, tiny_path: Path) -> None:
    options = {"episodes": 2, "k": 3, "rollout": {"max_tokens": 6, "max_context": 128, "dtype": "float32"}}
    result = molt_gym.evaluate("toy_envs:Coin-v0", tiny_path, **options)
    assert len({t.messages[-1]["content"] for t in result.trajectories}) > 2
    cold = molt_gym.evaluate("toy_envs:Coin-v0", tiny_path, eval={"temperature": 1e-4}, **options)
    assert len({t.messages[-1]["content"] for t in cold.trajectories}) <= 2
    assert set(result.pass_at) == {1, 3}


def test_as_many_rollouts_are_played_as_were_asked_for(toys: Path, tiny_path: Path) -> None:
    few = {"env_kwargs": {"num_tasks": 2}, "rollout": {"max_tokens": 4, "max_context": 128}}
    by_function = molt_gym.rollout("toy_envs:Letters-v0", lambda observation: "xyz", 5, **few)
    assert [t.reward for t in by_function] == [0.0] * 5
    assert {t.index for t in by_function} == {0, 1}
    by_model = molt_gym.rollout("toy_envs:Letters-v0", tiny_path, 3, **few)
    assert all(t.turns == 2 and sum(t.rows[0].mask) <= 8 for t in by_model)
    assert len(by_model) == 3


@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_a_number_of_rollouts_that_is_none_is_refused(toys: Path, n: Any) -> None:
    with pytest.raises(molt_gym.ConfigError, match="n: .*; write a number of rollouts"):
        molt_gym.rollout("toy_envs:Letters-v0", lambda observation: "xyz", n)


async def test_an_async_policy_is_awaited_inside_a_running_loop(toys: Path) -> None:
    class Slow:
        async def reply(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
            await asyncio.sleep(0)
            return {"role": "assistant", "content": "a"}

    assert [t.reward for t in molt_gym.rollout("toy_envs:Letters-v0", Slow(), 2)] == [1.0, 1.0]


def test_a_policy_that_fails_fails_its_rollout_alone(toys: Path) -> None:
    def reply(observation: dict[str, Any]) -> str:
        if "task 0" in observation["messages"][0]["content"]:
            raise ValueError("no idea")
        return "a"

    played = molt_gym.rollout("toy_envs:Letters-v0", reply, 4, env_kwargs={"num_tasks": 4})
    assert sorted(t.failure.reason if t.failure else "" for t in played) == ["", "", "", "policy_error"]


def test_the_command_of_a_run_that_fails_ends_with_1_and_says_why(
    toys: Path, tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--rollout.max-tokens", "8", "--rollout.max-context", "256", "--eval.before", "false",
             "--env-kwargs.trouble", "raise in step"]
    command = ["train", "toy_envs:Letters-v0", "--model", str(tiny_path), "--out", str(tmp_path / "run"), *words]
    assert cli.main(command) == 1
    assert "step_error 32" in capsys.readouterr().err
    assert cli.main(["train", "toy_envs:Lettres-v0", "--model", str(tiny_path)]) == 2
