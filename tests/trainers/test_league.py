import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molt_gym.trainers import league
from molt_gym.trainers.config import load_config
from molt_gym.trainers.league import League, wants_league


@pytest.fixture
def make(tmp_path_factory, monkeypatch):
    """A league whose checkpoints are exported as empty folders."""
    monkeypatch.setattr(league, "export_checkpoint", lambda checkpoint, out, base: out.mkdir())

    def league_of(size, pick, seed=0):
        folder = tmp_path_factory.mktemp("run")
        return folder, League(load_config("Test-v0", overrides={
            "out": str(folder), "league.size": size, "league.pick": pick, "seed": seed}), folder / "base")

    return league_of


def update(run, folder, step):
    run.update(folder / "checkpoints" / f"step-{step:06d}" if step else None)
    return [int(path.name[5:]) for path in sorted((folder / "league").iterdir())]


def test_the_newest_checkpoints_are_members(make):
    folder, run = make(2, "newest")
    assert update(run, folder, 0) == []
    assert [update(run, folder, step) for step in (10, 10, 20, 30)] == [[10], [10], [10, 20], [20, 30]]


def test_a_sample_has_checkpoints_of_any_age(make):
    found = set()
    for seed in range(12):
        folder, run = make(2, "sampled", seed)
        for step in range(1, 9):
            members = update(run, folder, step)
            assert len(members) == min(2, step)
        found.update(members)
    assert len(found) > 5


@pytest.mark.parametrize("pick", ["newest", "sampled"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.integers(1, 99), min_size=1, max_size=8, unique=True).map(sorted), size=st.integers(1, 4))
def test_members_are_as_many_as_allowed_stay_over_an_interruption_and_none_is_newer_than_the_checkpoint(
    make, pick, steps, size
):
    folder, run = make(size, pick)
    for number, step in enumerate(steps, start=1):
        before = update(run, folder, step)
        assert len(before) == min(size, number) and set(before) <= set(steps[:number])
        assert update(run, folder, step) == before
    first = steps[0]
    assert max(update(run, folder, first)) == first and update(run, folder, 0) == []


def test_the_oldest_is_that_of_the_lowest_number_and_what_is_no_checkpoint_stays(make):
    folder, run = make(2, "newest")
    (folder / "league" / "step-mine").mkdir()
    for step in (999_999, 1_000_000, 1_000_001):
        run.update(folder / "checkpoints" / f"step-{step}")
    assert sorted(path.name for path in (folder / "league").iterdir()) == ["step-1000000", "step-1000001", "step-mine"]


def test_what_a_crash_left_of_a_member_is_removed(make):
    folder, _ = make(2, "newest")
    (folder / "league" / ".partial-step-000002-0a").mkdir()
    League(load_config("Test-v0", overrides={"out": str(folder)}), folder / "base")
    assert not list((folder / "league").iterdir())


@pytest.mark.parametrize(("overrides", "wanted"), [
    ({}, False),
    ({"env_kwargs": {"opponent": "random"}}, False),
    ({"env_kwargs": {"opponent": "league"}}, True),
    ({"env_kwargs": {"opponent": ["random", "league"]}}, True),
    ({"eval": {"env_kwargs": {"opponent": "league"}}}, True),
])
def test_a_run_has_a_league_where_an_env_is_told_to_play_against_it(overrides, wanted):
    assert wants_league(load_config("TicTacToe-v0", preset=overrides)) is wanted


def test_an_env_of_a_mixture_may_want_it():
    mixture = {"TicTacToe-v0": {"weight": 1, "env_kwargs": {"opponent": "league"}}, "Math-v0": {"weight": 1}}
    assert wants_league(load_config("TicTacToe-v0+Math-v0", preset={"mixture": mixture}))
