"""Runs jobs of the actor in several processes that are forked from one, which is many times faster than starting each.

    python layouts.py FOLDER        reads FOLDER/jobs.pickle, writes FOLDER/NAME.pt for each job
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from molt_gym.trainers.actor.fsdp_actor import ActorSpec, FsdpActor
from molt_gym.trainers.actor.launch import join_group

Job = tuple[str, ActorSpec, list[tuple[Any, ...]]]
"""A name, an actor, and its calls in order: the name of a method and arguments."""


def run(rank: int, folder: Path, jobs: list[Job]) -> None:
    torch.set_num_threads(1)
    for name, spec, calls in jobs:
        world = spec.config.actor.world_size
        if rank < world:
            join_group(dist.FileStore(str(folder / f"{name}.store"), world), rank, world)
            actor = FsdpActor(spec)
            told = [getattr(actor, method)(*arguments) for method, *arguments in calls]
            weights = {name: tensor.detach().clone() for name, tensor in actor.weights()}
            if rank == 0:
                torch.save((told, weights), folder / f"{name}.pt")
            actor.close()
            dist.destroy_process_group()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    todo = pickle.loads((where / "jobs.pickle").read_bytes())
    ranks = max(spec.config.actor.world_size for _, spec, _ in todo)
    start_processes(run, (where, todo), nprocs=ranks, start_method="fork")
