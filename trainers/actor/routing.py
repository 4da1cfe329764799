"""Routing replay: the experts that the sampler sent each token to, taken in training as well.

The two compute router logits with rounding of their own, so that some tokens would go to other experts than those that
they were sampled with. Only the choice is replayed. Invariants: logits and weights are those of the router now, so it
keeps its gradient, and they are computed in float32; a choice lasts until the next forward pass, so layers that are
recomputed in the backward pass go the same way; a token of which nothing is known (-1) is routed live.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Replay:
    """What one router is to choose: [T, top_k], or None for what it would.

    Has the interface of nemo_automodel's RouterReplay, less its registry, in which models of one process would mix.
    """

    chosen: Tensor | None = None

    def apply(self, live: Tensor) -> Tensor:
        """The choice for [T, top_k] experts that the router would take.

        Raises:
            ValueError: the choice is of other tokens.
        """
        if self.chosen is None:
            return live
        if self.chosen.shape != live.shape:
            raise ValueError(f"routing replay: experts {list(self.chosen.shape)} for a router that chooses "
                             f"{list(live.shape)}; the rows are of another model, or of other tokens")
        return torch.where(self.chosen[:, :1] < 0, live, self.chosen.to(live.dtype))


class Routing:
    """The routers of a decoder, by the numbers of their layers; its own choice is replayed in each."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.routers: dict[int, nn.Module] = {}
        self._replays: dict[int, Replay] = {}
        self._layers = 0
        for number, layer in enumerate(layers):
            self._layers = number + 1
            for router in filter(_is_router, layer.modules()):
                self.routers[number], self._replays[number] = router, Replay()
                _install(router, self._replays[number])

    def follow(self, experts: Tensor | None) -> None:
        """From now on take these experts, [T, layers, top_k], or none but one's own.

        Raises:
            ValueError: they are of a model with another number of layers.
        """
        if experts is not None and self.routers and experts.shape[1] != self._layers:
            raise ValueError(f"routing replay: experts of {experts.shape[1]} layers for a model of {self._layers}")
        for number, replay in self._replays.items():
            replay.chosen = None if experts is None else experts[:, number]

    @property
    def shape(self) -> dict[int, int]:
        """Experts by the numbers of their layers."""
        return {number: len(router.weight) for number, router in self.routers.items()}

    def freeze(self) -> None:
        """Take the routers out of what is trained."""
        for router in self.routers.values():
            router.requires_grad_(False)


def _is_router(module: nn.Module) -> bool:
    """Transformers calls them so; those of nemo_automodel have a place for a replay. Both project by a weight."""
    return hasattr(module, "weight") and (hasattr(module, "router_replay") or type(module).__name__.endswith("Router"))


def _install(router: nn.Module, replay: Replay) -> None:
    if hasattr(router, "router_replay"):
        router.router_replay = replay
    else:
        router.forward = partial(_routed, router, router.forward, replay)


def _routed(router: nn.Module, forward: Any, replay: Replay, hidden: Tensor, *arguments: Any, **options: Any) -> Any:
    with _Replaying(router.weight, replay) as mode:
        told = forward(hidden, *arguments, **options)
    if not mode.done:
        raise ValueError(f"routing replay: {type(router).__name__} does not choose by topk, which is not supported; "
                         "write rollout.routed_experts = false")
    return tuple(part.to(hidden.dtype) if part.is_floating_point() else part for part in told)


class _Replaying(TorchFunctionMode):
    """Within a router: its projection is computed in float32, and topk over its experts returns the choice."""

    def __init__(self, weight: Tensor, replay: Replay) -> None:
        super().__init__()
        self._weight, self._replay, self.done = weight, replay, replay.chosen is None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.linear and args[1] is self._weight:
            args = tuple(part if part is None else part.float() for part in args)
            kwargs = {name: part if part is None else part.float() for name, part in kwargs.items()}
        found = func(*args, **kwargs)
        scores = args[0] if args else None
        if func not in (torch.topk, Tensor.topk) or scores.shape[-1] != len(self._weight) or scores.ndim != 2:
            return found
        if self._replay.chosen is None:
            return found
        indices, self.done = self._replay.apply(found.indices), True
        return torch.return_types.topk((scores.gather(-1, indices), indices))
