"""A model folder from a checkpoint: no GPU, no process group, whatever number of ranks wrote it.

Invariants: the folder is the one that training began with, except for the weights that were trained, and it appears
when it is whole; each tensor has the dtype that it came in, unless another one is asked for; a tied head is stored
once; of the weights no more is in memory than the layer being read and the file being written.
"""

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from molt_gym.errors import ConfigError

from .actor.lora import PREFIX, base_hash, write_adapter
from .actor.state import NAMES
from .architecture import LOADING, model_class
from .atomic import atomic_path
from .checkpoint import STATE, best_checkpoint, checkpoint_path, load_state, newest_checkpoint, problem
from .config import ActorConfig

SHARD_BYTES = 4 << 30
_BESIDE = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
"""What lies beside the weights of a model and belongs to it: configuration, tokenizer, template, code."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INDEX = "model.safetensors.index.json"

Named = Iterable[tuple[str, Tensor]]


def about(model: Path, actor: ActorConfig) -> dict[str, Any]:
    """What a checkpoint must tell of a run, to be exported."""
    lora = actor.lora
    return {"model": str(model.absolute()), "lora_scale": lora.alpha / lora.rank if lora.rank else 0}


def find_checkpoint(source: Path, step: int | str | None) -> Path:
    """The checkpoint that a folder is or, of a run, that of a step, the "best" one, or the newest one.

    Raises:
        ConfigError: there is none, or it is not whole.
    """
    folder = source / "checkpoints"
    if step not in (None, "best") and not str(step).isdecimal():
        raise ConfigError(f"step: {step!r} is none of a run; write its number, or 'best'")
    if (source / STATE).is_file():
        if step is not None:
            raise ConfigError(f"step: {step!r} of {source}, which is one checkpoint; name the run, or leave step out")
        path: Path | None = source
    elif not folder.is_dir():
        raise ConfigError(f"export: {source} is neither a run nor a checkpoint; write RUN or RUN/checkpoints/step-...")
    elif step is None:
        path = newest_checkpoint(folder)
    else:
        path = best_checkpoint(folder) if step == "best" else checkpoint_path(folder, int(step))
    if path is None or not path.is_dir():
        there = ", ".join(sorted(other.name for other in folder.glob("step-*"))) or "none"
        what = "no whole checkpoint" if step is None else f"no checkpoint of step {step}" if step != "best" else (
            "no best checkpoint, as none was evaluated")
        raise ConfigError(f"export: {source} has {what}; there are: {there}")
    if (trouble := problem(path)) is not None:
        raise ConfigError(f"export: {path} is not whole ({trouble}); choose another step")
    return path


def export(
    source: str | Path, out: str | Path, *, dtype: str | None = None, step: int | str | None = None,
    model: str | Path | None = None,
) -> Path:
    """See `molt_gym.export`."""
    checkpoint, out = find_checkpoint(Path(source).expanduser(), step), Path(out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out: {out} is there already; choose a new folder")
    base = Path(model or load_state(checkpoint).get("model", "")).expanduser()
    if not (base / "config.json").is_file():
        raise ConfigError(f"model: there is no model folder {base}, with which the run began and whose tokenizer and "
                          "configuration are exported too; name where it is now")
    if dtype not in (None, *_DTYPES.values()):
        raise ConfigError(f"dtype: {dtype!r} is none that models are exported in; write float32, bfloat16 or float16")
    export_checkpoint(checkpoint, out, base, dtype=None if dtype is None else getattr(torch, dtype))
    return out


def export_checkpoint(
    checkpoint: Path, out: Path, base: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES,
    adapter: Path | None = None,
) -> None:
    """Write the folder `base` with the weights of a checkpoint as `out`, in place of what is there.

    Args:
        base: model folder with which training began.
        dtype: of all weights; None keeps that of each.
        shard_bytes: where a file of weights ends.
        adapter: where adapters, if the checkpoint has any, are written by themselves, too, as peft does.

    Raises:
        ConfigError: its adapters were trained on another base.
    """
    config, scale = AutoConfig.from_pretrained(base), load_state(checkpoint).get("lora_scale", 0)
    if scale:
        _check_base(checkpoint, base)
    with LOADING, torch.device("meta"):
        skeleton = model_class(config).from_config(config)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(out) as folder:
        folder.mkdir()
        for file in base.iterdir():
            if file.is_file() and file.suffix in _BESIDE and file.name != _INDEX:
                shutil.copyfile(file, folder / file.name)
        files = _Files(base, dtype, config.dtype or torch.float32)
        names = _write(folder, _tensors(checkpoint / "actor", skeleton, files, scale), shard_bytes)
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if dtype is not None:
            settings = _with_dtype(settings, str(dtype).removeprefix("torch."))
        if names & skeleton.all_tied_weights_keys.keys():
            # They came with a tie that the trained ones do not have.
            settings["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if scale and adapter is not None:
        _write_adapter(checkpoint, adapter, base, scale)


def _check_base(checkpoint: Path, base: Path) -> None:
    expected = torch.zeros(32, dtype=torch.uint8)
    _load({"base": expected}, checkpoint / "actor")
    if not torch.equal(expected, base_hash(base)):
        raise ConfigError(f"model: the adapters in {checkpoint} were trained on other weights than those in {base}; "
                          "name the model with which the run began")


def _write_adapter(checkpoint: Path, out: Path, base: Path, scale: float) -> None:
    tensors = {PREFIX + name: tensor for layer in _layers(checkpoint / "actor") for name, tensor in layer.items()}
    rank = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)
    with atomic_path(out) as folder:
        write_adapter(folder, tensors, rank, scale * rank, str(base))


class _Files:
    """Weights of a model folder, read one at a time; dtype: of what is written, None for its own or else `usual`."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, usual: torch.dtype) -> None:
        self._dtype, self._usual = dtype, usual
        self._readers = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors"))]
        self.names = {name: reader for reader in self._readers for name in reader.keys()}

    def __getitem__(self, name: str) -> Tensor:
        return self.names[name].get_tensor(name)

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """In the dtype in which it is written under this name."""
        if not tensor.is_floating_point():
            return tensor
        if self._dtype is None and name in self.names:
            kept = getattr(torch, _DTYPES.get(self.names[name].get_slice(name).get_dtype(), ""), self._usual)
            return tensor.to(kept)
        return tensor.to(self._dtype or self._usual)


def _renamed(folder: Path, skeleton: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """What gives the weights of a layer the names, and cuts them into the parts, that model folders have."""
    entry = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.get(NAMES)
    if entry is None:
        return partial(revert_weight_conversion, skeleton)
    kept = torch.empty(entry.size, dtype=torch.uint8)
    _load({NAMES: kept}, folder)
    adapter = pickle.loads(kept.numpy().tobytes())
    return lambda layer: dict(part for item in layer.items() for part in adapter.convert_single_tensor_to_hf(*item))


def _tensors(folder: Path, skeleton: Any, files: _Files, scale: float) -> Iterator[tuple[str, Tensor]]:
    """All weights by the names that they have in model folders: the trained ones, then what else the base has."""
    done, renamed = set(skeleton.all_tied_weights_keys), _renamed(folder, skeleton)
    for layer in _layers(folder):
        adapters = {name: layer.pop(name) for name in list(layer) if ".lora_" in name}
        trained = renamed(layer)
        for owner in (name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")):
            a, b = (adapters[f"{owner}.lora_{part}.weight"] for part in "AB")
            (name,) = renamed({f"{owner}.weight": torch.empty(0)})
            trained[name] = torch.addmm(files[name].float(), b, a, alpha=scale)
        for name, tensor in trained.items():
            done.add(name)
            yield name, files.cast(name, tensor)
    for name in files.names.keys() - done:
        yield name, files.cast(name, files[name])


def _layers(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The trained weights, a layer at a time, by their names in the model."""
    known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {key.removeprefix("model."): value for key, value in known.items() if key.startswith("model.")}
    for _, names in groupby(sorted(shapes, key=_layer), _layer):
        layer = {name: torch.empty(shapes[name].size, dtype=shapes[name].properties.dtype) for name in names}
        _load({"model": layer}, folder)
        yield layer


def _load(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        # That there is no process group.
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def _layer(name: str) -> str:
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


def _write(folder: Path, tensors: Named, shard_bytes: int) -> set[str]:
    """Write safetensors, with an index where there are several; returns the names."""
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    size = total = 0

    def end() -> None:
        save_file(shard, folder / f"{len(shards):05d}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            end()
            size = 0
        shard[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    end()
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    for number, name in enumerate(names):
        (folder / f"{number:05d}").rename(folder / name)
    weights = {tensor: file for file, tensors_of in zip(names, shards, strict=True) for tensor in tensors_of}
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return set(weights)


def _with_dtype(settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Also within parts, such as that for text."""
    changed = {key: _with_dtype(value, dtype) if isinstance(value, dict) else value for key, value in settings.items()}
    return changed | {key: dtype for key in ("dtype", "torch_dtype") if key in changed}
