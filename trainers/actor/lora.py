"""LoRA: low-rank adapters beside the linear layers of a frozen model, with the names and files of peft.

A layer computes W·x + b + (alpha / rank)·B·(A·x), where A [rank, in] and B [out, rank] are trained in float32 and B is
0 at first. Invariants: the base model's parameters keep their names and values; adapters are the same whatever the
number of ranks; there is no dropout, under which sampler and trainer would be two distributions.
"""

import hashlib
import json
import math
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from molt_gym.errors import ConfigError

from ..config_actor import LoraConfig

PREFIX = "base_model.model."
"""Of the names that peft gives to parameters."""
_BLOCKS, _BLOCK = 64, 1 << 16
_WEIGHTS = ("*.safetensors", "*.bin")


class LoraLinear(nn.Linear):
    """A linear layer, taken over with its frozen parameters, and its adapter."""

    def __init__(self, linear: nn.Linear, config: LoraConfig, seed: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.scale, self.enabled = config.alpha / config.rank, True
        device, generator = self.weight.device, torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(self.in_features)
        a = torch.empty(config.rank, self.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Linear(self.in_features, config.rank, bias=False, device="meta")
        self.lora_B = nn.Linear(config.rank, self.out_features, bias=False, device="meta")
        self.lora_A.weight = nn.Parameter(a.to(device))
        self.lora_B.weight = nn.Parameter(torch.zeros(self.out_features, config.rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y = super().forward(x)
        return y + self.scale * self.lora_B(self.lora_A(x)) if self.enabled else y


def add_adapters(model: nn.Module, config: LoraConfig, seed: int) -> None:
    """Freeze a model, before it is sharded, and give the layers that `config` names an adapter.

    Raises:
        ConfigError: a name fits no linear layer.
    """
    model.requires_grad_(False)
    experts = next((name for name, parameter in model.named_parameters() if parameter.ndim == 3), None)
    if experts and dist.get_rank() == 0:
        warnings.warn(f"actor.lora: stacks of matrices such as {experts} get no adapter and stay as they are",
                      stacklevel=2)
    for name in _targets(model, config):
        owner, _, last = name.rpartition(".")
        parent, linear = model.get_submodule(owner), model.get_submodule(name)
        setattr(parent, last, LoraLinear(linear, config, seed ^ zlib.crc32(name.encode())))


def _targets(model: nn.Module, config: LoraConfig) -> list[str]:
    """Names of the layers that get an adapter, in the model's order."""
    head = model.get_output_embeddings()
    linear = {name for name, module in model.named_modules()
              if isinstance(module, nn.Linear) and module is not head and "visual" not in name.split(".")}
    if config.target_modules == ("all-linear",):
        return [name for name, _ in model.named_modules() if name in linear]
    chosen: set[str] = set()
    for target in config.target_modules:
        fitting = {name for name in linear if name == target or name.endswith(f".{target}")}
        if not fitting:
            raise ConfigError(f"actor.lora.target_modules: {target!r} {_why_not(model, target)}; write 'all-linear' or "
                              f"some of {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}")
        chosen |= fitting
    return [name for name, _ in model.named_modules() if name in chosen]


def _why_not(model: nn.Module, target: str) -> str:
    others = [name for name, _ in (*model.named_parameters(), *model.named_modules())
              if f".{target}." in f".{name}." and "." in name]
    if not others:
        return "is no layer of this model"
    kind = "experts, a stack of matrices" if "experts" in others[0] else "an embedding, the head or a block"
    return f"is no linear layer ({others[0]}, {kind}), and only those can have an adapter"


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within, the base model computes."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def merged(model: nn.Module, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters by the base model's names, each with its adapter added, in float32; all ranks must iterate."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    for name, parameter in named.items():
        owner, _, last = name.rpartition(".")
        if owner in layers and last == "weight":
            a, b = (gathered(named[f"{owner}.lora_{part}.weight"]) for part in "AB")
            yield name, torch.addmm(gathered(parameter).float(), b, a, alpha=layers[owner].scale)
        elif not name.endswith((".lora_A.weight", ".lora_B.weight")):
            yield name, gathered(parameter)


def gathered(parameter: Tensor) -> Tensor:
    """A parameter, gathered where it is sharded; all ranks must call."""
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int, alpha: float, base: str) -> None:
    """Write a folder that peft and vLLM load; base: the model that it belongs to.

    tensors: by peft's names, in float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
              folder / "adapter_model.safetensors", metadata={"format": "pt"})
    layers = sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors})
    text = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "init_lora_weights": True, "inference_mode": True, "use_rslora": False, "use_dora": False,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "target_modules": layers}
    (folder / "adapter_config.json").write_text(json.dumps(text, indent=2), encoding="utf-8")


def base_hash(path: str | Path) -> Tensor:
    """[32] uint8 that tell one base model from another: of its weight files' sizes and parts of their content.

    A model that was trained differs everywhere, so parts are enough, and large models need not be read twice.
    """
    digest = hashlib.sha256()
    for file in sorted(file for pattern in _WEIGHTS for file in Path(path).glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{size}\n".encode())
        with file.open("rb") as stream:
            for block in range(_BLOCKS):
                stream.seek(max(0, size - _BLOCK) * block // (_BLOCKS - 1))
                digest.update(stream.read(_BLOCK))
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)
