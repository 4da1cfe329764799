"""Which rollouts of a step failed after they had ended, and how many may fail, and for what reason.

Invariant: a reason that has a budget counts against that alone, all others count together; a step in which nothing
ended stops the run, whatever the budgets, and so do steps in a row in which nothing was learnt.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from molt_gym.errors import RunFailed
from molt_gym.tokens import Failure, RowRef, Trajectory

from .actor.actor import Actor
from .config import Config

MOST_IDLE = 8
"""Steps in a row, or all of the run's, in which nothing was learnt."""


def fail_lost_rows(groups: Sequence[Sequence[Trajectory]], actor: Actor) -> None:
    """Rollouts whose rows lie elsewhere, and are lost, become failed ones; asks the ranks, and blocks."""
    refs = [(trajectory, row.source) for group in groups for trajectory in group if trajectory.failure is None
            for row in trajectory.rows if isinstance(row, RowRef)]
    if refs:
        for (trajectory, _), lost in zip(refs, actor.lost([source for _, source in refs]), strict=True):
            if lost:
                trajectory.failure = Failure("rows_lost", "the node that held its tokens has died", "")


def check_failures(played: Sequence[Trajectory], config: Config, step: int) -> None:
    """Raise RunFailed if more rollouts of the step failed than `failures.budgets` and `max_failure_rate` allow."""
    failures = [trajectory.failure for trajectory in played if trajectory.failure is not None]
    counts = Counter(failure.reason for failure in failures)
    for limit, share, reasons in _budgets(config, counts, nothing_left=len(failures) == len(played)):
        number = sum(counts[reason] for reason in reasons)
        if number > share * len(played):
            told = ", ".join(f"{reason} {counts[reason]}" for reason in sorted(reasons, key=counts.get, reverse=True))
            first = next(failure for failure in failures if failure.reason in reasons)
            raise RunFailed(f"{number} of {len(played)} rollouts of step {step} failed ({told}), a share of "
                            f"{number / len(played):.2g}{limit}; the first: {first.message:.2000}")


def check_idle(steps: int, why: Mapping[str, int], config: Config) -> None:
    """Raise RunFailed after so many steps in a row in which nothing was learnt; why: reasons and counts of the last."""
    if steps >= min(MOST_IDLE, config.steps):
        told = ", ".join(f"{reason} {count}" for reason, count in sorted(why.items()) if count)
        raise RunFailed(f"nothing was learnt in {steps} steps in a row (last: {told or 'nothing to train'}); see "
                        "rollout.incomplete_group and rollout.max_staleness for what is dropped; for gradients that "
                        "are not finite write a lower actor.lr, or actor.dtype = 'float32'")


def _budgets(config: Config, counts: Counter[str], *, nothing_left: bool) -> Iterator[tuple[str, float, list[str]]]:
    """In words, the share that it allows, and the reasons that count against it."""
    if nothing_left:
        yield ", so that nothing is left to train on", 0.0, list(counts)
    budgets = config.failures.budgets
    for reason in (reason for reason in counts if reason in budgets):
        yield f", more than failures.budgets.{reason} = {budgets[reason]} allows", budgets[reason], [reason]
    rate = config.rollout.max_failure_rate
    yield (f", more than rollout.max_failure_rate = {rate} allows", rate,
           [reason for reason in counts if reason not in budgets])
