"""How a model sees: an image as patches for its vision tower, and as so many tokens of its text.

Invariants: engine and trainer are given the same numbers, made here by one code (the processor's path through Pillow,
wherever there is another one); the number of tokens is that of the patches, and is counted before an image is cut up.
"""

import functools
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..images import image_digest, open_image

if TYPE_CHECKING:
    from torch import Tensor

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Types of models whose images are understood."""
_KNOWN_SIZES = 4096
_KEPT_PIXELS = 32

Grid = tuple[int, int, int]
"""Patches of an image: in time (1), down, and across."""


class Vision:
    """The image processor of a model folder. Threads may share one.

    Args:
        path: of the model.
        max_pixels: larger images are scaled down to it, besides what the model's own processor does.

    Raises:
        ConfigError: the folder has no image processor, or one of another kind than the Qwen-VL models have.
    """

    token_id: int
    """Of what stands for an image, repeated once for each token that it has."""
    merge: int
    """So many patches down and across become one token."""
    max_pixels: int | None
    """As given."""

    def __init__(self, path: str | PathLike[str], *, max_pixels: int | None = None) -> None:
        from transformers import AutoConfig, AutoImageProcessor

        config = AutoConfig.from_pretrained(path)
        try:
            self._processor = AutoImageProcessor.from_pretrained(path, backend="pil")
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {path} is of type {config.model_type}, and has no image processor that can be "
                              f"loaded ({error}); copy its preprocessor_config.json there too") from error
        self.token_id, self.merge, self.max_pixels = config.image_token_id, self._processor.merge_size, max_pixels
        size = dict(self._processor.size)
        self._least, self._most = size["shortest_edge"], size["longest_edge"]
        if max_pixels is not None:
            self._most = min(self._most, max_pixels)
            self._least = min(self._least, self._most)
        self._grids: dict[str, Grid] = {}
        self._kept = functools.lru_cache(_KEPT_PIXELS)(self._patches)

    @classmethod
    def of(cls, path: str | PathLike[str], *, max_pixels: int | None = None) -> "Vision | None":
        """That of a model folder; None for a model that sees nothing, or whose images are not understood."""
        from transformers import AutoConfig

        return cls(path, max_pixels=max_pixels) if AutoConfig.from_pretrained(path).model_type in MODELS else None

    def grid(self, uri: str, where: str = "image") -> Grid:
        """How many patches an image has.

        Raises:
            ValueError: as `open_image`, or it is too long and narrow.
        """
        name = image_digest(uri)
        if (known := self._grids.get(name)) is None:
            picture = open_image(uri, where)
            if len(self._grids) >= _KNOWN_SIZES:
                self._grids.clear()
            known = self._grids[name] = self._grid(picture.height, picture.width, where)
        return known

    def count(self, uri: str, where: str = "image") -> int:
        """How many tokens an image has. Raises as `grid`."""
        _, height, width = self.grid(uri, where)
        return height * width // self.merge**2

    def pixels(self, uri: str) -> "Tensor":
        """[patches, channels · time · height · width of a patch] float32."""
        return self._kept(uri)

    def _patches(self, uri: str) -> "Tensor":
        size = {"shortest_edge": self._least, "longest_edge": self._most}
        made: Any = self._processor([open_image(uri)], return_tensors="pt", size=size)
        if tuple(made["image_grid_thw"][0].tolist()) != self.grid(uri):
            raise ValueError(f"image: the processor makes {made['image_grid_thw'][0].tolist()} patches of it where "
                             f"{list(self.grid(uri))} were counted")
        return made["pixel_values"]

    def _grid(self, height: int, width: int, where: str) -> Grid:
        patch, resize = self._processor.patch_size, import_module(type(self._processor).__module__).smart_resize
        try:
            height, width = resize(height, width, patch * self.merge, self._least, self._most)
        except ValueError as error:
            raise ValueError(f"{where}: {width} x {height} pixels: {error}") from error
        return 1, height // patch, width // patch
