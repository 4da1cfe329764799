"""Geo3k-v0: the policy reads a figure of geometry, and its answer is compared with the right one."""

from .env import Geo3kEnv

__all__ = ["Geo3kEnv"]
