"""Tokenizers that know no added tokens, for the pieces of a text between those that it has.

Invariant: a piece is encoded as the library encodes it in the whole text. Many tokenizers put a space before the text
that they are given, or before what follows an added token; none puts one into the middle of a text.
"""

from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

__all__ = ["PLACES", "speller"]

PLACES = ("nothing", "token", "text")
"""What a piece may come after: it begins the sequence, or follows an added token or other text."""


def speller(backend: Tokenizer, after: str) -> Tokenizer:
    """A tokenizer with the same model for a piece in one of `PLACES`."""
    made = Tokenizer(backend.model)
    if (normalizer := _unprefixed(backend.normalizer, after)) is not None:
        made.normalizer = normalizer
    if (pre_tokenizer := _unprefixed(backend.pre_tokenizer, after)) is not None:
        made.pre_tokenizer = pre_tokenizer
    return made


def _unprefixed(step: Any, after: str) -> Any:
    """A step of a tokenizer without the space that it would put before the piece; None if it does nothing else."""
    if isinstance(step, pre_tokenizers.Sequence | normalizers.Sequence):
        parts = [_unprefixed(part, after) for part in step]
        return type(step)([part for part in parts if part is not None])
    first = isinstance(step, pre_tokenizers.Metaspace) and step.prepend_scheme == "first"
    if after == "nothing" or after == "token" and not first:
        return step
    if isinstance(step, pre_tokenizers.Metaspace):
        return pre_tokenizers.Metaspace(step.replacement, prepend_scheme="never", split=step.split)
    if isinstance(step, pre_tokenizers.ByteLevel):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=step.use_regex)
    return None if isinstance(step, normalizers.Prepend) else step
