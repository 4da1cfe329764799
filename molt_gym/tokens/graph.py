"""The record of one rollout in ids: what the engine was given, what it sampled, how the turns hang together.

Invariants: the path from the root to a node, concatenated, is exactly what the engine was given and returned. A turn is
recorded by `commit` alone, after its generation succeeded and was checked. A sampled id is trained in exactly one row,
however many branches go on from it. The experts of an id are those of the computation that was told first, in all rows.

A conversation that was seen is a path in a trie, from its tools by the digests of its messages. With interned messages
a known history costs one look-up each.
"""

import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..images import ImageSpan
from ..messages import InternedTools, Message, digest_of, digest_of_tools, digests_of, has_digest, text_length
from .generation import Generation
from .renderer import Renderer
from .trajectory import UNSAMPLED_VERSION, Row

Tools = Sequence[Mapping[str, Any]]

_TIPS = 16


@dataclass(frozen=True)
class Prompt:
    """A request, ready for the engine.

    ids: all that the engine is to be given: the path to `parent`, then `context`.
    parent: the turn it goes on from; None for one that starts anew.
    kind: "root", a conversation not seen before; "extend", goes on from a recorded one; "fork", its history was
        rewritten, so some or all of it had to be rendered again.
    """

    ids: tuple[int, ...]
    parent: int | None
    context: tuple[int, ...]
    kind: Literal["root", "extend", "fork"]
    messages: list[Message]
    tools: Tools
    place: "_Place" = field(repr=False)
    """Of `tools` and `messages` as they were when the prompt was made."""
    images: tuple[ImageSpan, ...] = field(default=(), repr=False)
    """Those in `ids`."""


@dataclass(frozen=True)
class _Place:
    """A conversation in the trie: the last point of it that was there, and the digests that lead on from it.

    point: None where not even the tools were known.
    """

    tools: bytes
    point: int | None
    rest: tuple[bytes, ...]


@dataclass(frozen=True)
class _Node:
    """Context (no generation), or what was sampled after it. `end`: how many ids its path has; images: in `ids`."""

    parent: int | None
    ids: Sequence[int]
    end: int
    generation: Generation | None = None
    images: tuple[ImageSpan, ...] = ()


class TokenGraph:
    """Turns of one rollout, in any number of interleaved conversations. Threads may share one.

    Args:
        renderer: of the model that samples.
        history: what to do when only the chat template would write the history differently than it was sampled:
            "rerender" follows the template and forks, "keep" goes on from the sampled ids.
    """

    forks: int
    """How many recorded prompts are forks."""
    turns: int
    """How many turns are recorded."""

    def __init__(self, renderer: Renderer, *, history: Literal["keep", "rerender"] = "rerender") -> None:
        if history not in ("keep", "rerender"):
            raise ValueError(f"history: {history!r}; write 'keep' or 'rerender'")
        self.forks = 0
        self.turns = 0
        self._renderer = renderer
        self._keep = history == "keep"
        self._nodes: list[_Node] = []
        self._experts: dict[int, np.ndarray] = {}
        self._contexts: dict[tuple[int | None, tuple[int, ...], tuple[ImageSpan, ...]], int] = {}
        self._tips: dict[int, tuple[int, ...]] = {}
        self._roots: dict[bytes, int] = {}
        self._edges: list[dict[bytes, int]] = []
        self._conversations: dict[int, int] = {}
        self._prompts: set[int] = set()
        self._reply_digests: set[bytes] = set()
        self._lock = threading.Lock()

    def prepare(self, messages: Sequence[Message], tools: Tools = (), *, limit: float = math.inf) -> Prompt:
        """The prompt for a conversation; records nothing.

        It goes on from the longest recorded conversation (with the same tools) that the messages extend and that the
        template leaves as it is. The same messages asked again give the same prompt: a new sample.

        Args:
            limit: how many ids fit, as in `Renderer.render`: a prompt that is returned may still be too long.

        Raises:
            PromptTooLong: the text cannot fit.
            ValueError: as `Renderer.render`.
        """
        return self._prepare(messages, tools, limit, math.inf)

    def prepare_short(
        self, messages: Sequence[Message], tools: Tools = (), *, limit: float = math.inf, at_most: int
    ) -> Prompt | None:
        """The same, or None if more than about `at_most` characters, of tools too, had to be encoded: that is slow."""
        fresh = itertools.takewhile(lambda message: not has_digest(message), reversed(messages))
        if sum(map(text_length, fresh)) > at_most:
            return None
        return self._prepare(messages, tools, limit, at_most)

    def _prepare(self, messages: Sequence[Message], tools: Tools, limit: float, at_most: float) -> Prompt | None:
        messages, tools = list(messages), tools if type(tools) is InternedTools else list(tools)
        place, points, digests = self._find(messages, tools)
        forked = False
        for length in range(len(messages), 0, -1):
            point = points[length] if length < len(points) else None
            parent = None if point is None else self._conversations.get(point)
            if parent is not None:
                before, reply, new = messages[: length - 1], messages[length - 1], messages[length:]
                if at_most < math.inf and sum(map(text_length, new)) > at_most:
                    return None
                sampled, room = self._nodes[parent].ids, limit - self._nodes[parent].end
                context = self._renderer.extend(before, reply, new, tools, sampled, keep=self._keep, limit=room)
                if context is not None:
                    ids = self._path(parent) + tuple(context)
                    kind = "fork" if forked else "extend"
                    images = self._images(parent) + self._renderer.image_spans(context, new, len(ids) - len(context))
                    return Prompt(ids, parent, tuple(context), kind, messages, tools, place, images)
            # A recorded prompt, or a recorded reply, that it goes on from, but not as it was recorded.
            forked = forked or length < len(messages) and point in self._prompts
            forked = forked or digests[length - 1] in self._reply_digests
        if at_most < math.inf and sum(map(text_length, messages)) + len(str(tools)) > at_most:
            return None
        ids = tuple(self._renderer.render(messages, tools, limit=limit))
        images = self._renderer.image_spans(ids, messages)
        return Prompt(ids, None, ids, "fork" if forked else "root", messages, tools, place, images)

    def commit(self, prompt: Prompt, generation: Generation, reply: Message) -> int:
        """Records a turn and returns its node.

        Args:
            generation: what the engine returned for `prompt.ids`.
            reply: the message that the client sees; a request that holds it extends this turn.

        Raises:
            ValueError: the generation was aborted or does not hold together (see `Generation.checked`), or the prompt
                is not one that `prepare` made here. Nothing is recorded then.
        """
        generation = generation.checked()
        if generation.finish_reason == "abort":
            raise ValueError("generation.finish_reason: 'abort'; a turn is recorded when its generation has ended")
        with self._lock:
            if prompt.parent is not None and not self._is_turn(prompt.parent):
                raise ValueError(f"prompt.parent: {prompt.parent} is no turn of this graph")
            start = self._nodes[prompt.parent].end if prompt.parent is not None else 0
            if len(prompt.ids) != start + len(prompt.context) or prompt.ids[start:] != prompt.context:
                raise ValueError("prompt.ids: were changed after prepare(); give the engine and commit() what it made")
            known = len(self._nodes)
            images = tuple(image for image in prompt.images if image.start >= start)
            context = self._context(prompt.parent, prompt.context, len(prompt.ids), images)
            node = self._add(_Node(context, generation.ids, len(prompt.ids) + len(generation.ids), generation))
            if generation.routed_experts is not None:
                self._keep_experts(node, np.asarray(generation.routed_experts, np.int16))
            self._remember(node, prompt.parent, prompt.ids + tuple(generation.ids))
            digest = digest_of(reply)
            point = self._insert(prompt.place)
            self._prompts.add(point)
            self._reply_digests.add(digest)
            self._conversations[self._step(point, digest)] = node
            self.turns += 1
            self.forks += prompt.kind == "fork" and context >= known
        return node

    def _is_turn(self, node: int) -> bool:
        return 0 <= node < len(self._nodes) and self._nodes[node].generation is not None

    def path(self, node: int) -> list[int]:
        """All ids from the root to the end of the node: what the engine was given and returned."""
        return list(self._path(node))

    def rows(self) -> list[Row]:
        """One row a leaf, in the order of their turns. What leaves share is trained in the first of them."""
        inner = {node.parent for node in self._nodes}
        trained: set[int] = set()
        return [self._row(leaf, trained) for leaf in range(len(self._nodes)) if leaf not in inner]

    def _row(self, leaf: int, trained: set[int]) -> Row:
        row = Row([], [], [], [])
        line, tops = self._line(leaf), list[np.ndarray]()
        for part in line:
            node = self._nodes[part]
            length = len(node.ids)
            row.ids += node.ids
            row.images += node.images
            if node.generation is None or part in trained:
                row.mask += [0] * length
                row.logprobs += [0.0] * length
                row.versions += [UNSAMPLED_VERSION] * length
            else:
                trained.add(part)
                row.mask += [1] * length
                row.logprobs += node.generation.logprobs
                row.versions += node.generation.versions
                tops += [] if node.generation.top is None else [node.generation.top]
        row.top = np.concatenate(tops) if tops and sum(map(len, tops)) == sum(row.mask) else None
        known = next((self._experts[part] for part in line if part in self._experts), None)
        if known is not None:
            row.experts = np.concatenate([self._experts_of(part, known.shape[1:]) for part in line])
        return row

    def _experts_of(self, part: int, shape: tuple[int, ...]) -> np.ndarray:
        held = self._experts.get(part)
        return np.full((len(self._nodes[part].ids), *shape), -1, np.int16) if held is None else held

    def _keep_experts(self, node: int, routed: np.ndarray) -> None:
        """What was told of the positions from the root on, wherever nothing is known yet.

        The last id of a turn was not processed in it, but is when the next one goes on from there.
        """
        for part in self._line(node):
            start = self._nodes[part].end - len(self._nodes[part].ids)
            told = routed[start : self._nodes[part].end]
            held = self._experts.setdefault(part, self._experts_of(part, routed.shape[1:]))[: len(told)]
            unknown = (held < 0).all((1, 2))
            held[unknown] = told[unknown]

    def _line(self, node: int | None) -> list[int]:
        line = []
        while node is not None:
            line.append(node)
            node = self._nodes[node].parent
        return line[::-1]

    def _context(self, parent: int | None, ids: tuple[int, ...], end: int, images: tuple[ImageSpan, ...]) -> int:
        """The context node of these ids under a parent: samples of one prompt share it."""
        known = self._contexts.get((parent, ids, images))
        if known is None:
            known = self._contexts[parent, ids, images] = self._add(_Node(parent, ids, end, images=images))
        return known

    def _add(self, node: _Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _images(self, node: int) -> tuple[ImageSpan, ...]:
        return tuple(image for part in self._line(node) for image in self._nodes[part].images)

    def _path(self, node: int) -> tuple[int, ...]:
        known = self._tips.get(node)
        if known is not None:
            return known
        return tuple(itertools.chain.from_iterable(self._nodes[part].ids for part in self._line(node)))

    def _remember(self, node: int, parent: int | None, path: tuple[int, ...]) -> None:
        """Keeps the path of a turn at hand that will likely be gone on from; of the latest few, for they are long."""
        self._tips.pop(parent, None)
        self._tips[node] = path
        if len(self._tips) > _TIPS:
            del self._tips[next(iter(self._tips))]

    def _find(self, messages: Sequence[Message], tools: Tools) -> tuple[_Place, list[int], list[bytes]]:
        """The place of a conversation, the points of its known beginnings from none on, the digests of all messages."""
        root = digest_of_tools(tools)
        digests = digests_of(messages)
        point = self._roots.get(root)
        if point is None:
            return _Place(root, None, tuple(digests)), [], digests
        points, edges = [point], self._edges
        for digest in digests:
            point = edges[point].get(digest)
            if point is None:
                break
            points.append(point)
        return _Place(root, points[-1], tuple(digests[len(points) - 1 :])), points, digests

    def _insert(self, place: _Place) -> int:
        """The point of a conversation, which is put into the trie where it was not there."""
        point = place.point
        if point is None and (point := self._roots.get(place.tools)) is None:
            point = self._roots[place.tools] = self._new_point()
        for digest in place.rest:
            point = self._step(point, digest)
        return point

    def _step(self, point: int, digest: bytes) -> int:
        following = self._edges[point].get(digest)
        if following is None:
            following = self._edges[point][digest] = self._new_point()
        return following

    def _new_point(self) -> int:
        self._edges.append({})
        return len(self._edges) - 1
