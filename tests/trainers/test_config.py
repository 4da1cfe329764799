import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molt_gym.errors import ConfigError
from molt_gym.trainers.config import Config, field_help, load_config, parse_cli


def refusal(**sources):
    with pytest.raises(ConfigError) as caught:
        load_config("X-v0", **sources)
    assert "validation error" not in str(caught.value) and "pydantic" not in str(caught.value)
    return str(caught.value)


def test_an_id_is_enough():
    config = load_config("CodeExec-v0")
    assert (config.env, config.model, config.steps, config.rollouts_per_step) == ("CodeExec-v0", None, 40, 32)


def test_importing_it_loads_no_torch():
    code = ("import sys, molt_gym.trainers.config\n"
            "print([name for name in ('torch', 'transformers', 'vllm', 'ray') if name in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_overrides_win_over_the_file_over_the_preset_over_the_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('env = "Other-v0"\nsteps = 7\n[actor]\nlr = 1e-5\neps = 1e-6\n')
    config = load_config("X-v0", file=file, preset={"actor": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}, "seed": 5},
                         overrides={"actor.lr": 1e-4})
    assert (config.env, config.steps, config.seed) == ("X-v0", 7, 5)
    assert (config.actor.lr, config.actor.eps, config.actor.weight_decay) == (1e-4, 1e-6, 0.1)


def test_the_file_can_name_the_env(tmp_path):
    (tmp_path / "run.toml").write_text('env = "Other-v0"')
    assert load_config(file=tmp_path / "run.toml").env == "Other-v0"
    with pytest.raises(ConfigError, match="^env: missing; write text"):
        load_config()


@pytest.mark.parametrize("overrides", [
    {"rollout": {"group_size": 3}}, {"rollout.group_size": 3}, {"rollout__group_size": 3}, {"rollout.group_size": "3"},
])
def test_an_option_can_be_spelt_in_three_ways(overrides):
    assert load_config("X-v0", overrides=overrides).rollout.group_size == 3


def test_env_arguments_are_merged_key_by_key():
    config = load_config("X-v0", preset={"env_kwargs": {"level": 1, "seeds": [1]}},
                         overrides={"env_kwargs.level": 2, "env_kwargs": {"range": (1, 9)},
                                    "env_kwargs__deep__er": True})
    assert config.env_kwargs == {"level": 2, "seeds": [1], "range": [1, 9], "deep": {"er": True}}


@pytest.mark.parametrize(("key", "nearest"), [
    ("rollout.group_sise", "rollout.group_size"), ("group_size", "rollout.group_size"), ("stepz", "steps"),
    ("learning.lr", "actor.lr"), ("algorithm.importance.lo", "algorithm.importance.low"),
    ("rollout__maxtokens", "rollout.max_tokens"),
])
def test_an_unknown_option_is_answered_with_the_nearest(key, nearest):
    message = refusal(overrides={key: 1})
    assert message.startswith(f"{key.replace('__', '.')} (from the overrides): unknown option; nearest: ")
    assert nearest in message.split("nearest: ")[1].split(", ")


def test_unknown_options_of_a_file_and_a_preset_are_named_with_their_source(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[rollout.x]\ny = 1\n[actor]\nlearning_rate = 1\n")
    message = refusal(file=file, preset={"sede": 1})
    assert "sede (from the model's preset): unknown option; nearest: seed" in message
    assert f"actor.learning_rate (from the file {file}): unknown option" in message
    assert f"rollout.x (from the file {file}): unknown option" in message


@pytest.mark.parametrize(("key", "value", "message"), [
    ("rollout.group_size", "eight", "got 'eight' (str); write an integer >= 1"),
    ("rollout.group_size", 2.5, "got 2.5 (float); write an integer >= 1"),
    ("steps", 0, "got 0 (int); write an integer >= 1"),
    ("steps", True, "got True (bool); write an integer >= 1"),
    ("steps", None, "got None (NoneType); write an integer >= 1"),
    ("rollout.temperature", 0, "got 0 (int); write a number > 0"),
    ("rollout.top_p", 1.5, "got 1.5 (float); write a number > 0 and <= 1"),
    ("actor.lr", float("nan"), "got nan (float); write a number > 0"),
    ("actor.betas", [0.9, 1.0], "got [0.9, 1.0] (list); write a list of 2, each a number >= 0 and < 1"),
    ("placement", "moon", "got 'moon' (str); write 'local' or 'ray'"),
    ("algorithm.kl.use", "both", "got 'both' (str); write 'loss' or 'reward'"),
    ("algorithm.loss", 5, "got 5 (int); write text"),
    ("algorithm.dual_clip", 1, "got 1 (int); write a number > 1, or leave it out"),
    ("eval.before", "perhaps", "got 'perhaps' (str); write true or false"),
    ("model", 5, "got 5 (int); write text, or leave it out"),
    ("env_kwargs", 5, "got 5 (int); write a table"),
    ("rollout", 5, "got 5 (int); write a table of its options"),
    ("rollout.dynamic_filter", [0], "got [0] (list); write a list of 2, each a number, or leave it out"),
])
def test_a_value_of_the_wrong_kind_is_named_with_what_to_write(key, value, message):
    assert refusal(overrides={key: value}) == f"{key} (from the overrides): {message}"


def test_all_that_is_wrong_is_said_at_once():
    message = refusal(overrides={"steps": 0, "seed": -1, "actor.betas": ["a", "b"]})
    assert [line.split(" ")[0] for line in message.splitlines()] == ["steps", "seed", "actor.betas"]


def test_env_arguments_that_a_file_cannot_hold_are_refused():
    message = refusal(overrides={"env_kwargs": {"items": [1, {"tool": object}]}})
    assert message.startswith("env_kwargs.items[1].tool: got <class 'object'> (type); write text, a number")
    assert "env_kwargs.split: got None" in refusal(overrides={"env_kwargs.split": None})


CONTRADICTIONS = [
    ({"rollout.group_size": 1}, "rollout.group_size: 1", "write rollout.group_size >= 2"),
    ({"rollout.group_size": 1, "algorithm.estimator": "rloo"}, "rollout.group_size: 1", "rollout.group_size >= 2"),
    ({"rollout.top_p": 0.9}, "rollout.top_p: 0.9", "write rollout.top_p = 1"),
    ({"rollout.top_k": 20}, "rollout.top_k: 20", "write rollout.top_k = 0"),
    ({"rollout.top_k": 20, "algorithm.loss": "reinforce", "rollout.max_staleness": 1}, "rollout.top_k: 20",
     "write rollout.top_k = 0"),
    ({"rollout.max_staleness": 1, "algorithm.importance.level": "off"}, "algorithm.importance.level: 'off'",
     "rollout.max_staleness = 0"),
    ({"rollout.routed_experts": True}, "rollout.routed_experts: true", "write rollout.engine = 'vllm'"),
    ({"rollout.release_memory": True}, "rollout.release_memory: true", "or rollout.release_memory = false"),
    ({"algorithm.updates_per_batch": 3}, "algorithm.updates_per_batch: 3", "or rollout.groups_per_step = 6"),
    ({"algorithm.updates_per_batch": 2, "algorithm.loss": "reinforce"}, "algorithm.updates_per_batch: 2",
     "write algorithm.updates_per_batch = 1"),
    ({"actor.world_size": 5}, "actor.world_size: 5", "write a divisor of 32"),
    ({"actor.world_size": 32, "algorithm.updates_per_batch": 2}, "actor.world_size: 32", "write a divisor of 16"),
    ({"actor.world_size": 6, "actor.tp": 2, "actor.cp": 2}, "actor.world_size: 6", "write 8 or smaller parts"),
    ({"actor.world_size": 10, "actor.tp": 2}, "actor.world_size: 10 / 2 (actor.tp × actor.cp)", "of 32 times 2"),
    ({"actor.ep": 2, "actor.world_size": 2, "actor.backend": "transformers"}, "actor.ep: 2", "backend = 'automodel'"),
    ({"actor.ep": 2, "actor.world_size": 2, "actor.lora.rank": 8}, "actor.lora.rank: 8", "and ep = 1"),
    ({"actor.tp": 2, "actor.world_size": 2, "actor.backend": "automodel"}, "actor.tp: 2", "write tp = 1"),
    ({"rollout.max_tokens": 2048}, "rollout.max_tokens: 2048", "write a smaller max_tokens"),
    ({"algorithm.importance": {"level": "geo", "mode": "clip"}}, "algorithm.importance.mode: 'clip'", "'token'"),
    ({"algorithm.importance": {"low": 3.0}}, "algorithm.importance.low: 3.0", "write low <= high"),
    ({"algorithm.dual_clip": 3, "algorithm.loss": "reinforce"}, "algorithm.dual_clip: 3.0", "leave it out"),
    ({"algorithm.token_sum_divisor": 5}, "algorithm.token_sum_divisor: 5", "leave it out"),
    ({"algorithm.estimator": "grop"}, "algorithm.estimator: there is no 'grop'; did you mean 'grpo'?", "'module:name'"),
    ({"algorithm.loss": "pop"}, "algorithm.loss: there is no 'pop'; did you mean 'ppo'?", "'module:name'"),
    ({"critic.lr": 1e-3}, "critic: is configured", "leave it out or write algorithm.estimator = 'gae'"),
    ({"algorithm.gamma": 0.9}, "algorithm.gamma: 0.9 with algorithm.estimator = 'grpo'", "write algorithm.gamma = 1"),
    ({"algorithm.ceiling": 2}, "algorithm.ceiling: 2.0", "write algorithm.loss = 'cispo'"),
    ({"algorithm.importance": {"gate": "tv"}}, "algorithm.importance.gate: 'tv'", "write level = 'token' or 'seq'"),
    ({"algorithm.kl": {"coefficient": 0.1, "use": "reward"}}, "algorithm.kl.use: 'reward'", "kl.use = 'loss'"),
    ({"algorithm.kl.model": "tiny"}, "algorithm.kl.model: would be loaded for nothing", "or write kl.coefficient > 0"),
    ({"algorithm.kl.target": 0.1}, "algorithm.kl.target: 0.1", "write kl.coefficient > 0"),
    ({"algorithm.teacher": "tiny"}, "algorithm.teacher: is configured", "algorithm.estimator = 'on_policy_distill'"),
    ({"algorithm": {"estimator": "on_policy_distill", "kl": {"coefficient": 1, "use": "reward"}}},
     "algorithm.teacher: missing", "name a model"),
    ({"algorithm": {"estimator": "on_policy_distill", "teacher": "tiny",
                    "kl": {"coefficient": 1, "use": "reward", "kind": "k3"}}}, "algorithm.kl.kind: 'k3'", "'k1'"),
    ({"engine": "vllm", "rollout.routed_experts": True, "rollout.max_staleness": 1}, "rollout.routed_experts: true",
     "write rollout.max_staleness = 0"),
    ({"algorithm.overlong_buffer": 600}, "algorithm.overlong_buffer: 600", "write at most that"),
    ({"rollout.dynamic_filter": [0.5, 0.5]}, "rollout.dynamic_filter: [0.5, 0.5]", "low < high"),
    ({"eval.k": 4}, "eval.k: 4", "eval.temperature > 0"),
    ({"actor.decay_share": 0.5}, "actor.decay_share: 0.5 does nothing with actor.schedule = 'constant'", "'wsd'"),
    ({"actor.min_lr_ratio": 0.5}, "actor.min_lr_ratio: 0.5 does nothing with actor.schedule = 'constant'", "leave it"),
    ({"actor.momentum": 0.5}, "actor.momentum: 0.5 does nothing with actor.optimizer = 'adamw'", "'muon'"),
    ({"algorithm.overlong_penalty": 2}, "algorithm.overlong_penalty: 2.0 does nothing", "write a larger overlong_b"),
    ({"algorithm.kl.kind": "k2"}, "algorithm.kl.kind: 'k2' does nothing with algorithm.kl.coefficient = 0", "> 0"),
    ({"algorithm.kl.ref": "rollout"}, "algorithm.kl.ref: 'rollout' does nothing", "write kl.coefficient > 0"),
    ({"algorithm.importance": {"level": "token", "mode": "trunc", "low": 0.9}}, "algorithm.importance.low: 0.9 does",
     "write high in its place"),
    ({"rollout.weight_transfer": "gloo"}, "rollout.weight_transfer: 'gloo' does nothing", "engine = 'vllm'"),
]


@pytest.mark.parametrize(("overrides", "start", "remedy"), CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused_with_what_to_change(overrides, start, remedy):
    message = refusal(overrides=overrides)
    assert message.startswith(start) and remedy in message and "\n" not in message


@pytest.mark.parametrize("overrides", [
    {"rollout.top_p": 0.9, "rollout.top_k": 5, "algorithm.loss": "reinforce"},
    {"algorithm.updates_per_batch": 2, "actor.world_size": 2},
    {"actor.world_size": 64, "actor.tp": 4, "actor.cp": 2},
    {"algorithm": {"estimator": "reinforce", "gamma": 0.9, "loss": "cispo", "ceiling": 2}, "rollout.group_size": 1},
    {"algorithm.kl": {"coefficient": 0.1, "kind": "k3", "ref": "rollout"}, "algorithm.estimator": "flash_reinforce"},
    {"algorithm.kl": {"coefficient": 0.1, "model": "tiny", "target": 0.1}, "algorithm.loss": "gspo"},
    {"algorithm": {"estimator": "gae", "lam": 0.9}, "critic.warmup_steps": 5, "rollout.group_size": 1},
    {"algorithm.importance": {"level": "seq", "gate": "binary_kl", "high": 0.1}},
    {"algorithm.importance": {"level": "token", "mode": "trunc"}},
    {"eval.k": 4, "eval.temperature": 1.0},
    {"algorithm.aggregation": "rollout_mean_token_sum", "algorithm.token_sum_divisor": 512},
])
def test_their_consistent_counterparts_are_accepted(overrides):
    load_config("X-v0", overrides=overrides)


def test_what_a_preset_says_of_what_the_user_does_not_want_goes_with_it():
    preset = {"actor": {"schedule": "linear", "min_lr_ratio": 0.1}}
    ratios = [load_config("X-v0", preset=preset, overrides=overrides).actor.min_lr_ratio
              for overrides in ({}, {"actor.schedule": "cosine"}, {"actor.schedule": "constant"})]
    assert ratios == [0.1, 0.1, 0.0]
    preset = {"algorithm": {"kl": {"coefficient": 0.1, "kind": "k2", "ref": "rollout"}}}
    assert load_config("X-v0", preset=preset, overrides={"algorithm.kl.coefficient": 0}).algorithm.kl.kind == "auto"


@pytest.mark.parametrize(("overrides", "level"), [
    ({}, "off"), ({"rollout.max_staleness": 1}, "geo"), ({"algorithm.importance.level": "token"}, "token"),
    ({"rollout.max_staleness": 2, "algorithm.importance.level": "seq"}, "seq"),
])
def test_auto_corrects_only_what_can_be_stale(overrides, level):
    assert load_config("X-v0", overrides=overrides).importance_level == level


def test_the_dynamic_filter_can_be_a_switch():
    filters = [load_config("X-v0", overrides={"rollout.dynamic_filter": value}).rollout.dynamic_filter
               for value in (True, False, None, [0.1, 0.9])]
    assert filters == [(0.0, 1.0), None, None, (0.1, 0.9)]


def test_a_config_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        load_config("X-v0").steps = 3


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    assert refusal(file=tmp_path / "none.toml").endswith("No such file or directory; write the path of a TOML file")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    assert "bad.toml: is not TOML (Invalid value" in refusal(file=tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b'env = "\xe9"')
    assert "latin.toml: is not TOML" in refusal(file=tmp_path / "latin.toml")


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))
tables = st.dictionaries(st.text("abc_.-é \n\"'", min_size=0, max_size=5), values, max_size=3)


trees = st.fixed_dictionaries({
    "env": text.filter(bool), "model": st.none() | text, "steps": st.integers(1, 10**12), "env_kwargs": tables,
    "actor": st.fixed_dictionaries({"lr": st.floats(0, 1e9, exclude_min=True)}),
    "rollout": st.fixed_dictionaries({
        "temperature": st.floats(1e-3, 10), "group_size": st.integers(2, 64), "template_kwargs": tables,
        "max_turns": st.none() | st.integers(1, 9), "max_envs": st.none() | st.integers(1, 9),
        "dynamic_filter": st.none() | st.just([0.25, 0.75])}),
    "algorithm": st.fixed_dictionaries({
        "loss": st.sampled_from(["ppo", "reinforce"]),
        "importance": st.fixed_dictionaries({"level": st.sampled_from(["auto", "token", "seq", "geo"])})}),
    "eval": st.fixed_dictionaries({"after": st.booleans(), "env_kwargs": tables}),
})


@given(tree=trees)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_reads_back_equal(tmp_path, tree):
    config = Config.model_validate(tree)
    config.to_toml(tmp_path / "config.toml")
    assert load_config(file=tmp_path / "config.toml") == config


def test_command_line_words_become_overrides():
    overrides = parse_cli(["--rollout.group-size", "8", "--steps=50", "--eval.after", "--env-kwargs.levels", "[1, 2]",
                           "--env-kwargs.name=a=b", "--model", "7", "--actor.lr", "1e-3", "--eval.before", "false",
                           "--rollout.max-turns", "none", "--out", "true", "--algorithm.loss", "ppo",
                           "--algorithm.truncation-coefficient", "-1", "--rollout.template-kwargs", "{think = true}",
                           "--rollout.dynamic-filter", "true"])
    assert overrides == {
        "rollout.group_size": 8, "steps": 50, "eval.after": True, "env_kwargs.levels": [1, 2], "env_kwargs.name": "a=b",
        "model": "7", "actor.lr": 1e-3, "eval.before": False, "rollout.max_turns": None, "out": "true",
        "algorithm.loss": "ppo", "algorithm.truncation_coefficient": -1, "rollout.template_kwargs": {"think": True},
        "rollout.dynamic_filter": True,
    }
    assert load_config("X-v0", overrides=overrides).rollout.template_kwargs == {"think": True}


def test_ids_and_reasons_on_the_command_line_keep_their_hyphens():
    overrides = parse_cli(["--mixture.My-Env-v0.env-kwargs.top-k", "2", "--failures.budgets.tool-box", "0.5"])
    assert overrides == {"mixture.My-Env-v0.env_kwargs.top_k": 2, "failures.budgets.tool-box": 0.5}
    weights = {"mixture": {"My-Env-v0": {"weight": 0.5}}}
    assert load_config("My-Env-v0", overrides={**weights, **overrides}).mixture == {
        "My-Env-v0": {"weight": 0.5, "env_kwargs": {"top_k": 2}}}


def test_python_spells_true_and_false_in_its_own_way_and_dates_are_text():
    words = ["--env-kwargs.hard", "False", "--env-kwargs.since", "2024-01-01", "--eval.before", "False"]
    assert parse_cli(words) == {"env_kwargs.hard": False, "env_kwargs.since": "2024-01-01", "eval.before": False}


def test_text_on_the_command_line_cannot_smuggle_in_other_options():
    assert parse_cli(["--steps", "3\nvalue2 = 1"]) == {"steps": "3\nvalue2 = 1"}


@pytest.mark.parametrize(("words", "message"), [
    (["--rollout.group-sise", "8"], r"rollout.group_sise \(from the command line\): unknown.*: rollout.group_size"),
    (["--steps.x", "8"], r"steps.x \(from the command line\): unknown option; steps takes an integer >= 1"),
    (["steps", "8"], "'steps' on the command line is no option; write --NAME VALUE"),
    (["--steps"], "--steps on the command line lacks its value"),
    (["--steps", "--seed", "1"], "--steps on the command line lacks its value"),
    (["--"], "'--' on the command line is no option"),
])
def test_a_command_line_that_makes_no_sense_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_cli(words)


@pytest.mark.parametrize("words", [["--engine", "vllm"], ["--rollout.engine", "vllm"], ["--rollout.engine=vllm"]])
def test_the_engine_is_a_word_and_its_arguments_are_a_table(words):
    config = load_config("X-v0", overrides=parse_cli([*words, "--rollout.engine-args.gpu-memory-utilization", "0.5"]))
    assert config.rollout.engine == "vllm"
    assert config.rollout.engine_args == {"gpu_memory_utilization": 0.5}
    assert load_config("X-v0", overrides={"engine": "vllm"}).rollout.engine == "vllm"
    assert load_config("X-v0", overrides={"engine": "vllm", "rollout.engines": 2}).rollout.engines == 2


@pytest.mark.parametrize(("overrides", "message"), [
    ({"engine": "sglang"}, "rollout.engine .*: got 'sglang'.*write 'transformers' or 'vllm'"),
    ({"engine": "vllm", "rollout.engine_args.max_model_len": 9},
     "rollout.engine_args.max_model_len: is set by the run itself; write rollout.max_context instead"),
    ({"engine": "vllm", "rollout.engine_args": {"logprobs_mode": "raw_logits"}},
     "rollout.engine_args.logprobs_mode: is set by the run itself; leave it out"),
    ({"rollout.engine_args.block_size": 64}, "rollout.engine_args: block_size with rollout.engine = 'transformers'"),
    ({"rollout.engines": 2},
     "rollout.engines: 2 with rollout.engine = 'transformers'.*write rollout.engines = 1 or rollout.engine = 'vllm'"),
    ({"engine": "vllm", "rollout.engines": 0}, "rollout.engines .*: got 0.*write an integer >= 1"),
    ({"engine": "vllm", "rollout.temperature": 0.005}, "rollout.temperature: 0.005 with rollout.engine = 'vllm'"),
])
def test_what_an_engine_does_not_take_is_refused(overrides, message):
    assert re.search(message, refusal(overrides=overrides))


def test_the_help_explains_every_option():
    lines = field_help().splitlines()
    assert "  --rollout.group-size: an integer >= 1 (default: 8)" in lines
    assert "  --rollout.max-turns: an integer >= 1, or leave it out" in lines
    assert len(lines) % 2 == 0 and all(line.strip() not in ("", "None") for line in lines)


def test_settings_can_be_a_mapping_in_place_of_a_file():
    assert load_config("X-v0", preset={"steps": 3}, file={"steps": 5}, overrides={"seed": 1}).steps == 5
    assert refusal(file={"rollout": {"grup_size": 4}}).startswith("rollout.grup_size (from config): unknown option")


def test_a_table_takes_the_place_of_what_is_none():
    config = load_config("X-v0", preset={"env_kwargs": {"level": "hard"}}, overrides={"env_kwargs": {"level": {}}})
    assert config.env_kwargs == {"level": {}}


def test_names_may_have_spaces_between_them_and_there_is_one():
    lora = {"actor.lora.rank": 4, "actor.lora.target_modules": "q_proj, v_proj"}
    assert load_config("X-v0", overrides=lora).actor.lora.target_modules == ("q_proj", "v_proj")
    assert "target_modules (from the overrides): got ''" in refusal(overrides=lora | {"actor.lora.target_modules": ""})


def test_paths_are_taken_as_text(tmp_path):
    assert load_config("X-v0", overrides={"env_kwargs": {"dataset": Path("a") / "b"}}).env_kwargs["dataset"] == "a/b"
    assert load_config("X-v0", overrides={"out": Path("runs") / "a"}).out == str(Path("runs") / "a")
    assert load_config("X-v0", overrides={"out": "~/a"}).out == str(Path("~/a").expanduser())
