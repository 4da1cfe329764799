"""An adapter (LoRA) in a worker of vLLM, put there from memory.

vLLM itself would read it from a folder at the first request. Invariant: there is one adapter, it changes between two
tokens only, and every layer it has finds its place.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from .vllm_spec import ADAPTER, Lora


def put_adapter(runner: Any, tensors: Mapping[str, Tensor], lora: Lora) -> None:
    """Replace the adapter of a model runner, for all requests that name it; without tensors, by one that adds nothing.

    tensors: by peft's names.

    Raises:
        ValueError: vLLM has no adapter for a layer.
    """
    manager = runner.lora_manager._adapter_manager
    if tensors:
        adapter = _adapter(runner, manager, tensors, lora)
    else:
        adapter = manager.create_dummy_lora(ADAPTER, lora.rank, runner.lora_manager.embedding_modules)
    manager.remove_adapter(ADAPTER)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER)
    for module in runner.model.modules():
        if isinstance(module, LogitsProcessorWithLoRA) and isinstance(module.punica_wrapper, PunicaWrapperCPU):
            module.punica_wrapper.add_lora_logits = partial(_add_logits, module.punica_wrapper)


def _add_logits(wrapper: PunicaWrapperCPU, y: Tensor, x: Tensor, *arguments: Any, **options: Any) -> None:
    """As vLLM does; and for the rows of a text that is scored, for which vLLM has but one index a request."""
    rows, requests = x.view(-1, x.shape[-1]).shape[0], wrapper.indices_len[1]
    if rows != requests:
        # Texts are scored with the adapter, which has the first place.
        kept = wrapper._sampler_indices[:rows].clone()
        wrapper._sampler_indices[:rows], wrapper.indices_len[1] = 0, rows
    PunicaWrapperCPU.add_lora_logits(wrapper, y, x, *arguments, **options)
    if rows != requests:
        wrapper._sampler_indices[:rows], wrapper.indices_len[1] = kept, requests


def _adapter(runner: Any, manager: Any, tensors: Mapping[str, Tensor], lora: Lora) -> LoRAModel:
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER, dict(tensors), PEFTHelper(r=lora.rank, lora_alpha=lora.alpha, target_modules=[]), device="cpu",
        dtype=manager.lora_config.lora_dtype, weights_mapper=renames(manager.model))
    places = set(manager.modules).union(*manager.packed_modules.values())
    # Each worker of a pipeline has layers of its own.
    if missing := set() if runner.parallel_config.pipeline_parallel_size > 1 else set(adapter.loras) - places:
        raise ValueError(f"adapter: vLLM has no place for {len(missing)} layers, such as {min(missing)}; write "
                         "actor.lora.transfer = 'merged'")
    return adapter


def renames(model: Any) -> Any:
    """What maps the checkpoint's names to those of a model of vLLM, and leaves q_proj apart from qkv_proj; or None."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    # By vLLM 0.32 and 0.25; mappers without either rename alone.
    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper
