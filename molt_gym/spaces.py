"""The two spaces of every chat env: what a model is sent, and what it answers.

Invariants: text of any code points and any length is inside, also "", NUL and lone surrogates; samples are legal,
fixed by the seed alone, and equal in every process. `gymnasium.spaces.Text` can do neither for chat.

Elements are plain JSON data. Batched, they become tuples. `AsyncVectorEnv` must be made with `shared_memory=False`.
"""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import Space

from .messages import Conversation, Message, validate_conversation, validate_message

__all__ = ["AssistantMessageSpace", "ConversationSpace"]

# Encodable text only, so that envs which hash or write what they are told survive a sample; lone surrogates are inside
# the spaces all the same.
_PIECES = ("a", "Z", "7", " ", "\n", "\t", "é", "e\u0301", "中", "😀", "\u2028", "\x00", "{", "}", "\\", '"')
_WORDS = ("print(1)", "```python\n", "```", "<|im_end|>", "<think>", "None", "\\boxed{4}", "https://example.org/?q=1")


class _ChatSpace(Space[dict[str, Any]], ABC):
    """What the two spaces share: validation decides what is inside, and elements are their own JSON form."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @abstractmethod
    def validate(self, x: Any) -> None:
        """Raises a ValueError that names the field which keeps `x` out of the space."""

    @abstractmethod
    def _draw(self) -> dict[str, Any]: ...

    @property
    def is_np_flattenable(self) -> bool:
        """Always false: text has no numpy form of fixed size."""
        return False

    def contains(self, x: Any) -> bool:
        """Whether `x` is a legal element."""
        try:
            self.validate(x)
        except ValueError:
            return False
        return True

    def sample(self, mask: None = None, probability: None = None) -> dict[str, Any]:
        """A random legal element, fixed by the seed of the space; masks and probabilities have no meaning here."""
        if mask is not None or probability is not None:
            raise ValueError(f"{self!r} has no mask and no probability; call sample() without them")
        return self._draw()

    def to_jsonable(self, sample_n: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Copies of the elements, which are JSON already.

        JSON itself spells a lone high surrogate that is followed by a lone low one like the character they make, so
        that this one sort of text comes back from `json.loads` as that character.
        """
        return [copy.deepcopy(element) for element in sample_n]

    def from_jsonable(self, sample_n: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Copies of the elements.

        Raises:
            ValueError: one of them is outside of the space.
        """
        for element in sample_n:
            self.validate(element)
        return [copy.deepcopy(element) for element in sample_n]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__.removesuffix('Space')}()"

    def _text(self, longest: int = 12) -> str:
        size = int(self.np_random.integers(longest + 1))
        return "".join(self._pick(_PIECES if self._chance(0.8) else _WORDS) for _ in range(size))

    def _pick(self, choices: tuple[Any, ...]) -> Any:
        return choices[int(self.np_random.integers(len(choices)))]

    def _chance(self, probability: float) -> bool:
        return bool(self.np_random.random() < probability)

    def _assistant(self) -> Message:
        message: Message = {"role": "assistant", "content": self._text()}
        if self._chance(0.3):
            message["reasoning_content"] = self._text()
        if self._chance(0.3):
            message["tool_calls"] = [self._call(f"call_{index}") for index in range(self.np_random.integers(1, 3))]
            message["content"] = self._pick((None, message["content"]))
        return message

    def _call(self, call_id: str) -> dict[str, Any]:
        arguments = json.dumps({"query": self._text()}) if self._chance(0.8) else self._pick(("", '{"query":'))
        function = {"name": self._pick(("search", "run", "submit")), "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}


class AssistantMessageSpace(_ChatSpace):
    """Every message of role "assistant": content, reasoning and tool calls, also calls with broken arguments."""

    def validate(self, x: Any) -> None:
        """Raises a ValueError that names the field which keeps `x` out of the space."""
        validate_message(x, "action")
        if x["role"] != "assistant":
            raise ValueError(f"action.role: {x['role']!r}; write 'assistant'")

    def _draw(self) -> Message:
        return self._assistant()


class ConversationSpace(_ChatSpace):
    """Every conversation `{"messages": [...], "tools": [...]}` of at least one message."""

    def validate(self, x: Any) -> None:
        """Raises a ValueError that names the field which keeps `x` out of the space."""
        validate_conversation(x)

    def _draw(self) -> Conversation:
        messages: list[Message] = [{"role": "system", "content": self._text()}] if self._chance(0.5) else []
        messages.append({"role": "user", "content": self._text()})
        for _ in range(self.np_random.integers(3)):
            reply = self._assistant()
            calls = reply.get("tool_calls", ())
            answers = [{"role": "tool", "tool_call_id": call["id"], "content": self._text()} for call in calls]
            messages += [reply, *(answers or [{"role": "user", "content": self._text()}])]
        parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
        tool = {"type": "function", "function": {"name": "search", "parameters": parameters}}
        return {"messages": messages, "tools": [tool] if self._chance(0.5) else []}
