"""The options of a run, their types, their help and the rules between them.

Invariants: a `Config` that exists is consistent across its components; importing this module loads neither torch nor
transformers; what `Config.to_toml` writes, `config.load_config` reads back equal.
"""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from .algorithms.registry import ESTIMATORS, LOSSES, Registry
from .config_rules import contradictions


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("bool", "true and false are not numbers")
    return value


def _plain(value: Any, name: str = "") -> Any:
    """`value` as TOML can hold it (tuples become lists), so that a run's config file tells all of it."""
    if isinstance(value, dict):
        return {key: _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name}: got {value!r} ({type(value).__name__}); write text, a number, true or false, a list or "
                     "a table, or leave the key out")


def _mixture(value: Any) -> Any:
    """Entries of a mixture as tables, so that a bare number is a weight."""
    if not isinstance(value, dict):
        return value
    entries = {env: _plain(entry if isinstance(entry, dict) else {"weight": entry}, f".{env}")
               for env, entry in value.items()}
    kinds = {"weight": (int | float, "a number from 0 on"), "env_kwargs": (dict, "a table"),
             "max_turns": (int, "an integer from 1 on")}
    for env, entry in entries.items():
        for name, item in {"weight": None, **entry}.items():
            if name not in kinds:
                raise ValueError(f".{env}.{name}: unknown option; write one of {', '.join(kinds)}")
            kind, words = kinds[name]
            least = {"weight": 0, "max_turns": 1}.get(name)
            if not isinstance(item, kind) or isinstance(item, bool) or (least is not None and not least <= item < inf):
                raise ValueError(f".{env}.{name}: got {item!r}; write {words}")
    if entries and not any(entry["weight"] for entry in entries.values()):
        raise ValueError(": all weights are 0; write one above")
    return entries


_NUMBER = BeforeValidator(_no_bool)
Count = Annotated[int, Ge(1), _NUMBER]
Natural = Annotated[int, Ge(0), _NUMBER]
Positive = Annotated[float, Gt(0), _NUMBER]
NotNegative = Annotated[float, Ge(0), _NUMBER]
Share = Annotated[float, Ge(0), Le(1), _NUMBER]
Moment = Annotated[float, Ge(0), Lt(1), _NUMBER]
Number = Annotated[float, _NUMBER]
Text = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
Table = Annotated[dict[str, Any], BeforeValidator(lambda value: _plain(value) if isinstance(value, dict) else value)]
Mix = Annotated[dict[str, Any], BeforeValidator(_mixture)]
Range = Annotated[tuple[Number, Number] | None,
                  BeforeValidator(lambda value: ((0.0, 1.0) if value else None) if isinstance(value, bool) else value)]
Names = Annotated[tuple[Text, ...],
                  BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)]
Dtype = Literal["auto", "float32", "bfloat16"]
MOST_RANK = 512
"""Of adapters, in vLLM."""
Backend = Literal["auto", "transformers", "automodel"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]


def _one_of(registry: Registry, what: str) -> Any:
    return Field(description=f"{what}: {', '.join(registry.names())}, or 'module:name' of a file of your own.")


class Section(BaseModel):
    """Base of all parts: immutable, no unknown keys, no NaN or infinity; the docstring under a field is its help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def to_toml(self, path: str | os.PathLike[str] | None = None) -> str:
        """The options as TOML, also written to `path` if given; those that are None are left out."""
        text = tomli_w.dumps(_without_none(self.model_dump()))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8", newline="\n")
        return text


class RolloutConfig(Section):
    """How rollouts are generated."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """What samples tokens: plain transformers in this process, or vLLM in a process of its own."""
    engine_args: Table = {}
    """Further arguments of vLLM's AsyncEngineArgs, such as gpu_memory_utilization."""
    engines: Count = 1
    """Engines that share the rollouts; more than one with vllm only."""
    runners: Count = 1
    """Processes that play the rollouts, with placement ray; otherwise this one does."""
    env_processes: Literal["auto", "always", "never"] = "auto"
    """Whether each environment gets a process of its own: auto if it says own_process = True."""
    weight_transfer: Literal["auto", "gloo", "ipc", "nccl", "file"] = "auto"
    """How weights reach vLLM; auto: gloo on CPUs, ipc on a GPU that both share, nccl across GPUs."""
    transfer_timeout: Positive = 300.0
    """Seconds for one bucket of weights, after which the engine is given up."""
    routed_experts: bool = False
    """Whether vLLM tells which experts each token of a mixture went to, and the actor sends it to the same."""
    release_memory: bool = False
    """On a GPU that engine and actor share, whether each hands its memory over while the other works."""
    groups_per_step: Count = 4
    """Tasks a step trains on; each is played group_size times."""
    group_size: Count = 8
    """Rollouts of one task."""
    max_tokens: Count = 512
    """Most tokens of one reply."""
    max_context: Count = 2048
    """Most tokens of prompt and reply together."""
    max_turns: Count | None = None
    """Most replies of a rollout; without it, what the environment was registered with."""
    temperature: Positive = 1.0
    """Sampling temperature; the trainer computes its log-probabilities under the same."""
    top_p: Annotated[float, Gt(0), Le(1), _NUMBER] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: Natural = 0
    """Sample among the k likeliest tokens; 0 is off."""
    max_staleness: Natural = 0
    """Weight versions that a trained token may lag behind; 0 is strictly on-policy."""
    max_concurrency: Count = 64
    """Most sequences that an engine decodes at once; further ones queue."""
    dtype: Dtype = "auto"
    """Precision of the sampler; auto follows actor.dtype."""
    history: Literal["rerender", "keep"] = "rerender"
    """When only the chat template rewrites earlier turns: render anew (a new branch), or keep what was sampled."""
    incomplete_group: Literal["keep", "drop"] = "keep"
    """A group with failed rollouts: train on those that are there, or drop the group."""
    retries: Natural = 1
    """New attempts for a rollout that failed."""
    max_failure_rate: Share = 0.5
    """Share of failed rollouts above which the run stops."""
    reset_timeout: Positive = 60.0
    """Seconds for one reset of the environment."""
    step_timeout: Positive = 60.0
    """Seconds for one step of the environment."""
    generate_timeout: Positive = 570.0
    """Seconds for one reply; SDKs give up after 600 and ask again."""
    episode_timeout: Positive = 1800.0
    """Seconds for one rollout."""
    template_kwargs: Table = {}
    """Extra variables of the chat template, such as enable_thinking."""
    server_host: Text = "127.0.0.1"
    """Address at which agents reach the policy; for agents in containers, one that they can reach."""
    server_url: Text | None = None
    """What agents are told, such as http://host.docker.internal:8000; without it, made of the address and the port."""
    server_port: Annotated[int, Ge(0), Le(65535), _NUMBER] = 0
    """Port of that address; 0 takes a free one."""
    tool_parser: Text | None = None
    """How tool calls are read: "vllm:NAME" for one of vLLM's parsers; without it, the forms that are built in."""
    reasoning_parser: Text | None = None
    """How reasoning is read: "vllm:NAME" for one of vLLM's parsers; without it, a leading <think> block."""
    dynamic_filter: Range = None
    """Train a group only if low < mean score < high: [low, high], or true for [0, 1]; other groups are replaced."""


class ImportanceConfig(Section):
    """Correction for the policy that sampled differing from the policy before the update."""

    level: Literal["auto", "off", "token", "seq", "geo"] = "auto"
    """What the band gates: a token, a sequence's product or its geometric mean; auto is off on-policy, else geo."""
    mode: Literal["mask", "clip", "trunc"] = "mask"
    """Outside the band: weight 0 (mask), clamped to it (clip), or cut at its upper end (trunc)."""
    gate: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """What the band bounds: the probability ratio, or from above a distance of the two policies."""
    low: NotNegative = 0.5
    """Lower end of the band, for gate ratio."""
    high: Positive = 2.0
    """Upper end of the band."""
    score_centering: Natural = 0
    """How many of the sampler's likeliest tokens the bias of a correction is taken out by; 0 is off."""


class KlConfig(Section):
    """Penalty on the distance from a reference."""

    coefficient: NotNegative = 0.0
    """Weight of the penalty; 0 is off, and no reference is loaded."""
    kind: Literal["auto", "k1", "k2", "k3"] = "auto"
    """Estimate of the divergence at a token; auto is k1 in the reward and k3 as a loss."""
    use: Literal["loss", "reward"] = "loss"
    """A term of the loss, or of the reward of each token, for estimators that take it there."""
    ref: Literal["model", "rollout"] = "model"
    """The reference: a frozen model, or the policy that sampled."""
    model: Text | None = None
    """Folder or hub name of the frozen model; without it, the model that the run begins with."""
    target: Positive | None = None
    """Divergence that the coefficient is steered towards; without it, the coefficient stays."""
    horizon: Count = 10_000
    """Rollouts over which the steered coefficient changes by up to a fifth."""


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    estimator: Annotated[Text, _one_of(ESTIMATORS, "Advantage estimator")] = "grpo"
    loss: Annotated[Text, _one_of(LOSSES, "Policy loss")] = "ppo"
    aggregation: Literal["token_mean", "rollout_mean_token_mean", "group_mean_token_mean",
                         "rollout_mean_token_sum"] = "token_mean"
    """How token losses become one number, over the whole optimizer window."""
    token_sum_divisor: Count | None = None
    """Fixed divisor of rollout_mean_token_sum."""
    clip_low: Share = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Gt(1), _NUMBER] | None = None
    """Bound on the ratio of tokens with a negative advantage, for loss ppo."""
    ceiling: Annotated[float, Ge(1), _NUMBER] | None = None
    """Most that loss cispo weighs a token; without it, 5."""
    gamma: Share = 1.0
    """Discount a sampled token, for estimators that have one."""
    lam: Share = 0.95
    """λ of generalised advantage estimation."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the policy's entropy, which is added to what is maximised."""
    teacher: Text | None = None
    """Folder or hub name of the model that estimator on_policy_distill learns from."""
    teacher_engine: Literal["actor", "vllm"] = "actor"
    """What computes the teacher's log-probabilities: the ranks of the actor, or vLLM in a process of its own."""
    teacher_engine_args: Table = {}
    """Further arguments of vLLM's AsyncEngineArgs for the teacher, such as tensor_parallel_size."""
    reward_clip: Positive = 10.0
    """Rewards are clipped to this size, either sign, before the baseline."""
    updates_per_batch: Count = 1
    """Optimizer updates a step, each on an equal share of its groups."""
    overlong_buffer: Natural = 0
    """Tokens before rollout.max_tokens over which a long reply loses reward; 0 is off."""
    overlong_penalty: NotNegative = 1.0
    """What a reply of full length loses when overlong_buffer is set."""
    truncation_coefficient: Annotated[float, Le(1), _NUMBER] = 1.0
    """Factor on the positive reward of a rollout that length cut off; a negative value replaces the reward."""
    importance: ImportanceConfig = ImportanceConfig()
    kl: KlConfig = KlConfig()


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained in the place of the model's weights."""

    rank: Natural = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Positive = 32.0
    """An adapter is weighed by alpha / rank."""
    dropout: NotNegative = 0.0
    """Only 0: with dropout, the trainer would compute other probabilities than the sampler."""
    target_modules: Names = ("all-linear",)
    """Linear layers with an adapter, by the ends of their names, such as q_proj,v_proj; all-linear: all but a head."""
    transfer: Literal["auto", "adapter", "merged"] = "auto"
    """What an update sends to the engines: adapters, or whole weights with the adapters in them; auto: as they can."""


class ActorConfig(Section):
    """The model being trained and its optimizer."""

    dtype: Dtype = "auto"
    """Precision of the forward and backward pass; master weights are float32."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for the matrices of the hidden layers and AdamW for all others."""
    lr: Positive = 1e-6
    """Peak learning rate; with adapters, 10 times as much unless it is set."""
    lr_groups: dict[str, Positive] = {}
    """Factors on lr by patterns of parameter names, such as {"*embed_tokens*" = 0.1}; the last that fits counts."""
    schedule: Schedule = "constant"
    """Course of the learning rate after the warm-up; wsd stays, then falls linearly over the last updates."""
    decay_share: Annotated[float, Gt(0), Le(1), _NUMBER] = 0.2
    """Share of all updates over which wsd falls."""
    warmup_steps: Natural = 0
    """Optimizer updates over which the learning rate rises."""
    min_lr_ratio: Share = 0.0
    """Where linear, cosine and wsd end, as a share of lr."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, of matrices; norms and biases have none."""
    betas: tuple[Moment, Moment] = (0.9, 0.95)
    """Decay rates of Adam's moments."""
    momentum: Moment = 0.95
    """Decay rate of Muon's momentum."""
    eps: Positive = 1e-8
    """Adam's epsilon."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm."""
    micro_batch_tokens: Count = 2048
    """Most tokens of a forward pass; a longer row gets one of its own."""
    logprob_micro_batch_tokens: Count | None = None
    """The same for passes without gradients; without it, 4 times micro_batch_tokens."""
    head_dtype: Literal["auto", "float32"] = "auto"
    """Precision of logits: that of the model, or float32, which costs little."""
    backend: Backend = "auto"
    """What builds the model: transformers or nemo_automodel; auto: the latter with ep > 1 or experts on one GPU."""
    world_size: Count = 1
    """Processes that share the update: shares of the rows × cp × tp."""
    tp: Count = 1
    """Processes that share each layer's matrices, by heads and columns."""
    cp: Count = 1
    """Processes that share the tokens of each micro-batch, so that long rows fit."""
    ep: Count = 1
    """Processes that share the experts of each layer, of those that have other rows, with backend automodel."""
    freeze_vision: bool = True
    """Whether the vision tower of a vision-language model, projector included, stays as it is."""
    max_pixels: Annotated[int, Ge(1), _NUMBER] | None = None
    """Larger images are scaled down to so many pixels, for the sampler too; without it, the model's own limit."""
    frozen_router: bool = False
    """Whether the routers of a mixture-of-experts model stay as they are."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again: nothing, all but matrix products and attention, or whole layers."""
    compile: bool = False
    """Whether layers become fewer, larger kernels: faster and smaller on GPUs, after a minute at the start."""
    offload_optimizer: bool = False
    """Whether the optimizer's state of a GPU lies in the CPU's memory between its steps."""
    lora: LoraConfig = LoraConfig()


class CriticConfig(Section):
    """The model of values that estimator gae needs; what is not said here is as in section actor."""

    lr: Positive = 1e-5
    """Peak learning rate."""
    value_clip: Positive = 0.2
    """How far updates of a batch move a value before its loss stops to shrink; a large number is off."""
    warmup_steps: Natural = 0
    """Optimizer updates in which the critic learns alone and the actor stays as it is."""


class EvalConfig(Section):
    """Evaluation on held-out tasks."""

    every: Natural = 0
    """Steps between evaluations; 0: only before and after."""
    episodes: Count = 64
    """Tasks of an evaluation."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    temperature: NotNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    k: Count = 1
    """Rollouts of a task, for pass@k."""
    max_turns: Count | None = None
    """Most replies of a rollout; without it, that of training."""
    env_kwargs: Table = {}
    """Environment arguments for evaluation, over those for training."""
    concurrent: bool = True
    """Whether the next step's rollouts and training go on meanwhile, where the engine is vllm; the weights wait."""


class FailureConfig(Section):
    """What a run survives. Each kind of failure has a budget of its own."""

    engine_restarts: Natural = 8
    """Engines that may be started in place of others."""
    runner_restarts: Natural = 8
    """Runners that may be started in place of others."""
    actor_restarts: Natural = 3
    """Times that training goes on from its last checkpoint by itself after a rank of the actor has died."""
    budgets: dict[str, Share] = {}
    """Share of a step's rollouts that may fail for a reason; other reasons share rollout.max_failure_rate."""
    watchdog: NotNegative = 300.0
    """Seconds without any progress after which it is said what is waited for, and since when; 0: never."""


class RayConfig(Section):
    """Where the parts run with placement ray."""

    address: Text | None = None
    """Cluster to join, such as auto or ray://head:10001; without it RAY_ADDRESS, or else one of its own."""
    layout: Literal["auto", "colocate", "disaggregate"] = "auto"
    """Engines on the devices of the actor or on others; auto: on others if there are enough."""
    start_timeout: Positive = 600.0
    """Seconds until the cluster has given every part its place."""


class LeagueConfig(Section):
    """Earlier checkpoints of the run that games are played against, where an environment's opponent is league."""

    size: Count = 4
    """Most of them, each of which takes as much memory as the model."""
    pick: Literal["newest", "sampled"] = "newest"
    """Which of the checkpoints: the newest ones, or some of all, with equal chances."""


class CheckpointConfig(Section):
    """Checkpoints to resume from."""

    every: Natural = 10
    """Steps between checkpoints; 0: only at the end."""
    keep: Count = 2
    """Newest checkpoints that stay, beside the best."""
    asynchronous: bool = True
    """Train on while a copy of the state, in the CPU's memory, is written; without, wait for the disk."""
    resume: Literal["auto", "never"] = "auto"
    """Continue from the newest whole checkpoint of the run's folder, or refuse a folder that has one."""


class Config(Section):
    """All that a run needs to know. Build it with `load_config`, which explains what is wrong with it."""

    env: Annotated[Text, Field(min_length=1)]
    """Environment id; of a mixture, the ids joined by +."""
    mixture: Mix = {}
    """Environments to train in at the same time: weight by id, or a table of weight, env_kwargs and max_turns."""
    curriculum: Text | None = None
    """module:function that is given a step's metrics and returns new weights by id, or None."""
    model: Text | None = None
    """Hub name, local folder or name of a model at hand; without it, smollm2-135m."""
    out: Text | None = None
    """Folder of the run; without it, a new one under runs/."""
    steps: Count = 40
    """Training steps."""
    seed: Natural = 0
    """Fixes tasks, sampling and order."""
    placement: Literal["local", "ray"] = "local"
    """Where the parts run: local is this process and its children, ray a cluster or a machine of many devices."""
    env_kwargs: Table = {}
    """Arguments of the environment."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    league: LeagueConfig = LeagueConfig()
    failures: FailureConfig = FailureConfig()
    ray: RayConfig = RayConfig()

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts that a full batch holds."""
        return self.rollout.groups_per_step * self.rollout.group_size

    @property
    def importance_level(self) -> Literal["off", "token", "seq", "geo"]:
        """`algorithm.importance.level` with auto resolved; off is measured but not applied."""
        level = self.algorithm.importance.level
        return ("geo" if self.rollout.max_staleness else "off") if level == "auto" else level

    @property
    def adapter_updates(self) -> bool:
        """Whether updates send adapters alone to the engines, rather than whole weights."""
        lora, able = self.actor.lora, self.rollout.engine == "vllm" and not self.rollout.release_memory
        wanted = lora.transfer == "adapter" or (lora.transfer == "auto" and lora.rank <= MOST_RANK)
        return bool(lora.rank) and able and wanted

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if problems := list(contradictions(self)):
            raise ValueError("\n".join(problems))
        return self


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: _without_none(value) if isinstance(value, dict) else value
            for key, value in tree.items() if value is not None}
