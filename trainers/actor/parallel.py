"""The ranks of the actor as meshes, tensor parallelism on transformers models, and gradients that agree in all layouts.

Invariants: a parameter is sharded over the ranks of `Layout.shards`, and by tensor parallelism in addition where the
model's own plan says so; a loss is a sum over tokens, so gradients are sums over ranks; ranks of one tp group see the
same tokens and keep what they do not shard equal to the bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from molt_gym.errors import ConfigError

from .context import Context
from .sizes import Sizes

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_OF_HEADS = "replicated_with_grad_allreduce"
"""What transformers calls a weight that each tp rank applies to its own heads."""


@dataclass(frozen=True)
class Layout:
    """This rank's place.

    shards: mesh that parameters are sharded over. tp: of tensor parallelism, or None. context: the ranks that hold the
    same rows' other tokens, or None. share: which share of the rows this rank has. first: whether it speaks for all
    that have the same.
    """

    sizes: Sizes
    shards: DeviceMesh
    tp: DeviceMesh | None
    context: Context | None
    share: int
    first: bool

    @classmethod
    def of(cls, sizes: Sizes, device: str) -> "Layout":
        """That of this process, in a group of `sizes.world` that exists; all ranks must call."""
        mesh = init_device_mesh(device, (sizes.shards, sizes.tp), mesh_dim_names=("shards", "tp"))
        share, place = divmod(dist.get_rank(), sizes.cp * sizes.tp)
        context = None
        if sizes.cp > 1:
            rows = init_device_mesh(device, (sizes.dp, sizes.cp, sizes.tp), mesh_dim_names=("dp", "cp", "tp"))
            context = Context(rows.get_group("cp"), rows.get_local_rank("cp"), sizes.cp)
        return cls(sizes, mesh["shards"], mesh["tp"] if sizes.tp > 1 else None, context, share, place == 0)

    def finish(self, named: Mapping[str, nn.Parameter], plan: Mapping[str, str]) -> None:
        """With tp, give weights that it does not shard one gradient on its ranks; plan: `tensor_plan` of the model."""
        for name, parameter in named.items():
            if parameter.grad is None or "tp" in (parameter.grad.device_mesh.mesh_dim_names or ()):
                continue
            local = parameter.grad.to_local()
            dist.all_reduce(local, group=self.tp.get_group())
            if plan.get(name.rpartition(".")[0]) != _OF_HEADS:
                # Each rank has the whole gradient; on a GPU only nearly the same one, as sums have no order there.
                local /= self.sizes.tp


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """What transformers plans for each module of a model under tensor parallelism, by full names."""
    patterns = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is model.get_decoder()), "")
    return {name: style for name, module in model.named_modules() for pattern, style in patterns.items()
            if fnmatchcase(name, prefix + pattern)}


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard what `tensor_plan` has columns and rows for; everything else is computed by each rank of the mesh.

    Raises:
        ConfigError: there is no such plan.
    """
    plan = {name: _STYLES[style]() for name, style in tensor_plan(model).items()
            if style in _STYLES and isinstance(model.get_submodule(name), nn.Linear)}
    if not plan:
        raise ConfigError(f"actor.tp: {mesh.size()} for a {model.config.model_type}, which transformers has no tensor "
                          "parallel plan for; write 1")
    # Each rank has read the whole model, and takes its part without asking the first.
    parallelize_module(model, mesh, plan, src_data_rank=None)

