"""What vLLM answered, as a `Generation`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.logprobs import FlatLogprobs

from molt_gym.tokens import Generation
from molt_gym.tokens.generation import TOP


def generation_of(
    output: Any, starts: Sequence[tuple[int, int]], prompt: int, routed: np.ndarray | None, most: int
) -> Generation:
    """One reply.

    Args:
        output: vLLM's CompletionOutput.
        starts: versions of the weights, each with the place in the reply from which it sampled.
        prompt: its length.
        routed: experts of each position that was processed, if they are known.
        most: how many of the likeliest tokens of each place to tell.
    """
    sampled = list(output.token_ids)
    if isinstance(output.logprobs, FlatLogprobs):
        logprobs = output.logprobs.logprobs
    else:
        logprobs = [entry[token].logprob for token, entry in zip(sampled, output.logprobs or (), strict=True)]
    ends = [start for _, start in starts[1:]] + [len(sampled)]
    versions = [version for (version, start), end in zip(starts, ends, strict=True) for _ in range(start, end)]
    reason = output.finish_reason if output.finish_reason in ("stop", "length") else "abort"
    if routed is not None:
        # The last id was not processed, unless it was before it was known to be the last.
        routed = routed[: prompt + len(sampled) - 1].astype(np.int16)
    top = None
    if most:
        # The sampled token is among them, or beside them with the rank that it has.
        ranked = (sorted(entry.items(), key=lambda item: item[1].rank)[:most] for entry in output.logprobs or ())
        top = np.array([[(token, found.logprob) for token, found in entry] for entry in ranked], TOP)
    return Generation(sampled, logprobs, versions, reason, routed, top)
