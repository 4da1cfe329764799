"""The loop of supervised fine-tuning: conversations → one window → one update.

Invariants: the loss of an update is the mean over all trained tokens of its conversations, however they are cut into
micro-batches or dealt to ranks; the order is a function of seed and step, so a run that is resumed goes on exactly as
one that was not interrupted; a checkpoint is of whole steps, and its metrics are on disk before it is.
"""

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from molt_gym.errors import ConfigError, RunFailed
from molt_gym.images import keyed

from .actor.balance import first_fit
from .actor.launch import LocalActor
from .actor.packing import TrainRow, train_row
from .actor.sizes import Sizes
from .checkpoint import Checkpoints, load_state, mark_best
from .config import Config, load_config
from .progress import Progress, number
from .run_dir import RunDir
from .sft_config import SftConfig
from .sft_data import Example
from .waiting import finished

__all__ = ["SftLoop", "actor_config", "window"]

_SCORED_AT_ONCE = 256


def actor_config(config: SftConfig) -> Config:
    """That of an actor which maximises Σ w·log π: the loss of REINFORCE, with every advantage 1."""
    actor = config.actor.model_dump()
    rollout = {"max_context": max(2, config.max_context or 0), "max_tokens": 1, "groups_per_step": 1,
               "group_size": 2 * config.actor.world_size}
    return load_config("sft", overrides={"actor": actor, "rollout": rollout, "algorithm": {"loss": "reinforce"}})


def window(examples: Sequence[Example], most: int, shares: int) -> list[TrainRow]:
    """The rows of an update: each token weighs the same, and conversations are packed as a micro-batch of `most` tokens
    holds them, yet so that there is a part for each of the shares.
    """
    tokens = sum(example.trained for example in examples)
    sizes = [sum(len(row.ids) for row in example.rows) for example in examples]
    limit = min(most, math.ceil(sum(sizes) / shares))
    rows: list[TrainRow] = []
    for example, group in zip(examples, first_fit(sizes, limit), strict=True):
        rows += [train_row(row, 1.0, 1 / tokens, len(rows) + place, group) for place, row in enumerate(example.rows)]
    return rows


@dataclass
class SftLoop:
    """One run's parts, and `step`, the number of updates behind it."""

    config: SftConfig
    actor: LocalActor
    training: list[Example]
    held_out: list[Example]
    run_dir: RunDir
    progress: Progress
    total: int
    step: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    """See `Checkpoints`."""
    whole: bool = True
    """Whether weights, step and metrics file agree, so that they can be saved."""

    def __post_init__(self) -> None:
        checkpoint = self.config.checkpoint
        self.checkpoints = Checkpoints(self.run_dir.checkpoints_path, checkpoint.keep, say=self.progress.message,
                                       asynchronous=checkpoint.asynchronous, about=self.about)

    def load(self) -> None:
        """Go on from the newest whole checkpoint, without which the run begins anew.

        Raises:
            ConfigError: it is of a run on other data, or in another order.
        """
        path = self.checkpoints.newest()
        if path is None:
            self.progress.message(f"no whole checkpoint in {self.run_dir.checkpoints_path}; starting again")
            self.run_dir.cut_metrics(-1)
            return
        state = load_state(path)
        if state.get("order") != self._order:
            raise ConfigError(f"data: the run in {self.run_dir.path} was trained on other data, or with another seed "
                              "or batch_size; give the same ones to go on with it, or choose another folder")
        total = state.get("total", self.total)
        if self.config.actor.schedule != "constant" and total != self.total:
            raise ConfigError(f"steps: the learning rate of the run in {self.run_dir.path} falls over {total} updates "
                              f"and would jump if there were {self.total}; write as many, or actor.schedule = "
                              "'constant'")
        self.actor.load(path / "actor")
        self.step = state["step"]
        self.run_dir.cut_metrics(self.step)

    async def run(self, finish: Callable[[Path], None]) -> Path:
        """All updates that are left, with evaluations and checkpoints, then `finish` with the last one; returns it."""
        try:
            await self._done(self._between)
            while self.step < self.total:
                await self._done(self._update)
                await self._done(self._between)
            path = self._save()
            await self._done(finish, path)
            return path
        except BaseException as error:
            interrupted = isinstance(error, asyncio.CancelledError)
            if interrupted or self.step:
                self.progress.message(f"{'interrupted' if interrupted else 'failed'} after step {self.step}, "
                                      f"{self._try_save()}; go on with --resume {self.run_dir.path}")
            raise

    def summary(self) -> dict[str, Any]:
        """What a user wants to know at the end."""
        lines = self.run_dir.read_metrics()
        found = {what: [line[name] for line in lines if name in line]
                 for what, name in (("training loss", "train/loss"), ("held-out loss", "eval/loss"))}
        return {what: f"{number(values[0])} → {number(values[-1])}" for what, values in found.items() if values}

    async def _done(self, work: Callable[..., None], *arguments: Any) -> None:
        """An update that was cut off would leave weights that belong to no step, so an interrupt waits for its end."""
        async def nothing() -> None:
            return

        await finished(asyncio.to_thread(work, *arguments), nothing, self.progress.message)

    def _update(self) -> None:
        started = time.perf_counter()
        examples, epoch = self._chosen()
        self.whole = False
        found = self.actor.train([self._window(examples)])
        if found.get("policy/nan_logprobs", 0) > 0 or not math.isfinite(found["policy/loss"]):
            raise RunFailed(f"step {self.step + 1}: log-probabilities are not finite; write a lower actor.lr, or "
                            "actor.dtype = 'float32'")
        tokens, seconds = sum(example.trained for example in examples), time.perf_counter() - started
        self.step += 1
        metrics = {"step": self.step, "epoch": epoch, "train/loss": found["policy/loss"], "train/tokens": tokens,
                   "train/conversations": len(examples), "policy/entropy": found["policy/entropy"],
                   **{name: value for name, value in found.items() if name.startswith(("optim/", "perf/"))},
                   "time/step": seconds}
        self.run_dir.append_metrics(metrics)
        self.whole = True
        loss, rate = number(metrics["train/loss"]), metrics["optim/lr"]
        self.progress.message(f"step {self.step:>{len(str(self.total))}}/{self.total}  loss {loss}  {tokens:,} tokens"
                              f"  lr {rate:.2e}  {seconds:.1f} s")

    def _window(self, examples: Sequence[Example]) -> list[TrainRow]:
        return window(examples, self.actor.micro_batch_tokens, Sizes.of(self.config.actor).dp)

    def _chosen(self) -> tuple[list[Example], int]:
        size = self.config.batch_size
        epoch, place = divmod(self.step, math.ceil(len(self.training) / size))
        order = list(range(len(self.training)))
        random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        return [self.training[number] for number in order[place * size : (place + 1) * size]], epoch

    def _between(self) -> None:
        """Save and evaluate if it is time for that."""
        last, every = self.step == self.total, self.config.checkpoint.every
        due = bool(self.held_out) and (last or not self.step or (
            self.config.eval.every > 0 and self.step % self.config.eval.every == 0))
        if last or (self.step and (due or (every and self.step % every == 0))):
            self._begin_save()
        scores = {line["step"]: -line["eval/loss"] for line in self.run_dir.read_metrics() if "eval/loss" in line}
        if due and self.step not in scores:
            loss, tokens = self._held_out_loss()
            self.run_dir.append_metrics({"step": self.step, "eval/loss": loss, "eval/tokens": tokens})
            self.progress.message(f"held-out loss after step {self.step}: {number(loss)}, {tokens:,} tokens")
            scores[self.step] = -loss
        if scores:
            self.checkpoints.settle()
            mark_best(self.run_dir.checkpoints_path, scores)

    def _held_out_loss(self) -> tuple[float, int]:
        """Mean over all tokens, and how many there are."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.held_out), _SCORED_AT_ONCE):
            part = self.held_out[start : start + _SCORED_AT_ONCE]
            for logprobs in self.actor.score(self._window(part)):
                total, tokens = total - math.fsum(logprobs), tokens + len(logprobs)
        return total / tokens, tokens

    @cached_property
    def _order(self) -> str:
        """What the steps that are done depend on."""
        digest = hashlib.blake2b(f"{self.config.seed} {self.config.batch_size}".encode(), digest_size=16)
        for example in self.training:
            digest.update(repr([(keyed(row.ids, row.images), row.mask) for row in example.rows]).encode())
        return digest.hexdigest()

    def _begin_save(self) -> None:
        with suppress(OSError):
            self.checkpoints.begin(self.step, self.actor, {"order": self._order, "total": self.total})

    def _save(self) -> Path:
        self._begin_save()
        return self.checkpoints.finish()

    def _try_save(self) -> str:
        """Where the state was saved, or why not."""
        self.checkpoints.settle()
        if not self.whole:
            return "not saved, as it was in the middle of a step"
        try:
            return f"saved as {self._save()}"
        except (OSError, RunFailed) as error:
            return f"not saved ({error}); older checkpoints are as they were"
