"""From finished groups to the rows of the optimizer's windows: shaping, advantages, weights.

Invariants: the unit is the rollout, whatever its number of rows; weights are those of the whole window, so the loss
does not depend on how the window is cut; a rollout that failed or is too old is counted, and trains nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from molt_gym.tokens import Trajectory

from .actor.packing import AnyRow, train_row
from .algorithms.advantages import estimate_advantages
from .algorithms.losses import token_weights
from .algorithms.registry import ESTIMATORS
from .algorithms.shaping import overlong_penalty, scale_truncated
from .config import Config

Group = list[Trajectory]


def usable(groups: Sequence[Group], config: Config, version: int, dropped: Counter) -> list[Group]:
    """Groups without rollouts that failed, have nothing to train, or are older than the staleness allowed.

    What is left out, but for failures, which their own metrics count, is added to `dropped` by reason.
    """
    oldest = version - config.rollout.max_staleness
    kept = []
    for group in groups:
        good = []
        for trajectory in group:
            stats = [row.stats for row in trajectory.rows if row.stats.sampled]
            if trajectory.failure is not None:
                continue
            if not stats:
                dropped["empty"] += 1
            elif min(row.oldest for row in stats) < oldest:
                dropped["stale"] += 1
            else:
                good.append(trajectory)
        if len(good) < len(group) and config.rollout.incomplete_group == "drop":
            dropped["incomplete_group"] += len(good)
        elif good:
            kept.append(good)
    return kept


def sampled_tokens(trajectories: Iterable[Trajectory]) -> int:
    """How many tokens the policy sampled."""
    return sum(row.stats.sampled for trajectory in trajectories for row in trajectory.rows)


def windows(groups: Sequence[Group], config: Config) -> tuple[list[list[AnyRow]], dict[str, float]]:
    """One list of rows for each optimizer update, and the metrics of the advantages, if those are one a rollout.

    Advantages of tokens are made where the rows are, which have rewards for that.
    """
    rollouts = [trajectory for group in groups for trajectory in group]
    numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    tokens = torch.tensor([sampled_tokens([trajectory]) for trajectory in rollouts])
    rewards = shaped_rewards(rollouts, config)
    per_token = ESTIMATORS.traits(config.algorithm.estimator).per_token
    advantages = torch.zeros_like(rewards) if per_token else estimate_advantages(
        config.algorithm.estimator, rewards, numbers, tokens)
    updates = min(config.algorithm.updates_per_batch, len(groups))
    share = torch.div(numbers * updates, len(groups), rounding_mode="floor")
    result: list[list[AnyRow]] = []
    row_number = 0
    for update in range(updates):
        chosen = (share == update).nonzero().flatten().tolist()
        weights = token_weights(config.algorithm.aggregation, tokens[chosen], numbers[chosen],
                                config.algorithm.token_sum_divisor)
        window = []
        for weight, index in zip(weights.tolist(), chosen, strict=True):
            for row in rollouts[index].rows:
                window.append(train_row(row, advantages[index].item(), weight, row_number, int(numbers[index]), index,
                                        rewards[index].item()))
                row_number += 1
        result.append(window)
    if per_token:
        return result, {}
    idle = (advantages == 0).double().mean().item()
    return result, {"advantage/mean": advantages.mean().item(), "advantage/zero": idle}


def shaped_rewards(rollouts: Sequence[Trajectory], config: Config) -> torch.Tensor:
    """Rewards [R] after the overlong ramp, the truncation coefficient and the clip."""
    algorithm = config.algorithm
    rewards = torch.tensor([trajectory.reward for trajectory in rollouts], dtype=torch.float64)
    if algorithm.overlong_buffer:
        lengths = torch.tensor([longest_reply(trajectory) for trajectory in rollouts])
        rewards = rewards - overlong_penalty(lengths, config.rollout.max_tokens, algorithm.overlong_buffer,
                                             algorithm.overlong_penalty)
    cut = torch.tensor([trajectory.length_limited for trajectory in rollouts])
    rewards = scale_truncated(rewards, cut, algorithm.truncation_coefficient)
    return rewards.clamp(-algorithm.reward_clip, algorithm.reward_clip)


def longest_reply(trajectory: Trajectory) -> int:
    """Tokens of the longest unbroken run of sampled ids."""
    return max((row.stats.longest_reply for row in trajectory.rows), default=0)
