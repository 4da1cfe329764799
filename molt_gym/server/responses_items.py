"""Items of the OpenAI Responses API, and the chat messages that they spell.

Invariants: the items of one reply, sent back, are one assistant message, and the very one of the reply. An item that
was read once costs a look-up when it comes again. Nothing is fetched on behalf of an item.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from reprlib import repr as show
from typing import Any

import msgspec

from ..messages import Message
from .errors import WireError, invalid, unsupported
from .exchange import Memory, Token

Item = dict[str, Any]

_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,.", re.IGNORECASE)
ROLES = ("user", "assistant", "system", "developer")


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
        parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts or [""]]
        parts[0]["logprobs"] = [_logprob(token) for token in tokens or ()]
        items.append({"id": f"msg_{key}", "type": "message", "role": "assistant", "content": parts})
    for index, call in enumerate(calls):
        head = {"id": f"fc_{key}_{index}", "type": "function_call", "call_id": call["id"]}
        items.append(head | {"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
    for item in items:
        item["status"] = "incomplete" if cut and item is items[-1] else "completed"
    return items


def read_items(raws: Sequence[msgspec.Raw], memory: Memory) -> list[Message]:
    """The messages that input items spell.

    Reasoning, text and calls in a row are one assistant message, until one of them cannot belong to it: text after
    text, reasoning after text or calls, an item of another response of this session. Items of one response of this
    session are one message even if results of its calls stand between them, and come before those.

    Raises:
        WireError: names the item.
    """
    entries: list[Message | _Turn] = []
    index = 0

    def read(item: Any) -> list[Message]:
        return _read(item, f"input[{index}]", memory)

    for index, raw in enumerate(raws):  # noqa: B007  read by `read`
        data = bytes(raw)
        for found in memory.intern(data, read):
            if "kind" not in found:
                entries.append(found)
                continue
            owner = found["owner"] if f"resp_{found['owner']}" in memory.responses else None
            turn = _home(entries, found["kind"], owner)
            if turn is None:
                entries.append(turn := _Turn())
            turn.add(data, found, owner)
    return [entry.message(memory) if isinstance(entry, _Turn) else entry for entry in entries]


@dataclass
class _Turn:
    """Pieces that are one assistant message.

    A piece is a dict: its `kind`, the field of the message that it is; its `value`; its `owner`, the completion that
    its id names, if it names one.
    """

    data: list[bytes] = field(default_factory=list)
    pieces: list[dict[str, Any]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    owner: str | None = None

    def takes(self, kind: str, owner: str | None) -> bool:
        if owner and self.owner and owner != self.owner:
            return False
        if kind == "reasoning_content":
            return self.kinds == {kind}
        return kind == "tool_calls" or kind not in self.kinds

    def add(self, data: bytes, piece: dict[str, Any], owner: str | None) -> None:
        self.data.append(data)
        self.pieces.append(piece)
        self.kinds.add(piece["kind"])
        self.owner = self.owner or owner

    def message(self, memory: Memory) -> Message:
        # No item begins with a blank, so that no item is taken for the items of a turn.
        return memory.intern(b" [%b]" % b",".join(self.data), lambda _: [_merge(self.pieces)])[0]


def _home(entries: Sequence[Message | _Turn], kind: str, owner: str | None) -> _Turn | None:
    """The turn that a piece belongs to; None if it begins one."""
    for entry in reversed(entries):
        if isinstance(entry, _Turn):
            return entry if entry.takes(kind, owner) and (entry is entries[-1] or entry.owner == owner) else None
        if owner is None or entry["role"] != "tool":
            break
    return None


def _merge(pieces: Sequence[dict[str, Any]]) -> Message:
    merged: Message = {"role": "assistant", "content": ""}
    for piece in pieces:
        kind, value = piece["kind"], piece["value"]
        if kind == "content" or kind not in merged:
            merged[kind] = value
        else:
            merged[kind] = merged[kind] + value if kind == "tool_calls" else f"{merged[kind]}\n\n{value}"
    return merged


def _owner(item: Item) -> str | None:
    item_id = item.get("id")
    return item_id.split("_")[1] if isinstance(item_id, str) and "_" in item_id else None


def _read(item: Any, where: str, memory: Memory) -> list[Message]:
    """The message that an item is, or the piece of an assistant's; neither for reasoning that cannot be read."""
    if not isinstance(item, dict):
        raise invalid(where, f"{show(item)}; write an item such as {{'role': 'user', 'content': '...'}}")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    match kind:
        case "message":
            message = _message(item, where)
            return [_piece(item, "content", message["content"]) if message["role"] == "assistant" else message]
        case "reasoning":
            text = "\n\n".join(_texts(item, "content", where) or _texts(item, "summary", where))
            return [_piece(item, "reasoning_content", text)] if text else []
        case "function_call":
            function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            return [_piece(item, "tool_calls", [call])]
        case "function_call_output":
            content = _content(item.get("output"), f"{where}.output")
            return [{"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content}]
        case "item_reference":
            return _read(_referenced(item, where, memory), where, memory)
    if not isinstance(kind, str):
        raise invalid(f"{where}.type", f"{show(kind)} is no string; write 'message', for one")
    raise unsupported(f"{where}.type", f"{show(kind)}; write message, function_call, function_call_output or reasoning")


def _piece(item: Item, kind: str, value: Any) -> dict[str, Any]:
    return {"kind": kind, "value": value, "owner": _owner(item)}


def _message(item: Item, where: str) -> Message:
    role = item.get("role")
    if role not in ROLES:
        hint = "; write the output of a tool as an item of type function_call_output" if role == "tool" else ""
        raise invalid(f"{where}.role", f"{show(role)} is none of {', '.join(ROLES)}{hint}")
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, f"{show(content)}; write a string or a list of parts")
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    match kind:
        case "input_text" | "output_text":
            return {"type": "text", "text": _string(part, "text", where)}
        case "refusal":
            return {"type": "text", "text": _string(part, "refusal", where)}
        case "input_image":
            return {"type": "image_url", "image_url": {"url": _image(part, where)}}
        case "input_file" | "input_audio":
            raise unsupported(f"{where}.type", f"{kind!r}; write the text as input_text")
    raise invalid(f"{where}.type" if isinstance(part, dict) else where,
                  f"{show(part)}; write a part such as {{'type': 'input_text', 'text': '...'}}")


def _image(part: dict[str, Any], where: str) -> str:
    if part.get("file_id") is not None:
        raise unsupported(f"{where}.file_id", f"{show(part['file_id'])}; write the image as a data URI in image_url")
    url = _string(part, "image_url", where)
    if not _DATA_URI.match(url):
        raise unsupported(f"{where}.image_url", f"{show(url)}; nothing is fetched, write 'data:image/png;base64,...'")
    return url


def _texts(item: Item, key: str, where: str) -> list[str]:
    parts = item.get(key)
    if parts is None:
        return []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise invalid(f"{where}.{key}", f"{show(parts)}; write a list of parts with a text each")
    return [_string(part, "text", f"{where}.{key}[{index}]") for index, part in enumerate(parts)]


def _referenced(item: Item, where: str, memory: Memory) -> Item:
    item_id = _string(item, "id", where)
    owner = _owner(item)
    conversation = memory.responses.get(f"resp_{owner}")
    if owner is not None and conversation is not None:
        for known in write_items(owner, conversation[-1], tokens=()):
            if known["id"] == item_id:
                return known
    raise WireError("not_found", f"{where}.id: {show(item_id)} is no output item of this session; write the item "
                    "itself", param=f"{where}.id", code="item_not_found")


def _string(item: Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"{where}.{key}", f"{show(value)} is no string")
    return value


def _logprob(token: Token) -> dict[str, Any]:
    data = list(token.text.encode("utf-8", "replace") if token.data is None else token.data)
    return {"token": token.text, "bytes": data, "logprob": token.logprob, "top_logprobs": []}
