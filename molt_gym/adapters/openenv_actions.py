"""What a reply means to an OpenEnv server, and what its observations say to a policy."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..messages import Message, arguments_of, text_of

__all__ = ["KINDS", "Actions", "Wanted", "actions_of", "describe", "tool_text", "tools_of"]

KINDS = ("text", "tool", "mcp")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOTHING = (None, "", [], {})
_CHOICES = {"enum", "const"}


@dataclass(frozen=True)
class Wanted:
    """action: to be sent to the server; None: the reply holds none, for the reason `problem`. call: id of the tool
    call that asks for it, if one does."""

    action: dict[str, Any] | None
    problem: str = ""
    call: str | None = None

    def answered(self, content: Any) -> Message:
        """The message that says something to it."""
        if self.call is None:
            return {"role": "user", "content": content}
        return {"role": "tool", "tool_call_id": self.call, "content": content}


@dataclass(frozen=True)
class Actions:
    """kind: one of `KINDS`. field: of the action, that takes the reply's text. tools: to offer; of "mcp", none yet.
    parse: of the user, (reply text) → action."""

    kind: str
    field: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    parse: Callable[[str], dict[str, Any]] | None = None

    def of(self, message: Message) -> Iterator[Wanted]:
        """What a reply asks for, in order; nothing if it calls no tool though actions are tool calls."""
        if self.kind == "text":
            yield self._said(text_of(message))
            return
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], arguments_of(call)
            if isinstance(arguments, str):
                yield Wanted(None, "The arguments are no JSON object.", call["id"])
            elif self.kind == "mcp":
                yield Wanted({"type": "call_tool", "tool_name": name, "arguments": arguments}, call=call["id"])
            elif name != (known := self.tools[0]["function"]["name"]):
                yield Wanted(None, f"There is no tool {name!r:.80}; call {known}.", call["id"])
            else:
                yield Wanted(arguments, call=call["id"])

    def _said(self, text: str) -> Wanted:
        if self.parse is None:
            return Wanted({self.field: text})
        try:
            action = self.parse(text)
        except ValueError as error:
            return Wanted(None, f"That is no legal reply: {error}.")
        if not isinstance(action, dict):
            raise TypeError(f"action: the function returned {action!r:.100}; return a dict, or raise ValueError")
        return Wanted(action)


def actions_of(schema: dict[str, Any], kind: str = "auto") -> Actions:
    """How actions of a JSON schema are written.

    Args:
        schema: of the action class, from the server's /schema.
        kind: one of `KINDS`, or "auto": calls of MCP tools if the schema is that of such calls, text if its only field
            is a string, else a tool whose arguments are the action.

    Raises:
        ConfigError: there is no such kind, or the action has not the one string that text could go to.
    """
    fields = {name: field for name, field in (schema.get("properties") or {}).items() if name != "metadata"}
    required = [name for name in schema.get("required") or () if name in fields]
    needed = required or list(fields)
    is_text = len(needed) == 1 and fields[needed[0]].get("type") == "string" and not fields[needed[0]].keys() & _CHOICES
    if kind == "auto":
        calls = not fields or {"tool_name", "arguments"} <= fields.keys()
        kind = "mcp" if calls else "text" if is_text and len(fields) == 1 else "tool"
    if kind == "mcp":
        return Actions("mcp")
    if kind == "text":
        if not is_text:
            raise ConfigError("action: 'text' needs an action with one string to fill in; the server's have the fields "
                              f"{', '.join(fields)}; write 'tool', or a module:function that makes an action of a text")
        return Actions("text", needed[0])
    if kind != "tool":
        raise ConfigError(f"action: {kind!r}; write 'auto', {', '.join(map(repr, KINDS))}, or a module:function that "
                          "makes an action of a text")
    title = str(schema.get("title"))
    function = {"name": title if _NAME.fullmatch(title) else "act", "description": schema.get("description") or "",
                "parameters": {"type": "object", "properties": fields, "required": required}
                | ({"$defs": schema["$defs"]} if "$defs" in schema else {})}
    return Actions("tool", tools=({"type": "function", "function": function},))


def tools_of(observation: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools that the answer to "list_tools" offers; [] if there are none in it."""
    found = []
    for tool in observation.get("tools") or ():
        schema = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
        found.append({"type": "function", "function": function})
    return found


def describe(observation: dict[str, Any]) -> str:
    """An observation in words: its text if that is all that it holds, else a line for each field.

    Metadata and what is empty are left out, unless there is nothing but metadata.
    """
    shown = {name: value for name, value in observation.items() if name != "metadata" and value not in _NOTHING}
    if not shown and isinstance(observation.get("metadata"), dict):
        shown = observation["metadata"]
    if len(shown) == 1:
        return _words(*shown.values())
    return "\n".join(f"{name}: {_words(value)}" for name, value in shown.items())


def tool_text(observation: dict[str, Any]) -> str:
    """What an MCP tool gave, or that it failed; `describe` if it is no observation of a tool."""
    if "tool_name" not in observation:
        return describe(observation)
    if error := observation.get("error"):
        return f"Error: {error.get('message')}" if isinstance(error, dict) else f"Error: {error}"
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        texts = [_words(part["text"]) for part in result["content"] if isinstance(part, dict) and "text" in part]
        words = "\n".join(texts) if texts else _words(result.get("data"))
        return f"Error: {words}" if result.get("is_error") or result.get("isError") else words
    return _words(result)


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
