"""The process of vLLM behind Ray: an actor that holds it, and calls to that actor from any process.

Nothing here loads torch, which that actor has no need of. Invariants: whoever calls an engine knows that it has ended
when a call fails for that reason, or seconds after its process, its actor or its node has died; a call that is given up
is cancelled in vLLM.
"""

import asyncio
import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError, TaskCancelledError

from molt_gym.errors import RunFailed

from ..rollout.busy_clock import BusyClock
from ..rollout.vllm_process import CLOSE_TIMEOUT, HostProcess
from ..rollout.vllm_spec import HostSpec

CALLS = 1 << 20
"""Calls at once, of which each request is one; a pause must never wait for them."""
LOOK = 0.2
"""Seconds between two looks at whether the process lives."""


class EngineEnded(RunFailed):
    """A call failed as there is no engine any more."""


class EngineActor:
    """Holds an engine's process.

    Args:
        spec: what it is started with.
        devices: the GPUs it sees, in place of those that Ray gave this actor, as CUDA_VISIBLE_DEVICES has them.
    """

    def __init__(self, spec: HostSpec, devices: str | None = None) -> None:
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        self._host, self._clock = HostProcess(spec), BusyClock()

    async def log(self) -> str:
        """Node and path of the log."""
        return f"{ray.util.get_node_ip_address()}:{self._host.log}"

    async def ready(self) -> int:
        """The number of the process, once it is ready."""
        return await self._answer(self._host.ready)

    async def call(self, name: str, *arguments: Any) -> Any:
        """A method of `VllmHost`.

        Raises:
            EngineEnded: the process has ended.
        """
        if name == "generate":
            self._clock.enter()
        try:
            result = await self._answer(self._host.call(name, *arguments))
        finally:
            if name == "generate":
                self._clock.leave()
        if name in ("pause", "resume"):
            getattr(self._clock, name)()
        return result

    async def busy(self) -> float:
        """Seconds in which requests were in flight and not paused."""
        return self._clock.read()

    async def end(self) -> str:
        """Wait until the process has ended, and say why."""
        while self._host.ended is None:
            await asyncio.sleep(LOOK)
        return str(self._host.ended)

    async def close(self, reason: Exception) -> None:
        """End the process."""
        await asyncio.to_thread(self._host.close, reason)

    async def _answer(self, future: "Future[Any]") -> Any:
        try:
            return await asyncio.wrap_future(future)
        except RunFailed as error:
            raise EngineEnded(str(error)) if self._host.ended is not None else error from None


class Calls:
    """Calls to an `EngineActor` from any process, and whether it has ended."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.ended: Exception | None = None
        self._lock, self._pending = threading.Lock(), set[Future[Any]]()
        self.start("end").add_done_callback(self._watched)

    def start(self, name: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the actor. Raises nothing; cancelling the future cancels the call."""
        future: Future[Any] = Future()
        with self._lock:
            if self.ended is not None:
                future.set_exception(self.ended)
                return future
            self._pending.add(future)
        ref = getattr(self.handle, name).remote(*arguments)
        ref.future().add_done_callback(partial(self._answered, future))
        future.add_done_callback(lambda done: ray.cancel(ref) if done.cancelled() else None)
        return future

    def fail(self, reason: Exception) -> None:
        """There is no engine any more: fail what is pending and what is called from now on."""
        with self._lock:
            self.ended = self.ended or reason
            pending, self._pending = self._pending, set()
        for future in pending:
            if future.set_running_or_notify_cancel():
                future.set_exception(self.ended)

    def _watched(self, end: "Future[str]") -> None:
        if not end.cancelled() and end.exception() is None:
            self.fail(RunFailed(end.result()))

    def _answered(self, future: "Future[Any]", answer: "Future[Any]") -> None:
        error = answer.exception()
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, EngineEnded):
            self.fail(RunFailed(str(cause)))
        elif isinstance(cause, RayError) and not isinstance(cause, TaskCancelledError):
            self.fail(RunFailed(f"the engine's Ray actor died: {cause}"))
        with self._lock:
            if future not in self._pending:
                return
            self._pending.remove(future)
        if future.set_running_or_notify_cancel():
            if error is None:
                future.set_result(answer.result())
            else:
                future.set_exception(cause if isinstance(cause, RunFailed) else RunFailed(
                    f"the vLLM engine failed: {cause}"))


class RayHost:
    """`HostProcess` on another node: starts at once, on a place that `options` of Ray actors name."""

    def __init__(self, spec: HostSpec, options: dict[str, Any], devices: str | None = None) -> None:
        self.handle = ray.remote(EngineActor).options(**{"max_concurrency": CALLS} | options).remote(spec, devices)
        self._calls = Calls(self.handle)
        self.ready: Future[int] = self._calls.start("ready")
        self.log = "(on its node)"
        self._calls.start("log").add_done_callback(self._logged)

    @property
    def ended(self) -> Exception | None:
        """Why there is no engine any more."""
        return self._calls.ended

    def call(self, name: str, *arguments: Any) -> "Future[Any]":
        """Call a method of `VllmHost`. Raises nothing; cancelling the future cancels the call."""
        return self._calls.start("call", name, *arguments)

    def busy(self) -> "Future[float]":
        """Seconds in which requests were in flight and not paused."""
        return self._calls.start("busy")

    def close(self, reason: Exception) -> None:
        """Fail what is pending for `reason` and end actor and process. Idempotent."""
        alive = self._calls.ended is None
        self._calls.fail(reason)
        if not ray.is_initialized():
            return
        if alive:
            with suppress(RayError, GetTimeoutError):
                ray.get(self.handle.close.remote(reason), timeout=CLOSE_TIMEOUT + 5)
        ray.kill(self.handle)

    def _logged(self, log: "Future[str]") -> None:
        if not log.cancelled() and log.exception() is None:
            self.log = log.result()
