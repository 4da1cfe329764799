"""CodeExec-v0: the policy writes Python, which is run and tested."""

from .env import CodeExecEnv

__all__ = ["CodeExecEnv"]
