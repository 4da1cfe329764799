"""What a vLLM engine is started with: its arguments, the environment of its process, and what users may not set.

Importing this module does not load vLLM. Invariant: what decides over tokens and log-probabilities is set here and by
the run's own options, never by `rollout.engine_args` or by a model's generation_config.json.
"""

import ast
import difflib
import importlib.util
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from molt_gym.errors import ConfigError

from ..config_rules import speculates

Backend = Literal["gloo", "ipc", "nccl", "file"]

ADAPTER = 1
"""vLLM's number of the one adapter that there may be."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for."""
TRANSFER = "molt-gym"
"""Name under which the workers register how they receive weights."""
SHARED_GPU = 0.45
"""Share of a GPU's memory that an engine takes beside the trainer, unless told otherwise."""
LENT_GPU = 0.8
"""The same where each gives its memory back while the other works."""
INSTALL = "pip install 'molt-gym[vllm]', or on a machine without a GPU: pip install --no-deps -r cpu-engines.lock"


@dataclass(frozen=True)
class Lora:
    """Of the adapter that an update sends in the place of the weights."""

    rank: int
    alpha: float


@dataclass(frozen=True)
class HostSpec:
    """What an engine's process needs to know.

    model: folder of model and tokenizer. dtype: of weights and cache. max_context: tokens of prompt and reply.
    max_sequences: most sequences in the batch. stop_token_ids: end every reply. backend: how weights arrive. cpu:
    whether it runs on the processor. engine_args: further arguments of vLLM's AsyncEngineArgs. spans: whether to take
    versions from the outputs, where vLLM writes them there. routed_experts: whether to tell which experts each position
    went to. release_memory: whether it can sleep. score_temperature: under which prompts are scored. lora: if
    updates bring adapters. vision: whether it is given images; max_pixels: see `molt_gym.tokens.vision.Vision`.
    """

    model: str
    dtype: Literal["float32", "bfloat16"]
    max_context: int
    max_sequences: int
    stop_token_ids: tuple[int, ...]
    backend: Backend
    cpu: bool
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    spans: bool = True
    routed_experts: bool = False
    release_memory: bool = False
    score_temperature: float = 1.0
    lora: Lora | None = None
    vision: bool = False
    max_pixels: int | None = None

    @property
    def workers(self) -> int:
        """Processes over which the model is spread."""
        return engine_workers(self.engine_args)


def engine_workers(engine_args: Mapping[str, Any], option: str = "rollout.engine_args") -> int:
    """Processes, and GPUs if it has any, over which an engine with these arguments spreads the model.

    Raises:
        ConfigError: one of them is no such number.
    """
    sizes = {name: engine_args.get(name, 1)
             for name in ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"{option}.{name}: got {size!r}; write an integer >= 1")
    return math.prod(sizes.values())


def memory_share(engine_args: Mapping[str, Any], default: float) -> float:
    """Share of a GPU's memory that an engine with these arguments takes.

    Raises:
        ConfigError: it is no share.
    """
    share = engine_args.get("gpu_memory_utilization", default)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ConfigError(f"rollout.engine_args.gpu_memory_utilization: got {share!r}; write a number above 0, at most "
                          "1")
    return share


def engine_arguments(spec: HostSpec) -> dict[str, Any]:
    """Keyword arguments for AsyncEngineArgs."""
    share = LENT_GPU if spec.release_memory else SHARED_GPU
    defaults: dict[str, Any] = {"gpu_memory_utilization": share} if spec.backend == "ipc" else {}
    if spec.release_memory:
        defaults["enable_sleep_mode"] = True
    if spec.routed_experts and not spec.cpu:
        defaults["enable_return_routed_experts"] = True
    if spec.cpu:
        # Prompts are never cut into chunks, which would end the engine: vLLM cannot take back a draw of a seeded CPU
        # generator. A single worker runs within vLLM's process, as two that hand over every step cost more.
        defaults = {"enforce_eager": True, "distributed_executor_backend": "uni" if spec.workers == 1 else "mp",
                    "enable_chunked_prefill": False, "max_num_batched_tokens": max(2048, spec.max_context),
                    "kv_cache_memory_bytes": _kv_bytes(spec)}
    if spec.vision:
        # Patches arrive as the trainer has them, and nothing else is looked at.
        defaults |= {"limit_mm_per_prompt": {"video": 0}, "mm_device_do_normalize": False,
                     "skip_mm_profiling": spec.cpu}
    if speculates(spec.engine_args):
        # vLLM's default is on, and what the cache holds of the drafting heads would outlive them.
        defaults["enable_prefix_caching"] = False
    # Where others of a batch have an adapter, vLLM on CPUs takes the last one for those without: it stays empty.
    slots = 2 if spec.cpu else 1
    lora = {} if spec.lora is None else {
        "enable_lora": True, "max_loras": slots, "max_cpu_loras": slots,
        "max_lora_rank": min(rank for rank in LORA_RANKS if rank >= spec.lora.rank)}
    return {"max_logprobs": -1} | defaults | dict(spec.engine_args) | lora | {
        "model": spec.model, "dtype": spec.dtype, "max_model_len": spec.max_context, "max_num_seqs": spec.max_sequences,
        "generation_config": "vllm", "logprobs_mode": "processed_logprobs", "seed": 0,
        "scheduling_policy": "priority",
        "weight_transfer_config": {"backend": TRANSFER},
        "worker_extension_cls": f"{__package__}.vllm_worker.WorkerExtension"}


def environment(cpu: bool, scratch: Path, vision: bool = False) -> dict[str, str]:
    """Environment variables of the engine's process; `scratch` takes its sockets and files."""
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
    if not cpu:
        return {**os.environ, **ours}
    # Compiling takes half a minute at the first request, even in eager mode, and bound threads would all meet on the
    # same cores; users may know better. Without multiprocessing vLLM takes the "uni" executor on CPUs.
    defaults = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if vision and importlib.util.find_spec("torchvision") is None:
        package = scratch / "stand-in" / "torchvision"
        package.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("torchvision_stand_in.py"), package / "__init__.py")
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    return {**defaults, **os.environ, **ours, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def check_engine_args(given: Mapping[str, Any], option: str = "rollout.engine") -> None:
    """Raise ConfigError without vLLM, for arguments that it does not know, and for numbers of processes that are none.

    The names are read from vLLM's source, as importing it takes many seconds. Where they cannot be found, vLLM itself
    refuses unknown ones when it starts.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ConfigError(f"{option}: 'vllm' needs vLLM, which is not installed; {INSTALL}")
    source = Path(spec.origin).with_name("engine") / "arg_utils.py"
    known = _fields(source.read_text(encoding="utf-8")) if source.is_file() else set()
    for name in given if known else ():
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1, 0)[0]
            raise ConfigError(f"{option}_args.{name}: vLLM has no such argument; nearest: {nearest}")
    engine_workers(given, f"{option}_args")


def _fields(source: str) -> set[str]:
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)
               and node.name in ("EngineArgs", "AsyncEngineArgs"))
    return {line.target.id for node in classes for line in node.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)}


def _kv_bytes(spec: HostSpec) -> int:
    """Room for every sequence at full length, and at most 1 GiB unless a single one needs more."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(spec.model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * size * (4 if spec.dtype == "float32" else 2)
    # Caches are made of blocks of 128 tokens on CPUs, and one block is set aside.
    rows = -(-spec.max_context // 128) * 128
    return token * (max(rows, min(rows * spec.max_sequences, 2**30 // token)) + 256)
