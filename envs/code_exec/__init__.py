"""CodeExec-v0 and AgentCodeExec-v0: the policy writes Python, which is run and tested."""

from .agent import CodeExecAgent
from .env import CodeExecEnv

__all__ = ["CodeExecAgent", "CodeExecEnv"]
