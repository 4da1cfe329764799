"""A harness of verifiers that talks to the model in this process, where its own ones start a program for each turn."""

import json
from contextlib import AsyncExitStack
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, omit
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]


class ChatHarness(Harness[HarnessConfig]):
    """A conversation with the tools of the task, until a reply calls none of them."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: ModelContext, trace: Trace, runtime: Runtime, endpoint: str, secret: str, mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Talks until the end of a segment. The caller fixes the parameters; see `Harness.launch`."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [
            message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            http = DefaultAsyncHttpxClient(trust_env=False, verify=endpoint.startswith("https:"), timeout=None)
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http))
            tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools or omit)
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    content = await _called(call.function, names, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def _called(function: Any, names: dict[str, Any], connections: dict[str, Any]) -> Any:
    """What a tool returns, or what was wrong with the call."""
    if function.name not in names:
        return f"There is no tool {function.name!r}; there are {', '.join(names) or 'none'}."
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"The arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "The arguments are no JSON object."
    return await call_mcp(connections, names, function.name, arguments)
