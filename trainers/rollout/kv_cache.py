"""Keys and values of the sequences being decoded, in slots of one tensor, and the attention that reads them.

Invariant: slot i holds the first `length` positions of sequence i at columns 0..length-1; what lies behind is garbage
that the mask hides. The last column is scratch for padding.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedConfig

from molt_gym.errors import ConfigError

from ..architecture import check_attention

ATTENTION = "molt_gym_slots"


class SlotCache:
    """Has the one method that transformers' attention layers call on a cache, and writes where it is told.

    Args:
        config: of the model.
        slots, capacity: how many sequences of how many positions.

    Raises:
        ConfigError: the model keeps something else than keys and values.
    """

    is_compileable = False

    def __init__(
        self, config: PreTrainedConfig, slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if getattr(config, "kv_lora_rank", None):
            raise ConfigError(f"model: {config.model_type} keeps compressed keys and values, for which the engine "
                              "transformers has no cache; write rollout.engine = 'vllm'")
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, slots, heads, capacity + 1, width)
        self._kv = _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self._slots = self._columns = torch.empty(0, dtype=torch.long)
        self._rows: slice | torch.Tensor = self._slots
        self._window = 0

    def aim(self, slots: torch.Tensor, columns: torch.Tensor, window: int, *, first: bool) -> None:
        """Say where the next forward pass writes and reads.

        Args:
            slots: [B], the slot of each row.
            columns: [B, T], the column of each new token.
            window: how many columns attention looks at.
            first: whether the slots are 0..B-1, so that reading them needs no copy.
        """
        self._slots, self._columns, self._window = slots, columns, window
        self._rows = slice(0, len(slots)) if first else slots

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: object) -> tuple[torch.Tensor, ...]:
        """Store [B, heads, T, width] keys and values; return those of the whole window, [B, heads, window, width]."""
        slots, columns = self._slots[:, None], self._columns
        out = []
        for store, new in zip(self._kv[layer], (key, value), strict=True):
            store[slots, :, columns] = new.transpose(1, 2)
            out.append(store[self._rows, :, : self._window])
        return tuple(out)

    def get_seq_length(self, *_: object) -> int:
        """Positions are always given, so nobody needs this number."""
        return 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another one."""
        self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]

    def save(self, slot: int, length: int) -> torch.Tensor:
        """A copy of the first `length` positions."""
        return self._kv[:, :, slot, :, :length].clone()

    def load(self, slot: int, saved: torch.Tensor, length: int) -> None:
        """Put the first `length` positions of what `save` returned into a slot."""
        self._kv[:, :, slot, :, :length] = saved[:, :, :, :length]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written, unlike torch's; garbage could be NaN, which no mask hides."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def _attend(
    layer: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **asked: object,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention that folds the heads of a group into the query axis instead of copying keys.

    query [B, H, T, D], key and value [B, G, L, D], attention_mask [B, 1, T, L] -> [B, T, H, D].
    """
    check_attention(layer, asked)
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    query = query.reshape(batch, groups, heads // groups * length, width)
    mask = attention_mask.repeat(1, 1, heads // groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, length, width).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attend)
