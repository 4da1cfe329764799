"""Runs whose judge is the policy itself, or what it was at the start, on the engines of the run."""

import functools
import json
import shutil

import pytest

from molt_gym import ConfigError, EnvFailure, Judge
from molt_gym.judge import Calls
from molt_gym.tokens.trajectory import read_jsonl
from molt_gym.trainers.rollout.env_maker import EnvMaker


def steps_of(result):
    return [line for line in result.metrics if "eval/when" not in line]


def played(result):
    return [trajectory for step in range(1, len(steps_of(result)) + 1)
            for trajectory in read_jsonl(result.run_dir / "rollouts" / f"step-{step:06d}.jsonl")]


@pytest.fixture(scope="module")
def judged(train):
    """`judged("policy")`: a run that such a judge paid for, at one engine that takes one request at a time."""

    @functools.cache
    def run(judge="policy", env="judged_envs:Judged-v0", **options):
        return train(**{
            "env": env, "env_kwargs": {"judge": judge} if judge else {}, "rollout__max_context": 512,
            "rollout__max_concurrency": 1, "eval__before": False, "eval__after": False, "actor__lr": 3e-2, **options})

    return run


def verdicts(result):
    """Of the first two rollouts of each group, at the first step."""
    return {(t.group, t.rollout): (t.messages[-1]["content"], t.info["verdict"]) for t in played(result)
            if t.step == 1 and t.rollout < 2}


def test_the_policy_judges_itself_at_one_engine_that_takes_one_request_at_a_time(judged):
    result = judged()
    for line in steps_of(result):
        assert line["rollout/count"] == 8 and not any(name.startswith("rollout/failed") for name in line)
        assert line["judge/requests"] + line.get("judge/cached", 0) == 16
        assert 0 < line["judge/tokens"] <= 4 * line["judge/requests"] and line["judge/seconds"] > 0
        assert line["staleness/max"] == 0


def test_parts_of_the_reward_are_summed_over_turns_and_logged(judged):
    result = judged()
    for step, line in enumerate(steps_of(result), 1):
        rollouts = [t for t in played(result) if t.step == step]
        for t in rollouts:
            assert t.reward == pytest.approx(0.5 * t.info["reward/style"] + 0.01 * t.info["reward/length"])
        assert line["reward/style"] == pytest.approx(sum(t.info["reward/style"] for t in rollouts) / len(rollouts))
        assert line["reward/length"] == pytest.approx(sum(
            len(m["content"]) for t in rollouts for m in t.messages if m["role"] == "assistant") / len(rollouts))


def test_what_a_judge_said_is_in_no_row_and_no_count_of_the_policy(judged):
    result = judged()
    for t in played(result):
        assert t.turns == 2 and len(t.rows) == 1 and t.rows[0].stats.sampled <= 16
    assert all(line["rollout/length_mean"] <= 16 for line in steps_of(result))


def test_a_frozen_judge_stays_as_the_policy_was(judged):
    current, frozen = judged(), judged("frozen")
    first, second = [[[line[name] for name in ("reward/style", "reward/length")] for line in steps_of(result)]
                     for result in (current, frozen)]
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.slow
def test_envs_in_processes_of_their_own_get_the_same_verdicts(judged):
    there = judged(rollout__env_processes="always", rollout__group_size=2, steps=1)
    assert verdicts(there) == verdicts(judged()) and len(verdicts(there)) == 4


def test_agents_ask_from_loops_of_their_own_while_the_weights_change(judged):
    lines = steps_of(judged(None, "judged_envs:JudgedAgent-v0", rollout__max_staleness=1, rollout__max_concurrency=64))
    for line in lines:
        assert line["judge/requests"] + line.get("judge/cached", 0) == line["rollout/count"] == 8
        assert line["reward/style"] == line["reward/mean"] > 0


def test_a_judge_that_cannot_be_had_ends_the_run_before_it_begins(judged):
    with pytest.raises(ConfigError, match="there is no folder|the hub does not give it"):
        judged("nowhere/at/all")


def test_the_models_that_judge_are_known_before_the_rollouts_begin(toys):
    maker = EnvMaker.of("judged_envs:Judged-v0", {"judge": "frozen"})
    assert maker.num_tasks() == 20 and maker.judges == {"frozen"}
    elsewhere = EnvMaker.of("judged_envs:Judged-v0", {"judge": "policy"}, "always")
    assert elsewhere.num_tasks() == 20 and elsewhere.judges == {"policy"}


def test_a_local_model_judges_outside_of_a_run(toys, tiny_path):
    from judged_envs import LetterJudge

    judge = LetterJudge(tiny_path, "r", repeats=3, calls=Calls(max_tokens=6))
    found = judge.score("x", "y")
    assert len({judgement.reasoning for judgement in found.judgements}) == 3 and 0 <= found.score <= 1
    with pytest.raises(EnvFailure, match="judge 'nowhere/at/all': "):
        Judge("nowhere/at/all", "r").score("x", "y")


def test_a_question_that_is_too_long_for_the_judge_is_its_failure(toys, tiny_path):
    with pytest.raises(EnvFailure, match="leaves no room for a reply"):
        Judge(str(tiny_path), "r").score("x", "y " * 5000)


def test_a_judge_that_cannot_be_computed_says_why(tiny_path, tmp_path):
    folder = shutil.copytree(tiny_path, tmp_path / "judge")
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(EnvFailure, match="mamba .*; choose a model"):
        Judge(str(folder), "r").score("x", "y")
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(EnvFailure, match=f"judge '{folder}': .*unheard-of"):
        Judge(str(folder), "r").score("x", "z")
