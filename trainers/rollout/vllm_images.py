"""Prompts with images for vLLM, which gets patches and not pictures, so that sampler and trainer see the same numbers.

Needs vLLM. Invariant: ids go in as they are; nothing is expanded or cut up there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchFeature
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from molt_gym.images import ImageSpan, image_digest
from molt_gym.tokens import Sampling
from molt_gym.tokens.vision import Vision

from .engine import Request, image_refusal


def image_input(ids: list[int], images: Sequence[ImageSpan], vision: Vision) -> Any:
    """The prompt for vLLM's engine.

    Raises:
        ValueError: an image takes another number of tokens among the ids than it has.
    """
    if error := image_refusal(Request(ids, Sampling(), images=tuple(images)), vision):
        raise error
    grid = torch.tensor([vision.grid(image.uri) for image in images])
    values = {"pixel_values": torch.cat([vision.pixels(image.uri) for image in images]), "image_grid_thw": grid}
    fields = {"pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
              "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True)}
    places = [PlaceholderRange(offset=image.start, length=image.count) for image in images]
    return mm_input(ids, MultiModalKwargsItems.from_hf_inputs(BatchFeature(values), fields),
                    {"image": [image_digest(image.uri) for image in images]}, {"image": places})
