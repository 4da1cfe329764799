import math

import pytest
import torch

from molt_gym.errors import RunFailed
from molt_gym.trainers.parity import ParityProbe


class Side:
    """Engine and actor in one, which knows the scores."""

    version = 4

    def __init__(self, *scores: list[float]) -> None:
        self.known = scores

    async def scores(self, ids: list[int], images: tuple = ()) -> list[list[float]]:
        return list(self.known)

    def logprobs(self, ids: list[int], images: tuple = ()) -> list[float]:
        return self.known[0]


@pytest.fixture
def probe(renderer) -> ParityProbe:
    return ParityProbe.of(renderer, 256, torch.float32, torch.float32, gpu=False)


async def test_sides_that_agree_pass_and_the_difference_is_told(probe):
    assert await probe.check(Side([-1.0, -2.0]), Side([-1.0, -2.0005])) == pytest.approx(2.5e-4)


async def test_sides_that_differ_end_the_run_with_both_values(probe):
    with pytest.raises(RunFailed, match=r"version 4 .*-1\.5000 and -2\.0000 a token.*0\.5 apart.*tolerance 0\.001"):
        await probe.check(Side([-1.0, -2.0]), Side([-2.0, -2.0]))


async def test_of_several_engines_each_is_compared(probe):
    ours, off = [-1.0, -2.0], [-1.0, -2.0005]
    assert await probe.check(Side(ours, off, ours), Side(ours)) == pytest.approx(2.5e-4)
    with pytest.raises(RunFailed, match="version 4 engine 2 of 3 computes other log-probabilities"):
        await probe.check(Side(ours, [-2.0, -2.0], ours), Side(ours))


async def test_not_a_number_is_no_parity(probe):
    with pytest.raises(RunFailed):
        await probe.check(Side([math.nan]), Side([math.nan]))


def test_the_tolerance_is_that_of_the_coarser_dtype(renderer):
    mixed = ParityProbe.of(renderer, 256, torch.bfloat16, torch.float32, gpu=False)
    assert mixed.tolerance > ParityProbe.of(renderer, 256, torch.float32, gpu=False).tolerance


def test_the_prompt_fits_the_context(renderer):
    assert len(ParityProbe.of(renderer, 10, torch.float32, gpu=False).ids) == 9
