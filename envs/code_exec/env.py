"""CodeExec: the policy writes Python, the env runs it and tells what came of it, until the hidden tests pass."""

from typing import Any

from molt_gym.env import ChatEnv, Turn
from molt_gym.messages import Message, text_of

from .exercises import PRESETS, Exercises

__all__ = ["CodeExecEnv"]


class CodeExecEnv(ChatEnv):
    """Write Python that passes hidden tests; programs really run, in a sandbox, and their output is fed back.

    The last closed fenced Python block of a reply, outside of what is thought, is the program. Reward 1 and the end of
    the episode once it passes; until then 0 and, as a user message, its output, its error, or that there is no program.
    A program passes that ends without an error and within its limits, and that prints what is expected (space at the
    ends of lines and of the text does not count, nor a millionth where a number with a decimal point is expected) or
    whose functions pass the checks. `info["outcome"]` is "passed", "wrong", "error", "timeout" or "no_program".

    Args:
        split: "train" or "test"; no task is in both.
        render_mode: None or "ansi".
        **options: further arguments of `Exercises`: `families` and `difficulty` of generated tasks, `dataset` for
            tasks of one's own, the limits of an execution, and more.

    Raises:
        ConfigError: an argument makes no sense, or the sandbox cannot work here; the message says what to install.
        TypeError: there is no such option.
    """

    presets = PRESETS

    def __init__(self, *, split: str = "train", render_mode: str | None = None, **options: Any) -> None:
        super().__init__(render_mode=render_mode)
        self._exercises = Exercises(split=split, **options)
        self.num_tasks = self._exercises.num_tasks

    def begin(self, index: int) -> list[Message]:
        """The instruction and the prompt of the task."""
        self._task = self._exercises.task(index)
        return self._exercises.opening(self._task)

    def answer(self, message: Message) -> Turn:
        """Runs the program of a reply.

        Raises:
            EnvFailure: the sandbox did not work ("sandbox"), or the tests fit no solution at all ("tests").
        """
        verdict = self._exercises.assess(self._task, text_of(message))
        info = {"outcome": verdict.outcome}
        if verdict.outcome == "passed":
            return Turn(reward=1.0, terminated=True, info=info)
        return Turn([{"role": "user", "content": verdict.feedback}], info=info)

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        """Noisy conversations to warm up a small policy with, fixed by the seed; see `demonstrations.py`.

        Raises:
            ValueError: the tasks are not those that print one value.
        """
        return self._exercises.demonstrations(count, seed)

    def close(self) -> None:
        """Ends what is running."""
        self._exercises.cancel()
        super().close()
