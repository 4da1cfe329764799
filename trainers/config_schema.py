"""The options of a run, their help and the rules between them.

Invariants: a `Config` that exists is consistent across its components; importing this module loads neither torch nor
transformers; what `Config.to_toml` writes, `config.load_config` reads back equal.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field, model_validator

from .config_actor import MOST_RANK, ActorConfig, CriticConfig
from .config_algorithm import AlgorithmConfig
from .config_rules import contradictions
from .config_types import (
    NUMBER,
    Count,
    Dtype,
    Folder,
    Mix,
    Natural,
    NotNegative,
    Positive,
    PositiveShare,
    Range,
    Section,
    Seed,
    Share,
    Table,
    Text,
)


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
    max_envs: Count | None = None
    """Most environments in play at a time in such a process, evaluation's included; others wait. Without it, all."""
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
    top_p: PositiveShare = 1.0
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
    server_port: Annotated[int, Ge(0), Le(65535), NUMBER] = 0
    """Port of that address; 0 takes a free one."""
    tool_parser: Text | None = None
    """How tool calls are read: "vllm:NAME" for one of vLLM's parsers; without it, the forms that are built in."""
    reasoning_parser: Text | None = None
    """How reasoning is read: "vllm:NAME" for one of vLLM's parsers; without it, a leading <think> block."""
    dynamic_filter: Range = None
    """Train a group only if low < mean reward < high: [low, high], or true for [0, 1]; other groups are replaced."""


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
    out: Folder | None = None
    """Folder of the run; without it, a new one under runs/."""
    steps: Count = 40
    """Training steps."""
    seed: Seed = 0
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
