"""What the sections of a run's options are made of: their base, and types whose errors say what to write.

Invariant: importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError


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
    if isinstance(value, os.PathLike):
        return os.fspath(value)
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


NUMBER = BeforeValidator(_no_bool)
Count = Annotated[int, Ge(1), NUMBER]
Natural = Annotated[int, Ge(0), NUMBER]
Positive = Annotated[float, Gt(0), NUMBER]
Seed = Annotated[int, Ge(0), Lt(2**63), NUMBER]
NotNegative = Annotated[float, Ge(0), NUMBER]
Share = Annotated[float, Ge(0), Le(1), NUMBER]
PositiveShare = Annotated[float, Gt(0), Le(1), NUMBER]
Moment = Annotated[float, Ge(0), Lt(1), NUMBER]
Number = Annotated[float, NUMBER]
Text = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
Folder = Annotated[str, BeforeValidator(
    lambda value: os.path.expanduser(value) if isinstance(value, str | os.PathLike) else value)]
Table = Annotated[dict[str, Any], BeforeValidator(lambda value: _plain(value) if isinstance(value, dict) else value)]
Mix = Annotated[dict[str, Any], BeforeValidator(_mixture)]
Range = Annotated[tuple[Number, Number] | None,
                  BeforeValidator(lambda value: ((0.0, 1.0) if value else None) if isinstance(value, bool) else value)]
Names = Annotated[tuple[Text, ...], MinLen(1), BeforeValidator(
    lambda value: [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value)]
Dtype = Literal["auto", "float32", "bfloat16"]


class Section(BaseModel):
    """Base of all parts: immutable, no unknown keys, no NaN or infinity; the docstring under a field is its help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def to_toml(self, path: str | os.PathLike[str] | None = None) -> str:
        """The options as TOML, also written to `path` if given; those that are None are left out."""
        text = tomli_w.dumps(_without_none(self.model_dump()))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8", newline="\n")
        return text


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: _without_none(value) if isinstance(value, dict) else value
            for key, value in tree.items() if value is not None}
