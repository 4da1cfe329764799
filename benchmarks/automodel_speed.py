"""Why nemo_automodel trains slowly on one GPU: forward and backward passes, one change at a time.

    python benchmarks/automodel_speed.py [--tokens 16384] [--steps 4]

A Qwen3 of 0.6B parameters with random weights, rows of 1,024 tokens, the head on every eighth position. The column
"computes in" is the dtype that the first feed-forward layer really saw. Needs a GPU and nemo_automodel; two minutes.
"""

import argparse
import gc
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

ROW = 1024
EVERY = 8

SHAPE = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}

MIXTURE = SHAPE | {"num_hidden_layers": 12, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512}


class Step(nn.Module):
    """Cross-entropy of the next ids at every eighth position."""

    def __init__(self, model: nn.Module, mask: Callable[[Tensor], Tensor | None] = lambda _: None) -> None:
        super().__init__()
        self.model, self._mask = model, mask

    def forward(self, ids: Tensor) -> Tensor:
        """[B, L] -> loss."""
        hidden = self.model.model(input_ids=ids, attention_mask=self._mask(ids))
        hidden = getattr(hidden, "last_hidden_state", hidden)
        logits = self.model.get_output_embeddings()(hidden[:, :-1:EVERY]).flatten(0, 1)
        return F.cross_entropy(logits.float(), ids[:, 1::EVERY].flatten())


def plain(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """By transformers."""
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").to(DEVICE)


def automodel(config: PreTrainedConfig, dtype: torch.dtype, *, setup: bool = True, **backend: str) -> nn.Module:
    """By nemo_automodel, as its documentation does; setup: with its FSDP2."""
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.models.common import BackendConfig

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = BackendConfig(**{"attn": "sdpa", "linear": "torch", "rms_norm": "torch"} | backend)
    return NeMoAutoModelForCausalLM.from_config(
        config, torch_dtype=dtype, attn_implementation="sdpa", use_liger_kernel=False, backend=options,
        distributed_setup=DistributedSetup.build(FSDP2Config(mp_policy=policy), world_size=1) if setup else None)


def sharded(step: Step) -> Step:
    """By our own FSDP2 on one rank: masters in float32, computing in bfloat16."""
    options = {"mesh": init_device_mesh(DEVICE.type, (1,)), "reshard_after_forward": False,
               "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for layer in step.model.model.layers.children():
        fully_shard(layer, **options)
    return fully_shard(step, **options)


def measure(step: Step, ids: Tensor, steps: int) -> tuple[str, int, float, float]:
    """Dtype of the computation, FSDP units, seconds of a pass forward and backward, peak memory in GiB."""
    seen: list[str] = []
    next(step.model.model.layers.children()).mlp.register_forward_pre_hook(
        lambda _, args: seen.append(str(args[0].dtype).removeprefix("torch.")))
    units = sum(isinstance(module, FSDPModule) for module in step.modules())
    torch.cuda.reset_peak_memory_stats()
    for number in range(steps + 2):
        if number == 2:
            torch.cuda.synchronize()
            started = time.perf_counter()
        step(ids).backward()
        step.zero_grad()
    torch.cuda.synchronize()
    return seen[0], units, (time.perf_counter() - started) / steps, torch.cuda.max_memory_allocated() / 2**30


def dense_mask(ids: Tensor) -> Tensor:
    """[B, 1, L, L] bool, as for packed rows."""
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril().expand(
        len(ids), 1, -1, -1)


def variants(config: PreTrainedConfig, mixture: PreTrainedConfig) -> dict[str, Callable[[], Step]]:
    """What is built, by what it shows; rates are only told of the dense model."""
    full, half = torch.float32, torch.bfloat16
    return {
        "transformers, bfloat16": lambda: Step(plain(config, half)),
        "transformers, float32": lambda: Step(plain(config, full)),
        "transformers, float32 + FSDP2 here": lambda: sharded(Step(plain(config, full))),
        "automodel with its FSDP2, float32": lambda: Step(automodel(config, full)),
        "the same, TF32 products": lambda: Step(automodel(config, full)),
        "automodel with its FSDP2, bfloat16": lambda: Step(automodel(config, half)),
        "automodel, float32 + FSDP2 here": lambda: sharded(Step(automodel(config, full, setup=False))),
        "the same, norms torch_fp32": lambda: sharded(Step(
            automodel(config, full, setup=False, rms_norm="torch_fp32"))),
        "the same, dense mask": lambda: sharded(Step(automodel(config, full, setup=False), dense_mask)),
        "mixture, transformers": lambda: sharded(Step(plain(mixture, full))),
        "mixture, automodel": lambda: sharded(Step(automodel(mixture, full, setup=False))),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, tie_word_embeddings=True, max_position_embeddings=4096,
                         architectures=["Qwen3ForCausalLM"])
    mixture = Qwen3MoeConfig(**MIXTURE, norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=4096,
                             architectures=["Qwen3MoeForCausalLM"])
    config.use_cache = mixture.use_cache = False
    ids = torch.randint(0, config.vocab_size, (options.tokens // ROW, ROW), device=DEVICE)
    heads = config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    flop = 6 * ids.numel() * (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size / EVERY)
    lines = []
    for name, make in variants(config, mixture).items():
        torch.set_float32_matmul_precision("high" if "TF32" in name else "highest")
        try:
            dtype, units, seconds, memory = measure(make(), ids, options.steps)
            rate = "" if "mixture" in name else f"{flop / seconds / 1e12:.0f}"
            lines.append(f"{name:36} {dtype:12} {units:9} {ids.numel() / seconds:9,.0f} {rate:>8} {memory:9.1f}")
        except Exception:  # noqa: BLE001  the other variants are of interest all the same
            lines.append(f"{name:36} failed: {traceback.format_exc().splitlines()[-1][:80]}")
        print(lines[-1], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"\n{'model':36} {'computes in':12} {'FSDP units':>9} {'tokens/s':>9} {'TFLOP/s':>8} {'peak GiB':>9}")
    print("\n".join(lines))
    dist.destroy_process_group()


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if __name__ == "__main__":
    main()
