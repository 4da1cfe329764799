"""The policy on FSDP2: float32 masters, gradients summed over micro-batches and ranks, AdamW.

Every rank gets all rows and takes its share, so all ranks agree on what there is without asking each other. Invariants:
a row that has no gradient is not computed, yet it counts in the weights of the others; a gradient that is not finite
changes nothing and is counted; a reference model or a critic is there only if it is used.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from molt_gym.errors import ConfigError

from ..algorithms.importance import importance_coefficients
from ..algorithms.kl import kl_loss
from ..algorithms.losses import LossOptions, aggregate, policy_loss, value_loss
from ..algorithms.metrics import Metrics, add, mean_of, means
from ..config import Config
from .model import Policy, load_policy, reshard
from .packing import MicroBatch, TrainRow, balance, collate, micro_batches
from .scoring import Scores, Scoring, token_advantages
from .trained import Trained


@dataclass(frozen=True)
class ActorSpec:
    """What a rank needs: the model folder, the run's options, its compute dtype, and how many updates are planned.

    reference: folder of the frozen model that a KL or a teacher needs; without it, `path`.
    """

    path: str
    config: Config
    dtype: torch.dtype
    total_updates: int
    reference: str | None = None


class FsdpActor:
    """One rank of the actor; a process group must exist."""

    def __init__(self, spec: ActorSpec) -> None:
        self._spec, self._config = spec, spec.config
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", self._rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
        self._export_dtype = AutoConfig.from_pretrained(spec.path).dtype or torch.float32
        load = partial(load_policy, device=self._device, ranks=self._ranks, compute=spec.dtype,
                       max_context=spec.config.rollout.max_context)
        self._scoring, critic = Scoring.of(spec.config), self._config.critic
        self._learner = Trained(load(spec.path), self._config.actor, spec.total_updates)
        self._policy = self._learner.policy
        self._critic = Trained(load(spec.path, critic=True), self._config.actor.model_copy(update={"lr": critic.lr}),
                               spec.total_updates) if self._scoring.critic else None
        self._reference = load(spec.reference or spec.path, frozen=True) if self._scoring.frozen else None
        self._kl = 0.0
        self.updates = 0

    def train(self, windows: Sequence[Sequence[TrainRow]], kl: float | None = None) -> dict[str, float]:
        """One optimizer update a window; kl: coefficient now, if it is not that of the options."""
        started = time.perf_counter()
        self._kl = self._config.algorithm.kl.coefficient if kl is None else kl
        total = self._prepare([row for window in windows for row in window], len(windows) > 1)
        scored = time.perf_counter()
        for window in windows:
            add(total, self._update(window))
        result = means(self._sum_over_ranks(total))
        return result | {"time/logprobs": scored - started, "time/train": time.perf_counter() - scored}

    def _update(self, window: Sequence[TrainRow]) -> Metrics:
        total: Metrics = {}
        if self._critic is not None:
            add(total, self._learn(self._critic, window, window, self._value_loss, ("value", "critic")))
        cold = self._critic is not None and self.updates < self._config.critic.warmup_steps
        rows = [row for row in window if not cold and (row.teaches or self._scoring.all_rows)]
        add(total, self._learn(self._learner, rows, window, self._loss, ("policy", "optim")) if rows
            else self._measure(window))
        self.updates += 1
        return total

    def _learn(
        self, learner: Trained, rows: Sequence[TrainRow], window: Sequence[TrainRow],
        loss_of: Callable[[MicroBatch], tuple[Tensor, Metrics]], names: tuple[str, str],
    ) -> Metrics:
        """One update on some rows of the window; names: prefixes of the metrics of loss and optimizer."""
        batches, steps = self._share(rows)
        total: Metrics = {}
        for step in range(steps):
            learner.policy.set_requires_gradient_sync(step == steps - 1)
            # Every rank must take part in every forward and backward pass; those with no rows left lend one.
            own = step < len(batches)
            batch = batches[step] if own else self._lent(window)
            loss, metrics = loss_of(batch)
            (loss if own else loss * 0).backward()
            if own:
                share = loss.detach().double()
                add(total, metrics | {f"{names[0]}/loss": torch.stack([share, torch.zeros_like(share)])})
        values = {f"{names[1]}/{name}": value for name, value in learner.step(self.updates).items()}
        # What all ranks have in common comes from the first.
        share = 1.0 if self._rank == 0 else 0.0
        add(total, {name: torch.tensor([value * share, share], dtype=torch.float64, device=self._device)
                    for name, value in (values | {f"{names[0]}/loss": 0.0}).items()})
        return total

    def _measure(self, window: Sequence[TrainRow]) -> Metrics:
        """No row teaches anything: no update, yet sampler and trainer are compared on one of them."""
        with torch.no_grad():
            _, metrics = self._loss(self._lent(window))
        return metrics if self._rank == 0 else {}

    def _lent(self, window: Sequence[TrainRow]) -> MicroBatch:
        return collate(micro_batches(window[:1], self._config.actor.micro_batch_tokens)[0], self._device)

    def _share(self, rows: Sequence[TrainRow]) -> tuple[list[MicroBatch], int]:
        """This rank's micro-batches, and how many passes all ranks make."""
        shares = [micro_batches(part, self._config.actor.micro_batch_tokens) for part in balance(rows, self._ranks)]
        return [collate(tries, self._device) for tries in shares[self._rank]], max(map(len, shares))

    def _logprobs(self, batch: MicroBatch, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
        """[N] log π of the trainable tokens; [S, V] logits under the sampling temperature and [S] their logsumexp."""
        scaled, temperature = policy(batch).float(), self._config.rollout.temperature
        if temperature != 1:
            scaled = scaled / temperature
        lse = scaled.logsumexp(-1)
        return scaled[batch.source_of, batch.targets] - lse[batch.source_of], scaled, lse

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        logp, scaled, lse = self._logprobs(batch, self._policy)
        known = [row.old_logprobs for row in batch.order]
        old = logp.detach() if None in known else logp.new_tensor([value for values in known for value in values])
        algorithm = self._config.algorithm
        importance = algorithm.importance
        coefficients, metrics = importance_coefficients(
            old, batch.behaviour, batch.rows, level=self._config.importance_level, mode=importance.mode,
            gate=importance.gate, low=importance.low, high=importance.high)
        options = LossOptions(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip,
                              algorithm.ceiling or LossOptions.ceiling)
        loss, more = policy_loss(algorithm.loss, logp, old, batch.advantages, batch.weights, batch.rows,
                                 coefficients=coefficients, options=options)
        metrics |= more
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._scoring.entropy):
            entropy = (lse - torch.einsum("sv,sv->s", (scaled - lse[:, None]).exp_(), scaled))[batch.source_of]
        metrics["policy/entropy"] = mean_of(entropy)
        if self._scoring.entropy:
            loss = loss - algorithm.entropy_coefficient * aggregate(entropy, batch.weights)
        if self._scoring.kl_loss:
            reference = batch.behaviour if batch.reference is None else batch.reference
            distance, more = kl_loss(logp, reference, batch.weights, self._scoring.kind, algorithm.kl.ref)
            loss, metrics = loss + self._kl * distance, metrics | more
        return loss, metrics

    def _values(self, batch: MicroBatch) -> Tensor:
        """[N] of the critic, before each trainable token."""
        return self._critic.policy(batch).float()[batch.source_of, 0]

    def _value_loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        return value_loss(self._values(batch), batch.values, batch.returns, batch.weights,
                          self._config.critic.value_clip)

    def _prepare(self, rows: Sequence[TrainRow], several: bool) -> Metrics:
        """Score rows and give tokens their advantages, as far as the updates need it; several: of them."""
        scoring, metrics, old = self._scoring, {}, {}
        if scoring.kl_reward or several:
            old = self._score([row for row in rows if row.teaches or scoring.per_token or scoring.all_rows])
        if self._reference is not None:
            reference = self._score(rows, lambda batch: self._logprobs(batch, self._reference)[0])
            reshard(self._reference)
            for row in rows:
                row.ref_logprobs = reference[row.row]
        if scoring.per_token:
            values = self._score(rows, self._values) if self._critic else {}
            metrics = token_advantages(rows, old, values, self._config, self._kl)
        for row in rows if several else ():
            # In the first update of a batch π is π_old.
            row.old_logprobs = old.get(row.row)
        return {name: value.to(self._device) for name, value in metrics.items()} if self._rank == 0 else {}

    @torch.no_grad()
    def _score(self, rows: Sequence[TrainRow], tell: Callable[[MicroBatch], Tensor] | None = None) -> Scores:
        """What `tell` says of the trained tokens, log π by default; all ranks need it for their shares of windows."""
        batches, steps = self._share(rows)
        found: Scores = {}
        for step in range(steps):
            batch = batches[step] if step < len(batches) else self._lent(rows)
            values = (tell(batch) if tell else self._logprobs(batch, self._policy)[0]).tolist()
            for row in batch.order if step < len(batches) else ():
                found[row.row], values = values[: len(row.trained)], values[len(row.trained) :]
        everything: list[Scores] = [{}] * self._ranks
        dist.all_gather_object(everything, found)
        return {row: values for part in everything for row, values in part.items()}

    def score(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """log π of each row's trained tokens, under the sampling temperature; all ranks must call."""
        found = self._score(rows)
        reshard(self._policy)
        return [found[row.row] for row in rows]

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each id but the first, at temperature 1; all ranks must call."""
        row = TrainRow(list(ids), [1] * len(ids), [0.0] * len(ids), 0.0, 0.0, 0, 0)
        batch = collate(micro_batches([row], len(ids))[0], self._device)
        return self._policy(batch).float().log_softmax(-1)[batch.source_of, batch.targets].tolist()

    def _sum_over_ranks(self, metrics: Metrics) -> Metrics:
        everything: list[Metrics] = [{}] * self._ranks
        dist.all_gather_object(everything, {name: value.cpu() for name, value in metrics.items()})
        total: Metrics = {}
        for part in everything:
            add(total, part)
        return total

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters; all ranks must iterate."""
        for name, parameter in self._learner.named.items():
            tensor = parameter.detach()
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local() if self._ranks == 1 else tensor.full_tensor()
            yield name, tensor

    def _state(self) -> dict[str, object]:
        critic = {"critic": self._critic.state()} if self._critic else {}
        return {**self._learner.state(), **critic, "updates": torch.tensor(self.updates)}

    def save(self, folder: Path) -> None:
        """Write a sharded checkpoint.

        Raises:
            OSError: the disk is full or refuses, for some rank.
        """
        try:
            dcp.save(self._state(), checkpoint_id=folder)
        except CheckpointException as error:
            # Torch's writer loses the reason, which is often a full disk.
            free = shutil.disk_usage(folder.parent).free >> 20
            raise OSError(f"cannot write {folder}: {_cause(error)}; {free} MB are free there") from error

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read a checkpoint into parameters and optimizer, in place.

        Raises:
            ConfigError: it is not of this model.
        """
        state = self._state()
        try:
            dcp.load(state, checkpoint_id=folder)
        except CheckpointException as error:
            raise ConfigError(f"model: {folder} was saved from another one than {self._spec.path}; "
                              f"{_cause(error)}") from error
        self.updates = int(state["updates"])
        # A forward pass that no backward pass followed leaves the old weights gathered.
        for learner in filter(None, (self._learner, self._critic)):
            learner.reshard()

    def export(self, folder: Path) -> None:
        """Write the model as transformers does, in the dtype that it came in."""
        state = {name: tensor.to("cpu", self._export_dtype).clone() for name, tensor in self.weights()}
        if self._rank == 0:
            self._policy.model.save_pretrained(folder, state_dict=state)
            # save_pretrained takes the dtype from the model, which is in float32 here.
            config = AutoConfig.from_pretrained(folder)
            config.dtype = self._export_dtype
            config.save_pretrained(folder)

    def offload(self) -> None:
        """Leave the GPU, until `onload`: parameters and optimizer state go to the CPU's memory. On a CPU, nothing."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """Come back to the GPU."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        if self._device.type == "cpu":
            return
        for learner in filter(None, (self._learner, self._critic)):
            learner.move(device)
        if self._reference is not None:
            self._reference.to(device)
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Nothing that the process does not own."""


def _cause(error: CheckpointException) -> str:
    """What was raised within a checkpoint call, which wraps it in something that is no Exception."""
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
