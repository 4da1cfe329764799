"""How many rollouts may fail for which reason."""

import pytest

from molt_gym.errors import ConfigError, RunFailed
from molt_gym.tokens import Failure, Trajectory
from molt_gym.trainers.config import load_config, parse_cli
from molt_gym.trainers.failures import check_failures


def check(budgets: dict[str, float], *reasons: str, of: int = 10, rate: float = 0.5) -> None:
    """`reasons` are those of the rollouts that failed."""
    config = load_config("Any-v0", overrides={"failures": {"budgets": budgets}, "rollout.max_failure_rate": rate})
    failures = [Failure(reason, f"{reason} said", "") for reason in reasons]
    played = [Trajectory("Any-v0", i, failure=failure) for i, failure in enumerate(failures)]
    played += [Trajectory("Any-v0", i, reward=1.0) for i in range(len(reasons), of)]
    check_failures(played, config, 7)


def test_a_reason_with_a_budget_counts_against_that_alone() -> None:
    check({"judge": 0.6, "step_timeout": 0.1}, *["judge"] * 6, "step_timeout", rate=0.0)
    with pytest.raises(RunFailed, match=r"2 of 10 rollouts of step 7 failed \(step_timeout 2\), a share of 0.2, more "
                       r"than failures.budgets.step_timeout = 0.1 allows; the first: step_timeout said"):
        check({"judge": 0.6, "step_timeout": 0.1}, *["judge"] * 6, *["step_timeout"] * 2)


def test_the_other_reasons_count_together() -> None:
    check({"judge": 0.3}, *["judge"] * 3, *["a"] * 3, *["b"] * 2)
    with pytest.raises(RunFailed, match=r"6 of 10 .*\(b 4, a 2\), a share of 0.6, more than rollout.max_failure_rate = "
                       "0.5 allows; the first: a said"):
        check({"judge": 0.3}, *["judge"] * 3, *["a"] * 2, *["b"] * 4)


def test_a_budget_of_0_allows_none() -> None:
    with pytest.raises(RunFailed, match="budgets.judge = 0.0"):
        check({"judge": 0}, "judge")
    check({"judge": 0}, "sandbox")


def test_a_step_in_which_all_failed_stops_the_run_whatever_the_budgets() -> None:
    with pytest.raises(RunFailed, match=r"4 of 4 .*\(judge 3, other 1\), .*nothing is left to train on"):
        check({"judge": 1.0}, "judge", "judge", "judge", "other", of=4, rate=1.0)
    check({}, of=0)


def test_envs_may_name_reasons_of_their_own_in_any_place_that_takes_options() -> None:
    ways = [{"failures__budgets__my_judge": 0.25}, {"failures": {"budgets": {"my_judge": 0.25}}},
            parse_cli(["--failures.budgets.my_judge", "0.25"])]
    for way in ways:
        assert load_config("Any-v0", overrides=way).failures.budgets == {"my_judge": 0.25}
    # A reason is written as the env writes it.
    budgets = load_config("Any-v0", overrides=parse_cli(["--failures.budgets.tool-box", "0.5"])).failures.budgets
    assert budgets == {"tool-box": 0.5}


@pytest.mark.parametrize("wrong", [{3: 0.1}, {"judge": 2}, {"judge": "often"}])
def test_a_budget_is_a_share_for_a_text(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="failures.budgets.*write a table from text to a number >= 0 and <= 1"):
        load_config("Any-v0", overrides={"failures": {"budgets": wrong}})
