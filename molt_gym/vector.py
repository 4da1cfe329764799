"""ChatVectorEnv: several envs of one id, each in a thread of its own, stepped at the same time.

Envs that want processes of their own (`own_process`) share one thread instead, where they play one after the other;
`vectorization_mode="async"` gives each a process.

`gym.make_vec("CodeExec-v0", num_envs=4)` gives one. The vector entry point of an id is "molt_gym.vector:" + id, because
Gymnasium does not tell a vector constructor which env it is for. `vectorization_mode="sync"` works as well; "async"
needs `vector_kwargs={"shared_memory": False}`, since text has no place in a fixed array.

Invariants: an env that fails loses nothing of the others; a call never outlasts its deadline; observations and actions
are tuples of what single envs take and give.
"""

import concurrent.futures
import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from .errors import EnvFailure
from .messages import Conversation, Message
from .registry import creators, find_spec, make
from .spaces import AssistantMessageSpace
from .threads import Worker

__all__ = ["ChatVectorEnv", "VectorEnvFailure"]

Conversations = tuple[Conversation, ...]
Flags = np.ndarray
T = TypeVar("T")


class VectorEnvFailure(EnvFailure):
    """Some of the envs failed; `reset(options={"reset_mask": mask})` of these goes on with all.

    Attributes:
        failures: what each failed env raised, by its number.
        results: what the call would have returned. A failed env has its last observation (None before its first),
            reward NaN, and no info.
    """

    def __init__(self, failures: dict[int, EnvFailure], results: Any) -> None:
        first = next(iter(failures.values()))
        super().__init__(first.reason, "; ".join(f"env {i}: {error}" for i, error in failures.items()))
        self.failures = failures
        self.results = results
        self.args = (failures, results)


class ChatVectorEnv(VectorEnv[Conversations, Sequence[Message], np.ndarray]):
    """Makes, resets and steps `num_envs` envs concurrently.

    Args:
        env_id: an id as for `molt_gym.make`.
        num_envs: how many.
        autoreset_mode: when an env that is over starts anew, as in `gymnasium.vector`. NEXT_STEP, Gymnasium's default,
            ignores an action for it; SAME_STEP resets at once and keeps the end in `infos["final_obs"]` and
            `infos["final_info"]`; DISABLED leaves it to `reset(options={"reset_mask": mask})`.
        deadline: seconds that one reset, step or close of all may take; an env that has not answered by then fails.
        **kwargs: for `molt_gym.make`, such as `max_episode_steps`, `render_mode` and what the env takes.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int = 1,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        deadline: float = 600.0,
        **kwargs: Any,
    ) -> None:
        self.envs: list[gym.Env] = []
        self._workers: list[Worker] = []
        if isinstance(num_envs, bool) or not isinstance(num_envs, int | np.integer) or num_envs < 1:
            raise ValueError(f"num_envs: {num_envs!r}; write an integer from 1 on")
        if not isinstance(deadline, int | float) or not 0 < deadline <= threading.TIMEOUT_MAX:
            raise ValueError(f"deadline: {deadline!r}; write seconds above 0, and a number that a clock can hold")
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.deadline = deadline
        alone = not getattr(creators(find_spec(env_id))[1], "own_process", False)
        workers = [Worker(f"{env_id}[{i}]") for i in range(num_envs if alone else 1)]
        self._workers = workers if alone else workers * num_envs
        made, failures = self._run({i: partial(make, env_id, **kwargs) for i in range(num_envs)})
        self.envs = list(made.values())
        if failures:
            self.close()
            raise next(iter(failures.values()))
        self.metadata = {**self.envs[0].metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = self.envs[0].render_mode
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._observations: list[Conversation | None] = [None] * num_envs
        self._over = np.zeros(num_envs, dtype=np.bool_)
        self._unfit = np.ones(num_envs, dtype=np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Conversations, dict[str, Any]]:
        """Starts an episode in each env, or in those of a mask.

        Args:
            seed: one for each env; an int stands for seed, seed + 1, ...; None lets each go on with its random state.
            options: reset options of the envs, where "index" may also be a sequence of one task for each env;
                "reset_mask" is an array of `num_envs` bools that says which to reset.

        Raises:
            VectorEnvFailure: some envs failed; the others are reset.
        """
        options = dict(options or {})
        mask = self._checked_mask(options.pop("reset_mask", None))
        seeds = [None] * self.num_envs if seed is None else seed
        if isinstance(seeds, int | np.integer):
            super().reset(seed=int(seeds))
            seeds = [int(seeds) + i for i in range(self.num_envs)]
        indices = options.get("index")
        if not isinstance(indices, Sequence | np.ndarray):
            indices = [indices] * self.num_envs
        for name, values in (("seed", seeds), ("options['index']", indices)):
            if len(values) != self.num_envs:
                raise ValueError(f"{name}: {len(values)} values for {self.num_envs} envs; write one for each")
        calls = {}
        for i in map(int, np.flatnonzero(mask)):
            own = {**options, "index": indices[i]} if "index" in options else options
            calls[i] = partial(self.envs[i].reset, seed=seeds[i], options=own)
        outcomes, failures = self._run(calls)
        self._over[mask] = False
        self._unfit[mask] = False
        for i, (observation, _) in outcomes.items():
            self._observations[i] = observation
        infos = self._merged({i: info for i, (_, info) in outcomes.items()})
        self._unfit[list(failures)] = True
        return self._conclude(failures, (self._batched(), infos))

    def step(self, actions: Sequence[Message]) -> tuple[Conversations, np.ndarray, Flags, Flags, dict[str, Any]]:
        """Answers one assistant message for each env; those of envs that are reset by this step are ignored.

        Returns:
            A tuple of observations, float rewards, bool terminated and truncated of shape (num_envs,), and infos.

        Raises:
            ValueError: an action is not in the action space; no env was stepped.
            ResetNeeded: an env was never reset, has failed, or is over and the mode is DISABLED; no env was stepped.
            VectorEnvFailure: some envs failed; the others were stepped, and `results` has what they returned.
        """
        actions = list(actions)
        if len(actions) != self.num_envs:
            raise ValueError(f"actions: {len(actions)} for {self.num_envs} envs; write one for each")
        waiting = self._unfit | self._over if self.autoreset_mode is AutoresetMode.DISABLED else self._unfit
        if waiting.any():
            raise ResetNeeded(
                f"envs {np.flatnonzero(waiting).tolist()} have no episode running; call "
                "reset(options={'reset_mask': mask}) with a mask that is True for them"
            )
        for i in map(int, np.flatnonzero(~self._over)):
            try:
                AssistantMessageSpace().validate(actions[i])
            except ValueError as error:
                raise ValueError(f"actions[{i}]: {error}") from None
        outcomes, failures = self._run({i: partial(self._step_one, i, action) for i, action in enumerate(actions)})
        rewards = np.full(self.num_envs, np.nan)
        terminated, truncated = np.zeros((2, self.num_envs), dtype=np.bool_)
        for i, outcome in outcomes.items():
            self._observations[i], rewards[i], terminated[i], truncated[i], _ = outcome
        infos = self._merged({i: info for i, (*_, info) in outcomes.items()})
        self._unfit[list(failures)] = True
        ended = terminated | truncated
        self._over = ended if self.autoreset_mode is not AutoresetMode.SAME_STEP else np.zeros_like(ended)
        return self._conclude(failures, (self._batched(), rewards, terminated, truncated, infos))

    def render(self) -> tuple[Any, ...]:
        """What each env renders; transcripts with `render_mode="ansi"`."""
        frames, failures = self._run({i: env.render for i, env in enumerate(self.envs)})
        return self._conclude(failures, tuple(frames.values()))

    def close_extras(self) -> None:
        """Closes the envs, each in its thread, and ends the threads."""
        _, failures = self._run({i: env.close for i, env in enumerate(self.envs)})
        for worker in self._workers:
            worker.stop()
        for i, error in failures.items():
            gym.logger.warn(f"env {i} of {self!r} did not close: {error}")

    def _step_one(self, i: int, action: Message) -> tuple[Conversation, float, bool, bool, dict[str, Any]]:
        env = self.envs[i]
        if self._over[i]:
            observation, info = env.reset()
            return observation, 0.0, False, False, info
        observation, reward, terminated, truncated, info = env.step(action)
        reward = float(reward)
        if (terminated or truncated) and self.autoreset_mode is AutoresetMode.SAME_STEP:
            final = {"final_obs": observation, "final_info": info}
            observation, info = env.reset()
            info = {**info, **final}
        return observation, reward, terminated, truncated, info

    def _run(self, calls: Mapping[int, Callable[[], Any]]) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """Runs a call for each numbered env in its thread; gives results and errors once all ended or time is up."""
        if self.closed:
            raise ClosedEnvironmentError(f"{self!r} was closed; make another one")
        until = time.monotonic() + self.deadline
        failures: dict[int, BaseException] = {}
        futures = {}
        busy = {worker for worker in self._workers if worker.busy}
        for i, call in calls.items():
            if self._workers[i] in busy:
                failures[i] = EnvFailure("timeout", "an earlier call that was given up has not returned yet")
            else:
                futures[i] = self._workers[i].submit(call)
        concurrent.futures.wait(futures.values(), timeout=until - time.monotonic())
        results = {}
        for i, future in futures.items():
            if not future.done():
                failures[i] = EnvFailure("timeout", f"no answer within {self.deadline:g} s")
            elif (error := future.exception()) is not None:
                failures[i] = error
            else:
                results[i] = future.result()
        return results, dict(sorted(failures.items()))

    def _conclude(self, failures: dict[int, BaseException], results: T) -> T:
        """The results, or the error that stands for the failures: one that is no EnvFailure is a bug and goes first."""
        failed: dict[int, EnvFailure] = {}
        for i, error in failures.items():
            if not isinstance(error, EnvFailure):
                error.add_note(f"raised in env {i} of {self!r}")
                raise error
            failed[i] = error
        if failed:
            raise VectorEnvFailure(failed, results)
        return results

    def _merged(self, infos: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """As Gymnasium's `_add_info` for values of one type; of several types, a key has an array of objects."""
        merged: dict[str, Any] = {}
        for key in dict.fromkeys(key for info in infos.values() for key in info):
            values = {i: info[key] for i, info in infos.items() if key in info}
            nested = key != "final_obs" and all(isinstance(value, dict) for value in values.values())
            merged[key] = self._merged(values) if nested else self._array(values)
            merged[f"_{key}"] = np.isin(np.arange(self.num_envs), list(values))
        return merged

    def _array(self, values: Mapping[int, Any]) -> np.ndarray:
        listed = list(values.values())
        alike = {(value.shape, value.dtype) if isinstance(value, np.ndarray)
                 else type(value) in (bool, int, float) or isinstance(value, np.number) for value in listed}
        if len(alike) == 1 and False not in alike:
            found = np.array(listed)
            array = np.zeros((self.num_envs, *found.shape[1:]), dtype=found.dtype)
            array[list(values)] = found
            return array
        array = np.full(self.num_envs, None, dtype=object)
        for i, value in values.items():
            array[i] = value
        return array

    def _batched(self) -> Conversations:
        # None only for envs that failed before their first observation, within VectorEnvFailure.results.
        return tuple(copy.deepcopy(self._observations))  # type: ignore[arg-type]

    def _checked_mask(self, mask: Any) -> np.ndarray:
        if mask is None:
            return np.ones(self.num_envs, dtype=np.bool_)
        if not isinstance(mask, np.ndarray) or mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
            raise ValueError(f"options['reset_mask']: {mask!r:.200}; write an array of {self.num_envs} bools")
        if not mask.any():
            raise ValueError("options['reset_mask']: it is False everywhere; leave the call out")
        if any(self._observations[i] is None for i in np.flatnonzero(~mask)):
            raise ResetNeeded("the first reset has to be one of all envs; leave options['reset_mask'] out")
        return mask


def __getattr__(name: str) -> Callable[..., ChatVectorEnv]:
    """The vector constructor of a registered id, which Gymnasium asks for as `molt_gym.vector:<id>`."""
    if name in gym.registry:
        return partial(ChatVectorEnv, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and no env is registered as {name!r}")
