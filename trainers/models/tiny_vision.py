"""The tiny model that sees: a Qwen3-VL of six hundred thousand parameters, for an environment that shows pictures.

It sees 64 x 64 pixels in 16 tokens, of larger images that which is left when they are scaled down.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molt_gym.messages import Message
from molt_gym.tokens import Renderer
from molt_gym.tokens.supervised import supervised_rows
from molt_gym.tokens.vision import Vision

from .tiny_tokenizer import VISION_MARKERS, VOCABULARY, Example
from .warm_start import train_on_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["build_seeing"]

_PATCH, _MERGED, _SIDE = 8, 2, 64


def build_seeing(
    folder: Path, tokenizer: "PreTrainedTokenizerFast", conversations: Sequence[Sequence[Message]],
    tools: Sequence[Mapping[str, Any]], seed: int,
) -> None:
    """Makes the model and trains it on the conversations.

    Args:
        folder: where the model goes.
        tokenizer: one that was learnt from the conversations.
        conversations: with images.
        tools: offered in them.
        seed: of the weights.
    """
    import torch
    from transformers import Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer.save_pretrained(folder)
    config = _config(tokenizer)
    config.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=_PATCH, temporal_patch_size=2, merge_size=_MERGED,
        size={"shortest_edge": (_PATCH * _MERGED) ** 2, "longest_edge": _SIDE**2}).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    vision = Vision(folder)
    renderer = Renderer(tokenizer, vision=vision)
    examples = [Example(row.ids, row.mask, row.images) for conversation in conversations
                for row in supervised_rows(renderer, conversation, tools)]
    train_on_examples(model, examples, vision)
    model.save_pretrained(folder)


def _config(tokenizer: "PreTrainedTokenizerFast") -> Any:
    from transformers import Qwen3VLConfig

    text = dict(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.08,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5],
                         "mrope_interleaved": True})
    vision = dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=2, patch_size=_PATCH, spatial_merge_size=_MERGED,
        temporal_patch_size=2, out_hidden_size=128, num_position_embeddings=(_SIDE // _PATCH) ** 2,
        deepstack_visual_indexes=[0], initializer_range=0.1)
    start, image, end = tokenizer.convert_tokens_to_ids(list(VISION_MARKERS))
    return Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=image, vision_start_token_id=start,
                         vision_end_token_id=end, video_token_id=VOCABULARY - 1, tie_word_embeddings=True,
                         dtype="float32")
