"""Agents: programs that talk to a model through a stock SDK, as Gymnasium envs."""

from .agent import ChatAgent, Result, find_agent, load_agent, register_agent
from .command import CommandAgent
from .context import AgentContext
from .env import AgentEnv
from .run import AgentRun, agent_rng

__all__ = [
    "AgentContext",
    "AgentEnv",
    "AgentRun",
    "ChatAgent",
    "CommandAgent",
    "Result",
    "agent_rng",
    "find_agent",
    "load_agent",
    "register_agent",
]
