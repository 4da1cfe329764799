"""The policy on FSDP2: float32 masters, gradients summed over micro-batches and ranks, AdamW.

Every rank gets all rows and takes its share, so all ranks agree on what there is without asking each other. Invariants:
a row that has no gradient is not computed, yet it counts in the weights of the others; a gradient that is not finite
changes nothing and is counted; a reference model or a critic is there only if it is used.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from molt_gym.errors import ConfigError
from molt_gym.images import ImageSpan
from molt_gym.tokens.vision import Vision

from ..algorithms.importance import importance_coefficients, score_centering
from ..algorithms.kl import kl_loss
from ..algorithms.losses import LossOptions, aggregate, policy_loss, value_loss
from ..algorithms.metrics import Metrics, add, mean_of, means
from .actor import ActorSpec
from .admission import admitted
from .dealing import Dealer
from .flops import peak_operations, rates
from .lora import without_adapters
from .model import Policy, Told, load_policy, reshard
from .packing import MicroBatch, Order, TrainRow, build_trie
from .parallel import Layout
from .routing import Routing
from .scoring import Scores, Scoring, by_row, token_advantages
from .sizes import Sizes
from .state import NAMES, StateWriter, pickled, read_state
from .trained import Trained

Tell = Callable[[MicroBatch], Tensor]
"""Something of each trained token, [N]."""


class FsdpActor:
    """One rank of the actor; a process group must exist."""

    def __init__(self, spec: ActorSpec) -> None:
        self._spec, self._config = spec, spec.config
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", self._rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self._device)
        # GPUs of several kinds hold different amounts, and ranks must make the same passes.
        agreed = torch.tensor(admitted(spec), device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        self.micro_batch_tokens, self._sums_first = agreed.tolist()
        self._layout = Layout.of(Sizes.of(spec.config.actor), self._device.type)
        load = partial(load_policy, layout=self._layout, compute=spec.dtype,
                       max_context=spec.config.rollout.max_context, options=self._config.actor)
        self._scoring, critic = Scoring.of(spec.config), self._config.critic
        lora = self._config.actor.lora.rank > 0
        self._learner = Trained(load(spec.path, seed=self._config.seed), self._config.actor, spec.total_updates,
                                spec.path if lora else None)
        self._policy = self._learner.policy
        if self._config.rollout.routed_experts and not self._policy.routing.routers:
            raise ConfigError(f"rollout.routed_experts: true, but {type(self._policy.model).__name__} has no routers "
                              "that can replay them; write false")
        self._critic = Trained(load(spec.path, critic=True), self._config.actor.model_copy(
            update={"lr": critic.lr, "lr_groups": {}}),
                               spec.total_updates) if self._scoring.critic else None
        self._reference = None
        if self._scoring.frozen:
            # A policy with adapters is its own reference, without them.
            own = lora and spec.reference in (None, spec.path)
            self._reference = self._policy if own else load(spec.reference or spec.path, frozen=True)
            if self._reference.routing.shape != self._policy.routing.shape:
                # Another model's experts are not those that the sampler chose among.
                self._reference.routing = Routing(())
        vision = Vision.of(spec.path, max_pixels=self._config.actor.max_pixels)
        self._dealer = Dealer(self._layout, self._device, self._learner.cost.pairs, vision)
        self._writer = StateWriter()
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
        total = self._sum_over_ranks(total)
        seconds = time.perf_counter() - scored
        peak = peak_operations(self._device, self._spec.dtype) * self._ranks
        result = rates(total, seconds, peak) | means(total) | {"time/logprobs": scored - started, "time/train": seconds}
        if self._device.type == "cuda":
            result["perf/gpu_memory_peak"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        return result

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
        total: Metrics = {}
        whole = self._layout.sizes.shards == 1
        for batch, own, last in self._dealer.dealt(rows, self.micro_batch_tokens, window):
            learner.policy.set_requires_gradient_sync(last or not self._sums_first)
            # A rank that has all weights gathers them at once: they stay until the optimizer changes them.
            learner.policy.set_reshard_after_backward(last or not whole)
            loss, metrics = loss_of(batch)
            (loss if own else loss * 0).backward()
            if own:
                share = loss.detach().double()
                metrics |= learner.cost.done(batch, tokens=learner is self._learner)
                add(total, metrics | {f"{names[0]}/loss": torch.stack([share, torch.zeros_like(share)])})
        learner.policy.finish_gradients()
        values = {f"{names[1]}/{name}": value for name, value in learner.step(self.updates).items()}
        # What all ranks have in common comes from the first.
        share = 1.0 if self._rank == 0 else 0.0
        add(total, {name: torch.tensor([value * share, share], dtype=torch.float64, device=self._device)
                    for name, value in (values | {f"{names[0]}/loss": 0.0}).items()})
        return total

    def _measure(self, window: Sequence[TrainRow]) -> Metrics:
        """No row teaches anything: no update, yet sampler and trainer are compared on one of them."""
        with torch.no_grad():
            _, metrics = self._loss(self._dealer.lent(window))
        return metrics if self._rank == 0 else {}

    def _told(self, batch: MicroBatch, policy: Policy, *, entropy: bool = False) -> Told:
        return policy(batch, self._config.rollout.temperature, entropy=entropy)

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        told = self._told(batch, self._policy, entropy=True)
        logp, entropy = told.logprobs, told.entropy
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
        if importance.score_centering:
            terms = score_centering(told.top, batch.top, batch.advantages, level=self._config.importance_level,
                                    mode=importance.mode, low=importance.low, high=importance.high)
            loss = loss + aggregate(terms, batch.weights)
        metrics["policy/entropy"] = mean_of(entropy)
        if self._scoring.entropy:
            loss = loss - algorithm.entropy_coefficient * aggregate(entropy, batch.weights)
        if self._scoring.kl_loss:
            reference = batch.behaviour if batch.reference is None else batch.reference
            distance, more = kl_loss(logp, reference, batch.weights, self._scoring.kind, algorithm.kl.ref)
            loss, metrics = loss + self._kl * distance, metrics | more
        return loss, metrics

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        with without_adapters(self._reference):
            return self._told(batch, self._reference).logprobs

    def _value_loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        return value_loss(self._critic.policy(batch).values, batch.values, batch.returns, batch.weights,
                          self._config.critic.value_clip)

    def _prepare(self, rows: Sequence[TrainRow], several: bool) -> Metrics:
        """Score rows and give tokens their advantages, as far as the updates need it; several: of them."""
        scoring, metrics = self._scoring, {}
        tell: dict[str, Tell] = {}
        if scoring.kl_reward or several:
            tell["old"] = lambda batch: self._told(batch, self._policy).logprobs
        if self._reference is not None:
            tell["reference"] = self._reference_logprobs
        if self._critic is not None:
            tell["values"] = lambda batch: self._critic.policy(batch).values
        every = scoring.per_token or scoring.all_rows
        found = self._score([row for row in rows if row.teaches or every], tell)
        if self._reference is not None:
            reshard(self._reference)
            for row in rows:
                row.ref_logprobs = found["reference"][row.row]
        if scoring.per_token:
            metrics = token_advantages(rows, found.get("old", {}), found.get("values", {}), self._config, self._kl)
        for row in rows if several else ():
            # In the first update of a batch π is π_old.
            row.old_logprobs = found["old"].get(row.row)
        return {name: value.to(self._device) for name, value in metrics.items()} if self._rank == 0 else {}

    @torch.no_grad()
    def _score(self, rows: Sequence[TrainRow], tell: Mapping[str, Tell]) -> dict[str, Scores]:
        """What each of `tell` says of the trained tokens; all ranks need it for their shares of windows."""
        told: list[tuple[Order, dict[str, Tensor]]] = []
        limit = self._config.actor.logprob_micro_batch_tokens or 4 * self.micro_batch_tokens
        for batch, own, _ in self._dealer.dealt(rows, limit, rows) if tell else ():
            values = {name: one(batch) for name, one in tell.items()}
            if own:
                told.append((batch.order, values))
        everything: list[dict[str, Scores]] = [{}] * self._ranks
        # They are looked at only now, so that no batch is waited for before the next one is laid out.
        dist.all_gather_object(everything, {name: by_row(told, name) for name in tell})
        return {name: {row: values for part in everything for row, values in part[name].items()} for name in tell}

    def score(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """log π of each row's trained tokens, under the sampling temperature; all ranks must call."""
        found = self._score(rows, {"now": lambda batch: self._told(batch, self._policy).logprobs})["now"]
        reshard(self._policy)
        return [found[row.row] for row in rows]

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        """Log-probability of each id but the first, at temperature 1; all ranks must call."""
        row = TrainRow(list(ids), [1] * len(ids), [0.0] * len(ids), 0.0, 0.0, 0, 0, images=list(images))
        return self._policy(self._dealer.collate([build_trie([row])])).logprobs.tolist()

    def _sum_over_ranks(self, metrics: Metrics) -> Metrics:
        everything: list[Metrics] = [{}] * self._ranks
        dist.all_gather_object(everything, {name: value.cpu() for name, value in metrics.items() if self._layout.first})
        total: Metrics = {}
        for part in everything:
            add(total, part)
        return total

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, or whole adapters, as the engine takes them; all ranks must iterate."""
        return self._learner.adapters() if self._config.adapter_updates else self._learner.whole()

    def _state(self) -> dict[str, object]:
        state = {**self._learner.state(), "updates": torch.tensor(self.updates)}
        if self._critic is not None:
            state["critic"] = self._critic.state()
        if (adapter := getattr(self._policy.model, "state_dict_adapter", None)) is not None:
            state[NAMES] = pickled(adapter)
        return state

    def begin_save(self, folder: Path) -> "Future[None]":
        """Begin to write a sharded checkpoint of the state now; see `StateWriter.begin`."""
        return self._writer.begin(self._state(), folder)

    def save(self, folder: Path) -> None:
        """Write a sharded checkpoint."""
        self.begin_save(folder).result()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read a checkpoint into parameters and optimizer, in place.

        Raises:
            ConfigError: it is not of this model.
        """
        state = self._state()
        read_state(state, folder, self._spec.path)
        self.updates = int(state["updates"])
        # A forward pass that no backward pass followed leaves the old weights gathered.
        for learner in filter(None, (self._learner, self._critic)):
            reshard(learner.policy)
        self._learner.check(state, folder)

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

    def close(self, timeout: float = 0.0) -> None:
        """Wait so many seconds for what is being written."""
        self._writer.close(timeout)
