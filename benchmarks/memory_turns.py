"""Engine and actor take turns on one GPU: the memory in use at each phase, and whether both still compute the same.

    python benchmarks/memory_turns.py --result NAME        on a GPU

A random model of the shape of Qwen3-0.6B is trained a little, its weights go to vLLM, and vLLM samples; whoever does
not work has handed its memory over (`rollout.release_memory`).
"""

import argparse
import asyncio
import random
import shlex
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from rollout_in_training import describe
from vllm_updates import make_model

from molt_gym.tokens import Renderer, Sampling
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.config import load_config
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.vllm_engine import VllmEngine

ROUNDS = 3


class Table:
    """A row for each phase."""

    def __init__(self) -> None:
        self.rows = ["| | GiB in use on the GPU | of them the actor's |", "|---|---|---|"]

    def phase(self, name: str) -> None:
        """What is in use now."""
        free, total = torch.cuda.mem_get_info()
        ours = torch.cuda.memory_allocated()
        self.rows.append(f"| {name} | {(total - free) / 2**30:.1f} | {ours / 2**30:.1f} |")
        print(self.rows[-1], flush=True)


async def turns(path: Path, renderer: Renderer, table: Table) -> None:
    """All phases."""
    draw = random.Random(0)
    ids = [draw.randrange(3, 256) for _ in range(300)]
    engine = VllmEngine(path, renderer, dtype=torch.bfloat16, max_context=2048, max_sequences=64, release_memory=True)
    try:
        table.phase("engine started")
        await engine.pause()
        await engine.release()
        table.phase("engine asleep")
        config = load_config("Any-v0", overrides={"rollout.max_context": 2048, "actor.lr": 1e-4})
        actor = LocalActor(ActorSpec(str(path), config, torch.bfloat16, ROUNDS))
        for version in range(1, ROUNDS + 1):
            rows = [TrainRow(ids, [0] * 50 + [1] * 250, [0.0] * 50 + [-9.0] * 250, 1.0, 0.001, n, n) for n in range(8)]
            actor.train([rows])
            ours = actor.logprobs(ids)
            table.phase(f"round {version}: trained")
            await engine.update_weights(actor.weights(), version)
            table.phase("weights sent")
            actor.offload()
            await engine.resume()
            table.phase("engine awake, actor away")
            theirs = await engine.score(ids)
            table.rows.append(f"| mean difference of log-probabilities: "
                              f"{fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True)):.4f} | | |")
            await asyncio.gather(*engine.submit([Request(ids[: 20 + n], Sampling(100)) for n in range(64)]))
            await engine.pause()
            await engine.release()
            table.phase("engine asleep")
            actor.onload()
        actor.close()
    finally:
        await engine.close()


def main(options: argparse.Namespace) -> None:
    """The table."""
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        _, renderer = make_model(Path(folder), "0.6b", torch.bfloat16, "cpu")
        asyncio.run(turns(Path(folder), renderer, table))
    print("\n".join(["", describe(), *table.rows]))
    if options.result:
        command = shlex.join(["python", "benchmarks/memory_turns.py", *sys.argv[1:]])
        text = "\n".join(["# Memory of engine and actor in turns", "", describe(), "", "```", command, "```", "",
                          *table.rows])
        (Path(__file__).resolve().parent / "results" / f"{options.result}.md").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
