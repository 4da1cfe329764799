"""Which places the parts of a run get in a cluster, worked out from numbers alone; importable without Ray."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from molt_gym.errors import ConfigError

Layout = Literal["colocate", "disaggregate"]
Bundle = dict[str, float]


@dataclass(frozen=True)
class Parts:
    """How many there are of each part; workers: devices of an engine. device: what ranks and engines compute on."""

    ranks: int
    engines: int
    workers: int
    runners: int
    device: Literal["CPU", "GPU"]


@dataclass(frozen=True)
class Plan:
    """bundles: what is reserved, each on one node. ranks, engines, runners: for each its bundles by number."""

    layout: Layout
    bundles: list[Bundle]
    ranks: list[int]
    engines: list[list[int]]
    runners: list[int]


def plan(parts: Parts, layout: Layout) -> Plan:
    """Colocated, engine i shares the devices of the ranks from i × workers on; otherwise each part has its own.

    On CPUs, runner i shares too; beside GPUs it has a CPU of its own.
    """
    gpu, sizes = parts.device == "GPU", parts.workers if parts.device == "GPU" else 1
    if layout == "colocate":
        count = max(parts.ranks, parts.engines * sizes, 0 if gpu else parts.runners)
        bundles: list[Bundle] = [{"GPU": 1, "CPU": 2} if gpu else {"CPU": 1} for _ in range(count)]
        engines = [list(range(i * sizes, (i + 1) * sizes)) for i in range(parts.engines)]
        if not gpu:
            return Plan(layout, bundles, list(range(parts.ranks)), engines, list(range(parts.runners)))
    else:
        bundles = [{"GPU": 1, "CPU": 1} if gpu else {"CPU": 1} for _ in range(parts.ranks)]
        engines = [[parts.ranks + i] for i in range(parts.engines)]
        bundles += [{"GPU": parts.workers, "CPU": 1} if gpu else {"CPU": parts.workers} for _ in engines]
    first = len(bundles)
    bundles += [{"CPU": 1} for _ in range(parts.runners)]
    return Plan(layout, bundles, list(range(parts.ranks)), engines, list(range(first, len(bundles))))


def choose(
    parts: Parts, layout: Literal["auto", "colocate", "disaggregate"], nodes: Sequence[Mapping[str, float]]
) -> Plan:
    """The plan for a cluster of these nodes, whose resources are given by name.

    Raises:
        ConfigError: it does not fit, with the arithmetic.
    """
    layouts: list[Layout] = ["disaggregate", "colocate"] if layout == "auto" else [layout]
    problems = []
    for wanted in layouts:
        found = plan(parts, wanted)
        problem = _problem(found, parts, nodes)
        if problem is None:
            return found
        problems.append(f"{wanted}: {problem}")
    raise ConfigError("ray.layout: the run does not fit into the cluster; write fewer parts or smaller ones, or use a "
                      "larger cluster\n" + "\n".join(problems))


def _problem(found: Plan, parts: Parts, nodes: Sequence[Mapping[str, float]]) -> str | None:
    demand: Counter[str] = Counter()
    for bundle in found.bundles:
        demand.update(bundle)
    for name, amount in demand.items():
        there = sum(node.get(name, 0) for node in nodes)
        if amount > there:
            return f"{_arithmetic(found, parts, name)} = {amount:g} {name}; the cluster has {there:g}"
    # A colocated engine over several GPUs needs them on one node.
    whole = [{name: parts.workers * amount for name, amount in found.bundles[places[0]].items()}
             for places in found.engines if len(places) > 1]
    for needed in (found.bundles, whole):
        for bundle in needed:
            count, size = needed.count(bundle), " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            room = sum(min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in nodes)
            if not room:
                return f"no node has {size} for one part"
            if room < count:
                return f"{count} parts need {size} on a node each; the nodes have room for {room} of them"
    return None


def _arithmetic(found: Plan, parts: Parts, name: str) -> str:
    counts = {"actor.world_size": parts.ranks, "rollout.engines": parts.engines, "rollout.runners": parts.runners}
    if found.layout == "disaggregate":
        firsts = [found.ranks[:1], found.engines[0], found.runners]
        sizes = [found.bundles[first[0]].get(name, 0) if first else 0 for first in firsts]
        return " + ".join(f"{counts[option]} {option} × {size:g}" for option, size in zip(counts, sizes, strict=True)
                          if size)
    shared = ", ".join(f"{option} {counts[option]}" for option in counts)
    if parts.workers > 1:
        shared += f", {parts.workers} GPUs an engine"
    return f"{sum(name in bundle for bundle in found.bundles)} places ({shared})"
