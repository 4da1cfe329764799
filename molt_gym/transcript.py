"""Conversations on a terminal: printed for people to read, and played by a person in the place of the policy."""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from .images import KINDS, image_digest, open_image, source_of
from .messages import Message, same_message, text_of
from .tokens.trajectory import Trajectory

__all__ = ["play", "print_message", "print_trajectory"]

_STYLES = {"system": "magenta", "developer": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}


def print_trajectory(console: Console, trajectory: Trajectory) -> None:
    """The transcript of a rollout, and how it ended."""
    title = f"{trajectory.env} · task {trajectory.index} · rollout {trajectory.rollout}"
    console.print(Rule(Text(title, "bold"), align="left", style="dim"))
    for message in trajectory.messages:
        print_message(console, message)
    if trajectory.failure is not None:
        console.print(Text(f"failed: {trajectory.failure.reason}: {trajectory.failure.message}", "bold red"))
        return
    ends = [name for name in ("terminated", "truncated", "length_limited") if getattr(trajectory, name)]
    sampled = sum(sum(row.mask) for row in trajectory.rows)
    how = f"{trajectory.turns} turns · {sampled} tokens sampled · {', '.join(ends).replace('_', ' ') or 'unfinished'}"
    reward = "–" if trajectory.reward is None else f"{trajectory.reward:g}"
    console.print(Text(f"reward {reward}", "bold").append(f"  {how}", "dim"))
    console.print()


def print_message(console: Console, message: Message, pictures: Path | None = None) -> None:
    """A message under its role. Text is shown as it is: no markup, no control characters.

    An image is a line that says how large it is; it is written into the folder `pictures`, if there is one, and named.
    """
    console.print(Text(message["role"], f"bold {_STYLES.get(message['role'], '')}"))
    if message.get("reasoning_content"):
        console.print(Padding(Text(_printable(message["reasoning_content"]), "dim italic"), (0, 0, 0, 2)))
    if text := _content(message, pictures):
        console.print(Padding(Text(_printable(text)), (0, 0, 0, 2)))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        console.print(Padding(Text(_printable(f"→ {function['name']}({function['arguments']})"), "cyan"), (0, 0, 0, 2)))


def play(
    env_id: str, *, seed: int | None = None, env_kwargs: Mapping[str, Any] | None = None, console: Console | None = None
) -> float:
    """Let a person answer an env from standard input, one episode; returns the reward.

    A reply ends with a line that holds a single dot. A reply that is a JSON object with "role" is taken as the message
    itself, so that tools can be called. Images are files in a folder that is there as long as the episode.

    Raises:
        EOFError: the input ended before the episode.
    """
    from .registry import make

    console = console or Console(highlight=False)
    env = make(env_id, **(env_kwargs or {}))
    try:
        with tempfile.TemporaryDirectory(prefix="molt-gym-") as folder:
            return _play(env, seed, console, Path(folder))
    finally:
        env.close()


def _play(env: Any, seed: int | None, console: Console, pictures: Path) -> float:
    observation, _ = env.reset(seed=seed)
    shown: list[Message] = []
    tools: list[dict[str, Any]] = []
    total, over = 0.0, False
    while not over:
        _print_new(console, observation["messages"], shown, pictures)
        if observation["tools"] != tools:
            tools = observation["tools"]
            console.print(Text("tools", "bold cyan"))
            console.print(Padding(Text(_printable("\n".join(map(json.dumps, tools)))), (0, 0, 0, 2)))
        console.print(Text("assistant", "bold green").append("  (end your reply with a line holding one dot)", "dim"))
        shown, reply = observation["messages"], _reply()
        try:
            observation, reward, terminated, truncated, _ = env.step(reply)
        except ValueError as error:
            console.print(Text(str(error), "red"))
            continue
        shown = [*shown, reply]
        total, over = total + float(reward), terminated or truncated
    _print_new(console, observation["messages"], shown, pictures)
    console.print(Text(f"reward {total:g}", "bold"))
    return total


def _print_new(console: Console, messages: list[Message], shown: list[Message], pictures: Path) -> None:
    """What does not stand there yet; all, if it does not go on from that, as what a sub-agent asks."""
    goes_on = len(messages) >= len(shown) and all(map(same_message, messages, shown))
    if not goes_on:
        console.print(Rule(Text("another conversation", "bold"), align="left", style="dim"))
    for message in messages[len(shown) if goes_on else 0 :]:
        print_message(console, message, pictures)


def _content(message: Message, pictures: Path | None) -> str:
    content = message.get("content")
    if not isinstance(content, list) or all(part.get("type") == "text" for part in content):
        return text_of(message)
    return "\n".join(_image(source_of(part), pictures) if part.get("type") in KINDS else part.get("text") or ""
                     for part in content)


def _image(uri: Any, pictures: Path | None) -> str:
    try:
        picture = open_image(uri)
    except ValueError as error:
        return f"[{error}]"
    size = f"[image, {picture.width} x {picture.height} pixels"
    if pictures is None:
        return f"{size}]"
    file = pictures / f"{image_digest(uri)[:12]}.png"
    picture.save(file)
    return f"{size}: {file}]"


def _reply() -> Message:
    lines: list[str] = []
    while (line := input()) != ".":
        lines.append(line)
    text = "\n".join(lines)
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    return message if isinstance(message, dict) and "role" in message else {"role": "assistant", "content": text}


def _printable(text: str) -> str:
    """`text` without control characters, which could drive the terminal, and with what it cannot encode escaped."""
    text = "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
