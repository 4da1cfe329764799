"""ToolUse-v0: the policy calls tools that really run, and answers with what they gave."""

from .agent import ToolUseAgent

__all__ = ["ToolUseAgent"]
