"""Math-v0: the policy solves problems of mathematics, and its answer is compared with the right one."""

from .env import MathEnv

__all__ = ["MathEnv"]
