"""Whole updates with every part of an algorithm: those of plain transformers in float64, on one rank and on two."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from molt_gym.tokens.generation import TOP
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.config import Config

Rows = Callable[..., list[TrainRow]]
Build = Callable[..., ActorSpec]
Weights = Callable[..., dict[str, Tensor]]

REWARD = {"coefficient": 0.3, "use": "reward"}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "reinforce": ({"estimator": "reinforce", "gamma": 0.9}, 1),
    "reinforce, KL to a model in the reward": ({"estimator": "reinforce", "gamma": 0.9, "kl": REWARD}, 1),
    "reinforce, KL to the sampler in the reward": (
        {"estimator": "reinforce", "kl": {**REWARD, "kind": "k2", "ref": "rollout"}}, 2),
    "KL loss to a model": ({"kl": {"coefficient": 0.3}}, 1),
    "KL loss to the sampler": ({"kl": {"coefficient": 0.3, "ref": "rollout"}}, 2),
    "entropy bonus": ({"entropy_coefficient": 0.2}, 1),
    "cispo": ({"loss": "cispo", "ceiling": 1.05}, 2),
    "gspo": ({"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05}, 2),
    "gate": ({"importance": {"level": "token", "gate": "tv", "high": 0.05}}, 1),
    "teacher": ({"estimator": "on_policy_distill", "teacher": "a folder", "kl": REWARD}, 2),
    "all": ({"estimator": "reinforce", "loss": "cispo", "entropy_coefficient": 0.1,
             "kl": {"coefficient": 0.3, "kind": "k2"}, "importance": {"level": "token", "mode": "trunc"}}, 2),
    "gae": ({"estimator": "gae", "gamma": 0.95, "lam": 0.8, "kl": REWARD}, 2),
    "score centering": ({"importance": {"level": "token", "mode": "trunc", "high": 1.05, "score_centering": 4}}, 1),
    "score centering with a critic": ({"estimator": "gae", "importance": {"score_centering": 4}}, 1),
}


class Plain:
    """One row at a time in float64, formulas written out, torch's own optimizer."""

    def __init__(self, path: str, reference: str, config: Config) -> None:
        self.model, self.reference = (AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager").eval() for folder in (path, reference))
        self.config, self.a = config, config.algorithm
        self.distances: list[Tensor] = []
        self.optimizer = self.adamw(self.model.parameters(), config.actor.lr)
        self.decoder = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval().base_model
        self.head = torch.zeros(1, 32, dtype=torch.float64, requires_grad=True)
        self.critic = self.adamw([*self.decoder.parameters(), self.head], config.critic.lr)

    def adamw(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.AdamW:
        """Decays matrices alone."""
        actor, parameters = self.config.actor, list(parameters)
        matrices, vectors = ([p for p in parameters if (p.ndim > 1) == many] for many in (True, False))
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": actor.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=lr, betas=actor.betas, eps=actor.eps)

    def step(self, optimizer: torch.optim.AdamW, loss: Tensor) -> None:
        """One update."""
        loss.backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, self.config.actor.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    def values(self, row: TrainRow) -> Tensor:
        """Of the critic, before each trained token."""
        hidden = self.decoder(input_ids=torch.tensor([row.ids]), use_cache=False).last_hidden_state[0]
        return (hidden @ self.head[0])[[p - 1 for p in row.trained]]

    def logprobs(self, model: torch.nn.Module, row: TrainRow) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the trained tokens, and the entropies of what they were sampled from."""
        logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0] / self.config.rollout.temperature
        logs = logits.log_softmax(-1)[[p - 1 for p in row.trained]]
        return logs[range(len(row.trained)), [row.ids[p] for p in row.trained]], -(logs.exp() * logs).sum(-1)

    def train(self, windows: Sequence[Sequence[TrainRow]]) -> dict[str, Tensor]:
        """The weights after one update a window."""
        rows = [row for window in windows for row in window]
        with torch.no_grad():
            old = {row.row: self.logprobs(self.model, row)[0] for row in rows}
            ref = {row.row: torch.tensor(row.behaviour, dtype=torch.float64) if self.a.kl.ref == "rollout"
                   else self.logprobs(self.reference, row)[0] for row in rows}
            before = {row.row: self.values(row) for row in rows}
        advantages, returns = self.advantages(rows, old, ref, before)
        for window in windows:
            if self.a.estimator == "gae":
                self.step(self.critic, sum(self.value_loss(row, before[row.row], returns[row.row]) for row in window))
            self.step(self.optimizer,
                      sum(self.loss(row, advantages[row.row], old[row.row], ref[row.row]) for row in window))
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def value_loss(self, row: TrainRow, before: Tensor, returns: Tensor) -> Tensor:
        """The row's share in the critic's loss."""
        values, limit = self.values(row), self.config.critic.value_clip
        near = before + (values - before).clamp(-limit, limit)
        return row.weight * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum() / 2

    def advantages(
        self, rows: Sequence[TrainRow], old: dict[int, Tensor], ref: dict[int, Tensor], values: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """By row, and what the critic learns."""
        if self.a.estimator == "grpo":
            return {row.row: torch.full_like(old[row.row], row.advantage) for row in rows}, {}
        in_reward = self.a.kl.coefficient > 0 and self.a.kl.use == "reward"
        kl = {row.row: self.distance(old[row.row], ref[row.row]) if in_reward else 0 * old[row.row] for row in rows}
        if in_reward:
            self.distances += kl.values()
        x = {number: -self.a.kl.coefficient * values for number, values in kl.items()}
        if self.a.estimator == "on_policy_distill":
            return x, {}
        result, gae = {}, self.a.estimator == "gae"
        for rollout in {row.rollout for row in rows}:
            total, after, last = 0.0, 0.0, True
            for row in sorted((row for row in rows if row.rollout == rollout), key=lambda row: -row.row):
                gains = []
                for gain, value in zip(x[row.row].flip(0).tolist(), values[row.row].flip(0).tolist(), strict=True):
                    gain += row.reward if last else 0.0
                    total = (gain + self.a.gamma * after - value + self.a.gamma * self.a.lam * total) if gae else (
                        gain + self.a.gamma * total)
                    gains.append(total)
                    after, last = value, False
                result[row.row] = torch.tensor(gains[::-1], dtype=torch.float64)
        everything = torch.cat(list(result.values()))
        white = {number: (part - everything.mean()) / everything.std(unbiased=False)
                 for number, part in result.items()}
        return white, {number: part + values[number] for number, part in result.items()}

    def distance(self, logp: Tensor, ref: Tensor) -> Tensor:
        """The KL of each token; the defaults are k3 as a loss and k1 in the reward."""
        x = logp - ref
        if self.a.kl.kind == "k2":
            return (x.square() / 2).clamp(max=10)
        if self.a.kl.use == "reward":
            return x
        return (x.exp() - 1 - x if self.a.kl.ref == "rollout" else (-x).exp() - 1 + x).clamp(max=10)

    def loss(self, row: TrainRow, advantages: Tensor, old: Tensor, ref: Tensor) -> Tensor:
        """The row's share in that of the window."""
        a, (logp, entropy) = self.a, self.logprobs(self.model, row)
        ratio, low, high = (logp - old).exp(), 1 - a.clip_low, 1 + a.clip_high
        if a.loss == "gspo":
            ratio = ((logp - old).mean().detach() + logp - logp.detach()).exp()
        terms = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        if a.loss == "cispo":
            terms = -ratio.detach().clamp(max=a.ceiling or 5) * advantages * logp
        mu = torch.tensor(row.behaviour, dtype=torch.float64)
        if a.importance.gate == "tv":
            terms = terms * (old - mu).exp() * ((old.exp() - mu.exp()).abs() <= a.importance.high)
        elif a.importance.mode == "trunc":
            terms = terms * (old - mu).exp().clamp(max=a.importance.high)
        terms = terms - a.entropy_coefficient * entropy
        if a.kl.coefficient and a.kl.use == "loss":
            self.distances.append(self.distance(logp, ref).detach())
            terms = terms + a.kl.coefficient * self.distance(logp, ref)
        if a.importance.score_centering:
            terms = terms + advantages * self.centering(row)
        return row.weight * terms.sum()

    def centering(self, row: TrainRow) -> Tensor:
        """What a constant advantage of 1 would be trained on, but for the sign."""
        logits = self.model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0]
        logs = (logits / self.config.rollout.temperature).log_softmax(-1)[[p - 1 for p in row.trained]]
        logs = logs.gather(1, torch.tensor(row.top["id"].astype(int)))
        p, q = logs.detach().exp(), torch.tensor(row.top["logprob"]).double().exp()
        rest = (1 - q.sum(-1)) / (1 - p.sum(-1))
        kept = q * self.corrected(p / q) - (rest * self.corrected(1 / rest))[:, None] * p
        return (kept * logs).sum(-1)

    def corrected(self, ratio: Tensor) -> Tensor:
        """The factor of a token."""
        on = self.a.importance.level == "token"
        return ratio.clamp(max=self.a.importance.high) if on else torch.ones_like(ratio)


@pytest.fixture(scope="module")
def other_path(model_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that is not far from the policy."""
    path = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def batch(random_rows: Rows, other_path: Path) -> Callable[[int], list[list[TrainRow]]]:
    """Windows of rollouts of two rows each, some with no advantage, sampled by a policy near the trained one."""
    model = AutoModelForCausalLM.from_pretrained(other_path, dtype=torch.float32).eval()

    @torch.no_grad()
    def build(count: int) -> list[list[TrainRow]]:
        windows = [random_rows(2, 4, seed=seed, idle=[1, 6], start=8 * seed) for seed in range(count)]
        for row in (row for window in windows for row in window):
            row.rollout = row.row // 2
            row.reward = float(row.rollout % 3) - 0.7
            logs = (model(torch.tensor([row.ids])).logits[0] / 0.7).log_softmax(-1)
            row.logprobs = [0.0, *logs[range(len(row.ids) - 1), row.ids[1:]].tolist()]
            row.logprobs = [value - 0.1 * (place % 3) for place, value in enumerate(row.logprobs)]
            values, ids = logs[[place - 1 for place in row.trained]].topk(4)
            row.top = np.empty(ids.shape, TOP)
            row.top["id"], row.top["logprob"] = ids.numpy(), values.numpy()
        return windows

    return build


@pytest.fixture
def started() -> Iterator[Callable[[ActorSpec], LocalActor]]:
    """Starts an actor, after the one before has ended."""
    running: list[LocalActor] = []

    def start(spec: ActorSpec) -> LocalActor:
        for actor in running:
            actor.close()
        running.append(LocalActor(spec))
        return running[-1]

    yield start
    for actor in running:
        actor.close()


def spec_of(spec: Build, other: Path, name: str, **more: Any) -> ActorSpec:
    options = {"algorithm": CASES[name][0], "actor__micro_batch_tokens": 30, "actor__lr": 0.03,
               "rollout__temperature": 0.7, **({"critic__lr": 0.02} if name == "gae" else {}), **more}
    return replace(spec(**options), reference=str(other))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[key].double(), rtol=0, atol=1e-6,
                                   msg=lambda text, key=key: key + text)


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_plain_transformers_in_float64(
    started: Any, spec: Build, batch: Any, other_path: Path, weights_of: Weights, name: str
) -> None:
    options, count = spec_of(spec, other_path, name), CASES[name][1]
    actor = started(options)
    before = weights_of(actor)
    plain = Plain(options.path, str(other_path), options.config)
    # Values are 0 in the first update.
    for _ in range(2 if CASES[name][0].get("estimator") == "gae" else 1):
        plain.distances.clear()
        metrics, expected = actor.train(batch(count)), plain.train(batch(count))
    assert_same(weights_of(actor), expected)
    assert max((tensor - before[key]).abs().max() for key, tensor in weights_of(actor).items()) > 1e-3
    if plain.distances:
        assert metrics["policy/kl_ref"] == pytest.approx(torch.cat(plain.distances).mean().item(), abs=1e-5)
        assert abs(metrics["policy/kl_ref"]) > 1e-3
    else:
        assert "policy/kl_ref" not in metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_update_of_one(
    started: Any, spec: Build, batch: Any, other_path: Path, weights_of: Weights, name: str
) -> None:
    results = []
    for ranks in (1, 2):
        actor = started(spec_of(spec, other_path, name, actor__world_size=ranks))
        results.append((actor.train(batch(CASES[name][1])), weights_of(actor)))
    (metrics, weights), (more_metrics, more_weights) = results
    assert_same(more_weights, weights)
    assert metrics.keys() == more_metrics.keys()
    for key, value in metrics.items():
        assert key.startswith(("time/", "perf/")) or more_metrics[key] == pytest.approx(value, abs=1e-5), key


def test_the_coefficient_of_the_moment_is_the_one_that_counts(
    started: Any, spec: Build, batch: Any, other_path: Path, weights_of: Weights
) -> None:
    for name in ("KL loss to a model", "reinforce, KL to a model in the reward", "teacher"):
        options = spec_of(spec, other_path, name)
        actor = started(options)
        actor.train(batch(1), 0.7)
        changed = options.config.algorithm.kl.model_copy(update={"coefficient": 0.7})
        algorithm = options.config.algorithm.model_copy(update={"kl": changed})
        config = options.config.model_copy(update={"algorithm": algorithm})
        assert_same(weights_of(actor), Plain(options.path, str(other_path), config).train(batch(1)))


def test_a_critic_learns_alone_at_first_and_goes_on_from_a_checkpoint_as_if_nothing_had_been(
    started: Any, spec: Build, batch: Any, other_path: Path, weights_of: Weights, tmp_path: Path
) -> None:
    options = spec_of(spec, other_path, "gae", critic__warmup_steps=2)
    actor = started(options)
    before = weights_of(actor)
    first = actor.train(batch(2))
    assert_same(weights_of(actor), before)
    actor.save(tmp_path / "state")
    second, weights = actor.train(batch(1)), weights_of(actor)
    assert first["value/mean"] != second["value/mean"] and second["optim/grad_norm"] > 0
    assert max((tensor - before[key]).abs().max() for key, tensor in weights.items()) > 1e-3
    again = started(options)
    again.train(batch(1))
    again.load(tmp_path / "state")
    repeated = again.train(batch(1))
    assert {key: repeated[key] for key in second if not key.startswith(("time/", "perf/"))} == {
        key: value for key, value in second.items() if not key.startswith(("time/", "perf/"))}
    assert all(torch.equal(tensor, weights[key]) for key, tensor in weights_of(again).items())


@pytest.mark.parametrize("name", ["cispo", "entropy bonus", "reinforce", "KL loss to the sampler"])
def test_without_need_no_second_model_is_there(started: Any, spec: Build, other_path: Path, name: str) -> None:
    assert started(replace(spec_of(spec, other_path, name), reference="no such folder")).updates == 0


def test_without_another_model_the_reference_is_the_policy_of_the_beginning(
    started: Any, spec: Build, batch: Any, other_path: Path
) -> None:
    actor = started(replace(spec_of(spec, other_path, "KL loss to a model"), reference=None))
    first, second = actor.train(batch(1)), actor.train(batch(1))
    assert first["policy/kl_ref"] == pytest.approx(0, abs=1e-8) and second["policy/kl_ref"] > 1e-4


def test_rows_without_advantage_are_computed_only_where_they_have_a_gradient(
    started: Any, spec: Build, batch: Any, other_path: Path, random_rows: Rows
) -> None:
    rows = random_rows(2, 2, idle=range(4))
    assert "optim/grad_norm" not in started(spec_of(spec, other_path, "gate")).train([rows])
    assert started(spec_of(spec, other_path, "entropy bonus")).train([rows])["optim/grad_norm"] > 0
    assert started(spec_of(spec, other_path, "KL loss to a model")).train([rows])["optim/grad_norm"] > 0
