import ast
import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from molt_gym.errors import ConfigError
from molt_gym.trainers.config import load_config
from molt_gym.trainers.rollout import vllm_spec
from molt_gym.trainers.rollout.vllm_engine import VllmEngine
from molt_gym.trainers.rollout.vllm_spec import (
    HostSpec,
    check_engine_args,
    engine_arguments,
    engine_workers,
    environment,
)

installed = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def spec(path, **options) -> HostSpec:
    return HostSpec(str(path), "float32", 256, 8, (2,), **{"backend": "gloo", "cpu": True, **options})


@installed
def test_arguments_that_vllm_does_not_know_are_refused_with_the_nearest():
    check_engine_args({"gpu_memory_utilization": 0.5, "enforce_eager": True})
    with pytest.raises(ConfigError, match=r"rollout.engine_args.gpu_memory_utilisation: .*gpu_memory_utilization"):
        check_engine_args({"gpu_memory_utilisation": 0.5})


def test_without_vllm_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout.engine: 'vllm'.*pip install 'molt-gym\[vllm\]'"):
        check_engine_args({})


def test_the_processes_of_an_engine_are_counted_and_a_size_that_is_none_is_refused():
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "prefill_context_parallel_size": 2}
    assert engine_workers({}) == 1 and engine_workers(sizes | {"enforce_eager": True}) == 12
    for wrong in ("two", None, 0, 2.0, True):
        with pytest.raises(ConfigError, match="rollout.engine_args.pipeline_parallel_size: got .*; write an integer"):
            engine_workers({"pipeline_parallel_size": wrong})


def test_where_vllms_source_is_not_found_vllm_itself_must_refuse(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=str(tmp_path / "x.py")))
    check_engine_args({"anything": 1})


def test_what_decides_over_tokens_cannot_be_overridden(tiny_path):
    given = {"generation_config": "auto", "logprobs_mode": "raw_logprobs", "dtype": "float16", "block_size": 64}
    arguments = engine_arguments(spec(tiny_path, engine_args=given))
    assert (arguments["generation_config"], arguments["logprobs_mode"]) == ("vllm", "processed_logprobs")
    assert (arguments["dtype"], arguments["block_size"], arguments["max_model_len"]) == ("float32", 64, 256)


@pytest.mark.parametrize("args", [{"speculative_config": {"method": "mtp"}}, {"spec_method": "mtp", "spec_tokens": 1}])
def test_the_prefix_cache_which_vllm_has_by_default_is_off_with_speculative_heads(tiny_path, args):
    assert engine_arguments(spec(tiny_path, engine_args=args))["enable_prefix_caching"] is False
    assert "enable_prefix_caching" not in engine_arguments(spec(tiny_path))
    options = {"rollout": {"engine": "vllm", "engine_args": args | {"enable_prefix_caching": True}}}
    with pytest.raises(ConfigError, match="enable_prefix_caching: true with speculative decoding"):
        load_config("CodeExec-v0", overrides=options)


@installed
def test_each_sampling_parameter_of_vllm_is_set_or_known_to_be_off_by_default():
    off = {"watermarking", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs",
           "stream_interval", "skip_clone", "output_text_buffer_length", "structured_outputs", "extra_args",
           "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection", "routed_experts_prompt_start",
           "trace_decode_token_ids"}
    theirs = Path(importlib.util.find_spec("vllm").origin).with_name("sampling_params.py").read_text()
    fields = {line.target.id for node in ast.walk(ast.parse(theirs))
              if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
              for line in node.body if isinstance(line, ast.AnnAssign) and not line.target.id.startswith("_")}
    ours = Path(vllm_spec.__file__).with_name("vllm_host.py").read_text()
    given = max(({keyword.arg for keyword in node.keywords} for node in ast.walk(ast.parse(ours))
                 if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "SamplingParams"), key=len)
    assert given <= fields <= given | off


def test_a_gpu_is_shared_at_the_same_time_or_in_turns(tiny_path):
    together = engine_arguments(spec(tiny_path, cpu=False, backend="ipc"))
    turns = engine_arguments(spec(tiny_path, cpu=False, backend="ipc", release_memory=True))
    assert "enable_sleep_mode" not in together and turns["enable_sleep_mode"]
    assert together["gpu_memory_utilization"] < 0.5 < turns["gpu_memory_utilization"]


def test_vllm_itself_tells_routed_experts_on_gpus_alone(tiny_path):
    assert engine_arguments(spec(tiny_path, cpu=False, routed_experts=True))["enable_return_routed_experts"]
    assert "enable_return_routed_experts" not in engine_arguments(spec(tiny_path, routed_experts=True))


def test_what_a_model_or_a_machine_cannot_do_is_refused_before_an_engine_starts(tiny_path, renderer):
    sizes = {"dtype": torch.float32, "max_context": 64, "max_sequences": 2, "cuda": False}
    with pytest.raises(ConfigError, match=r"rollout.routed_experts: true for a model without experts \(qwen3\)"):
        VllmEngine(tiny_path, renderer, routed_experts=True, **sizes)
    with pytest.raises(ConfigError, match=r"rollout.release_memory: true without a GPU"):
        VllmEngine(tiny_path, renderer, release_memory=True, **sizes)
    with pytest.raises(ConfigError, match=r"rollout.weight_transfer: 'ipc' without a GPU; write 'auto'"):
        VllmEngine(tiny_path, renderer, backend="ipc", **sizes)


def test_a_cache_on_a_cpu_holds_all_sequences_and_on_a_gpu_is_left_to_vllm(tiny_path):
    config = AutoConfig.from_pretrained(tiny_path)
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert engine_arguments(spec(tiny_path))["kv_cache_memory_bytes"] >= token * 8 * 256
    assert "kv_cache_memory_bytes" not in engine_arguments(spec(tiny_path, cpu=False))


def test_the_processes_environment_is_for_it_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    child = environment(True, tmp_path)
    assert child["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert child["HF_HUB_OFFLINE"] == child["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in environment(False, tmp_path)


def test_the_trainers_do_not_import_vllm():
    code = "import sys, molt_gym.trainers.api, molt_gym.trainers.session; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
