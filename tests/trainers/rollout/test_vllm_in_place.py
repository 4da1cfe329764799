"""Which layers of vLLM, on a GPU, hold weights as checkpoints do."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


def module(**attributes) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def attention(impl: type, cls: type | None = None) -> torch.nn.Module:
    from vllm.model_executor.layers.attention import Attention

    made = (cls or Attention).__new__(cls or Attention)
    torch.nn.Module.__init__(made)
    object.__setattr__(made, "impl", impl.__new__(impl))
    return made


def layers() -> list[torch.nn.Module]:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    return [module(), module(quant_method=None), module(quant_method=UnquantizedLinearMethod()),
            module(quant_method=UnquantizedEmbeddingMethod()), attention(FlashAttentionImpl)]


def test_a_dense_model_as_it_was_saved_is_written_over():
    from molt_gym.trainers.rollout.vllm_in_place import loads_in_place

    assert loads_in_place(torch.nn.Sequential(*layers()))


@pytest.mark.parametrize("odd", ["quantised", "experts", "packs", "latent attention", "kernel that packs"])
def test_one_layer_that_processes_its_weights_is_enough_to_reload_all(odd):
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from molt_gym.trainers.rollout.vllm_in_place import loads_in_place

    class Packs(UnquantizedLinearMethod):
        """One of a quantisation, which may do anything."""

    class Latent(Attention):
        """Another kind of attention."""

    class Kernel(FlashAttentionImpl):
        def process_weights_after_loading(self, act_dtype):
            """Keep a copy."""

    layer = {"quantised": lambda: module(quant_method=Packs()),
             "experts": lambda: module(quant_method=SimpleNamespace()),
             "packs": lambda: module(process_weights_after_loading=print),
             "latent attention": lambda: attention(FlashAttentionImpl, Latent),
             "kernel that packs": lambda: attention(Kernel)}[odd]()
    assert not loads_in_place(torch.nn.Sequential(*layers(), torch.nn.Sequential(layer)))
