import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest
from transformers import AutoConfig

from molt_gym.errors import ConfigError
from molt_gym.trainers.rollout.vllm_spec import HostSpec, check_engine_args, engine_arguments, environment

installed = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def spec(path, **options) -> HostSpec:
    return HostSpec(str(path), "float32", 256, 8, (2,), "gloo", **{"cpu": True, **options})


@installed
def test_arguments_that_vllm_does_not_know_are_refused_with_the_nearest():
    check_engine_args({"gpu_memory_utilization": 0.5, "enforce_eager": True})
    with pytest.raises(ConfigError, match=r"rollout.engine_args.gpu_memory_utilisation: .*gpu_memory_utilization"):
        check_engine_args({"gpu_memory_utilisation": 0.5})


def test_without_vllm_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout.engine: 'vllm'.*pip install 'molt-gym\[vllm\]'"):
        check_engine_args({})


def test_where_vllms_source_is_not_found_vllm_itself_must_refuse(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=str(tmp_path / "x.py")))
    check_engine_args({"anything": 1})


def test_what_decides_over_tokens_cannot_be_overridden(tiny_path):
    given = {"generation_config": "auto", "logprobs_mode": "raw_logprobs", "dtype": "float16", "block_size": 64}
    arguments = engine_arguments(spec(tiny_path, engine_args=given))
    assert (arguments["generation_config"], arguments["logprobs_mode"]) == ("vllm", "processed_logprobs")
    assert (arguments["dtype"], arguments["block_size"], arguments["max_model_len"]) == ("float32", 64, 256)


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
