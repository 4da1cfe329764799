"""Models that nemo_automodel has classes of its own for: its decoders, its experts over several ranks (ep).

Its `from_pretrained` loads parts of a model where they belong, so experts that no rank could hold are never whole.
With ep it shards everything; without, the caller does, as nemo_automodel leaves a model on a single rank in float32,
whatever its precision for computing is. Invariants: attention is that over packed sequences, routers are those that
replay; parameters go by the checkpoint's names wherever they leave the actor. Needs a GPU.
"""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from molt_gym.errors import ConfigError

from ..architecture import EXPERTS
from ..config_actor import Backend
from .attention import ATTENTION, Visible, attend
from .context import Context
from .head import score
from .parallel import Layout

INSTALL = "pip install --no-deps nemo-automodel==0.7.0 torchao==0.16.0, beside transformers==5.18.0"
_UNPACKED = ("actor.backend: 'automodel' computes the attention of this model in its own way, so rows cannot be "
             "packed; write 'transformers' and actor.ep = 1")


def chosen(backend: Backend, config: PreTrainedConfig, layout: Layout) -> bool:
    """Whether nemo_automodel is to build a model. Unless told, it does for mixtures of experts on a single GPU.

    On several, without ep, each would have to hold the whole model before it is sharded.

    Raises:
        ConfigError: it has to and cannot.
    """
    if backend == "automodel" or layout.sizes.ep > 1:
        if importlib.util.find_spec("nemo_automodel") is None:
            raise ConfigError(f"actor.backend: 'automodel' needs nemo-automodel, which is not installed; {INSTALL}; or "
                              "write 'transformers' and actor.ep = 1")
        if not _is_known(config):
            raise ConfigError(f"actor.backend: 'automodel' has no class for {', '.join(config.architectures or ())}; "
                              "write 'transformers' and actor.ep = 1")
        return True
    return (backend == "auto" and layout.shards.device_type == "cuda" and layout.sizes.world == 1
            and any(getattr(config, name, None) for name in EXPERTS)
            and importlib.util.find_spec("nemo_automodel") is not None and _is_known(config))


def _is_known(config: PreTrainedConfig) -> bool:
    from nemo_automodel._transformers.registry import MODEL_ARCH_MAPPING

    return any(name in MODEL_ARCH_MAPPING for name in config.architectures or ())


def build(path: str | Path, device: str, storage: torch.dtype, compute: torch.dtype, ep: int = 1) -> nn.Module:
    """The model of a folder on this rank; with ep > 1 sharded, experts over so many ranks, else whole.

    Args:
        path: of the model.
        device: kind of device, of which the current one is taken.
        storage: dtype of the parameters.
        compute: dtype of forward and backward passes, where it is sharded.
        ep: ranks that share the experts.

    Raises:
        ConfigError: there is no GPU, or attention over packed sequences has no place in the model.
    """
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.models.common import BackendConfig

    # Grouped products of experts take bfloat16 alone.
    experts = "torch_mm" if device == "cuda" and compute == torch.bfloat16 else "torch"
    backend = BackendConfig(attn="sdpa", linear="torch", rope_fusion=False, gate_precision=torch.float32,
                            experts=experts)
    setup = _setup(compute, ep) if ep > 1 else None
    try:
        model = NeMoAutoModelForCausalLM.from_pretrained(
            str(path), dtype=storage, attn_implementation=ATTENTION, use_liger_kernel=False, backend=backend,
            distributed_setup=setup)
    except (AssertionError, RuntimeError) as error:
        if torch.cuda.is_available():
            raise
        raise ConfigError("actor.backend: 'automodel' needs a GPU; write 'transformers' and actor.ep = 1") from error
    if not isinstance(model, PreTrainedModel):
        _adopt(model)
    return model.eval()


def _setup(compute: torch.dtype, ep: int) -> Any:
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config, MoEParallelizerConfig
    from nemo_automodel.components.distributed.mesh import ParallelismSizes

    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return DistributedSetup.build(
        FSDP2Config(mp_policy=precision), ParallelismSizes(ep_size=ep), world_size=dist.get_world_size(),
        # The outer model's own forward is not called.
        moe_parallel_config=MoEParallelizerConfig(reshard_after_forward=True, wrap_outer_model=False))


def _adopt(model: nn.Module) -> None:
    """Give a model with layers of nemo_automodel's own the interface that those of transformers have."""
    model.base_model = _Decoder(model.model)
    # Transformers does not train the embedding of this id.
    model.get_input_embeddings().padding_idx = model.config.pad_token_id
    head = model.get_output_embeddings()
    # The weight is taken without a call of the layer, which is when FSDP gathers it.
    head.score = score
    register_fsdp_forward_method(head, "score")


class _Decoder:
    """Called as a decoder of transformers is; no module, whose parameters would be there twice."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self.layers = list(decoder.layers.children())
        attending = [module for module in decoder.modules() if hasattr(module, "attn_func")]
        if len(attending) < len(self.layers):
            raise ConfigError(_UNPACKED)
        for module in attending:
            module.attn_func = partial(self._attend, module.attn_func)

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, visible: Visible, context: Context | None, **_: Any
    ) -> BaseModelOutput:
        # They stay for layers that are computed again in the backward pass.
        self._packed = {"visible": visible, "context": context}
        return BaseModelOutput(self._decoder(input_ids, position_ids=position_ids))

    def _attend(self, attention: Any, *arguments: Any, **options: Any) -> Tensor:
        with _Packed(self._packed) as mode:
            out = attention(*arguments, **options)
        if not mode.done:
            raise ConfigError(_UNPACKED)
        return out


class _Packed(TorchFunctionMode):
    """Within an attention function of nemo_automodel, which knows the scale and the heads."""

    def __init__(self, packed: dict[str, Any]) -> None:
        super().__init__()
        self._packed, self.done = packed, False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.done = True
        return attend(None, *args[:3], **self._packed, scaling=kwargs.get("scale"))[0].transpose(1, 2)
