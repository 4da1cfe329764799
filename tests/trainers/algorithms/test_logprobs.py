import math

import pytest
import torch
from torch import tensor

from molt_gym.trainers.algorithms.logprobs import entropy, next_token_logprobs, token_logprobs

NEXT = tensor([[0.0, 1.0, 2.0], [1.0, 0.0, -1.0], [0.5, 0.5, 0.5]])
"""Next-token logits by the previous token."""
IDS = tensor([0, 2, 1, 0])


def test_a_token_is_scored_by_the_logits_before_it():
    logprobs = next_token_logprobs(NEXT[IDS], IDS)
    torch.testing.assert_close(logprobs, tensor([-0.407606, -1.098612, -0.407606]), atol=1e-6, rtol=0)
    assert logprobs.sum().item() == pytest.approx(-1.913824, abs=1e-6)


@pytest.mark.parametrize("pads", [0, 1, 3, 8])
def test_padding_before_a_row_changes_nothing(pads):
    padded = torch.cat([torch.full((pads,), 1), IDS])
    torch.testing.assert_close(next_token_logprobs(NEXT[padded], padded)[pads:], next_token_logprobs(NEXT[IDS], IDS))


def test_batches_have_their_own_rows():
    both = torch.stack([IDS, IDS.flip(0)])
    torch.testing.assert_close(next_token_logprobs(NEXT[both], both)[0], next_token_logprobs(NEXT[IDS], IDS))


def test_temperature_divides_the_logits():
    expected = (NEXT / 2).log_softmax(-1)[torch.arange(3), tensor([2, 0, 1])]
    torch.testing.assert_close(token_logprobs(NEXT, tensor([2, 0, 1]), temperature=2.0), expected)
    assert token_logprobs(NEXT.bfloat16(), tensor([2, 0, 1])).dtype == torch.float32


def test_entropy_of_even_and_certain_distributions():
    values = entropy(tensor([[0.5, 0.5, 0.5], [100.0, 0.0, 0.0]]))
    torch.testing.assert_close(values, tensor([math.log(3), 0.0]))
    assert entropy(tensor([[0.0, 1.0]]), temperature=1e3).item() == pytest.approx(math.log(2), abs=1e-6)


def test_a_token_that_cannot_come_has_no_share_in_the_entropy_and_no_gradient():
    logits = tensor([[1.0, 1.0, -math.inf]], requires_grad=True)
    value = entropy(logits)
    value.sum().backward()
    assert value.item() == pytest.approx(math.log(2)) and logits.grad.tolist() == [[0, 0, 0]]
