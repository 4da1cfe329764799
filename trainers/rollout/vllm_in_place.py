"""Which models of vLLM can take weights without being loaded anew."""

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.attention.backend import AttentionImplBase

AS_STORED = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods whose kernels, on GPUs, read weights in the layout of a checkpoint."""


def loads_in_place(model: torch.nn.Module) -> bool:
    """Whether kernels read parameters as checkpoints have them, on a GPU, so that they can be written over.

    vLLM's own reloading, which makes each layer anew and then processes it, takes longer.
    """
    for module in model.modules():
        processes = getattr(module, "process_weights_after_loading", None)
        if type(module) is Attention:
            processes = type(module.impl).process_weights_after_loading is not (
                AttentionImplBase.process_weights_after_loading)
        method = getattr(module, "quant_method", None)
        if processes or type(method) not in AS_STORED:
            return False
    return True
