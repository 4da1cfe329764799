"""Images of rows in packed sequences: patches for the vision tower, and where what it makes of them stands.

Invariants: an image that several rows share where they share their beginning is computed once; rows whose ids are equal
and whose images are not share nothing from there on; a tower that is trained takes part in every pass with gradients,
so that all ranks have the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from molt_gym.images import ImageSpan
from molt_gym.tokens.vision import Vision

from ..vision_inputs import decoder_inputs, pictures, rope_positions, see

if TYPE_CHECKING:
    from .packing import MicroBatch, Trie


@dataclass
class ImageBatch:
    """The images of a micro-batch of T tokens.

    pixels: [P, D] patches, one image behind the other as they stand in the sequence. grids: [I, 3]. shown: [1, T] bool,
    the tokens of images. positions: [3, 1, T], of all tokens in time, height and width.
    """

    pixels: Tensor
    grids: Tensor
    shown: Tensor
    positions: Tensor

    @classmethod
    def of(cls, tries: Sequence["Trie"], length: int, vision: Vision, device: torch.device) -> "ImageBatch | None":
        """Of tries that lie side by side in a sequence of that length; None where no row has an image.

        Raises:
            ValueError: an image has another number of tokens than its row says.
        """
        positions, shown = torch.zeros(3, 1, length, dtype=torch.long), torch.zeros(1, length, dtype=torch.bool)
        found: dict[int, ImageSpan] = {}
        start = 0
        for trie in tries:
            for row, path in zip(trie.rows, trie.paths, strict=True):
                places = torch.tensor(path) + start
                positions[:, 0, places] = rope_positions(len(row.ids), row.images, vision)
                for image in row.images:
                    own = places[image.start : image.start + image.count]
                    found[int(own[0])] = image
                    shown[0, own] = True
            start += len(trie.ids)
        if not found:
            return None
        pixels, grids = pictures([found[place] for place in sorted(found)], vision, device)
        return cls(pixels, grids, shown.to(device), positions.to(device))


def inputs_of(model: nn.Module, batch: "MicroBatch") -> dict[str, Any]:
    """What the decoder of a model that sees is given for a micro-batch."""
    images, trained = batch.images, torch.is_grad_enabled() and next(model.base_model.visual.parameters()).requires_grad
    if images is not None:
        seen = see(model, images.pixels, images.grids)
        return {"position_ids": images.positions, **decoder_inputs(model, batch.input_ids, images.shown, seen)}
    if not trained:
        return {"position_ids": batch.position_ids, "input_ids": batch.input_ids}
    features, layers = see(model, *_nothing(model, batch.input_ids.device))
    idle = 0 * sum(part.sum() for part in (features, *layers))
    return {"position_ids": batch.position_ids, "inputs_embeds": model.get_input_embeddings()(batch.input_ids) + idle}


def _nothing(model: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
    """The smallest image, in black."""
    vision = model.config.vision_config
    side = vision.spatial_merge_size
    channels = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(side**2, channels, device=device), torch.tensor([[1, side, side]], device=device)
