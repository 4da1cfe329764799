"""What importing the trainer sets for the libraries under it."""

import subprocess
import sys

import pytest

GROWTH = """
import molt_gym.trainers, torch
from resource import RUSAGE_SELF, getrusage
weight = torch.ones(96, 64).bfloat16()
for rows in range(1, 640):
    torch.ones(rows, 64).bfloat16() @ weight.T
    if rows == 40:
        before = getrusage(RUSAGE_SELF).ru_maxrss
print(getrusage(RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_memory_does_not_grow_with_every_shape_of_micro_batch_that_was_ever_met():
    kilobytes = subprocess.run([sys.executable, "-c", GROWTH], check=True, capture_output=True, text=True, timeout=120)
    # 394 MB with what oneDNN and ideep keep by default, on processors with AVX-512.
    assert int(kilobytes.stdout) < 200_000
