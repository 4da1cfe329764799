"""Learning with vLLM as the sampler, from the command line's words to the model that comes out."""

from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import molt_gym

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


def command(process: psutil.Process) -> str:
    """Of a process; nothing of one that has ended and that nobody has looked after yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_tiny_model_learns_to_write_code(tmp_path: Path):
    result = molt_gym.train("CodeExec-v0", "tiny", out=tmp_path / "run", steps=6, engine="vllm", seed=1,
                            rollout__dtype="float32", actor__dtype="float32")
    scores = [line["eval/CodeExec-v0/pass_at_1"] for line in result.metrics if "eval/when" in line]
    assert scores[-1] - scores[0] >= 0.4
    steps = [line for line in result.metrics if "time/step" in line]
    assert len(steps) == 6
    assert all(line["mismatch/abs_diff_mean"] < 1e-5 for line in steps)
    assert not [child for child in psutil.Process().children() if "vllm" in command(child)]
