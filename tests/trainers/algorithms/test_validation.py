from dataclasses import fields

import pytest

from molt_gym.trainers.algorithms.registry import ESTIMATORS, LOSSES
from molt_gym.trainers.algorithms.validation import Settings, problems

CENTRED = {"score_centering": 5, "importance": "token"}
DISTILL = {"estimator": "on_policy_distill", "teacher": True, "kl": 1.0, "kl_use": "reward"}

REFUSED = [
    ({"estimator": "grpo", "group_size": 1}, "rollout.group_size: 1", "write rollout.group_size >= 2"),
    ({"estimator": "dr_grpo", "group_size": 1}, "rollout.group_size: 1", "write rollout.group_size >= 2"),
    ({"estimator": "rloo", "group_size": 1}, "rollout.group_size: 1", "write rollout.group_size >= 2"),
    ({"estimator": "reinforce_baseline", "group_size": 1}, "rollout.group_size: 1", "write rollout.group_size >= 2"),
    ({"estimator": "flash_reinforce", "group_size": 1, "groups_per_step": 1}, "rollout.groups_per_step: 1 of 1",
     "write rollout.groups_per_step >= 2"),
    ({"gamma": 0.9}, "algorithm.gamma: 0.9", "write algorithm.gamma = 1 or algorithm.estimator = 'gae' or 'reinforce'"),
    ({"lam": 0.9}, "algorithm.lam: 0.9", "leave it out or write algorithm.estimator = 'gae'"),
    ({"loss": "cispo", "clip": (0.2, 0.3)}, "algorithm.clip_low, algorithm.clip_high: 0.2, 0.3",
     "write algorithm.loss = 'gspo' or 'ppo'"),
    ({"loss": "reinforce", "clip": (0.1, 0.2)}, "algorithm.clip_low", "leave them out"),
    ({"loss": "reinforce", "top_p": 0.9, "kl": 0.1, "kl_ref": "rollout"},
     "rollout.top_p: 0.9 with algorithm.kl.ref = 'rollout'", "write rollout.top_p = 1"),
    ({"critic": True}, "critic: is configured", "leave it out or write algorithm.estimator = 'gae'"),
    ({"teacher_engine": True}, "algorithm.teacher_engine: is configured",
     "leave it out or write algorithm.estimator = 'on_policy_distill'"),
    ({"teacher": True}, "algorithm.teacher: is configured",
     "leave it out or write algorithm.estimator = 'on_policy_distill'"),
    (DISTILL | {"teacher": False}, "algorithm.teacher: missing", "name a model"),
    (DISTILL | {"kl": 0.0}, "algorithm.kl.coefficient: 0.0", "write kl.coefficient > 0 and kl.use = 'reward'"),
    (DISTILL | {"kl_use": "loss"}, "algorithm.kl.use = 'loss'", "write kl.coefficient > 0 and kl.use = 'reward'"),
    (DISTILL | {"kl_ref": "rollout"}, "algorithm.kl.ref: 'rollout'", "write algorithm.kl.ref = 'model'"),
    (DISTILL | {"kl_kind": "k3"}, "algorithm.kl.kind: 'k3'", "write kl.kind = 'k1' or leave it out"),
    (DISTILL | {"reference": True}, "algorithm.kl.model", "whose reference is the teacher; leave it out"),
    (DISTILL | {"dynamic_filter": True}, "rollout.dynamic_filter: True", "leave dynamic_filter out"),
    (DISTILL | {"overlong_buffer": 9}, "algorithm.overlong_buffer: 9", "leave overlong_buffer out"),
    (DISTILL | {"truncation_coefficient": 0.5}, "algorithm.truncation_coefficient: 0.5",
     "leave truncation_coefficient out"),
    ({"kl": 0.1, "kl_use": "reward"}, "algorithm.kl.use: 'reward' with algorithm.estimator = 'grpo'",
     "write algorithm.kl.use = 'loss' or algorithm.estimator = 'gae' or 'on_policy_distill' or 'reinforce'"),
    ({"kl": 0.1, "kl_kind": "k1"}, "algorithm.kl.kind: 'k1' with algorithm.kl.use = 'loss'", "write kl.kind = 'k2'"),
    ({"kl_target": 0.01}, "algorithm.kl.target: 0.01", "write kl.coefficient > 0"),
    ({"reference": True}, "algorithm.kl.model: would be loaded for nothing with algorithm.kl.coefficient = 0",
     "leave it out, or write kl.coefficient > 0"),
    ({"reference": True, "kl": 0.1, "kl_ref": "rollout"}, "for nothing with algorithm.kl.ref = 'rollout'",
     "kl.ref = 'model'"),
    ({"loss": "reinforce", "updates_per_batch": 2}, "algorithm.updates_per_batch: 2",
     "write algorithm.updates_per_batch = 1 or algorithm.loss = 'ppo'"),
    ({"loss": "reinforce", "dual_clip": 3.0}, "algorithm.dual_clip: 3.0", "no ratio to clip; leave it out"),
    ({"loss": "gspo", "dual_clip": 3.0}, "algorithm.dual_clip: 3.0", "no dual clip; leave it out or write"),
    ({"loss": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip: 3.0", "write algorithm.loss = 'ppo'"),
    ({"ceiling": 2.0}, "algorithm.ceiling: 2.0", "leave it out or write algorithm.loss = 'cispo'"),
    ({"loss": "cispo", "ceiling": 0.9}, "algorithm.ceiling: 0.9", "write algorithm.ceiling >= 1"),
    ({"token_sum_divisor": 9}, "algorithm.token_sum_divisor: 9", "write aggregation = 'rollout_mean_token_sum'"),
    ({"importance": "off", "max_staleness": 1}, "algorithm.importance.level: 'off'", "rollout.max_staleness = 0"),
    ({"mode": "clip"}, "algorithm.importance.mode: 'clip'", "level = 'token' or mode = 'mask'"),
    ({"mode": "trunc", "importance": "seq"}, "algorithm.importance.mode: 'trunc'", "level = 'token' or mode = 'mask'"),
    ({"gate": "tv"}, "algorithm.importance.gate: 'tv'", "write level = 'token' or 'seq', or gate = 'ratio'"),
    ({"gate": "binary_kl", "importance": "geo"}, "gate: 'binary_kl'", "write level = 'token' or 'seq'"),
    ({"gate": "tv", "importance": "token", "mode": "clip"}, "gate: 'tv'", "write mode = 'mask' or gate = 'ratio'"),
    ({"low": 3.0}, "algorithm.importance.low: 3.0", "write low <= high"),
    (CENTRED | {"loss": "gspo"}, "score_centering: 5", "write algorithm.loss = 'ppo' or 'reinforce'"),
    (CENTRED | {"loss": "cispo"}, "score_centering: 5", "write algorithm.loss = 'ppo' or 'reinforce'"),
    (CENTRED | {"updates_per_batch": 2}, "score_centering: 5", "write algorithm.updates_per_batch = 1"),
    (CENTRED | {"importance": "geo"}, "score_centering: 5", "write level = 'token' and gate = 'ratio'"),
    ({"score_centering": 5, "max_staleness": 1}, "algorithm.importance.level = 'auto'", "write level = 'token'"),
    (CENTRED | {"gate": "tv"}, "score_centering: 5", "write level = 'token' and gate = 'ratio'"),
    ({"top_p": 0.9}, "rollout.top_p: 0.9 with algorithm.loss = 'ppo'", "write rollout.top_p = 1"),
    ({"top_k": 5}, "rollout.top_k: 5 with algorithm.loss = 'ppo'", "write rollout.top_k = 0"),
    ({"loss": "gspo", "top_k": 5}, "rollout.top_k: 5 with algorithm.loss = 'gspo'", "write rollout.top_k = 0"),
    ({"loss": "reinforce", "top_p": 0.9, "importance": "token"}, "with algorithm.importance.level = 'token'",
     "write rollout.top_p = 1"),
    ({"routing_replay": True, "in_flight_updates": True, "max_staleness": 1}, "rollout.routed_experts: true",
     "write rollout.max_staleness = 0 or routed_experts = false"),
    ({"routing_replay": True, "speculative": True}, "rollout.routed_experts: true",
     "leave speculative_config (or spec_*) out"),
    ({"prefix_cache": True, "speculative": True}, "enable_prefix_caching: true", "write enable_prefix_caching = false"),
]

FINE = [
    {}, {"estimator": "reinforce", "gamma": 0.9, "group_size": 1}, {"estimator": "flash_reinforce", "group_size": 1},
    {"estimator": "reinforce", "kl": 0.1, "kl_use": "reward", "kl_target": 0.01, "reference": True},
    {"estimator": "gae", "critic": True, "kl": 0.1, "kl_use": "reward", "group_size": 1}, DISTILL,
    {"estimator": "reinforce", "kl": 0.1, "kl_kind": "k1", "kl_use": "reward"},
    {"kl": 0.1, "reference": True}, {"kl": 0.1, "kl_ref": "rollout"}, {"kl": 0.1, "kl_use": "loss", "kl_kind": "k2"},
    {"loss": "reinforce", "top_p": 0.9, "top_k": 5},
    {"loss": "gspo", "clip": (3e-4, 4e-4)}, {"estimator": "gae", "lam": 1.0},
    {"dual_clip": 3.0, "updates_per_batch": 4}, {"loss": "cispo", "ceiling": 2.0, "updates_per_batch": 4},
    {"loss": "gspo", "updates_per_batch": 4}, {"max_staleness": 2}, {"importance": "off"},
    {"importance": "seq", "gate": "tv", "high": 0.1}, {"importance": "token", "gate": "binary_kl", "high": 0.1},
    {"importance": "token", "mode": "trunc", "max_staleness": 1}, CENTRED | {"mode": "trunc", "max_staleness": 1},
    {"score_centering": 5, "loss": "reinforce"}, {"routing_replay": True, "prefix_cache": True},
    {"aggregation": "rollout_mean_token_sum", "token_sum_divisor": 9}, {"speculative": True},
]


@pytest.mark.parametrize(("options", "names", "fix"), REFUSED)
def test_what_does_not_go_together_is_refused_once_with_what_to_change(options, names, fix):
    found = problems(Settings(**options))
    assert len(found) == 1
    assert names in found[0] and fix in found[0]


@pytest.mark.parametrize("options", FINE)
def test_what_goes_together_is_not_refused(options):
    assert problems(Settings(**options)) == []


def test_all_refusals_come_at_once():
    found = problems(Settings(estimator="no", loss="no", low=3.0, top_p=0.9, prefix_cache=True, speculative=True))
    assert [message.partition(":")[0] for message in found] == [
        "algorithm.estimator", "algorithm.loss", "algorithm.importance.low", "rollout.top_p",
        "rollout.engine_args.enable_prefix_caching"]


def test_every_setting_estimator_and_loss_is_in_these_tables():
    used = {name for options in (*FINE, *(o for o, _, _ in REFUSED)) for name in options}
    assert {field.name for field in fields(Settings)} == used
    assert {o.get("estimator") for o in [*FINE, *(o for o, _, _ in REFUSED)]} - {None} == set(ESTIMATORS.names())
    assert {o.get("loss", "ppo") for o, _, _ in REFUSED} == set(LOSSES.names())
