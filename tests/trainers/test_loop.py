"""Whole runs of a tiny policy in a toy env: it learns, equal seeds give equal runs, trouble is told and survived."""

import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt_gym import RunFailed
from molt_gym.tokens.trajectory import read_jsonl
from molt_gym.trainers.checkpoint import newest_checkpoint
from molt_gym.trainers.config import load_config
from molt_gym.trainers.run_dir import read_metrics

Train = Callable[..., Any]


def steps_of(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in metrics if "eval/when" not in line]


def lasting(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not depend on the machine's speed; NaN as text, so that it equals itself."""
    kept = [{name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))}
            for line in metrics]
    return json.loads(json.dumps(kept), parse_constant=str)


def test_a_run_leaves_settings_metrics_transcripts_curve_checkpoints_and_a_model(train: Train) -> None:
    result = train(steps=3, checkpoint__every=2, eval__every=2)
    folder = result.run_dir
    assert load_config(file=folder / "config.toml").steps == 3
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert result.checkpoint == folder / "checkpoints" / "step-000003" == newest_checkpoint(folder / "checkpoints")
    assert [(line["step"], line.get("eval/when")) for line in result.metrics] == [
        (0, "before"), (1, None), (2, None), (2, "step 2"), (3, None), (3, "after")]
    assert result.metrics == read_metrics(folder)
    for name in ("reward/mean", "reward/std", "reward/toy_envs:Letters-v0", "pass/at_1", "rollout/length_mean",
                 "rollout/turns_mean", "rollout/truncated", "rollout/fork_rate", "policy/loss", "policy/entropy",
                 "policy/clip_fraction", "policy/kl_old", "mismatch/abs_diff_mean", "mismatch/bitwise_fraction",
                 "mismatch/kl", "advantage/mean", "staleness/mean", "staleness/max", "optim/lr", "optim/grad_norm",
                 "time/rollout", "time/logprobs", "time/train", "time/weights", "time/step",
                 "perf/rollout_tokens_per_s", "perf/train_tokens_per_s"):
        assert all(name in line for line in steps_of(result.metrics)), name
    for name in ("pass_at_1", "length_mean", "truncated"):
        assert f"eval/toy_envs:Letters-v0/{name}" in result.metrics[0]
    for step in (1, 2, 3):
        played = read_jsonl(folder / "rollouts" / f"step-{step:06d}.jsonl")
        assert len(played) == 8
        assert all(t.step == step and t.turns == 2 and t.reward is not None and len(t.messages) == 4 for t in played)
        assert {version for t in played for row in t.rows for version in row.versions} == {-1, step - 1}
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template


def test_every_trained_token_has_the_log_prob_that_transformers_computes(train: Train, tiny_path: Path) -> None:
    result = train(steps=1, actor__lr=1e-30, rollout__temperature=0.8)
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32, attn_implementation="eager").eval()
    compared = 0
    for trajectory in read_jsonl(result.run_dir / "rollouts" / "step-000001.jsonl"):
        for row in trajectory.rows:
            with torch.no_grad():
                logs = (model(torch.tensor([row.ids])).logits[0] / 0.8).log_softmax(-1)
            for position in (position for position, bit in enumerate(row.mask) if bit):
                found = logs[position - 1, row.ids[position]].item()
                assert found == pytest.approx(row.logprobs[position], abs=1e-4)
                compared += 1
    assert compared > 50
    line = steps_of(result.metrics)[0]
    assert line["mismatch/abs_diff_mean"] < 1e-5
    assert abs(line["policy/kl_old"]) < 1e-9


@pytest.mark.slow
def test_a_tiny_policy_learns(train: Train) -> None:
    rewards = [line["reward/mean"] for line in steps_of(train(steps=25, actor__lr=5e-3, eval__before=False,
                                                              eval__after=False, rollout__groups_per_step=4).metrics)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15


def test_equal_seeds_give_equal_runs_and_other_seeds_others(train: Train, tmp_path: Path) -> None:
    options = {"steps": 3, "algorithm__updates_per_batch": 2, "eval__every": 1}
    first, second = (train(tmp_path / name, **options) for name in "ab")
    assert lasting(first.metrics) == lasting(second.metrics)
    for file in ("model.safetensors", "config.json"):
        assert (first.run_dir / "model" / file).read_bytes() == (second.run_dir / "model" / file).read_bytes()
    assert lasting(train(tmp_path / "c", seed=2, **options).metrics) != lasting(first.metrics)


def test_a_run_may_lag_one_version_behind_and_says_so(train: Train) -> None:
    result = train(steps=6, rollout__max_staleness=1)
    lines = steps_of(result.metrics)
    assert len(lines) == 6
    assert max(line["staleness/max"] for line in lines) == 1
    assert all("is/filtered" in line for line in lines)
    for step in range(1, 7):
        for trajectory in read_jsonl(result.run_dir / "rollouts" / f"step-{step:06d}.jsonl"):
            versions = {v for row in trajectory.rows for v, bit in zip(row.versions, row.mask, strict=True) if bit}
            assert versions <= set(range(step))


def test_groups_that_all_pass_or_all_fail_are_replaced(train: Train) -> None:
    result = train(env="toy_envs:Coin-v0", steps=2, rollout__group_size=2, rollout__dynamic_filter=True)
    for line in steps_of(result.metrics):
        dropped = line.get("rollout/dropped/filtered", 0)
        assert line["rollout/dispatched_groups"] == 2 + dropped
        assert line["rollout/count"] == 2 * (2 + dropped)
        assert line["advantage/zero"] == 0
    assert any("rollout/dropped/filtered" in line for line in steps_of(result.metrics))


@pytest.mark.filterwarnings("ignore:chat template")
def test_tools_that_are_offered_and_never_called_are_warned_of_once(
    train: Train, capsys: pytest.CaptureFixture
) -> None:
    lines = steps_of(train(env_kwargs={"trouble": "tools"}, eval__before=False, eval__after=False).metrics)
    assert [(line["rollout/tools_offered"], line["rollout/tool_calls_mean"]) for line in lines] == [(16, 0), (16, 0)]
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("tools were offered in 16 turns and never called") == 1


def test_some_failed_rollouts_are_counted_and_the_others_train(train: Train) -> None:
    options = {"env_kwargs": {"trouble": "raise in step", "share": 0.1}, "rollout__max_failure_rate": 0.9}
    lines = steps_of(train(steps=3, eval__before=False, eval__after=False, **options).metrics)
    assert sum(line.get("rollout/failed/step_error", 0) for line in lines) > 0
    assert all("optim/grad_norm" in line for line in lines)


TROUBLES = [
    ("raise in reset", "reset_error", "the toy broke"), ("raise in step", "step_error", "the toy broke"),
    ("fail in step", "toybox", "the toy is lost"), ("nan", "reward", "nan"), ("text", "reward", "'high'"),
    ("hang in reset", "reset_timeout", "rollout.reset_timeout"),
    ("hang in step", "step_timeout", "rollout.step_timeout"), ("long", "prompt_too_long", "rollout.max_context"),
]


@pytest.mark.parametrize(("trouble", "reason", "words"), TROUBLES)
def test_a_run_whose_rollouts_all_fail_stops_with_counts_by_reason_and_exports_nothing(
    train: Train, tmp_path: Path, trouble: str, reason: str, words: str
) -> None:
    started = time.monotonic()
    with pytest.raises(RunFailed, match=f"8 of 8 rollouts of step 1 failed .{reason} 8") as caught:
        train(tmp_path / "run", steps=2, env_kwargs={"trouble": trouble}, eval__before=False,
              rollout={"reset_timeout": 1, "step_timeout": 1, "max_failure_rate": 1.0})
    assert words in str(caught.value)
    assert all(t.failure.traceback for t in read_jsonl(tmp_path / "run" / "rollouts" / "step-000001.jsonl"))
    assert time.monotonic() < started + 30
    assert not (tmp_path / "run" / "model").exists()
    assert newest_checkpoint(tmp_path / "run" / "checkpoints") is None


def test_more_failures_than_are_allowed_stop_a_run(train: Train) -> None:
    options = {"env_kwargs": {"trouble": "raise in step", "share": 0.1}, "eval__before": False}
    with pytest.raises(RunFailed, match="of 32 rollouts of step 1 failed .step_error .*max_failure_rate = 0.0 allows"):
        train(rollout__groups_per_step=8, rollout__max_failure_rate=0.0, **options)
    with pytest.raises(RunFailed, match="of 32 rollouts .*failures.budgets.step_error = 0.01 allows"):
        train(rollout__groups_per_step=8, failures__budgets__step_error=0.01, **options)


def test_a_run_that_fails_later_has_saved_what_it_had_learned(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path / "run", steps=2)
    with pytest.raises(RunFailed, match="step 3"):
        train(tmp_path / "run", steps=5, env_kwargs={"trouble": "raise in step"}, eval__after=False)
    assert "failed after step 2, saved as" in capsys.readouterr().out
    result = train(tmp_path / "run", steps=3, env_kwargs={"trouble": ""})
    assert [line["step"] for line in steps_of(result.metrics)] == [1, 2, 3]


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Makes the system refuse files that are larger, until the end of the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit if limit >= 0 else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_a_checkpoint_is_reported_and_the_older_one_is_gone_on_from(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture, file_size_limit: Callable[[int], None]
) -> None:
    train(tmp_path / "run", steps=2, eval__after=False)
    file_size_limit(300_000)
    with pytest.raises(OSError, match="cannot write .*MB are free"):
        train(tmp_path / "run", steps=6)
    file_size_limit(-1)
    assert "step 4 not saved (cannot write" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    result = train(tmp_path / "run", steps=6)
    straight = train(tmp_path / "straight", steps=6, eval__after=False)
    assert lasting(result.metrics) == lasting(straight.metrics)


def test_a_step_whose_record_cannot_be_written_is_not_saved_as_done(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture, file_size_limit: Callable[[int], None]
) -> None:
    train(tmp_path / "run", steps=2, eval__after=False)
    with pytest.raises(OSError):
        train(tmp_path / "run", steps=4, env_kwargs={"trouble": "no room"})
    file_size_limit(-1)
    assert "not saved, as it was in the middle of a step" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    result = train(tmp_path / "run", steps=4, env_kwargs={"trouble": ""})
    straight = train(tmp_path / "straight", steps=4, eval__after=False)
    assert lasting(result.metrics) == lasting(straight.metrics)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_gone_on_from(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    straight = train(tmp_path / "run", steps=4, eval__after=False)
    checkpoints = tmp_path / "run" / "checkpoints"
    file = checkpoints / "step-000004" / "actor" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step-000004 is not whole .*__0_0.distcp is damaged"):
        result = train(tmp_path / "run", steps=4)
    assert lasting(result.metrics) == lasting(straight.metrics)
    for path in checkpoints.iterdir():
        shutil.rmtree(path)
    result = train(tmp_path / "run", steps=4)
    assert f"no whole checkpoint in {checkpoints}; starting again" in capsys.readouterr().out
    assert lasting(result.metrics) == lasting(straight.metrics)


@pytest.mark.slow
def test_two_ranks_train_as_one(train: Train, tmp_path: Path) -> None:
    options = {"steps": 2, "eval__before": False, "eval__after": False, "rollout__groups_per_step": 3}
    one, two = (train(tmp_path / f"{ranks}", actor__world_size=ranks, **options) for ranks in (1, 2))
    for ours, theirs in zip(lasting(one.metrics), lasting(two.metrics), strict=True):
        ours["mismatch/bitwise_fraction"] = theirs["mismatch/bitwise_fraction"]
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
