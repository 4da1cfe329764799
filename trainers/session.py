"""The parts of a run, put together from its configuration."""

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from transformers import AutoConfig

from molt_gym.errors import ConfigError
from molt_gym.policy import Policy
from molt_gym.registry import creators, find_spec
from molt_gym.server.server import LoopbackServer
from molt_gym.tokens import Renderer, Sampling, Trajectory
from molt_gym.tokens.vision import Vision

from .actor.actor import Actor
from .architecture import EXPERTS
from .config import ActorConfig, Config
from .evaluate import EvalResult, evaluate, held_out_kwargs
from .judging import Bench, Desk, Model
from .parity import ParityProbe
from .rollout.agent_episode import AgentServer
from .rollout.engine import RolloutEngine
from .rollout.env_maker import EnvMaker, Seated
from .rollout.fleet import EngineFleet
from .rollout.frozen import FrozenModels
from .rollout.gate import Gate, OpenGate, WaveGate
from .rollout.mixture import MixedRunner, split
from .rollout.pool import TaskStream
from .rollout.runner import Limits, Runner
from .rollout.seats import PolicySeat, TokenSeat
from .rollout.stage import Stage
from .rollout.ticket import Ticket
from .rollout.transformers_engine import TransformersEngine
from .rollout.vllm_engine import VllmEngine
from .rollout.vllm_spec import Lora, check_engine_args
from .same_tokenizer import load_tokenizer
from .sft_config import SftConfig

S = TypeVar("S", Config, SftConfig)

EVAL_SEED = 1_000_003
"""Added to the run's seed where an env has no split, so that evaluation draws other tasks than training."""


def env_maker(config: Config, *, held_out: bool = False) -> EnvMaker:
    """The envs of training, or of evaluation, with the settings of one env; see `split`.

    Raises:
        UnknownEnv, NotAChatEnv, ConfigError: the env cannot be made.
    """
    if config.mixture:
        raise ConfigError(f"env: {config.env} is a mixture, and one env is needed here; name one of it")
    kwargs, turns = dict(config.env_kwargs), config.rollout.max_turns
    if held_out:
        kwargs = held_out_kwargs(find_spec(config.env)) | kwargs | config.eval.env_kwargs
        turns = config.eval.max_turns or turns
    if turns is not None:
        kwargs["max_episode_steps"] = turns
    return EnvMaker.of(config.env, kwargs, config.rollout.env_processes)


def count_tasks(maker: EnvMaker) -> int | None:
    """How many tasks an env has; None for no end of them.

    Raises:
        ConfigError: it has none.
    """
    if (count := maker.num_tasks()) == 0:
        raise ConfigError(f"env: {maker.env_id} has no tasks with the arguments {maker.kwargs}; write others, or leave "
                          "it out")
    return count


def env_preset(env: str, model: str) -> dict[str, Any]:
    """What the env's class recommends for any model and for this one."""
    presets = getattr(creators(find_spec(env))[1], "presets", {})
    return merge(presets.get("", {}), presets.get(model, {}))


def mixed_preset(parts: Sequence[Config], model: str) -> dict[str, Any]:
    """What the envs recommend for a run in all of them, the first of them before the others; see `with_own_turns`."""
    found: dict[str, Any] = {}
    for part in reversed(parts):
        found = merge(found, env_preset(part.env, model))
    if len(parts) > 1 and "rollout" in found:
        found["rollout"] = {name: value for name, value in found["rollout"].items() if name != "max_turns"}
    return found


def with_own_turns(config: Config, model: str) -> Config:
    """With the cap on turns that each env of a mixture recommends, unless the user set one."""
    if not config.mixture or config.rollout.max_turns is not None:
        return config
    own = {env: env_preset(env, model).get("rollout", {}).get("max_turns") for env in config.mixture}
    return config.model_copy(update={"mixture": {
        env: ({"max_turns": own[env]} if own[env] else {}) | entry for env, entry in config.mixture.items()}})


def with_adapters(config: S, said: ActorConfig, model: Path, say: Callable[[str], None]) -> S:
    """With a learning rate for adapters, where the user's own settings `said` nothing of it, and updates for the model.

    Adapters learn best at about 10 times the rate of all weights, whatever model and rank ("LoRA Without Regret",
    Schulman et al., 2025, who keep alpha at 32, as here). Beside routed experts vLLM has none on CPUs.

    Raises:
        ConfigError: adapters are to be sent, and vLLM cannot take them.
    """
    lora, changes = config.actor.lora, {}
    if not lora.rank:
        return config
    text = AutoConfig.from_pretrained(model).get_text_config()
    if any(getattr(text, name, None) for name in EXPERTS):
        if lora.transfer == "adapter":
            raise ConfigError(f"actor.lora.transfer: 'adapter' with a mixture of experts ({text.model_type}), beside "
                              "which vLLM takes none everywhere; write 'merged' or 'auto'")
        changes["lora"] = lora.model_copy(update={"transfer": "merged"})
    if "lr" not in said.model_fields_set:
        changes["lr"] = 10 * config.actor.lr
        say(f"actor.lr: {changes['lr']:g} for adapters, 10 times that of all weights; set it to take another")
    return config.model_copy(update={"actor": config.actor.model_copy(update=changes)})


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees of settings; where they meet, `above` wins."""
    both = {key: merge(below[key], above[key]) for key in below.keys() & above.keys()
            if isinstance(below[key], Mapping) and isinstance(above[key], Mapping)}
    return {**below, **above, **both}


def limits(config: Config) -> Limits:
    """Deadlines and retries."""
    rollout = config.rollout
    return Limits(rollout.reset_timeout, rollout.step_timeout, rollout.generate_timeout, rollout.episode_timeout,
                  rollout.retries)


def loopback(config: Config) -> LoopbackServer:
    """The server for agents."""
    rollout = config.rollout
    return LoopbackServer(host=rollout.server_host, port=rollout.server_port, public_url=rollout.server_url,
                          timeout=rollout.generate_timeout)


def pick_dtype(name: str, gpu: bool) -> torch.dtype:
    """auto: bfloat16 where the processor multiplies it natively, else float32."""
    if name != "auto":
        return getattr(torch, name)
    flags = Path("/proc/cpuinfo")
    native = gpu or (flags.is_file() and not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags.read_text().split()))
    return torch.bfloat16 if native else torch.float32


def with_dtypes(config: Config, gpu: bool) -> Config:
    """The configuration with the precisions that auto stands for. gpu: whether engine and actor have one."""
    actor = str(pick_dtype(config.actor.dtype, gpu)).removeprefix("torch.")
    sampler = config.rollout.dtype if config.rollout.dtype != "auto" else actor
    return config.model_copy(update={"actor": config.actor.model_copy(update={"dtype": actor}),
                                     "rollout": config.rollout.model_copy(update={"dtype": sampler})})


def load_renderer(path: Path, config: Config) -> Renderer:
    """The renderer of a model folder."""
    rollout = config.rollout
    renderer = Renderer(load_tokenizer(path), template_kwargs=dict(rollout.template_kwargs),
                        tool_parser=rollout.tool_parser, reasoning_parser=rollout.reasoning_parser,
                        vision=Vision.of(path, max_pixels=config.actor.max_pixels))
    renderer.warm_up()
    return renderer


def vllm_settings(config: Config) -> dict[str, Any]:
    """Keyword arguments of a `VllmEngine`."""
    rollout, lora = config.rollout, config.actor.lora
    return {"dtype": getattr(torch, rollout.dtype), "max_context": rollout.max_context,
            "max_sequences": rollout.max_concurrency, "engine_args": rollout.engine_args,
            "backend": None if rollout.weight_transfer == "auto" else rollout.weight_transfer,
            "transfer_timeout": rollout.transfer_timeout, "routed_experts": rollout.routed_experts,
            "release_memory": rollout.release_memory,
            "lora": Lora(lora.rank, lora.alpha) if config.adapter_updates else None}


class Sampler:
    """Engine and renderer: what it takes to play with a model.

    Args:
        path: model folder.
        done: called with each trajectory of training.
        engine: to play with another one than `config` names.
        gpu: whether engine and actor compute on GPUs; that of this machine by default.

    Raises:
        ConfigError: the engine is not installed, does not know one of its arguments, or cannot run the model.
    """

    def __init__(self, path: Path, config: Config, done: Callable[[Trajectory], None] = lambda _: None,
                 *, engine: RolloutEngine | None = None, gpu: bool | None = None) -> None:
        self._gpu = torch.cuda.is_available() if gpu is None else gpu
        self._path, self._config, self._done = path, with_dtypes(config, self._gpu), done
        self.renderer = load_renderer(path, config)
        self._threads = ThreadPoolExecutor(2, "molt-gym-encode")
        self._runners = WeakSet[Runner]()
        # Evaluation shares it with the training that it interrupts: they may be told to use the same port.
        self._agents = AgentServer(partial(loopback, config))
        self._stage = Stage(config.rollout.max_envs)
        self.engine: RolloutEngine = engine or self._make_engine()
        self._opponents = FrozenModels(config, path, load_renderer)
        model = Model(self.renderer, self.engine, config.rollout.max_context)
        self._bench = Bench(self._config, model, path)
        self._desk = Desk(self._bench, self._agents, self.engine)

    def _make_engine(self) -> RolloutEngine:
        rollout = self._config.rollout
        if rollout.engine == "transformers":
            return TransformersEngine(self._path, self.renderer, dtype=getattr(torch, rollout.dtype),
                                      max_context=rollout.max_context, max_sequences=rollout.max_concurrency)
        check_engine_args(rollout.engine_args)
        make = partial(VllmEngine, self._path, self.renderer, **vllm_settings(self._config))
        return EngineFleet(make, rollout.engines, self._config.failures.engine_restarts)

    def mixed_runner(self, makers: Sequence[EnvMaker], temperature: float, *, ordered: bool) -> MixedRunner:
        """Plays in several envs; ordered, what they ask goes to the engine in common waves."""
        gate = self._gate(makers, ordered=ordered)
        return MixedRunner([self.runner(maker, temperature, ordered=ordered, gate=gate) for maker in makers])

    def _gate(self, makers: Sequence[EnvMaker], *, ordered: bool) -> Gate:
        # Agents take their own time between two requests, so that no wave would ever be whole.
        waves = ordered and not any(maker.is_agent for maker in makers)
        return WaveGate(self.engine) if waves else OpenGate(self.engine)

    def runner(self, maker: EnvMaker, temperature: float, *, ordered: bool, gate: Gate | None = None) -> Runner:
        """Plays with the engine; `ordered` makes the outcome a function of the seed (see `WaveGate`)."""
        rollout = self._config.rollout
        gate = gate or self._gate([maker], ordered=ordered)
        sampling = Sampling(rollout.max_tokens, temperature, rollout.top_p, rollout.top_k,
                            top_logprobs=self._config.algorithm.importance.score_centering)

        def seat(ticket: Ticket, attempt: int) -> TokenSeat:
            return TokenSeat(self.renderer, rollout.history, sampling, rollout.max_context, ticket, attempt, gate,
                             self._threads)

        self._desk.attend()
        self._bench.prepare(maker.judges)
        make = Seated(maker, self._desk.address)
        others = self._opponents.others(gate, replace(sampling, top_logprobs=0), self._threads)
        runner = Runner(maker.env_id, make, seat, limits(self._config), live=gate.rollout, done=self._done,
                        stage=self._stage, server=self._agents, own_process=maker.own_process, others=others)
        self._runners.add(runner)
        return runner

    async def aclose(self) -> None:
        """End the engine, and those of judges and opponents."""
        await self._opponents.aclose()
        await self._desk.aclose()
        await self.engine.close()

    def take_faults(self) -> dict[str, int]:
        """What had to be started or sent again since the last call, for an engine that counts it."""
        return getattr(self.engine, "take_faults", dict)()

    def pending(self) -> list[tuple[str, float]]:
        """What each rollout waits for, and for how many seconds already."""
        return [rollout for runner in self._runners for rollout in runner.pending()]

    async def check_parity(self, actor: Actor, expected: list[float] | None = None) -> None:
        """Raise RunFailed where an engine, if it is code of its own, computes other log-probabilities than `actor`.

        expected: those of `actor`, from `parity_of`, if it cannot be asked now.
        """
        if isinstance(self.engine, EngineFleet):
            await self._probe().check(self.engine, actor, expected)

    async def parity_of(self, actor: Actor) -> list[float]:
        """The log-probabilities that `check_parity` compares with."""
        return await self._probe().expected(actor)

    def _probe(self) -> ParityProbe:
        dtypes = {getattr(torch, self._config.rollout.dtype), getattr(torch, self._config.actor.dtype)}
        return ParityProbe.of(self.renderer, self.engine.max_context, *dtypes, gpu=self._gpu)

    async def evaluate(self, *, alone: bool = True) -> list[EvalResult]:
        """The held-out scores of the weights in use, an env each; `alone`: nobody else plays meanwhile."""
        return [await self.score(part, alone=alone) for part in split(self._config)]

    async def score(self, config: Config, *, alone: bool = True, **options: Any) -> EvalResult:
        """The held-out score in the env of `config`; for `options` see `evaluate.evaluate`."""
        runner = self.runner(env_maker(config, held_out=True), config.eval.temperature, ordered=alone)
        try:
            return await evaluate_with(runner, config, **options)
        finally:
            await runner.aclose()
            if alone:
                await self.engine.reset_prefix_cache()


def policy_runner(policy: Policy, maker: EnvMaker, config: Config) -> Runner:
    """Plays with a policy that is no model of ours."""
    return Runner(maker.env_id, maker, lambda ticket, attempt: PolicySeat(policy), limits(config),
                  stage=Stage(config.rollout.max_envs), server=AgentServer(partial(loopback, config)),
                  own_process=maker.own_process)


async def evaluate_with(runner: Runner, config: Config, **options: Any) -> EvalResult:
    """The held-out score of whatever `runner` asks; for `options` see `evaluate.evaluate`."""
    maker = env_maker(config, held_out=True)
    tasks = held_out_tasks(config, maker)
    chunk = config.rollout.max_concurrency * config.rollout.engines
    return await evaluate(runner, tasks, config.eval.episodes, config.eval.k, chunk=chunk, seed=config.seed, **options)


def held_out_tasks(config: Config, maker: EnvMaker) -> TaskStream:
    """The first tasks of the test split in a fixed order; without a split, draws that training does not make."""
    has_split = "split" in maker.kwargs
    return TaskStream(count_tasks(maker), 0 if has_split else config.seed + EVAL_SEED, epochs=1)


def seed_everything(seed: int) -> None:
    """Seed what libraries draw from behind our back; our own sampling has generators of its own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)

