import numpy as np
import pytest

from molt_gym.tokens import Failure, Row, Trajectory
from molt_gym.trainers.scores import TaskScore, interval, pass_at_k, pass_hat_k, summary


def attempts(*rewards, index=0, tokens=2):
    """One task's attempts; None is one that failed."""
    row = Row([1, *[5] * tokens], [0, *[1] * tokens], [0.0, *[-1.0] * tokens], [-1, *[0] * tokens])
    return [Trajectory("Test-v0", index, index, number, rows=[row], reward=reward,
                       failure=Failure("judge", "", "") if reward is None else None)
            for number, reward in enumerate(rewards)]


@pytest.mark.parametrize(("n", "c", "k", "value"), [
    (4, 1, 1, 0.25), (4, 2, 2, 1 / 6), (4, 4, 4, 1.0), (4, 3, 4, 0.0), (5, 0, 2, 0.0), (10, 8, 3, 56 / 120)])
def test_pass_hat_k_is_the_share_of_draws_of_k_that_all_pass(n, c, k, value):
    assert pass_hat_k(n, c, k) == pytest.approx(value)


@pytest.mark.parametrize("of", [pass_at_k, pass_hat_k])
@pytest.mark.parametrize("counts", [(3, 0, 4), (0, 0, 1), (3, 4, 2), (3, 1, 0)])
def test_fewer_attempts_than_k_tell_nothing_and_are_no_score(of, counts):
    with pytest.raises(ValueError, match=f"k: {counts[2]} of {counts[0]} attempts"):
        of(*counts)


@pytest.mark.parametrize("of", ["pass_at", "pass_hat"])
def test_the_estimates_are_unbiased(of):
    generator, n, k = np.random.default_rng(0), 6, 3
    rates = generator.random(4000)
    groups = [attempts(*(generator.random(n) < rate).astype(float), index=i) for i, rate in enumerate(rates)]
    truth = {"pass_at": 1 - (1 - rates) ** k, "pass_hat": rates**k}[of].mean()
    result = summary("Test-v0", [TaskScore.of(group) for group in groups], n, [k])
    assert getattr(result, of)[k] == pytest.approx(truth, abs=0.01)


def test_several_sizes_are_told_of_the_same_attempts():
    tasks = [TaskScore.of(attempts(1, 1, 0, 0)), TaskScore.of(attempts(0, 0, 0, 0, index=1))]
    result = summary("Test-v0", tasks, 4, [2])
    assert result.pass_at == pytest.approx({1: 0.25, 2: 5 / 12, 4: 0.5})
    assert result.pass_hat == pytest.approx({2: 1 / 12, 4: 0.0})
    assert result.mean_at == {4: 0.25}
    assert set(result.intervals) == {"pass_at_1", "pass_at_2", "pass_at_4", "pass_hat_2", "pass_hat_4", "mean_at_4"}


def test_the_mean_is_over_tasks_and_not_over_the_attempts_that_happened_to_end():
    result = summary("Test-v0", [TaskScore.of(attempts(1, 1, 1)), TaskScore.of(attempts(0, None, None))], 3)
    assert (result.mean_at, result.reward_mean) == ({3: 0.5}, 0.75)


def test_wilsons_interval_holds_where_everything_passes_and_where_nothing_does():
    assert interval([1] * 10) == pytest.approx((0.72247, 1.0), abs=1e-4)
    assert interval([0] * 10) == pytest.approx((0.0, 0.27753), abs=1e-4)
    assert interval([1] * 8 + [0] * 2) == pytest.approx((0.49016, 0.94332), abs=1e-4)


def test_other_scores_get_the_percentiles_of_a_bootstrap_over_tasks_which_a_seed_fixes():
    values = np.random.default_rng(1).normal(0.3, 0.2, 400).tolist()
    low, high = interval(values)
    half = 1.96 * np.std(values) / 20
    assert (low, high) == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=0.003)
    assert interval(values) == (low, high)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    generator = np.random.default_rng(2)
    found = [interval(generator.binomial(1, 0.7, 40).tolist()) for _ in range(300)]
    found += [interval((generator.binomial(4, 0.7, 40) / 4).tolist()) for _ in range(100)]
    assert np.mean([low <= 0.7 <= high for low, high in found]) > 0.91


def test_values_that_are_neither_passes_nor_different_tell_no_interval():
    assert interval([0.5]) is None and interval([]) is None and interval([0.5] * 9) is None
    assert "mean_at_2" not in summary("Test-v0", [TaskScore.of(attempts(1, 0))], 2).intervals


def test_a_row_of_the_table_reads_back_and_shows_counts_and_means_first():
    score = TaskScore.of(attempts(1, 0.5, None, index=7, tokens=3))
    row = score.row()
    assert list(row.items())[:6] == [("position", 7), ("index", 7), ("attempts", 3), ("passes", 1),
                                     ("reward_mean", 0.75), ("length_mean", 3)]
    assert TaskScore.from_row(row) == score and score.failures == {"judge": 1}
