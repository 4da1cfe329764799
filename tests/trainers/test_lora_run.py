"""Runs that train adapters: their rate, what they leave, and that they learn with vLLM, which gets adapters alone."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import molt_gym
from molt_gym.errors import ConfigError
from molt_gym.trainers.config import Config, load_config
from molt_gym.trainers.session import with_adapters

LORA = {"actor__lora__rank": 4, "actor__lora__target_modules": "q_proj,down_proj"}


def test_a_run_leaves_adapters_and_a_model_with_them_and_its_default_rate_is_raised_once(
    train: Callable[..., Any], tiny_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"env": "toy_envs:Letters-v0", "defaults": False, "rollout__groups_per_step": 2, "eval__before": False,
                "rollout__group_size": 2, "rollout__max_tokens": 8, "rollout__max_context": 256, "eval__after": False}
    train(tmp_path / "run", steps=1, **settings, **LORA)
    assert "actor.lr: 1e-05 for adapters" in capfd.readouterr().out
    result = train(tmp_path / "run", steps=2, **settings, **LORA)
    assert "for adapters" not in capfd.readouterr().out
    assert load_config(file=tmp_path / "run" / "config.toml").actor.lr == pytest.approx(1e-5)
    assert [line["step"] for line in result.metrics if "time/step" in line] == [1, 2]

    folder = tmp_path / "run" / "adapter"
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["base_model_name_or_path"]) == (4, 32.0, str(tiny_path))
    adapters = load_file(folder / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 2
    base, model = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
                   for path in (tiny_path, tmp_path / "run" / "model"))
    changed = 0
    for name, parameter in base.named_parameters():
        a = adapters.get(f"base_model.model.{name.replace('.weight', '.lora_A.weight')}")
        wanted = parameter.detach()
        if a is not None:
            b = adapters[f"base_model.model.{name.replace('.weight', '.lora_B.weight')}"]
            wanted, changed = wanted + 8 * b @ a, changed + int(b.abs().max() > 0)
        torch.testing.assert_close(model.get_parameter(name).detach(), wanted, rtol=0, atol=1e-6)
    assert changed == 4

    base.lm_head.weight.data[0, 0] += 1
    base.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="trained on other weights than those in .*other"):
        molt_gym.export(tmp_path / "run", tmp_path / "out", model=tmp_path / "other")


def test_beside_experts_updates_are_of_merged_weights(tmp_path: Path) -> None:
    Qwen3MoeConfig(num_hidden_layers=1).save_pretrained(tmp_path)

    def updates(transfer: str) -> Config:
        config = load_config("Any-v0", overrides={"engine": "vllm", "actor__lr": 1e-4, "actor__lora__rank": 4,
                                                  "actor__lora__transfer": transfer})
        return with_adapters(config, config.actor, tmp_path, print)

    assert not updates("auto").adapter_updates
    assert updates("auto").actor.lr == 1e-4
    with pytest.raises(ConfigError, match="'adapter' with a mixture of experts .qwen3_moe.*write 'merged' or 'auto'"):
        updates("adapter")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_adapters_of_a_tiny_model_learn_to_write_code(tmp_path: Path) -> None:
    result = molt_gym.train("CodeExec-v0", "tiny", out=tmp_path / "run", steps=5, engine="vllm", seed=1,
                            rollout__dtype="float32", eval__episodes=24, actor__lora__rank=8)
    scores = [line["eval/CodeExec-v0/pass_at_1"] for line in result.metrics if "eval/when" in line]
    assert scores[-1] - scores[0] >= 0.25
    assert all(line["mismatch/abs_diff_mean"] < 1e-5 for line in result.metrics if "time/step" in line)
