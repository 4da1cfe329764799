"""Items of the OpenAI Responses API, and the chat messages that they spell.

Invariants: the items of one reply, sent back, are one assistant message, and the very one of the reply. An item that
was read once costs a look-up when it comes again. Nothing is fetched on behalf of an item.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from reprlib import repr as show
from typing import Any

import msgspec

from ..messages import Message
from . import parts
from .errors import WireError
from .exchange import Token
from .fields import Field, interned
from .memory import WireMemory
from .replies import openai_logprob

ROLES = ("user", "assistant", "system", "developer")
Item = dict[str, Any]


def write_items(key: str, message: Message, *, tokens: Sequence[Token] | None = None, cut: bool = False) -> list[Item]:
    """The output items of a reply: its reasoning, its text, its calls.

    Args:
        key: the id of the completion; part of the id of each item.
        tokens: all that were sampled. They ride on the text, so that with them there is one, "" if need be.
        cut: the reply ended for its length; the last item says so.
    """
    items: list[Item] = []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"id": f"rs_{key}", "type": "reasoning", "summary": [], "content": content})
    calls, content = message.get("tool_calls") or (), message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    if content or not calls or tokens is not None:
        said = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts or [""]]
        said[0]["logprobs"] = [
            openai_logprob(token, token.data or token.text.encode("utf-8", "replace")) for token in tokens or ()]
        items.append({"id": f"msg_{key}", "type": "message", "role": "assistant", "content": said})
    for index, call in enumerate(calls):
        head = {"id": f"fc_{key}_{index}", "type": "function_call", "call_id": call["id"]}
        items.append(head | {"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
    for item in items:
        item["status"] = "incomplete" if cut and item is items[-1] else "completed"
    return items


def read_items(items: Sequence[msgspec.Raw], memory: WireMemory) -> list[Message]:
    """The messages that input items spell.

    Reasoning, text and calls in a row are one assistant message, until one of them cannot belong to it: text after
    text, reasoning after text or calls, an item of another response of this session. Items of one response of this
    session are one message even if results of its calls stand between them, and come before those.

    Raises:
        WireError: names the item.
    """
    entries: list[Message | _Turn] = []
    read = interned("input", items, memory, lambda item: list(_read(item, memory)))
    for data, found in zip(items, read, strict=True):
        for piece in found:
            if "kind" not in piece:
                entries.append(piece)
                continue
            owner = piece["owner"] if f"resp_{piece['owner']}" in memory.responses else None
            turn = _home(entries, piece["kind"], owner)
            if turn is None:
                entries.append(turn := _Turn())
            turn.add(bytes(data), piece, owner)
    return [entry.message(memory) if isinstance(entry, _Turn) else entry for entry in entries]


@dataclass
class _Turn:
    """Pieces that are one assistant message.

    A piece is a dict: its `kind`, the field of the message that it is; its `value`; its `owner`, the completion that
    its id names, if it names one.
    """

    data: list[bytes] = field(default_factory=list)
    merged: Message = field(default_factory=dict)
    owner: str | None = None

    def takes(self, kind: str, owner: str | None) -> bool:
        if owner and self.owner and owner != self.owner:
            return False
        if kind == "reasoning_content":
            return self.merged.keys() == {kind}
        return kind == "tool_calls" or kind not in self.merged

    def add(self, data: bytes, piece: dict[str, Any], owner: str | None) -> None:
        self.data.append(data)
        self.owner = self.owner or owner
        kind, value = piece["kind"], piece["value"]
        if kind == "tool_calls":
            self.merged.setdefault(kind, []).extend(value)
        else:
            self.merged[kind] = f"{self.merged[kind]}\n\n{value}" if kind in self.merged else value

    def message(self, memory: WireMemory) -> Message:
        # No item begins with a blank, so that no item is taken for the items of a turn.
        key = b" [%b]" % b",".join(self.data)
        return memory.intern(key, lambda _: [{"role": "assistant", "content": "", **self.merged}])[0]


def _home(entries: Sequence[Message | _Turn], kind: str, owner: str | None) -> _Turn | None:
    """The turn that a piece belongs to; None if it begins one."""
    for entry in reversed(entries):
        if isinstance(entry, _Turn):
            return entry if entry.takes(kind, owner) and (entry is entries[-1] or entry.owner == owner) else None
        if owner is None or entry["role"] != "tool":
            break
    return None


def _owner(item: Field) -> str | None:
    item_id = item.value.get("id")
    return item_id.split("_")[1] if isinstance(item_id, str) and "_" in item_id else None


def _reply(item: Field, memory: WireMemory) -> Message:
    """The reply of this session that an item's id names; {} if it names none."""
    return memory.responses.get(f"resp_{_owner(item)}", [{}])[-1]


def _read(item: Field, memory: WireMemory) -> list[Message]:
    """The message that an item is, or the piece of an assistant's; neither for reasoning that nobody here can read."""
    value = item.expect(dict, "an item such as {'role': 'user', 'content': '...'}")
    kind = value.get("type")
    if kind is None:
        kind = "message" if "role" in value else "item_reference"
    match kind:
        case "message":
            role = value.get("role")
            if role not in ROLES:
                raise item["role"].invalid(f"{', '.join(ROLES)}, or for a tool an item of type function_call_output")
            content = parts.content_of(item, _part, optional=role == "assistant")
            return [_piece(item, "content", content) if role == "assistant" else {"role": role, "content": content}]
        case "reasoning":
            text = "\n\n".join(_texts(item, "content") or _texts(item, "summary"))
            # Some clients send back its id alone, as it came when its stream began.
            text = text or _reply(item, memory).get("reasoning_content", "")
            return [_piece(item, "reasoning_content", text)] if text else []
        case "function_call":
            arguments = parts.arguments_of(item["arguments"])
            call = parts.call_of(item.get("call_id", str), item.get("name", str), arguments)
            return [_piece(item, "tool_calls", [call])]
        case "function_call_output":
            content = parts.content_of(item, _part, "output", optional=True)
            return [{"role": "tool", "tool_call_id": item.get("call_id", str), "content": content}]
        case "item_reference":
            return _read(_referenced(item, memory), memory)
        case str():
            raise item["type"].unsupported("write message, function_call, function_call_output or reasoning")
    raise item["type"].invalid("'message', for one")


def _piece(item: Field, kind: str, value: Any) -> dict[str, Any]:
    return {"kind": kind, "value": value, "owner": _owner(item)}


def _part(part: Field) -> dict[str, Any]:
    match part.kind("input_text"):
        case "input_text" | "output_text" | "refusal" as kind:
            return parts.text_part(part, "refusal" if kind == "refusal" else "text")
        case "input_image":
            if part.value.get("file_id") is not None:
                raise part["file_id"].unsupported("no files are stored, write the image as a data URI in image_url")
            return parts.image_part(part["image_url"])
        case "input_file" | "input_audio":
            raise part["type"].unsupported("write the text as input_text")
    raise part["type"].invalid("'input_text', 'output_text' or 'input_image'")


def _texts(item: Field, name: str) -> list[str]:
    return [part.get("text", str) for part in item[name].each()] if item.value.get(name) is not None else []


def _referenced(item: Field, memory: WireMemory) -> Field:
    item_id, reply = item.get("id", str), _reply(item, memory)
    for known in write_items(_owner(item) or "", reply, tokens=()) if reply else ():
        if known["id"] == item_id:
            return Field(item.path, known)
    raise WireError("not_found", f"{item.path}.id: {show(item_id)} is no output item of this session; write the item "
                    "itself", param=f"{item.path}.id", code="item_not_found")
