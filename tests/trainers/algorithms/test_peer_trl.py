"""The same log-probabilities through TRL's GRPO loss; runs where trl is installed."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from molt_gym.trainers.algorithms.advantages import estimate_advantages
from molt_gym.trainers.algorithms.kl import kl_loss
from molt_gym.trainers.algorithms.losses import LossOptions, policy_loss, token_weights

pytestmark = pytest.mark.slow
LENGTH = 7
LENGTHS = torch.tensor([7, 3, 5, 1, 6, 2])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 1.0])
MASK = torch.arange(LENGTH) < LENGTHS[:, None]


def data():
    random = torch.Generator().manual_seed(0)
    logp, old, ref = (-torch.rand(6, LENGTH, generator=random, dtype=torch.float64) * 2 for _ in range(3))
    return logp.requires_grad_(), old, ref


def peer_loss(logp, old, ref, advantages, *, loss_type, level, beta, delta, ceiling):
    """TRL's own method, on an object with what it reads."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    reduce = SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x,
                             reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x)
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=beta, use_vllm=False,
        importance_sampling_level=level, loss_type=loss_type, epsilon_low=0.2,
        epsilon_high=ceiling if loss_type == "cispo" else 0.28, model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        current_gradient_accumulation_steps=1, max_completion_length=LENGTH, accelerator=reduce,
        _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)})
    ids = torch.zeros(6, LENGTH, dtype=torch.long)
    return trainer._compute_loss(stub, None, {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": MASK.long(),
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref,
        "num_items_in_batch": LENGTHS.sum()})


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("loss_type", "level", "name", "aggregation", "options"), [
    ("grpo", "token", "ppo", "rollout_mean_token_mean", {}),
    ("dapo", "token", "ppo", "token_mean", {}),
    ("bnpo", "token", "ppo", "token_mean", {}),
    ("dr_grpo", "token", "ppo", "rollout_mean_token_sum", {}),
    ("grpo", "token", "ppo", "rollout_mean_token_mean", {"dual_clip": 1.3}),
    ("grpo", "sequence", "gspo", "rollout_mean_token_mean", {}),
    ("dapo", "sequence", "gspo", "token_mean", {}),
    ("cispo", "token", "cispo", "token_mean", {"ceiling": 1.3}),
])
def test_losses_and_gradients_equal_those_of_trl(loss_type, level, name, aggregation, options, beta):
    logp, old, ref = data()
    estimator = "dr_grpo" if loss_type == "dr_grpo" else "grpo"
    advantages = estimate_advantages(estimator, REWARDS, GROUPS, LENGTHS)
    peer = peer_loss(logp, old, ref, advantages, loss_type=loss_type, level=level, beta=beta,
                     delta=options.get("dual_clip"), ceiling=options.get("ceiling"))
    theirs = torch.autograd.grad(peer, logp)[0]

    rows = torch.arange(6)[:, None].expand_as(MASK)[MASK]
    weights = token_weights(aggregation, LENGTHS, GROUPS, LENGTH if loss_type == "dr_grpo" else None)[rows]
    loss, _ = policy_loss(name, logp[MASK], old[MASK], advantages[rows], weights, rows,
                          options=LossOptions(0.2, 0.28, **options))
    loss = loss + beta * kl_loss(logp[MASK], ref[MASK], weights, "k3")[0]
    ours = torch.autograd.grad(loss, logp)[0]
    assert loss.item() == pytest.approx(peer.item(), abs=1e-12)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
