"""The engines of a run judge: vLLM behind Ray, with the adapters that are trained and without."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import molt_gym

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900),
              pytest.mark.skipif(not (find_spec("ray") and find_spec("vllm")), reason="Ray or vLLM is not installed")]


def test_one_engine_answers_rollouts_and_judges_asynchronously_and_a_frozen_one_is_the_base_of_the_adapters(
    cluster, wide_path, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "toys"))
    molt_gym.train(
        "judged_envs:JudgedTwice-v0", wide_path, out=tmp_path / "run", steps=3, placement="ray", engine="vllm",
        rollout={"groups_per_step": 4, "group_size": 4, "max_tokens": 8, "max_context": 512, "dtype": "float32",
                 "max_staleness": 1},
        actor={"lr": 0.1, "dtype": "float32", "lora": {"rank": 4}}, eval={"before": False, "after": False})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["rollout/count"]) for line in lines] == [(1, 16), (2, 16), (3, 16)]
    assert not [name for line in lines for name in line if name.startswith("rollout/failed")]
    assert max(line["staleness/max"] for line in lines) <= 1
    assert all(line["judge/requests"] + line.get("judge/cached", 0) == 32 for line in lines)
    told = [json.loads(line)["info"] for path in sorted(tmp_path.glob("run/rollouts/*.jsonl"))
            for line in path.read_text().splitlines()]
    assert all(info["now"] == info["then"] for info in told[:16])
    assert any(info["now"] != info["then"] for info in told[32:])
