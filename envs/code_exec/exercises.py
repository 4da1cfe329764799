"""What CodeExec is about, whoever owns the loop: tasks, how a conversation about one opens, what comes of a reply."""

from collections.abc import Sequence
from dataclasses import dataclass

from molt_gym.errors import ConfigError
from molt_gym.messages import Message
from molt_gym.sandbox import Limits, make_sandbox

from ..families import check_split
from .dataset import Dataset
from .demonstrations import demonstrations
from .fences import program_in
from .generator import Generator
from .grading import NO_PROGRAM, Verdict, grade
from .tasks import Task, TaskSource

__all__ = ["PRESETS", "Exercises"]

SYSTEM = "Reply with only a ```python code block."

PRESETS = {
    "": {"rollout": {"max_tokens": 256}},
    # One turn: the minutes of a first run are for learning to answer at once. Take more with rollout.max_turns.
    "tiny": {"rollout": {"max_tokens": 40, "max_turns": 1}},
    "smollm2-135m": {"steps": 20, "rollout": {"max_tokens": 40, "max_turns": 1}},
}
"""Settings of `molt_gym.train` by the name of the model."""


@dataclass(kw_only=True)
class Exercises:
    """Tasks, and the sandbox in which their solutions run.

    Args:
        families: names of generated families (`generator.FAMILIES`); None: the eight that print one value.
        difficulty: of generated tasks, from 1 on.
        split: "train" or "test"; no task is in both.
        dataset: take the tasks from a dataset instead: a .jsonl or .parquet file, or a name on the hub.
        dataset_split, prompt_column, tests_column, entry_point_column, shown_tests: see `dataset.Dataset`.
        system: the system message; None: there is none.
        sandbox: "bubblewrap", or "subprocess", which isolates neither files nor network nor processes.
        seconds: time limit of each execution.
        memory_mb: memory of each process of an execution, in MiB.
        output_chars: how much of an output or error the policy is shown.
        reuse: whether equal programs that can only do the same again are run once.

    Raises:
        ConfigError: an argument makes no sense, or the sandbox cannot work here; the message says what to install.
    """

    families: Sequence[str] | None = None
    difficulty: int = 1
    split: str = "train"
    dataset: str | None = None
    dataset_split: str | None = None
    prompt_column: str = "prompt"
    tests_column: str = "tests"
    entry_point_column: str = "entry_point"
    shown_tests: int = 0
    system: str | None = SYSTEM
    sandbox: str = "bubblewrap"
    seconds: float = 2.0
    memory_mb: int = 256
    output_chars: int = 300
    reuse: bool = True

    def __post_init__(self) -> None:
        self._source = self._make_source()
        self._limits = Limits(seconds=self.seconds, memory_mb=self.memory_mb, output_chars=self.output_chars)
        self._sandbox = make_sandbox(self.sandbox)

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
        return self._opening(task.prompt)

    def assess(self, task: Task, text: str) -> Verdict:
        """Runs the program of a reply. Threads may call it at the same time.

        Raises:
            EnvFailure: the sandbox did not work ("sandbox"), or the tests fit no solution at all ("tests").
        """
        program = program_in(text)
        if program is None:
            return Verdict("no_program", NO_PROGRAM)
        return grade(self._sandbox, program, task, self._limits, reuse=self.reuse)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """Noisy conversations to warm up a small policy with, fixed by the seed; see `demonstrations.py`.

        Raises:
            ValueError: the tasks are not those that print one value.
        """
        if not isinstance(self._source, Generator):
            raise ValueError("demonstrations: there are none for a dataset")
        return demonstrations(self._source, self._opening, count, seed)

    def cancel(self) -> None:
        """Ends what is running."""
        self._sandbox.cancel()

    def _opening(self, prompt: str) -> list[Message]:
        user = {"role": "user", "content": prompt}
        return [{"role": "system", "content": self.system}, user] if self.system else [user]

    def _make_source(self) -> TaskSource:
        if self.dataset is None:
            return Generator(self.families, self.difficulty, self.split)
        if self.families is not None:
            raise ConfigError("families: these are for generated tasks; leave out families or dataset")
        check_split(self.split)
        return Dataset(
            self.dataset,
            self.split,
            rows=self.dataset_split,
            prompt_column=self.prompt_column,
            tests_column=self.tests_column,
            entry_point_column=self.entry_point_column,
            shown_tests=self.shown_tests,
        )
