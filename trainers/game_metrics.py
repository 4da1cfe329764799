"""Metrics of games: the reward of each seat, and how often it won, drew and lost, also by opponent."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean

from molt_gym.tokens import Trajectory

RESULTS = ("win", "draw", "loss")


def result_rates(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Shares of the games that were played to their end; {} without any."""
    counts = Counter(trajectory.info["result"] for trajectory in trajectories if "result" in trajectory.info)
    return {result: counts[result] / counts.total() for result in RESULTS} if counts else {}


def game_metrics(ended: Sequence[Trajectory]) -> dict[str, float]:
    """Of each env and seat that the policy played, the reward and `result_rates`; of each opponent the latter."""
    seats, opponents = defaultdict(list), defaultdict(list)
    for trajectory in ended:
        if trajectory.seat:
            seats[f"{trajectory.env}/{trajectory.seat}"].append(trajectory)
            opponents[f"{trajectory.env}/against/{trajectory.info.get('opponent')}"].append(trajectory)
    metrics = {f"reward/{seat}": mean(trajectory.reward for trajectory in own) for seat, own in sorted(seats.items())}
    for name, own in sorted({**seats, **opponents}.items()):
        metrics |= {f"game/{name}/{result}": rate for result, rate in result_rates(own).items()}
    return metrics
