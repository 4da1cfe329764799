"""What CodeExec is about, whoever owns the loop: tasks, how a conversation about one opens, what comes of a reply."""

from functools import partial
from typing import Any

from molt_gym.errors import ConfigError
from molt_gym.messages import Message
from molt_gym.sandbox import Limits, make_sandbox

from ..sources import make_source
from .dataset import FIELDS, OPTIONAL, task_in
from .demonstrations import demonstrations
from .fences import program_in
from .generator import Generator
from .grading import NO_PROGRAM, Verdict, grade
from .tasks import Task

__all__ = ["PRESETS", "Exercises"]

SYSTEM = "Reply with only a ```python code block."

PRESETS = {
    "": {"rollout": {"max_tokens": 256}},
    # One turn: the minutes of a first run are for learning to answer at once. Take more with rollout.max_turns.
    "tiny": {"rollout": {"max_tokens": 40, "max_turns": 1}},
    "smollm2-135m": {"steps": 20, "rollout": {"max_tokens": 40, "max_turns": 1}},
}
"""Settings of `molt_gym.train` by the name of the model."""


class Exercises:
    """Tasks, and the sandbox in which their solutions run.

    Args:
        split: "train" or "test"; no task is in both.
        shown_tests: of a dataset, how many of the tests that are statements are shown in the prompt.
        system: the system message; None: there is none.
        sandbox: "bubblewrap", or "subprocess", which isolates neither files nor network nor processes.
        output_chars: how much of an output or error the policy is shown.
        reuse: whether equal programs that can only do the same again are run once.
        seconds: time limit of each execution.
        memory_mb: memory of each process of an execution, in MiB.
        **source: `families` (names in `generator.FAMILIES`; by default the eight that print one value) and `difficulty`
            (from 1 on) of generated tasks; or `dataset` and the other keywords of `molt_gym.load_tasks`, where
            `prompt_column`, `tests_column` and `entry_point_column` name the columns; see `dataset.py`.

    Raises:
        ConfigError: an argument makes no sense, or the sandbox cannot work here; the message says what to install.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        *,
        split: str = "train",
        shown_tests: int = 0,
        system: str | None = SYSTEM,
        sandbox: str = "bubblewrap",
        output_chars: int = 300,
        reuse: bool = True,
        seconds: float = 2.0,
        memory_mb: int = 256,
        **source: Any,
    ) -> None:
        if isinstance(shown_tests, bool) or not isinstance(shown_tests, int) or shown_tests < 0:
            raise ConfigError(f"shown_tests: {shown_tests!r}; write an integer from 0 on")
        if shown_tests and source.get("dataset") is None:
            raise ConfigError("shown_tests: this is for a dataset; write dataset too")
        self._source = make_source(
            Generator, partial(task_in, shown=shown_tests), split, fields=FIELDS, optional=OPTIONAL, **source)
        self._system, self._reuse = system, reuse
        self._limits = Limits(seconds=seconds, memory_mb=memory_mb, output_chars=output_chars)
        self._sandbox = make_sandbox(sandbox)

    @property
    def num_tasks(self) -> int | None:
        """How many there are; None: any index from 0 on is one."""
        return self._source.num_tasks

    def task(self, index: int) -> Task:
        """The task of an index.

        Raises:
            EnvFailure: reason "task": a row of the dataset holds none.
        """
        return self._source.task(index)

    def opening(self, task: Task) -> list[Message]:
        """The instruction, if there is one, and the prompt of the task."""
        user = {"role": "user", "content": task.prompt}
        return [{"role": "system", "content": self._system}, user] if self._system else [user]

    def assess(self, task: Task, text: str) -> Verdict:
        """Runs the program of a reply. Threads may call it at the same time.

        Raises:
            EnvFailure: the sandbox did not work ("sandbox"), or the tests fit no solution at all ("tests").
        """
        program = program_in(text)
        if program is None:
            return Verdict("no_program", NO_PROGRAM)
        return grade(self._sandbox, program, task, self._limits, reuse=self._reuse)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """Noisy conversations to warm up a small policy with, fixed by the seed; see `demonstrations.py`.

        Raises:
            ValueError: the tasks are not those that print one value.
        """
        if not isinstance(self._source, Generator):
            raise ValueError("demonstrations: there are none for a dataset")
        return demonstrations(self._source, self.opening, count, seed)

    def cancel(self) -> None:
        """Ends what is running."""
        self._sandbox.cancel()
