"""Whether two tokenizers are the same by content: what their ids mean, and which ids a text becomes.

Names, chat templates and special roles such as that of the end of a turn do not count: ids are scored as they were
sampled, in the context that the student's template made.
"""

import json
from itertools import zip_longest
from os import PathLike
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

PROBES = (
    "Hello world, it's 1234567.89 o'clock!\r\n\r\n\tdef f(x):\n        return x  # done   ", "a  b   c\n\n\nd ", " le",
    "CamelCase snake_case UPPER we'LL don't 3x7=21; y==2 && !z //", "x\u200bz\xa0w\u3000v\x00\x7f",
    "caf\u00e9 cafe\u0301 \ufb01 \u212b \u00bd \u2460 \uff21 \u0130 \u00df", "日本語 한국어 العربية हिन्दी ไทย 🙂👩‍👩‍👧",
)
"""Texts at which normalizers and pre-tokenizers part ways."""


def load_tokenizer(path: str | PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    It is that of its tokenizer.json also where the folder has a tekken.json too, which transformers prefers when vLLM's
    mistral-common is installed, and which has neither a chat template nor parts that can be looked at.
    """
    return AutoTokenizer.from_pretrained(path, mistral_format=False)


def difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """The first thing in which they differ, in words; None if there is nothing."""
    here, there = ours.get_vocab(), theirs.get_vocab()
    if here != there:
        token = min(here.items() ^ there.items(), key=lambda item: (item[1], item[0]))[0]
        return f"{token!r} is {there.get(token)} there and {here.get(token)} here"
    mine, other = _model(ours), _model(theirs)
    for name in sorted(mine.keys() & other.keys()):
        if mine[name] != other[name]:
            return f"{name}: {_first_difference(mine[name], other[name])}"
    added = ours.get_added_vocab()
    for text in (*PROBES, *(f"a {token} b{token}c" for token in added)):
        one, two = (tokenizer.encode(text, add_special_tokens=False) for tokenizer in (ours, theirs))
        if one != two:
            return f"{text!r} becomes {two} there and {one} here"
    return None


def _model(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Merges, scores and options; nothing of a tokenizer that is not made of parts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    model = json.loads(backend.to_str())["model"]
    # A mapping of ids is known from `get_vocab`, which has them in any order; a list of scores is not.
    return {name: value or None for name, value in model.items() if not (name == "vocab" and isinstance(value, dict))}


def _first_difference(ours: Any, theirs: Any) -> str:
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        return f"{theirs!r} there and {ours!r} here"
    place, (one, two) = next((place, pair) for place, pair in enumerate(zip_longest(ours, theirs))
                             if pair[0] != pair[1])
    return f"number {place} is {two!r} there and {one!r} here"
