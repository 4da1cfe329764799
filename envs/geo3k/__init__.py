"""Geo3k-v0 and Geo3kAgent-v0: the policy reads a figure of geometry, and its answer is compared with the right one."""

from .agent import Geo3kAgent
from .env import Geo3kEnv

__all__ = ["Geo3kAgent", "Geo3kEnv"]
