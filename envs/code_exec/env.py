"""CodeExec: the policy writes Python, the env runs it and tells what came of it, until the hidden tests pass."""

from collections.abc import Sequence
from typing import Any

from molt_gym.env import ChatEnv, Turn
from molt_gym.errors import ConfigError
from molt_gym.messages import Message, text_of
from molt_gym.sandbox import Limits, make_sandbox

from .dataset import Dataset
from .demonstrations import demonstrations
from .fences import program_in
from .generator import SPLITS, Generator
from .grading import NO_PROGRAM, grade
from .tasks import TaskSource

__all__ = ["CodeExecEnv"]

SYSTEM = "Reply with only a ```python code block."


class CodeExecEnv(ChatEnv):
    """Write Python that passes hidden tests; programs really run, in a sandbox, and their output is fed back.

    The last closed fenced Python block of a reply is the program. Reward 1 and the end of the episode once it passes;
    until then 0 and, as a user message, its output, its error, or that there is no program. A program passes that ends
    without an error and within its limits, and that prints what is expected (space at the ends of lines and of the
    text does not count) or whose functions pass the checks. `info["outcome"]` is "passed", "wrong", "error", "timeout"
    or "no_program".

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
        render_mode: None or "ansi".

    Raises:
        ConfigError: an argument makes no sense, or the sandbox cannot work here; the message says what to install.
    """

    presets = {
        "": {"rollout": {"max_tokens": 256}},
        # One turn: the minutes of a first run are for learning to answer at once. Take more with rollout.max_turns.
        "tiny": {"rollout": {"max_tokens": 40, "max_turns": 1}},
        "smollm2-135m": {"steps": 20, "rollout": {"max_tokens": 40, "max_turns": 1}},
    }

    def __init__(
        self,
        *,
        families: Sequence[str] | None = None,
        difficulty: int = 1,
        split: str = "train",
        dataset: str | None = None,
        dataset_split: str | None = None,
        prompt_column: str = "prompt",
        tests_column: str = "tests",
        entry_point_column: str = "entry_point",
        shown_tests: int = 0,
        system: str | None = SYSTEM,
        sandbox: str = "bubblewrap",
        seconds: float = 2.0,
        memory_mb: int = 256,
        output_chars: int = 300,
        reuse: bool = True,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if dataset is None:
            self._source: TaskSource = Generator(families, difficulty, split)
        elif families is not None:
            raise ConfigError("families: these are for generated tasks; leave out families or dataset")
        elif split not in SPLITS:
            raise ConfigError(f"split: {split!r}; write one of {', '.join(map(repr, SPLITS))}")
        else:
            self._source = Dataset(
                dataset,
                split,
                rows=dataset_split,
                prompt_column=prompt_column,
                tests_column=tests_column,
                entry_point_column=entry_point_column,
                shown_tests=shown_tests,
            )
        self.num_tasks = self._source.num_tasks
        self._system, self._reuse = system, reuse
        self._limits = Limits(seconds=seconds, memory_mb=memory_mb, output_chars=output_chars)
        self._sandbox = make_sandbox(sandbox)

    def begin(self, index: int) -> list[Message]:
        """The instruction and the prompt of the task."""
        self._task = self._source.task(index)
        return self._opening(self._task.prompt)

    def answer(self, message: Message) -> Turn:
        """Runs the program of a reply.

        Raises:
            EnvFailure: the sandbox did not work ("sandbox"), or the tests fit no solution at all ("tests").
        """
        program = program_in(text_of(message))
        if program is None:
            return Turn([_user(NO_PROGRAM)], info={"outcome": "no_program"})
        verdict = grade(self._sandbox, program, self._task, self._limits, reuse=self._reuse)
        if verdict.outcome == "passed":
            return Turn(reward=1.0, terminated=True, info={"outcome": "passed"})
        return Turn([_user(verdict.feedback)], info={"outcome": verdict.outcome})

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        """Noisy conversations to warm up a small policy with, fixed by the seed; see `demonstrations.py`.

        Raises:
            ValueError: the tasks are not those that print one value.
        """
        if not isinstance(self._source, Generator):
            raise ValueError("demonstrations: there are none for a dataset")
        return demonstrations(self._source, self._opening, count, seed)

    def close(self) -> None:
        """Ends what is running."""
        self._sandbox.cancel()
        super().close()

    def _opening(self, prompt: str) -> list[Message]:
        return ([{"role": "system", "content": self._system}] if self._system else []) + [_user(prompt)]


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}
