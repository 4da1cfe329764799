"""Judge-v0: the policy writes, and a judging model grades what it wrote."""

from .env import JudgeEnv

__all__ = ["JudgeEnv"]
