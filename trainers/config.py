"""Reading a run's configuration: defaults < the model's preset < TOML file < overrides.

Invariants: importing this module loads neither torch nor transformers; every refusal is a `ConfigError` that names the
option, the value, where it came from and what to write instead; all that is wrong is said at once. Tables are merged
key by key, everything else is replaced. The options themselves are in `config_schema`.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from molt_gym.errors import ConfigError

from .config_actor import ActorConfig
from .config_algorithm import AlgorithmConfig, ImportanceConfig
from .config_schema import CheckpointConfig, Config, EvalConfig, RolloutConfig
from .config_types import Section

__all__ = ["ActorConfig", "AlgorithmConfig", "CheckpointConfig", "Config", "EvalConfig", "ImportanceConfig",
           "RolloutConfig", "field_help", "load_config", "load_settings", "parse_cli"]

Keys = tuple[str, ...]
S = TypeVar("S", bound=Section)

_SHORTHANDS: dict[Keys, Keys] = {("engine",): ("rollout", "engine")}
_NAMED = {("mixture",), ("failures", "budgets"), ("actor", "lr_groups")}
"""Tables by ids and other names with hyphens of their own, rather than by keywords of Python."""


def load_config(
    env: str | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    file: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    preset: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration of a run in `env`.

    Args:
        env: environment id; without it, `file` or `overrides` must name one.
        model: hub name, folder or name of a model; wins over the other sources, like `env`.
        file: TOML file, such as the config.toml of an earlier run, or what one would hold.
        preset: values recommended for the model, below the file.
        overrides: values that win over the file. In all of them, `{"rollout": {"group_size": 8}}`,
            `{"rollout.group_size": 8}` and `{"rollout__group_size": 8}` are the same.

    Raises:
        ConfigError: an unknown option, a value of the wrong kind, or options that contradict each other.
    """
    given = {name: value for name, value in (("env", env), ("model", model)) if value is not None}
    return load_settings(Config, given, file=file, preset=preset, overrides=overrides)


def load_settings(
    schema: type[S],
    given: Mapping[str, Any],
    *,
    file: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    preset: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> S:
    """The same for other options than those of `Config`; `given` wins over the other sources."""
    merged: dict[str, Any] = {}
    sources: dict[Keys, str] = {}
    problems: list[str] = []
    said = ("config", file) if isinstance(file, Mapping) else (f"the file {file}", _read(file) if file else None)
    for source, tree in (("the model's preset", preset), said, ("the overrides", overrides), ("", given)):
        for path, value in _options(tree or {}, source, problems, schema):
            _put(merged, path, value)
            sources[path] = source
    if problems:
        raise ConfigError("\n".join(problems))
    # What a preset, or the run that is gone on with, says of what the user did not want goes with it.
    actor, kl = merged.get("actor", {}), merged.get("algorithm", {}).get("kl", {})
    unwanted = [("actor", "min_lr_ratio")] if actor.get("schedule") == "constant" else []
    unwanted += [("algorithm", "kl", name) for name in ("kind", "use", "ref")] if kl.get("coefficient") == 0 else []
    for path in unwanted:
        if sources.get(path) == "the model's preset":
            del (actor if path[0] == "actor" else kl)[path[-1]]
    try:
        return schema.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_explain(error, merged, sources, schema)))) from None


def parse_cli(arguments: Sequence[str], schema: type[Section] = Config) -> dict[str, Any]:
    """Overrides for `load_config` from command-line words such as `--rollout.group-size 8 --eval.after=false`.

    A switch without a value is true. Values of text options are taken as they are, others are read as TOML, with
    Python's True and False; `none` unsets an option that may be left out.

    Raises:
        ConfigError: a word that is no option, an unknown option, or an option without its value.
    """
    overrides: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError(f"{word!r} on the command line is no option; write --NAME VALUE, such as --steps 10")
        name, equals, text = word[2:].partition("=")
        path: Keys = ()
        for part in name.split("."):
            path += (part if path in _NAMED else part.replace("-", "_"),)
        name = ".".join(path)
        path, field = _resolve(path, "the command line", schema)
        switch = field is not None and field.annotation is bool
        value_next = words and not words[0].startswith("--") and (not switch or words[0].lower() in ("true", "false"))
        if not equals and value_next:
            text = words.pop(0)
        elif not equals and switch:
            text = "true"
        elif not equals:
            raise ConfigError(f"--{name} on the command line lacks its value; write --{name} VALUE")
        overrides[".".join(path)] = _parse_value(text, field)
    return overrides


def field_help(schema: type[Section] = Config) -> str:
    """One line an option, for `--help`: its name, what it takes, its default and what it does."""
    lines = []
    for path, field in _fields(schema):
        if path != ("env",):
            default = "" if field.default is None else f" (default: {field.default})"
            short = [".".join(word) for word, option in _SHORTHANDS.items() if option == path and schema is Config]
            name = ", --".join([".".join(path).replace("_", "-"), *short])
            lines.append(f"  --{name}: {_takes(field)}{default}\n      {field.description}")
    return "\n".join(lines)


def _read(file: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {file}: {error.strerror}; write the path of a TOML file") from None
    except ValueError as error:
        raise ConfigError(f"config file {file}: is not TOML ({error})") from None


def _options(
    tree: Mapping[str, Any], source: str, problems: list[str], schema: type[Section], prefix: Keys = ()
) -> Iterator[tuple[Keys, Any]]:
    """The (path, value) pairs of `tree`; unknown names go to `problems`."""
    for key, value in tree.items():
        try:
            path, field = _resolve((*prefix, *str(key).replace("__", ".").split(".")), source, schema)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if field is not None:
            yield path, value
        elif isinstance(value, Mapping):
            yield from _options(value, source, problems, schema, path)
        else:
            problems.append(f"{'.'.join(path)}{_from(source)}: got {_show(value)}; write a table of its options")


def _resolve(path: Keys, source: str, schema: type[Section]) -> tuple[Keys, FieldInfo | None]:
    """The option that `path` names, or None for a section. Paths into a free table lead to the table's field."""
    path = _SHORTHANDS.get(path, path) if schema is Config else path
    section = schema
    for i, name in enumerate(path):
        field = section.model_fields.get(name)
        if field is None:
            raise ConfigError(f"{'.'.join(path)}{_from(source)}: unknown option; " + _nearest(path, schema))
        if not _is_section(field):
            if i + 1 < len(path) and get_origin(field.annotation) is not dict:
                raise ConfigError(f"{'.'.join(path)}{_from(source)}: unknown option; {'.'.join(path[:i + 1])} takes "
                                  f"{_takes(field)}")
            return path, field
        section = field.annotation
    return path, None


def _nearest(path: Keys, schema: type[Section]) -> str:
    known = {".".join(option): option for option, _ in _fields(schema)}
    name = ".".join(path)

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        return max(whole, difflib.SequenceMatcher(None, path[-1], known[candidate][-1]).ratio() - 0.01)

    best = sorted(known, key=likeness, reverse=True)[:3]
    return "nearest: " + ", ".join(name for name in best if name == best[0] or likeness(name) >= 0.8)


def _put(tree: dict[str, Any], path: Keys, value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    name = path[-1]
    if not isinstance(value, Mapping):
        tree[name] = value
        return
    if not isinstance(tree.get(name), dict):
        tree[name] = {}
    for key, item in value.items():
        _put(tree[name], (key,), item)


def _explain(
    error: ValidationError, merged: Mapping[str, Any], sources: Mapping[Keys, str], schema: type[Section]
) -> Iterator[str]:
    """One line for each option that is wrong, without pydantic's words."""
    for problem in error.errors(include_url=False):
        path: Keys = ()
        section, field = schema, None
        for name in problem["loc"]:
            if field is not None and not _is_section(field):
                break
            field, path = section.model_fields[str(name)], (*path, str(name))
            section = field.annotation if _is_section(field) else section
        if field is None:
            yield str(problem["ctx"]["error"])
            continue
        name = ".".join(path)
        source = _from(next((where for known, where in sources.items() if known[:len(path)] == path), ""))
        if problem["type"] == "missing" and len(problem["loc"]) == len(path):
            yield f"{name}: missing; write {_takes(field)}, such as {name} = 'CodeExec-v0'"
        elif problem["type"] == "value_error":
            yield f"{name}{problem['ctx']['error']}{source}"
        else:
            value: Any = merged
            for part in path:
                value = value[part]
            yield f"{name}{source}: got {_show(value)}; write {_takes(field)}"


def _takes(field: FieldInfo) -> str:
    """What an option takes, in words."""
    return _describe(field.annotation, field.metadata)


def _describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _describe(arguments[0], [*arguments[1:], *metadata])
    if get_origin(annotation) is Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if get_origin(annotation) is tuple:
        size = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
        return f"a list{size}, each {_describe(arguments[0])}"
    if type(None) in arguments:
        return _describe(arguments[0], metadata) + ", or leave it out"
    if get_origin(annotation) is dict:
        return "a table" if arguments[1] is Any else f"a table from text to {_describe(arguments[1])}"
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "of a length >="}
    bounds = [f"{sign} {getattr(item, name)}" for item in metadata for name, sign in signs.items()
              if hasattr(item, name)]
    word = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[annotation]
    return " ".join([word, " and ".join(bounds)]).strip()


def _parse_value(text: str, field: FieldInfo | None) -> Any:
    takes = _takes(field) if field else ""
    if text == "none" and takes.endswith("leave it out"):
        return None
    if takes.startswith(("text", "'")):
        return text
    try:
        parsed = tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")
    except tomllib.TOMLDecodeError:
        return text
    # No option is a date.
    return parsed["value"] if parsed.keys() == {"value"} and not isinstance(parsed["value"], date | time) else text


def _fields(section: type[Section], prefix: Keys = ()) -> Iterator[tuple[Keys, FieldInfo]]:
    for name, field in section.model_fields.items():
        if _is_section(field):
            yield from _fields(field.annotation, (*prefix, name))
        else:
            yield (*prefix, name), field


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _from(source: str) -> str:
    return f" (from {source})" if source else ""


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
