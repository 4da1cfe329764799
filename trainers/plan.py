"""`molt-gym plan`: what a run will need and how long its steps may take, worked out from its settings alone.

Invariants: nothing is started and no weights are read; what training would refuse is refused here by the same code.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig

from molt_gym.cli_words import read_toml
from molt_gym.errors import ConfigError

from .actor.admission import planned
from .actor.fsdp_actor import ActorSpec
from .actor.memory import GIB, describe, fit
from .actor.memory import Plan as Training
from .actor.sizes import Shape
from .architecture import check_architecture
from .config import Config, load_config, load_settings
from .distill import SETTINGS as DISTILLATION
from .placement.places import Parts, choose
from .plan_parts import Fleet, rollout_lines, step_lines
from .plan_rates import Rates, TrainRates
from .rollout.mixture import split
from .rollout.vllm_spec import LENT_GPU, SHARED_GPU, engine_workers, memory_share
from .session import merge, mixed_preset, pick_dtype
from .sft_config import SftConfig
from .sft_loop import actor_config

MEMORY = {"h100": 79.1, "h200": 139.8, "b200": 178.3, "b300": 267.6}
"""GiB of a GPU that programs can have: an H200's as measured, of the others what nvidia-smi is reported to show, less a
little."""
SPEED = {"h100": (1.0, 3.35e12, 450e9), "b200": (2.27, 8e12, 900e9), "b300": (2.27, 8e12, 900e9)}
"""Products of matrices over an H200's in bfloat16, and bytes a second of memory and NVLink, by the data sheets (989 and
2,250 TFLOP/s)."""
ALONE = 0.92
"""Share of a GPU's memory that vLLM takes if it is not told otherwise."""

_SHORT = {"N": "nodes", "c": "cpus-per-task"}
"""Slurm's own short names of what is read."""


@dataclass(frozen=True)
class Cluster:
    """Nodes with GPUs of a kind; memory: GiB of each. cpus: of a node, if known."""

    nodes: int
    gpus: int
    kind: str
    memory: float
    cpus: int = sys.maxsize

    @classmethod
    def of(cls, text: str, gpus: str | None = None, nodes: int | None = None, memory: float | None = None) -> "Cluster":
        """What the arguments say, and where they are None the `#SBATCH` lines of a recipe.

        Raises:
            ConfigError: how many nodes there are or GPUs a node has, or their memory, is not known.
        """
        said = {name or _SHORT.get(short, short): value for name, short, value in re.findall(
            r"^#SBATCH\s+(?:--([\w-]+)[=\s]|-(\w))\s*(\S+)", text, re.MULTILINE)}
        for name in _SHORT.values():
            if not said.get(name, "1").isdecimal():
                raise ConfigError(f"#SBATCH --{name}: got {said[name]!r}; write one number")
        devices = [part.removeprefix("gpu:") for part in said.get("gres", "").split(",") if part.startswith("gpu:")]
        gpus = gpus or said.get("gpus-per-node") or "".join(devices[:1])
        kind, _, count = gpus.rpartition(":")
        if not count.isdecimal() or not int(count):
            raise ConfigError(f"--gpus: got {gpus!r}; write KIND:COUNT, such as h200:8, there or in the file as "
                              "#SBATCH --gpus-per-node=h200:8")
        if memory is None and kind.lower() not in MEMORY:
            raise ConfigError(f"--gpus: how much memory a {kind or 'GPU'} has is not known; write one of "
                              f"{', '.join(MEMORY)}, or --memory GIB")
        cpus = int(said.get("cpus-per-task", sys.maxsize))
        return cls(int(said.get("nodes", 1)) if nodes is None else nodes, int(count), kind,
                   MEMORY[kind.lower()] if memory is None else memory, cpus)

    def rates(self) -> dict[str, dict[str, float]]:
        """Those of `Rates` in which its GPUs differ from an H200, as far as they are known."""
        if self.kind.lower() not in SPEED:
            return {}
        products, memory, link = SPEED[self.kind.lower()]
        return {"train": {"peak": TrainRates().peak * products, "within": link}, "engine": {"memory": memory}}


def plan(path: Path, overrides: Mapping[str, Any] | None = None, *, gpus: str | None = None, nodes: int | None = None,
         memory: float | None = None, rates: Path | None = None) -> str:
    """Lines about the run of a settings file; one with `data` is for `sft`.

    Args:
        path: a TOML file that `train`, `distill` or `sft` takes.
        overrides: settings over those of the file.
        gpus: of a node, KIND:COUNT; without it, as the file's #SBATCH lines say, and so for `nodes`.
        nodes: of the cluster.
        memory: GiB of a GPU.
        rates: TOML file with rates, see `plan_rates.Rates`; those that it leaves out are as an H200 has them, or as
            `SPEED` says of the kind.

    Raises:
        ConfigError: a setting is wrong, or the run cannot fit.
    """
    schema = schema_of(path)
    cluster = Cluster.of(path.read_text(encoding="utf-8"), gpus, nodes, memory)
    measured = load_settings(Rates, {}, file=rates, preset=cluster.rates())
    if schema is SftConfig:
        return _sft_plan(path, overrides, cluster)
    config = _settings(path, overrides)
    model = Model.of(config, config.model, path, cluster.memory)
    colocated, told = _places(config, cluster)
    share = memory_share(config.rollout.engine_args, ALONE if not colocated else
                         LENT_GPU if config.rollout.release_memory else SHARED_GPU)
    alone = config.rollout.release_memory or config.rollout.engine == "transformers"
    taken = cluster.memory * share if colocated and not alone else 0.0
    beside = _beside(config, model, path, cluster)
    lines = [*_head(model, cluster, told), model.actor_line(cluster.memory - taken, beside)]
    if config.rollout.engine == "transformers":
        return "\n".join([*lines, "engine    transformers, beside the first rank; seconds are told of vllm alone"])
    fleet = Fleet.of(config, model.shape, model.cached, cluster.memory * share * GIB, measured.engine)
    lines += rollout_lines(config, fleet, measured.episode)
    return "\n".join(lines + step_lines(
        config, model.training, fleet, measured, (colocated, config.actor.world_size <= cluster.gpus)))


def schema_of(path: Path) -> type[Config] | type[SftConfig]:
    """Which options a settings file has: those of `sft` if it names data, else those of `train`."""
    if not path.is_file():
        raise ConfigError(f"config file {path}: is not there; write the path of a TOML file")
    return SftConfig if "data" in read_toml(path) else Config


def _sft_plan(path: Path, overrides: Mapping[str, Any] | None, cluster: Cluster) -> str:
    sft = load_settings(SftConfig, {}, file=path, overrides=overrides)
    ranks = sft.actor.world_size
    if ranks > cluster.gpus:
        raise ConfigError(f"actor.world_size: {ranks} ranks for the {cluster.gpus} GPUs of a node, and sft runs on "
                          "one; write at most that")
    model = Model.of(actor_config(sft), sft.model, path, cluster.memory)
    each = -(-sft.batch_size // model.training.sizes.dp)
    return "\n".join([*_head(model, cluster, f"{ranks} ranks"), model.actor_line(cluster.memory, {}),
                      f"step      {sft.batch_size} conversations, {each} a share"])


def _head(model: "Model", cluster: Cluster, told: str) -> list[str]:
    return [f"model     {model.name}: {model.shape.parameters() / 1e9:.2f}B parameters, by {model.file}",
            f"devices   {cluster.nodes} × {cluster.gpus} {cluster.kind} of {cluster.memory:g} GiB: {told}"]


@dataclass(frozen=True)
class Model:
    """A model, how it is to be trained, and what its configuration says of its text part."""

    name: str
    file: Path
    shape: Shape
    training: Training
    config: Any

    @classmethod
    def of(cls, config: Config, name: str | None, path: Path, memory: float) -> "Model":
        """That of a run on GPUs of so many GiB. Raises ConfigError where it cannot be computed, or cut so."""
        file = model_file(name, path)
        read = AutoConfig.from_pretrained(file)
        check_architecture(read, config.rollout.max_context)
        spec = ActorSpec(str(file), config, pick_dtype(config.actor.dtype, True), 1)
        shape, training = planned(spec, memory * GIB)
        return cls(name or "", file, shape, training, read.get_text_config())

    @property
    def cached(self) -> tuple[int, int]:
        """Numbers that a token leaves in the cache of each layer, and over how many GPUs they can be spread."""
        if rank := getattr(self.config, "kv_lora_rank", None):
            return rank + self.config.qk_rope_head_dim, 1
        return 2 * self.shape.kv_heads * self.shape.head_dim, self.shape.kv_heads

    def actor_line(self, room: float, beside: Mapping[str, float]) -> str:
        """What a rank needs of so many GiB, some of which others take. Raises ConfigError if it does not fit."""
        free = room - sum(beside.values())
        whole = fit(self.shape, self.training, free * GIB)
        others = "".join(f", less {amount:.1f} for {name}" for name, amount in beside.items())
        return f"actor     {describe(self.shape, self.training, whole)} of {room:.1f}{others}"


def model_file(name: str | None, path: Path) -> Path:
    """The configuration of a model: of a folder, or models/NAME.json beside the settings file, or of the hub's cache.

    Raises:
        ConfigError: there is none.
    """
    if name is None:
        raise ConfigError(f"model: missing in {path}; write a hub name or a folder")
    tried = [Path(name) / "config.json", path.parent / "models" / f"{Path(name).name}.json"]
    if isinstance(cached := try_to_load_from_cache(name, "config.json") if name.count("/") == 1 else None, str):
        tried.append(Path(cached))
    for file in tried:
        if file.is_file():
            return file
    raise ConfigError(f"model: no configuration of {name!r} is at hand; write a folder that has a config.json, or put "
                      f"that file there as {tried[1]}")


def _beside(config: Config, model: Model, path: Path, cluster: Cluster) -> dict[str, float]:
    """GiB of a rank that the arithmetic of the actor leaves out."""
    if not config.algorithm.teacher or config.algorithm.teacher_engine != "actor":
        return {}
    teacher = Model.of(config, config.algorithm.teacher, path, cluster.memory).shape
    more = (teacher.parameters() - model.shape.parameters()) / model.training.sizes.shards + teacher.embeddings
    return {"a larger teacher": max(0.0, model.training.compute * more / GIB)}


def _places(config: Config, cluster: Cluster) -> tuple[bool, str]:
    """Whether engines share GPUs with ranks, and where everything is. Raises ConfigError if it does not fit."""
    ranks, rollout = config.actor.world_size, config.rollout
    parts = Parts(ranks, rollout.engines, engine_workers(rollout.engine_args), rollout.runners, "GPU")
    told = f"{ranks} ranks, {rollout.engines} engines × {parts.workers} GPUs, {rollout.runners} runners"
    if config.placement == "local":
        if max(ranks, parts.engines * parts.workers) > cluster.gpus:
            raise ConfigError(f"placement: 'local' with {told} on the {cluster.gpus} GPUs of a node; write 'ray'")
        return True, f"{told}, on one node"
    node = {"GPU": float(cluster.gpus), "CPU": cluster.cpus}
    found = choose(parts, config.ray.layout, [node] * cluster.nodes)
    used = sum(bundle.get("GPU", 0) for bundle in found.bundles)
    return found.layout == "colocate", f"{told}, {found.layout}; {used:g} of {cluster.nodes * cluster.gpus} GPUs"


def _settings(path: Path, overrides: Mapping[str, Any] | None) -> Config:
    # A file for `distill` may leave out what that sets itself.
    default = DISTILLATION if read_toml(path).get("algorithm", {}).get("teacher") else {}
    draft = load_config(file=path, overrides=overrides, preset=default)
    preset = merge(default, mixed_preset(split(draft), draft.model or ""))
    return load_config(file=path, overrides=overrides, preset=preset)
