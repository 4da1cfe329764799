"""Supervised training of a small model on conversations: what it takes from random weights to a policy that tries.

Invariants: only what the assistant said is learnt; the weights are a function of the model, the examples and their
order (on one machine with one number of threads).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..architecture import decoder_of
from ..vision_inputs import decoder_inputs, pictures, rope_positions, see
from .tiny_tokenizer import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from molt_gym.tokens.vision import Vision

__all__ = ["BATCH", "train_on_examples"]

BATCH = 32
_MATRIX_LR, _LR, _END, _WARMUP = 2e-2, 1e-2, 0.1, 0.05


def train_on_examples(
    model: "PreTrainedModel", examples: Sequence[Example], vision: "Vision | None" = None
) -> list[float]:
    """One pass over the examples in their order, 32 a step.

    Matrices are updated by Muon and the rest, embeddings included, by AdamW: for these small models the loss falls in
    half the steps that AdamW alone takes. The learning rate rises for a twentieth of the steps, then follows a cosine
    down to a tenth.

    Args:
        model: changed in place.
        examples: with images if `vision` says how the model sees; its tower is trained, too.

    Returns:
        The loss of each step, in nats per token.
    """
    optimizers = _optimizers(model)
    steps = math.ceil(len(examples) / BATCH)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
                 for optimizer in optimizers]
    losses = []
    for step in range(steps):
        losses.append(_accumulate(model, examples[step * BATCH : (step + 1) * BATCH], vision))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return losses


def _optimizers(model: "PreTrainedModel") -> list[torch.optim.Optimizer]:
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices = [p for p in model.parameters() if p.ndim == 2 and p not in embeddings]
    others = [p for p in model.parameters() if p.ndim != 2 or p in embeddings]
    return [torch.optim.Muon(matrices, lr=_MATRIX_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def _rate(step: int, steps: int) -> float:
    rise = min(1.0, (step + 1) / (_WARMUP * steps))
    return rise * (_END + (1 - _END) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _accumulate(model: "PreTrainedModel", batch: Sequence[Example], vision: "Vision | None") -> float:
    """Gradients of the mean loss of a batch, in two parts, short rows and long ones, so that little is padding."""
    rows = sorted(batch, key=lambda row: len(row.ids))
    lengths = [len(row.ids) for row in rows]
    cut = min(range(1, len(rows) + 1), key=lambda k: k * lengths[k - 1] + (len(rows) - k) * lengths[-1])
    total = sum(sum(row.mask[1:]) for row in rows)
    loss_of_batch = 0.0
    for part in filter(None, (rows[:cut], rows[cut:])):
        width = len(part[-1].ids)
        ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in part])
        said = torch.tensor([row.mask + [0] * (width - len(row.mask)) for row in part], dtype=torch.bool)[:, 1:]
        # Padding follows all that is real, so causal attention needs no mask, which is the fast path.
        inputs = _seen(model, part, ids[:, :-1], vision) if vision else {"input_ids": ids[:, :-1]}
        states = decoder_of(model)(**inputs, use_cache=False).last_hidden_state[said]
        loss = F.cross_entropy(model.lm_head(states), ids[:, 1:][said], reduction="sum") / total
        loss.backward()
        loss_of_batch += loss.item()
    return loss_of_batch


def _seen(model: "PreTrainedModel", rows: Sequence[Example], ids: Tensor, vision: "Vision") -> dict[str, Any]:
    """Arguments of the decoder for rows [B, T]."""
    shown = torch.zeros(ids.shape, dtype=torch.bool)
    for place, row in enumerate(rows):
        for image in row.images:
            shown[place, image.start : image.start + image.count] = True
    images = [image for row in rows for image in row.images]
    if not images:
        return {"input_ids": ids}
    positions = torch.stack([rope_positions(ids.shape[1], row.images, vision) for row in rows], dim=1)
    seen = see(model, *pictures(images, vision, ids.device))
    return {"position_ids": positions, **decoder_inputs(model, ids, shown, seen)}
