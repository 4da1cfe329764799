"""The errors that users and the rollout runner tell apart.

Invariant: an env that cannot do its work raises `EnvFailure`; it never reports the trouble as a reward.
"""

from gymnasium.error import UnregisteredEnv

__all__ = ["ConfigError", "EnvFailure", "NotAChatEnv", "PromptTooLong", "RunFailed", "UnknownEnv"]


class EnvFailure(Exception):
    """The env, not the policy, failed: the rollout is counted by `reason` and left out of baseline and loss.

    Args:
        reason: a short slug that is counted in the metrics, such as "sandbox", "judge" or "timeout".
        detail: what happened, for people.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        if isinstance(reason, EnvFailure):  # Gymnasium's AsyncVectorEnv raises type(error)(error).
            reason, detail = reason.reason, reason.detail
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class ConfigError(ValueError):
    """A setting is unknown, malformed or contradicts another one; the message says what to write instead."""


class UnknownEnv(ConfigError, UnregisteredEnv):
    """No env is registered under the id; the message names the nearest ids."""


class NotAChatEnv(TypeError):
    """The env does not speak in conversations and assistant messages; the message says how to wrap it."""


class PromptTooLong(ValueError):
    """The prompt leaves no room for a reply in the context of the model."""


class RunFailed(RuntimeError):
    """The run cannot go on, for instance because too many of its rollouts failed; nothing is exported."""
