import math

import numpy as np
import pytest
import torch

from molt_gym.tokens import Sampling
from molt_gym.trainers.rollout.sampler import sample


def draws(logits, sampling, count=20_000, seed=0):
    uniforms = np.random.default_rng(seed).random(count)
    return sample(torch.tensor(logits).expand(count, -1), [sampling] * count, uniforms.tolist())[:2]


def chi_square(ids, probabilities):
    expected = np.asarray(probabilities) * len(ids)
    observed = np.bincount(ids, minlength=len(expected))
    assert observed[expected == 0].sum() == 0
    kept = expected > 0
    return ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()


LOGITS = torch.randn(12, generator=torch.Generator().manual_seed(3)).mul(2).tolist()
# The 99.9th percentile of the chi-square distribution with 11 degrees of freedom.
LIMIT = 31.3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_from_the_softmax_at_the_temperature(temperature):
    ids, logprobs = draws(LOGITS, Sampling(temperature=temperature))
    probabilities = torch.tensor(LOGITS, dtype=torch.float64).div(temperature).softmax(-1)
    assert chi_square(ids, probabilities) < LIMIT
    assert logprobs == pytest.approx(probabilities.log()[ids].tolist(), abs=1e-6)


def test_top_k_renormalises_over_the_k_likeliest():
    ids, logprobs = draws([0.0, 3.0, 1.0, 2.0], Sampling(top_k=2))
    total = math.exp(3) + math.exp(2)
    assert chi_square(ids, [0, math.exp(3) / total, 0, math.exp(2) / total]) < LIMIT
    assert {round(p, 5) for p in logprobs} == {round(3 - math.log(total), 5), round(2 - math.log(total), 5)}


@pytest.mark.parametrize(("top_p", "kept"), [
    (0.3, [1]), (0.5, [1]), (0.51, [1, 3]), (0.8, [1, 3, 0]), (1.0, [1, 3, 0, 2])])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p, kept):
    probabilities = [0.15, 0.5, 0.1, 0.25]
    ids, logprobs = draws(np.log(probabilities).tolist(), Sampling(top_p=top_p), 2_000)
    assert set(ids) == set(kept)
    mass = sum(probabilities[i] for i in kept)
    assert logprobs == pytest.approx([math.log(probabilities[i] / mass) for i in ids], abs=1e-6)


def test_top_p_is_taken_of_what_top_k_left():
    probabilities = [0.4, 0.3, 0.2, 0.1]
    ids, _ = draws(np.log(probabilities).tolist(), Sampling(top_k=2, top_p=0.5), 500)
    assert set(ids) == {0}
    ids, _ = draws(np.log(probabilities).tolist(), Sampling(top_k=2, top_p=0.6), 500)
    assert set(ids) == {0, 1}


def test_temperature_zero_takes_the_likeliest_and_gives_its_plain_logprob():
    ids, logprobs, _ = sample(torch.tensor([[1.0, 3.0, 2.0]]), [Sampling(temperature=0)], [0.999])
    assert ids == [1]
    assert logprobs == pytest.approx([3 - math.log(math.e + math.exp(3) + math.exp(2))], abs=1e-6)


def test_rows_with_different_settings_do_not_mix():
    logits = torch.tensor(LOGITS).expand(4, -1)
    settings = [Sampling(), Sampling(temperature=0), Sampling(top_k=1), Sampling(temperature=3.0, top_p=0.9)]
    uniforms = [0.2, 0.7, 0.9, 0.4]
    together = sample(logits, settings, uniforms)[:2]
    alone = [sample(logits[:1], [setting], [uniform]) for setting, uniform in zip(settings, uniforms, strict=True)]
    assert together == ([ids[0] for ids, *_ in alone], [logprobs[0] for _, logprobs, _ in alone])


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_never_draw_what_was_cut_off(uniform):
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]])
    ids, logprobs, _ = sample(logits, [Sampling()], [uniform])
    assert ids[0] in (1, 2) and math.isfinite(logprobs[0])
    ids, logprobs, _ = sample(torch.tensor([[0.0, 1.0, 2.0, 0.0]]), [Sampling(top_k=2)], [uniform])
    assert ids[0] in (1, 2) and math.isfinite(logprobs[0])


def test_bfloat16_logits_are_normalised_in_float32():
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, logprobs, _ = sample(logits, [Sampling()], [0.5])
    assert logprobs == pytest.approx([logits.float().log_softmax(-1)[0, ids[0]].item()], abs=1e-5)


def test_a_small_logit_in_a_large_vocabulary_keeps_its_share():
    logits = torch.zeros(2, 100_000)
    ids, *_ = sample(logits, [Sampling()] * 2, [0.123456, 0.999999])
    assert ids == [12_345, 99_999]


def test_the_likeliest_are_told_of_under_temperature_and_truncation_to_those_who_ask():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]] * 3)
    settings = [Sampling(temperature=2.0, top_logprobs=9), Sampling(), Sampling(top_k=1, top_logprobs=2)]
    *_, (all_of_them, none, cut) = sample(logits, settings, [0.5] * 3)
    assert none is None and all_of_them["id"].tolist() == [1, 2, 0, 3]
    expected = (logits[0] / 2).log_softmax(-1)[[1, 2, 0, 3]]
    assert all_of_them["logprob"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert cut["id"][0] == 1 and cut["logprob"].tolist() == [0.0, -math.inf]
