"""`molt-gym plan`."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_gym.cli import main
from molt_gym.errors import ConfigError
from molt_gym.trainers.actor.sizes import Shape, Sizes
from molt_gym.trainers.config import load_config
from molt_gym.trainers.plan import plan
from molt_gym.trainers.plan_parts import Fleet, in_flight
from molt_gym.trainers.plan_rates import Engine, EngineRates, EpisodeRates, TrainRates, active, operations, update

DENSE = {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
         "max_position_embeddings": 40960, "tie_word_embeddings": True}
RUN = """\
env = "Math-v0"
model = "mine/Dense"
placement = "ray"
rollout = {engine = "vllm", engines = 2, max_tokens = 1024, max_context = 2048, max_concurrency = 64}
actor = {world_size = 2, activation_checkpointing = "full"}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "Dense.json").write_text(json.dumps(DENSE))
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def figure(said: str, pattern: str) -> float:
    return float(re.search(pattern, said)[1].replace(",", ""))


def test_the_command_says_what_goes_where_and_how_long_a_step_takes(run, capsys):
    assert main(["plan", str(run), "--gpus", "h200:4"]) == 0
    said = capsys.readouterr().out
    assert "2 ranks, 2 engines × 1 GPUs, 1 runners, disaggregate; 4 of 4 GPUs" in said
    assert "the cache holds" in said
    assert "staleness 0, on-policy" in said
    assert "an engine at" in said


@pytest.mark.parametrize("lines", [
    ["--nodes=3", "--gpus-per-node=h200:8"], ["-N 3", "--gpus-per-node h200:8"], ["-N3", "--gres=nvme:1,gpu:h200:8"]])
def test_lines_for_slurm_are_read_as_slurm_reads_them(run, lines):
    run.write_text("".join(f"#SBATCH {line}\n" for line in lines) + RUN)
    assert "devices   3 × 8 h200 of 139.8 GiB: " in plan(run)


def test_a_range_of_nodes_is_refused(run):
    run.write_text("#SBATCH --nodes=2-4\n#SBATCH --gpus-per-node=h200:8\n" + RUN)
    with pytest.raises(ConfigError, match="#SBATCH --nodes: got '2-4'; write one number"):
        plan(run)


def test_settings_of_the_command_line_win(run, capsys):
    assert main(["plan", str(run), "--gpus", "h200:4", "--rollout.max-staleness", "2"]) == 0
    assert "staleness at most 2, some 2.0 on average" in capsys.readouterr().out


def test_engines_beside_the_ranks_leave_them_less(run):
    apart, shared = plan(run, gpus="h200:4"), plan(run, gpus="h200:2")
    assert "colocate; 2 of 2 GPUs" in shared
    assert figure(apart, r"= [\d.]+ of ([\d.]+)\n") == 139.8
    assert figure(shared, r"= [\d.]+ of ([\d.]+)\n") == pytest.approx(139.8 * 0.55, abs=0.1)


@pytest.mark.parametrize(("words", "said"), [
    (["--gpus", "h200:1"], "colocate: 2 places (actor.world_size 2, rollout.engines 2, rollout.runners 1) = 2 GPU; the "
                           "cluster has 1"),
    (["--gpus", "h200:4", "--memory", "20"], "actor: does not fit into the 20.0 GiB of a device"),
    (["--gpus", "h200:4", "--rollout.engine-args", "{gpu_memory_utilization = 0.06}"],
     "rollout.engine_args: an engine does not fit"),
    (["--gpus", "h200:4", "--rollout.max-context", "99999"], "is more than the model's 40960 positions"),
    (["--gpus", "h200:4", "--actor.world-size", "3"], "actor.world_size: 3 does not divide the 32 rollouts"),
    (["--gpus", "h200:6", "--actor.world-size", "4", "--actor.ep", "4", "--actor.backend", "automodel"],
     "actor.ep: 4 for a model without experts"),
    (["--gpus", "h200:4", "--model", "mine/Other"], "no configuration of 'mine/Other' is at hand"),
    (["--gpus", "t4:4"], "write one of h100, h200, b200, b300, or --memory GIB"),
    ([], "#SBATCH --gpus-per-node=h200:8"),
])
def test_what_cannot_be_is_refused(run, words, said, capsys):
    assert main(["plan", str(run), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys):
    assert main(["plan", "none.toml"]) == 2
    assert "config file none.toml: is not there" in capsys.readouterr().err


def test_rates_of_a_file_take_the_place_of_the_usual_ones(run, tmp_path):
    rates = tmp_path / "rates.toml"
    rates.write_text("weights = {fixed = 100.0}\nepisode = {env = 50.0}\n")
    usual, slow = plan(run, gpus="h200:4"), plan(run, gpus="h200:4", rates=rates)
    step = r"step +([\d.]+) s"
    assert figure(slow, step) == pytest.approx(figure(usual, step) + 99.71 + 49, abs=0.2)
    rates.write_text("weights = {fixd = 1}\n")
    with pytest.raises(ConfigError, match=r"weights.fixd .*: unknown option; nearest: weights.fixed"):
        plan(run, gpus="h200:4", rates=rates)


def test_gpus_of_another_kind_are_as_fast_as_their_data_sheets_say_beside_an_h200s(run, tmp_path):
    known, other, alike = plan(run, gpus="h200:4"), plan(run, gpus="b200:4"), plan(run, gpus="l40s:4", memory=139.8)
    peak, seconds = r"of ([\d,]+) TFLOP/s", r"training ([\d.]+)"
    assert (figure(known, peak), figure(other, peak), figure(alike, peak)) == (795, 1804, 795)
    assert figure(other, seconds) == pytest.approx(figure(known, seconds) / 2.27, rel=0.05)
    (rates := tmp_path / "rates.toml").write_text("train = {peak = 1e15}\n")
    assert figure(plan(run, gpus="b200:4", rates=rates), peak) == 1000


@pytest.mark.parametrize("share", [".22", 0, 1.5, True])
def test_a_share_of_memory_that_is_none_is_refused_by_name(run, share):
    with pytest.raises(ConfigError, match=r"rollout.engine_args.gpu_memory_utilization: got .*; write a number"):
        plan(run, {"rollout.engine_args.gpu_memory_utilization": share}, gpus="h200:4")


def test_of_a_run_without_vllm_only_the_actor_is_planned(run):
    run.write_text('env = "Math-v0"\nmodel = "mine/Dense"\n[actor]\nactivation_checkpointing = "full"\n')
    said = plan(run, gpus="h200:1").splitlines()
    assert said[1].endswith("1 ranks, 1 engines × 1 GPUs, 1 runners, on one node")
    assert said[-1].startswith("engine    transformers")


def test_a_larger_teacher_counts_on_every_rank(run):
    (run.parent / "models" / "Larger.json").write_text(json.dumps(DENSE | {"num_hidden_layers": 360}))
    run.write_text(RUN + 'algorithm = {teacher = "mine/Larger"}\n')
    with pytest.raises(ConfigError, match="actor: does not fit"):
        plan(run, gpus="h200:4", memory=70)
    assert "for a larger teacher" in plan(run, gpus="h200:4")


def test_the_active_parameters_of_a_mixture_are_those_of_the_experts_that_a_token_goes_to():
    sparse = Shape.of(DENSE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768})
    idle = 36 * 3 * 2560 * 768 * 120
    assert active(sparse) == pytest.approx(sparse.parameters() - sparse.embeddings - 2560 - idle)


def test_an_update_of_4b_takes_as_long_as_it_was_measured_to():
    """benchmarks/results/h200-actor-throughput.md: 4B, full checkpointing, single rows, 9,529 tokens/s at MFU .32."""
    shape, rows = Shape.of(DENSE), 64
    work = (operations(shape, 0, 2560, rows, 0), rows * 2560)
    seconds = update(shape, Sizes(), 16384, work, TrainRates(mfu=0.32), True)
    assert rows * 2560 / seconds == pytest.approx(9529, rel=0.1)


@settings(max_examples=50, deadline=None)
@given(sequences=st.floats(1, 512), more=st.floats(1, 512), context=st.floats(100, 30_000))
def test_more_sequences_make_an_engine_faster_and_each_of_them_slower(sequences, more, context):
    engine = Engine(Shape.of(DENSE), 1, 8e9, 147456, EngineRates())
    assert engine.rate(sequences + more, context) > engine.rate(sequences, context)
    assert engine.step(sequences + more, context) > engine.step(sequences, context)


def test_no_more_is_decoded_at_once_than_the_cache_holds():
    config = load_config("Math-v0", overrides={
        "engine": "vllm", "rollout.max_concurrency": 512, "rollout.groups_per_step": 64, "rollout.max_tokens": 1024})
    fleet = Fleet.of(config, Shape.of(DENSE), (2 * 8 * 128, 8), 20e9, EngineRates())
    dispatched, sequences = in_flight(config, fleet, EpisodeRates())
    assert dispatched == 512
    few = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_envs": 3})})
    assert in_flight(few, fleet, EpisodeRates()) == (512, 3)
    room = 20e9 - 2 * Shape.of(DENSE).parameters() - 3 * 2**30
    assert sequences * (512 + 256) * 147456 == pytest.approx(room, rel=1e-6)
