"""Log-probabilities and entropies in chunks are those of all logits at once, and so are their gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from molt_gym.trainers.actor import head
from molt_gym.trainers.actor.head import chunk_edges, score

POSITIONS, TOKENS, WIDTH, VOCAB = 13, 20, 8, 30


@pytest.fixture(params=[1, 5, 13, 100])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Tokens of which several follow a position, some positions none; in chunks of several sizes."""
    monkeypatch.setattr(head, "CHUNK", request.param)
    generator = torch.Generator().manual_seed(0)
    source_of = torch.randint(0, POSITIONS, (TOKENS,), generator=generator)
    by_source = source_of.argsort(stable=True)
    return SimpleNamespace(targets=torch.randint(0, VOCAB, (TOKENS,), generator=generator), source_of=source_of,
                           by_source=by_source, edges=chunk_edges(source_of[by_source], POSITIONS))


def plain(hidden: Tensor, layer: nn.Linear, asked: SimpleNamespace, temperature: float) -> tuple[Tensor, Tensor]:
    logs = (layer(hidden) / temperature).log_softmax(-1)
    return logs[asked.source_of, asked.targets], -(logs.exp() * logs).sum(-1)[asked.source_of]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("parts", [(1, 0), (0, 1), (1, 2)])
def test_values_and_gradients_are_those_of_all_logits_at_once(
    asked: SimpleNamespace, bias: bool, temperature: float, parts: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    hidden, layer = torch.randn(POSITIONS, WIDTH, requires_grad=True), nn.Linear(WIDTH, VOCAB, bias=bias)
    factors, inputs = torch.randn(2, TOKENS), [hidden, *layer.parameters()]
    outcomes = []
    for found in (score(hidden, layer, asked, temperature=temperature, entropy=True),
                  plain(hidden, layer, asked, temperature)):
        loss = sum((values * factor).sum() * part
                   for values, factor, part in zip(found, factors, parts, strict=True) if part)
        outcomes.append([*found, *torch.autograd.grad(loss, inputs)])
    for value, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


def test_no_logits_of_all_positions_are_ever_held(
    asked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, make = [], head._logits
    monkeypatch.setattr(head, "_logits", lambda hidden, *rest: sizes.append(len(hidden)) or make(hidden, *rest))
    hidden, layer = torch.randn(POSITIONS, WIDTH, requires_grad=True), nn.Linear(WIDTH, VOCAB)
    score(hidden, layer, asked)[0].sum().backward()
    assert max(sizes) <= head.CHUNK
    assert sum(sizes) == (POSITIONS if head.CHUNK >= POSITIONS else 2 * POSITIONS)


def test_logits_in_float32_are_not_rounded_to_the_precision_of_the_model(asked: SimpleNamespace) -> None:
    torch.manual_seed(0)
    hidden, layer = torch.randn(POSITIONS, WIDTH).bfloat16(), nn.Linear(WIDTH, VOCAB, bias=False).bfloat16()
    wide = nn.Linear(WIDTH, VOCAB, bias=False)
    wide.load_state_dict({"weight": layer.weight.float()})
    expected, _ = plain(hidden.float(), wide, asked, 1.0)
    exact, rounded = (score(hidden, layer, asked, exact=exact)[0] for exact in (True, False))
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-6)
    assert exact.dtype == rounded.dtype == torch.float32
    assert 1e-4 < (rounded - expected).abs().max() < 0.1


def test_a_head_that_is_not_trained_gets_no_gradient(asked: SimpleNamespace) -> None:
    hidden, layer = torch.randn(POSITIONS, WIDTH, requires_grad=True), nn.Linear(WIDTH, VOCAB).requires_grad_(False)
    score(hidden, layer, asked)[0].sum().backward()
    assert layer.weight.grad is None and hidden.grad.abs().sum() > 0


def test_nothing_asked_is_nothing_told() -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    asked = SimpleNamespace(targets=nothing, source_of=nothing, by_source=nothing, edges=chunk_edges(nothing, 0))
    hidden, layer = torch.randn(0, WIDTH, requires_grad=True), nn.Linear(WIDTH, VOCAB)
    logprobs, entropy = score(hidden, layer, asked, entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    assert len(logprobs) == len(entropy) == 0 and layer.weight.grad.abs().sum() == 0
