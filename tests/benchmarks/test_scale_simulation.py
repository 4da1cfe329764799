"""What is predicted of steps at scale."""

import re
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def scale():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import scale_simulation

        yield scale_simulation
        for name in ("scale_simulation", "step_simulation"):
            sys.modules.pop(name, None)


def test_measured_steps_are_predicted_about_as_well_as_the_document_says(scale):
    off = [scale.simulate(run)[0] / measured - 1 for _, _, run, measured, _ in scale.CHECKS]
    assert off == pytest.approx([-0.09, -0.09, 0.0, 0.06], abs=0.01)


def test_what_was_measured_is_in_the_results_that_are_named(scale):
    for _, file, run, measured, _ in scale.CHECKS:
        said = (RESULTS / f"{file}.md").read_text().replace(",", "")
        assert f"{measured:.2f}" in said
        assert f"{run.train:.2f}" in said
    for speed in ("19901", "22741"):
        assert speed in (RESULTS / "h200-rollout-in-training.md").read_text().replace(",", "")


def test_the_printed_checks_are_those_of_the_document_and_the_results(scale):
    rows = list(scale.checks())
    for place in (RESULTS / "scale-simulation.md", ROOT / "docs" / "scale.md"):
        assert [row for row in rows if row not in place.read_text()] == []
    assert re.findall(r"^\| [\d,]+ \|.*$", (ROOT / "docs" / "scale.md").read_text(), re.MULTILINE) == re.findall(
        r"^\| [\d,]+ \|.*$", (RESULTS / "scale-simulation.md").read_text(), re.MULTILINE)


@settings(max_examples=30, deadline=None)
@given(groups=st.integers(1, 6), size=st.integers(1, 4), stale=st.integers(0, 3), engines=st.integers(1, 3),
       train=st.floats(0, 5), pause=st.floats(0, 1), spread=st.floats(0, 1.5), slots=st.integers(1, 30))
def test_no_group_is_older_than_allowed_and_no_step_shorter_than_its_update(
        scale, groups, size, stale, engines, train, pause, spread, slots):
    run = scale.Run(groups, size, stale, engines, 0.01, 0.001, train, pause, 50, 400, spread, slots)
    from step_simulation import Simulation

    for seconds, age, dropped in islice(Simulation(run, 1).steps(), 6):
        assert 0 <= age <= stale
        assert seconds >= train + pause - 1e-9
        assert dropped == 0 or stale


def test_on_policy_a_step_is_the_sum_of_its_parts_and_otherwise_the_longer_one(scale):
    run = scale.Run(groups=4, size=4, stale=0, engines=2, a=0.0, b=0.01, train=10.0, pause=1.0, mean=100, longest=100)
    assert scale.simulate(run)[0] == pytest.approx(8 + 10 + 1)
    behind, stale, dropped = scale.simulate(replace(run, stale=1))
    assert behind == pytest.approx(11)
    assert (stale, dropped) == (1, 0)


def test_at_1024_gpus_messages_to_engines_are_what_weights_wait_for(scale):
    shape, rates = scale.shape_of(ROOT / "slurm" / "recipes" / "models" / "Qwen3-4B.json"), scale.Rates()
    few, many = (scale.cluster(shape, gpus, rates, 0.001) for gpus in (8, 1024))
    assert many[1]["checkpoint"] == pytest.approx(few[1]["checkpoint"] / 128)
    assert many[1]["store"] == 128 * few[1]["store"]
    assert many[0].pause == pytest.approx(30 * 512 * scale.MESSAGE)
