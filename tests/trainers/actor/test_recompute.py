"""Which operations of a layer run again in the backward pass."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from molt_gym.trainers.actor.attention import ATTENTION
from molt_gym.trainers.actor.model import Policy
from molt_gym.trainers.actor.packing import TrainRow, collate, micro_batches
from molt_gym.trainers.actor.recompute import recompute

LINEAR = 7
"""Matrices of a layer."""


class Counted(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("mode", "again", "products"), [("none", 0, 0), ("selective", 1, 0), ("full", 1, LINEAR - 1)])
def test_a_backward_pass_runs_again_what_was_not_kept(
    model_path: Callable[..., Path], random_rows: Callable[..., list[TrainRow]], mode: Any, again: int, products: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32, attn_implementation=ATTENTION)
    for layer in model.model.layers:
        recompute(layer, mode)
    batch = collate(micro_batches(random_rows(1, 3), 100)[0], torch.device("cpu"))
    loss = Policy(model.eval())(batch).logprobs.sum()
    with Counted() as backward:
        loss.backward()
    layers = len(model.model.layers)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert backward.counts["silu"] == layers * again
    # Nobody needs the result of the last product of a layer again.
    assert backward.counts["mm"] == layers * (2 * LINEAR + products) + 2
    assert bool(backward.counts[attention]) is (mode == "full")
