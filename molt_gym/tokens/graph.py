"""The record of one rollout in ids: what the engine was given, what it sampled, how the turns hang together.

Invariants: the path from the root to a node, concatenated, is exactly what the engine was given and returned. A turn is
recorded by `commit` alone, after its generation succeeded and was checked. A sampled id is trained in exactly one row,
however many branches go on from it.
"""

import copy
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..messages import Message, canonical
from .generation import Generation
from .renderer import Renderer
from .trajectory import UNSAMPLED_VERSION, Row

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A request, ready for the engine.

    ids: all that the engine is to be given: the path to `parent`, then `context`.
    parent: the turn it goes on from; None for one that starts anew.
    kind: "root", a conversation not seen before; "extend", goes on from a recorded one; "fork", its history was
        rewritten, so some or all of it had to be rendered again.
    """

    ids: list[int]
    parent: int | None
    context: list[int]
    kind: Literal["root", "extend", "fork"]
    messages: list[Message]
    tools: list[Mapping[str, Any]]
    fingerprint: bytes = field(repr=False)
    """Of `tools` and `messages` as they were when the prompt was made."""


@dataclass(frozen=True)
class _Node:
    """Context (no generation), or what was sampled after it."""

    parent: int | None
    ids: list[int]
    generation: Generation | None = None


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
        self._contexts: dict[int | None, list[int]] = {}
        self._conversations: dict[bytes, int] = {}
        self._prompts: set[bytes] = set()
        self._replies: dict[int, Message] = {}
        self._reply_prints: set[bytes] = set()
        self._keys: dict[str, int] = {}
        self._lock = threading.Lock()

    def prepare(self, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        """The prompt for a conversation; records nothing.

        It goes on from the longest recorded conversation (with the same tools) that the messages extend and that the
        template leaves as it is. The same messages asked again give the same prompt: a new sample.

        Raises:
            ValueError: as `Renderer.render`.
        """
        messages, tools = list(messages), list(tools)
        prints = _fingerprints(messages, tools)
        forked = False
        for length in range(len(messages), 0, -1):
            parent = self._conversations.get(prints[length])
            if parent is not None:
                before, reply, new = messages[: length - 1], messages[length - 1], messages[length:]
                sampled = self._nodes[parent].ids
                context = self._renderer.extend(before, reply, new, tools, sampled, keep=self._keep)
                if context is not None:
                    ids = self.path(parent) + context
                    kind = "fork" if forked else "extend"
                    return Prompt(ids, parent, context, kind, messages, tools, prints[-1])
            # A recorded prompt, or a recorded reply, that it goes on from, but not as it was recorded.
            forked = forked or length < len(messages) and prints[length] in self._prompts
            forked = forked or _fingerprint(b"", messages[length - 1]) in self._reply_prints
        context = self._renderer.render(messages, tools)
        return Prompt(list(context), None, context, "fork" if forked else "root", messages, tools, prints[-1])

    def commit(self, prompt: Prompt, generation: Generation, reply: Message, key: str | None = None) -> int:
        """Records a turn and returns its node.

        Args:
            generation: what the engine returned for `prompt.ids`.
            reply: the message that the client sees; a request that holds it extends this turn.
            key: names the request (a retry header, a hash of its body), for `recorded`.

        Raises:
            ValueError: the generation was aborted or does not hold together (see `Generation.checked`), the prompt is
                not one that `prepare` made here, or the key is taken. Nothing is recorded then.
        """
        generation = generation.checked()
        if generation.finish_reason == "abort":
            raise ValueError("generation.finish_reason: 'abort'; a turn is recorded when its generation has ended")
        with self._lock:
            if key in self._keys:
                raise ValueError(f"key: {key!r} is recorded already; answer the request from the record")
            if prompt.parent is not None and prompt.parent not in self._replies:
                raise ValueError(f"prompt.parent: {prompt.parent} is no turn of this graph")
            if prompt.ids != (self.path(prompt.parent) if prompt.parent is not None else []) + prompt.context:
                raise ValueError("prompt.ids: were changed after prepare(); give the engine and commit() what it made")
            known = len(self._nodes)
            context = self._context(prompt.parent, prompt.context)
            node = self._add(_Node(context, generation.ids, generation))
            self._replies[node] = copy.deepcopy(reply)
            self._prompts.add(prompt.fingerprint)
            self._reply_prints.add(_fingerprint(b"", reply))
            self._conversations[_fingerprint(prompt.fingerprint, reply)] = node
            self.turns += 1
            self.forks += prompt.kind == "fork" and context >= known
            if key is not None:
                self._keys[key] = node
        return node

    def recorded(self, key: str) -> tuple[int, Generation, Message] | None:
        """Node, generation and reply of the turn committed under the key, so that a retry gets the same answer."""
        node = self._keys.get(key)
        if node is None:
            return None
        generation = self._nodes[node].generation
        return None if generation is None else (node, generation, copy.deepcopy(self._replies[node]))

    def path(self, node: int) -> list[int]:
        """All ids from the root to the end of the node: what the engine was given and returned."""
        ids: list[int] = []
        for part in self._line(node):
            ids += self._nodes[part].ids
        return ids

    def rows(self) -> list[Row]:
        """One row a leaf, in the order of their turns. What leaves share is trained in the first of them."""
        inner = {node.parent for node in self._nodes}
        trained: set[int] = set()
        return [self._row(leaf, trained) for leaf in range(len(self._nodes)) if leaf not in inner]

    def _row(self, leaf: int, trained: set[int]) -> Row:
        row = Row([], [], [], [])
        for part in self._line(leaf):
            node = self._nodes[part]
            length = len(node.ids)
            row.ids += node.ids
            if node.generation is None or part in trained:
                row.mask += [0] * length
                row.logprobs += [0.0] * length
                row.versions += [UNSAMPLED_VERSION] * length
            else:
                trained.add(part)
                row.mask += [1] * length
                row.logprobs += node.generation.logprobs
                row.versions += node.generation.versions
        return row

    def _line(self, node: int | None) -> list[int]:
        line = []
        while node is not None:
            line.append(node)
            node = self._nodes[node].parent
        return line[::-1]

    def _context(self, parent: int | None, ids: list[int]) -> int:
        """The context node of these ids under a parent: samples of one prompt share it."""
        for sibling in self._contexts.get(parent, ()):
            if self._nodes[sibling].ids == ids:
                return sibling
        node = self._add(_Node(parent, list(ids)))
        self._contexts.setdefault(parent, []).append(node)
        return node

    def _add(self, node: _Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1


def _fingerprints(messages: Sequence[Message], tools: Tools) -> list[bytes]:
    """Of the tools alone, then with one more message each."""
    prints = [_digest(b"", tools)]
    for message in messages:
        prints.append(_fingerprint(prints[-1], message))
    return prints


def _fingerprint(before: bytes, message: Message) -> bytes:
    return _digest(before, canonical(message))


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
