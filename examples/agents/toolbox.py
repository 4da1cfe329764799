"""What openai_tools.py and anthropic_tools.py share: tools, questions, the reward, and a stand-in for a model."""

import functools
import json
import re
from typing import Any

from molt_gym import text_of
from molt_gym.sandbox import Limits, Sandbox, make_sandbox


def schema(name: str, description: str, argument: str) -> dict[str, Any]:
    """The schema, in the OpenAI form, of a tool that takes one text."""
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    schema("calculate", "The value of an arithmetic expression.", "expression"),
    schema("run_python", "Runs a Python program; returns what it prints.", "code"),
]


@functools.cache
def sandbox() -> Sandbox:
    """Models write anything: their code gets no network, no files and little time."""
    return make_sandbox()


def run_python(code: str) -> str:
    """What a program prints; failing that, its error."""
    done = sandbox().run(str(code), limits=Limits(seconds=5))
    return (done.stdout or done.stderr[-500:] or f"(no output, exit code {done.exit_code})").strip()


def calculate(expression: str) -> str:
    """The value of an expression, which is code that a model wrote, too."""
    return run_python(f"print({expression})")


def run_tool(name: str, arguments: str | dict[str, Any]) -> str:
    """Runs a tool. What is wrong with the call is said to the model, which can learn from it."""
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"calculate": calculate, "run_python": run_python}[name](**arguments)
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {type(error).__name__}: {error}"


def make_task(index: int) -> dict[str, Any]:
    """Task number `index`. Its "prompt" is what `ctx.messages` begins with."""
    a, b, n = 12 + 7 * index % 83, 34 + 11 * index % 59, 20 + 13 * index % 71
    primes = sum(all(k % d for d in range(2, k)) for k in range(2, n))
    prompt = f"What is {a} * {b}, and how many primes are below {n}? Answer with the two numbers."
    return {"prompt": prompt, "answers": [str(a * b), str(primes)]}


def reward(task: dict[str, Any], answer: str | None) -> float:
    """Half a point for each of the two numbers."""
    said = re.findall(r"\d+", answer or "")
    return sum(right in said for right in task["answers"]) / 2


def call(name: str, **arguments: str) -> dict[str, Any]:
    """A tool call as a model makes it."""
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def policy(observation: dict[str, Any]) -> str | dict[str, Any]:
    """A stand-in for a model: calls both tools at once, then says what they returned."""
    results = [text_of(message) for message in observation["messages"] if message["role"] == "tool"]
    if results:
        return f"The answers are {' and '.join(results)}."
    question = next(text_of(message) for message in observation["messages"] if message["role"] == "user")
    a, b, n = re.findall(r"\d+", question)
    code = f"print(sum(all(k % d for d in range(2, k)) for k in range(2, {n})))"
    calls = [call("calculate", expression=f"{a} * {b}"), call("run_python", code=code)]
    return {"role": "assistant", "content": "", "tool_calls": calls}
