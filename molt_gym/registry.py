"""From an id to an env: registration, installed plug-ins, and the check that an env can be trained at all.

Gymnasium's registry is the only one. What is added: plug-ins of the entry-point group `molt_gym.envs` (value: a module
whose import registers ids) are imported on the first unknown id, a broken one is warned about by name and hurts nothing
else, and an env that does not speak in messages is refused with advice. To play an env in another process, send
`find_spec(env_id, **kwargs).to_json()` there and give `EnvSpec.from_json(...)` to `make`; nothing need be imported.
"""

import copy
import difflib
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator, parse_env_id

from .adapters import suites
from .errors import ConfigError, NotAChatEnv, UnknownEnv
from .spaces import AssistantMessageSpace, ConversationSpace
from .task_env import TaskEnv

__all__ = ["PLUGIN_GROUP", "EnvInfo", "creators", "find_spec", "list_envs", "load_plugins", "make", "register"]

PLUGIN_GROUP = "molt_gym.envs"
_VECTOR = "molt_gym.vector:"
_CLASSICS = ("gymnasium.envs.toy_text", "gymnasium.envs.classic_control")
_plugin_errors: dict[EntryPoint, str | None] = {}
_speakers: dict[Any, bool] = {}


@dataclass(frozen=True)
class EnvInfo:
    """One line about an env: its id, the first line of its docstring, the package it comes from, and the arguments
    that it cannot be made without."""

    id: str
    summary: str
    source: str
    needs: tuple[str, ...] = ()


def register(
    id: str,
    entry_point: str | Callable[..., gym.Env],
    *,
    max_episode_steps: int | None = None,
    nondeterministic: bool = False,
    kwargs: dict[str, Any] | None = None,
    **spec: Any,
) -> None:
    """`gymnasium.register` for chat envs: `gym.make_vec(id)` gives a `ChatVectorEnv`, and `list_envs` lists the id.

    Args:
        id: "[namespace/]Name-v0".
        entry_point: "module:Class", or the class, which is turned into such a string if it can be imported by one.
        max_episode_steps: the cap on turns; an episode that reaches it is truncated.
        nondeterministic: whether equal seeds and actions may give different rewards (judges, sandboxes).
        kwargs: arguments of the constructor in JSON; they are copied on each make, so name data, never hold it here.
        **spec: further fields of Gymnasium's `EnvSpec`. Its passive checker is off unless `disable_env_checker=False`.

    Raises:
        ConfigError: the id has a colon, before which ids have a module to import.
    """
    if ":" in id:
        raise ConfigError(f"id: {id!r}; write it without a colon, such as {id.replace(':', '/')!r}: what stands before "
                          "one is the module whose import registers an id")
    if inspect.isclass(entry_point) and entry_point.__module__ != "__main__":
        module, name = entry_point.__module__, entry_point.__name__
        if getattr(sys.modules.get(module), name, None) is entry_point:
            entry_point = f"{module}:{name}"
    gym.register(
        id,
        entry_point=entry_point,
        max_episode_steps=max_episode_steps,
        nondeterministic=nondeterministic,
        kwargs=kwargs or {},
        **{"vector_entry_point": _VECTOR + id, "disable_env_checker": True} | spec,
    )


def find_spec(env_id: str, *, max_episode_steps: int | None = None, **kwargs: Any) -> EnvSpec:
    """A copy of the spec that an id stands for; an id without "-vN" stands for the latest version.

    Args:
        env_id: "Name-v0" of a registered env or an installed plug-in, or "module:Name-v0".
        max_episode_steps: another cap on turns than the registered one.
        **kwargs: arguments for the constructor, added to the registered ones.

    Raises:
        UnknownEnv: no module, plug-in or earlier `gym.register` knows the id; the message names the nearest ids.
        ConfigError: it is no id.
    """
    if not isinstance(env_id, str):
        raise ConfigError(f"env: {env_id!r:.200} is no id; write molt_gym.register('My-v0', MyEnv) first, and then its "
                          "id, 'My-v0'")
    module, _, name = env_id.rpartition(":")
    if module:
        _import_module(module, env_id)
    spec = _registered(name)
    if spec is None and module in ("", "molt_gym"):
        suites.load(name.rpartition("/")[0])
        spec = _registered(name)
    if spec is None and not module:
        load_plugins()
        spec = _registered(name)
    if spec is None:
        raise UnknownEnv(_unknown(env_id, name))
    spec = copy.deepcopy(spec)
    spec.kwargs.update(kwargs)
    if max_episode_steps is not None:
        spec.max_episode_steps = max_episode_steps
    return spec


def make(env_id: str | EnvSpec, **kwargs: Any) -> gym.Env:
    """`gymnasium.make` for chat envs, and for others through `molt_gym.TextEnv`.

    Args:
        env_id: "Name-v0" of a registered env or an installed plug-in, "module:Name-v0", or a spec.
        **kwargs: for the constructor of the env, for `TextEnv`, or for `gymnasium.make` (`max_episode_steps`, ...).

    Raises:
        UnknownEnv: nothing knows the id; the message names the nearest ids.
        ConfigError: it is no id, or an argument is missing without which its class cannot be, or is none of its own.
        NotAChatEnv: its spaces are not `molt_gym.Conversation` and `molt_gym.AssistantMessage`, and its actions cannot
            be written in a reply.
    """
    spec = env_id if isinstance(env_id, EnvSpec) else find_spec(env_id)
    # After a first reset that fails, Gymnasium's checker breaks every later step; `check-env` does its work.
    kwargs = {"disable_env_checker": True} | kwargs
    if not _speaks(spec, kwargs):
        from .adapters.text_env import text_spec

        spec = text_spec(spec)
    if missing := [name for name in _needs(creators(spec), spec) if name not in kwargs] if spec.entry_point else []:
        raise ConfigError(f"{spec.id}: {', '.join(missing)} missing; write it as a keyword, to train as env_kwargs="
                          f"{{'{missing[0]}': ...}} or --env-kwargs.{missing[0]} VALUE")
    try:
        env = gym.make(spec, **kwargs)
    except TypeError as error:
        unknown = re.search(r"(?:unexpected keyword argument|unknown keyword) '?(\w+)", str(error))
        if unknown is None or unknown[1] not in kwargs:
            raise
        raise ConfigError(f"{spec.id}: it takes no argument {unknown[1]!r}; {_arguments(spec)}") from error
    if isinstance(env.observation_space, ConversationSpace) and isinstance(env.action_space, AssistantMessageSpace):
        return env
    env.close()
    raise NotAChatEnv(
        f"{spec.id} is no chat env: its observations are {env.observation_space!r:.200} and its actions "
        f"{env.action_space!r:.200}. Derive it from molt_gym.ChatEnv, or register a gymnasium.Wrapper around it whose "
        "observation_space is molt_gym.Conversation(), whose action_space is molt_gym.AssistantMessage(), and which "
        "turns observations into messages and the text of a reply into an action."
    )


def _speaks(spec: EnvSpec, kwargs: dict[str, Any]) -> bool:
    """Whether the env of a spec converses; found out by making one, where neither its class nor its spec tells."""
    if str(spec.vector_entry_point).startswith(_VECTOR) or spec.entry_point is None:
        return True
    creator = creators(spec)[0]
    if inspect.isclass(creator) and issubclass(creator, TaskEnv):
        return True
    from .adapters.text_env import OPTIONS

    kwargs = {name: value for name, value in kwargs.items() if name not in (*OPTIONS, "render_mode")} | {
        "disable_env_checker": True}
    # One creator may serve several ids, and what it makes may depend on arguments and wrappers.
    key = creator, repr((spec, kwargs))
    if key not in _speakers:
        try:
            env = gym.make(spec, **kwargs)
        except Exception:  # noqa: BLE001  whatever it is, making it in earnest says it
            return True
        _speakers[key] = isinstance(env.action_space, AssistantMessageSpace)
        env.close()
    return _speakers[key]


def list_envs(suite: str | None = None) -> list[EnvInfo]:
    """The chat envs that can be made by id, sorted: built in, from plug-ins, and registered so far in this process.

    suite: the namespace of a suite of others, such as "reasoning_gym", for its envs alone; importing it may take
    seconds. `molt_gym.adapters.suites.SUITES` has the suites.

    An env counts if its class derives from `TaskEnv` or if it was registered through `molt_gym.register`; and those of
    Gymnasium's own that need nothing else to be installed, which `TextEnv` plays.
    """
    load_plugins()
    if suite is not None and suite not in suites.SUITES:
        raise UnknownEnv(f"suite: {suite!r} is none; write one of {', '.join(suites.SUITES)}")
    suites.load(suite)
    found = []
    for spec in sorted(_foreign_specs(), key=lambda spec: spec.id):
        try:
            creator, maker = creators(spec)
        except Exception as error:  # noqa: BLE001  a listing must survive any one env
            found.append(EnvInfo(spec.id, f"cannot be imported: {type(error).__name__}: {error}", _package(spec)))
            continue
        is_ours = str(spec.vector_entry_point).startswith(_VECTOR)
        if is_ours or (inspect.isclass(creator) and issubclass(creator, TaskEnv)):
            summary = (maker.__doc__ or "").strip().partition("\n")[0]
            source = spec.namespace if spec.namespace in suites.SUITES else getattr(maker, "__module__", "")
            found.append(EnvInfo(spec.id, summary, str(source).partition(".")[0], _needs((creator, maker), spec)))
    classics = {spec.name: spec for spec in sorted(tuple(gym.registry.values()), key=lambda spec: spec.version or 0)
                if spec.namespace is None and str(spec.entry_point).startswith(_CLASSICS)}
    found += [EnvInfo(spec.id, "Gymnasium's own, played in words", "gymnasium") for spec in classics.values()]
    return sorted((info for info in found if suite in (None, info.source)), key=lambda info: info.id)


def _arguments(spec: EnvSpec) -> str:
    """What an env takes, in words: what its class names and, where that hands others on, what its bases name."""
    names: dict[str, None] = {}
    creator, decider = creators(spec)
    for maker in (decider, creator):
        for part in inspect.getmro(maker) if inspect.isclass(maker) else (maker,):
            taken = inspect.signature(part).parameters.values()
            names |= {one.name: None for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
            if all(one.kind is not one.VAR_KEYWORD for one in taken):
                break
    return f"write one of {', '.join(names)}, or what the docstring of {getattr(decider, '__name__', spec.id)} adds"


def _needs(makers: tuple[Any, Any], spec: EnvSpec) -> tuple[str, ...]:
    arguments = [argument for maker in dict.fromkeys(makers) if inspect.isclass(maker)
                 for argument in inspect.signature(maker).parameters.values()]
    return tuple(one.name for one in arguments if one.default is one.empty and one.name not in spec.kwargs
                 and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))


def creators(spec: EnvSpec) -> tuple[Any, Any]:
    """What makes the env, and what decides its tasks: the same class or function, or, of an AgentEnv, its agent."""
    from .agents import AgentEnv, find_agent

    creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
    return creator, find_agent(spec.kwargs["agent"]) if creator is AgentEnv and "agent" in spec.kwargs else creator


def load_plugins() -> dict[str, str | None]:
    """Imports the installed plug-ins, each once in a process.

    Returns:
        The error of each plug-in by its name; None if it was imported.
    """
    found = {}
    for plugin in entry_points(group=PLUGIN_GROUP):
        if plugin not in _plugin_errors:
            _plugin_errors[plugin] = _import_plugin(plugin)
        found[plugin.name] = _plugin_errors[plugin]
    return found


def _import_plugin(plugin: EntryPoint) -> str | None:
    try:
        plugin.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a stranger's module does, others must go on
        problem = f"{type(error).__name__}: {error}"
        warnings.warn(f"env plug-in {plugin.name!r} ({plugin.value}) is left out: {problem}", stacklevel=3)
        return problem
    return None


def _import_module(module: str, env_id: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UnknownEnv(f"{env_id!r}: there is no module {module!r}; install it or put it on PYTHONPATH") from error


def _registered(name: str) -> EnvSpec | None:
    if name in gym.registry:
        return gym.registry[name]
    try:
        namespace, base, version = parse_env_id(name)
    except gym.error.Error:
        return None
    same = [spec for spec in tuple(gym.registry.values()) if (spec.namespace, spec.name) == (namespace, base)]
    return max(same, key=lambda spec: spec.version or 0) if same and version is None else None


def _unknown(env_id: str, name: str) -> str:
    ids = {spec.id.lower(): spec.id for spec in _foreign_specs()}
    suite = suites.hint(name.rpartition("/")[0])
    near = [ids[key] for key in difflib.get_close_matches(name.lower(), ids, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`molt-gym envs` lists the ids that there are."
    broken = [plugin for plugin, error in load_plugins().items() if error]
    note = f" These plug-ins could not be imported: {', '.join(broken)}." if broken else ""
    if suite:
        return f"no env is registered as {env_id!r}. {suite}"
    return (
        f"no env is registered as {env_id!r}; {hint}{note} An env of your own: call gymnasium.register({name!r}, "
        f"entry_point='my_pkg:MyEnv') first, write 'my_module:{name}' if the import of my_module registers it, or "
        f"install it with an entry point in the group {PLUGIN_GROUP!r}."
    )


def _foreign_specs() -> list[EnvSpec]:
    """All but the envs that Gymnasium registers for itself; of a copy, as another thread may be registering."""
    return [spec for spec in tuple(gym.registry.values()) if _package(spec) != "gymnasium"]


def _package(spec: EnvSpec) -> str:
    entry = spec.entry_point
    module = entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "")
    return module.partition(".")[0]
