"""Models that answer judges: those of a run, on its loopback server, or one by itself.

Invariants: what a judge samples is part of no rollout and trains nothing; its requests go to the engine at once, past
the gate at which rollouts wait for each other, as one of these waits for the verdict; equal questions to equal weights
have equal seeds. A model beside the policy is loaded before the rollouts begin, or else in float32: loading one in
another precision changes, for a moment, torch's default for all threads.
"""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
from transformers import AutoConfig

from molt_gym.judge_source import Address
from molt_gym.messages import Message
from molt_gym.policy import EndpointMessage
from molt_gym.server.errors import WireError
from molt_gym.server.exchange import Call, Options, Reply
from molt_gym.server.respond import Rules, TokenRespondent
from molt_gym.server.session import Session
from molt_gym.tokens import Generation, Renderer, Sampling

from .config import Config, load_config
from .models import resolve_model
from .rollout.agent_episode import AgentServer
from .rollout.engine import Request, RolloutEngine
from .rollout.transformers_engine import TransformersEngine

OPEN_TIMEOUT = 30.0
"""Seconds until the server listens."""
CONTEXT = 8192
"""Most tokens that a model by itself is shown and replies with, if it can."""


@dataclass(frozen=True)
class Model:
    """Who samples. base: whether without the adapter that is being trained."""

    renderer: Renderer
    engine: RolloutEngine
    max_context: int
    base: bool = False


class Bench:
    """A `Respondent` that answers with the model that a call names: "policy", "frozen", or another local one.

    Args:
        config: of the run, with precisions that are known.
        policy: the model of the run; None outside of one.
        start: folder of the model with which it began.
    """

    def __init__(self, config: Config, policy: Model | None = None, start: Path | None = None) -> None:
        self._config, self._policy, self._start = config, policy, start
        self._models: dict[str, asyncio.Future[Model]] = {}
        self._prepared: dict[str, Model] = {}

    def prepare(self, names: Iterable[str]) -> None:
        """Load the models that will be asked for. Raises ConfigError if one cannot be had."""
        for name in names:
            if self._alone(name) and name not in self._prepared:
                self._prepared[name] = self._load(name, getattr(torch, self._config.rollout.dtype))

    async def answer(self, call: Call) -> list[Reply]:
        """See `Respondent.answer`; nothing is recorded."""
        model = await self._model(call.model)
        rules = Rules(Sampling(model.max_context), model.max_context, free=True, seed=partial(_seed, call))

        async def generate(ids: list[int], sampling: Sampling, number: int, images: tuple = ()) -> Generation:
            return await model.engine.submit([Request(ids, sampling, images=images, base=model.base)])[0]

        return await TokenRespondent(model.renderer, generate, rules).answer(call)

    async def count(self, call: Call) -> int:
        """See `Respondent.count`."""
        model = await self._model(call.model)
        return len(model.renderer.render(call.messages, call.tools))

    async def aclose(self) -> None:
        """End the engines that were started here."""
        for loading in self._models.values():
            loading.cancel()
        loaded = [future.result() for future in self._models.values()
                  if future.done() and not future.cancelled() and future.exception() is None]
        await asyncio.gather(*(model.engine.close() for model in (*loaded, *self._prepared.values())))
        self._prepared.clear()
        self._models.clear()

    def _alone(self, name: str) -> bool:
        """Whether it takes an engine of its own."""
        return name != "policy" and not (name == "frozen" and self._config.adapter_updates)

    async def _model(self, name: str) -> Model:
        if self._policy is not None and not self._alone(name):
            return replace(self._policy, base=name == "frozen")
        if name in self._prepared:
            return self._prepared[name]
        if self._config.placement == "ray":
            raise WireError("unsupported", f"judge {name!r}: placement 'ray' has no place for a model beside the "
                            "policy; write judge 'policy', train adapters (actor.lora.rank), whose base is judge "
                            "'frozen', or start molt-gym serve and write its address")
        loading = self._models.get(name)
        if loading is None or (loading.done() and (loading.cancelled() or loading.exception() is not None)):
            loading = self._models[name] = asyncio.ensure_future(asyncio.to_thread(self._load, name, torch.float32))
        try:
            return await asyncio.shield(loading)
        except Exception as error:  # whatever keeps it from being loaded would do so again
            raise WireError("invalid_request", f"judge {name!r}: {error}", code="judge_model") from error

    def _load(self, name: str, dtype: torch.dtype) -> Model:
        from .session import load_renderer

        rollout = self._config.rollout
        if name == "frozen" and self._start is not None:
            path = self._start
        else:
            path = resolve_model(name, env=self._config.env, say=lambda _: None).path
        positions = getattr(AutoConfig.from_pretrained(path).get_text_config(), "max_position_embeddings", None)
        context = min(rollout.max_context, positions or rollout.max_context)
        renderer = load_renderer(path, self._config)
        engine = TransformersEngine(path, renderer, dtype=dtype, max_context=context,
                                    max_sequences=rollout.max_concurrency)
        return Model(renderer, engine, context)


class Desk:
    """Where the envs of a run find its `Bench`: a session on the server for agents, opened when it is first wanted."""

    def __init__(self, bench: Bench, server: AgentServer, engine: RolloutEngine) -> None:
        self._bench, self._server, self._engine = bench, server, engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Session | None = None
        self._opening, self._closed = asyncio.Lock(), False

    def attend(self) -> None:
        """Be there for envs that are played on the running loop."""
        self._loop = asyncio.get_running_loop()

    def address(self) -> Address:
        """For threads of envs, not for that of the loop.

        Raises:
            ConfigError: the server cannot listen where the settings say.
        """
        return asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(OPEN_TIMEOUT)

    async def _open(self) -> Address:
        async with self._opening:
            if self._closed:
                raise RuntimeError("the run is over")
            if self._session is None:
                server = await self._server.get(self)
                self._session = server.open(self._bench, remember=False)
        # Where a router takes requests to the engines, it does not know the version.
        version = (lambda: self._engine.version) if hasattr(self._engine, "version") else None
        return Address(self._session.url, self._session.key, version)

    async def aclose(self) -> None:
        """Close the session and what it was answered with."""
        self._closed = True
        if self._session is not None:
            self._session.close()
            self._session = None
        await self._server.release(self)
        await self._bench.aclose()


class LocalJudge:
    """A `Policy`: a model that is loaded here when it is first asked.

    Args:
        name: a hub name or a local folder.
    """

    def __init__(self, name: str, max_tokens: int, temperature: float) -> None:
        settings = {"env": "judge", "rollout.max_context": CONTEXT, "rollout.max_tokens": 1,
                    "rollout.max_concurrency": 8}
        self._bench = Bench(load_config(preset=settings))
        self._name, self._options = name, Options(temperature=temperature, max_tokens=max_tokens)

    async def reply(
        self, messages: list[Message], tools: list[dict[str, object]], *, seed: int | None = None
    ) -> Message:
        """The model's reply, as an `EndpointMessage`."""
        call = Call(messages, tools, replace(self._options, seed=seed), model=self._name)
        reply = (await self._bench.answer(call))[0]
        message = EndpointMessage(reply.message)
        message.completion_tokens, message.cut = reply.completion_tokens, reply.finish_reason == "length"
        return message


def _seed(call: Call, number: int, seed: int | None, sample: int) -> int:
    content = json.dumps([call.messages, seed, sample], sort_keys=True).encode()
    return int.from_bytes(blake2b(content, digest_size=8).digest())
