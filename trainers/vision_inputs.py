"""What the decoder of a vision-language model is given where there are images: embeddings, and positions in 3 axes.

The actor and the engine on transformers share it. Invariant: where an image stands is told by who laid the ids out, so
that an id which the model sampled and that spells an image is an ordinary token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from molt_gym.images import ImageSpan
from molt_gym.tokens.vision import Vision

Seen = tuple[Tensor, list[Tensor]]
"""[K, H] of the K tokens of images, and what the first layers of the decoder add at these, [K, H] each."""


def rope_positions(length: int, images: Sequence[ImageSpan], vision: Vision) -> Tensor:
    """[3, length]: time, height and width of each token of a row; all three the same for text.

    An image is one moment; its tokens differ in height and width, and text goes on behind the larger of the two.

    Raises:
        ValueError: an image has another number of tokens than in its row.
    """
    positions = torch.empty(3, length, dtype=torch.long)
    end = following = 0
    for start, count, uri in images:
        _, height, width = (size // vision.merge for size in vision.grid(uri))
        if count != height * width:
            raise ValueError(f"row.images: {count} tokens for an image of {height * width}; its row was made with "
                             "another processor or another limit (actor.max_pixels)")
        positions[:, end:start] = torch.arange(following, following + start - end)
        following += start - end
        rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
        positions[:, start : start + count] = following + torch.stack([torch.zeros(count, dtype=torch.long), rows,
                                                                       columns])
        end, following = start + count, following + max(height, width)
    positions[:, end:] = torch.arange(following, following + length - end)
    return positions


def pictures(images: Sequence[ImageSpan], vision: Vision, device: torch.device) -> tuple[Tensor, Tensor]:
    """[P, D] patches of images one behind the other, and their [I, 3] grids."""
    grids = torch.tensor([vision.grid(image.uri) for image in images])
    return torch.cat([vision.pixels(image.uri) for image in images]).to(device), grids.to(device)


def see(model: nn.Module, pixels: Tensor, grids: Tensor) -> Seen:
    """What the vision tower makes of patches [P, D]."""
    told = model.base_model.get_image_features(pixels, grids, return_dict=True)
    return torch.cat(list(told.pooler_output)), [
        torch.cat(list(layer)) for layer in getattr(told, "deepstack_features", None) or ()]


def decoder_inputs(model: nn.Module, ids: Tensor, shown: Tensor, seen: Seen) -> dict[str, Any]:
    """Arguments of the decoder for ids [B, T]; shown: [B, T] bool, where the K tokens of `seen` stand, in order."""
    features, layers = seen
    embeddings = model.get_input_embeddings()(ids)
    embeddings = embeddings.masked_scatter(shown[..., None], features.to(embeddings.dtype))
    more = {"visual_pos_masks": shown, "deepstack_visual_embeds": layers} if layers else {}
    return {"inputs_embeds": embeddings, **more}
