"""Math: the policy solves a problem, and the answer in its reply is compared with the right one."""

from typing import Any

from molt_gym.env import ChatEnv, Turn
from molt_gym.errors import ConfigError
from molt_gym.messages import Message, text_of

from ..families import FamilyGenerator
from ..sources import make_source
from .answers import RULES, Rule, find_answer
from .comparison import is_right
from .dataset import FIELDS, problem_in
from .demonstrations import demonstrations
from .problems import Generator, Problem
from .workers import check_installed

__all__ = ["MathEnv"]

SYSTEM = "Put the answer in \\boxed{}."
_NO_ANSWER, _WRONG = f"No answer. {SYSTEM}", "Wrong, try again."
_VERDICTS = {True: "right", False: "wrong", None: "undecided"}


class MathEnv(ChatEnv):
    r"""Solve problems of mathematics that have one exact answer.

    Problems are generated, or the rows of a dataset. Reward 1 and the end of the episode for a right answer; otherwise
    0, and a word about it as long as there are turns left. `info["outcome"]` is "right", "wrong", "no_answer", or
    "undecided" where comparing took too much time or memory, which earns nothing either. What counts as the answer says
    `answers.find_answer`, and what as right `comparison.is_right`.

    Args:
        split: "train" or "test"; no problem is in both.
        turns: how many replies there may be to a problem.
        rule: "any", or "boxed" to take what is in a box alone for an answer.
        system: the system message; None: there is none.
        seconds: the limit on a comparison.
        render_mode: None or "ansi".
        **source: `families` (names in `problems.FAMILIES`; all by default) and `difficulty` (from 1 on) of generated
            problems; or `dataset` and the other keywords of `molt_gym.load_tasks`, where `prompt_column` is "question"
            and `answer_column` "answer" if nothing else is said.

    Raises:
        ConfigError: an argument makes no sense, or math-verify is not installed.
        TypeError: there is no such option.
    """

    presets = {
        "": {"rollout": {"max_tokens": 256}},
        "tiny": {"rollout": {"max_tokens": 40}},
    }

    def __init__(
        self,
        *,
        split: str = "train",
        turns: int = 1,
        rule: Rule = "any",
        system: str | None = SYSTEM,
        seconds: float = 5.0,
        render_mode: str | None = None,
        **source: Any,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
            raise ConfigError(f"turns: {turns!r}; write an integer from 1 on")
        if rule not in RULES:
            raise ConfigError(f"rule: {rule!r}; write one of {', '.join(map(repr, RULES))}")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 3600:
            raise ConfigError(f"seconds: {seconds!r}; write a positive number below 3600")
        check_installed()
        self._source = self._make_source(split, **source)
        self._turns, self._rule, self._system, self._seconds = turns, rule, system, seconds
        self.num_tasks = self._source.num_tasks

    def begin(self, index: int) -> list[Message]:
        """The instruction and the problem.

        Raises:
            EnvFailure: reason "task": a row of the dataset holds none.
        """
        self._problem = self._source.task(index)
        self._left = self._turns
        return self.opening(self._problem)

    def answer(self, message: Message) -> Turn:
        """Grades a reply.

        Raises:
            EnvFailure: reason "grader": no worker could be had to compare answers.
        """
        self._left -= 1
        outcome = self.grade(self._problem, text_of(message))
        info = {"outcome": outcome}
        if outcome == "right" or not self._left:
            return Turn(reward=float(outcome == "right"), terminated=True, info=info)
        return Turn([{"role": "user", "content": self.feedback(outcome)}], info=info)

    def grade(self, problem: Problem, text: str) -> str:
        """The outcome of a reply to a problem; raises as `answer`."""
        found = find_answer(text, self._rule)
        if found is None:
            return "no_answer"
        return _VERDICTS[is_right(found, problem.answer, strict=problem.strict, seconds=self._seconds)]

    @staticmethod
    def feedback(outcome: str) -> str:
        """What the policy is told about a reply that is not right."""
        return _NO_ANSWER if outcome == "no_answer" else _WRONG

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        """Noisy conversations to warm up a small policy with, fixed by the seed; see `demonstrations.py`.

        Raises:
            ValueError: the problems are those of a dataset.
        """
        if not isinstance(self._source, FamilyGenerator):
            raise ValueError("demonstrations: there are none for a dataset")
        return demonstrations(self._source, self.opening, count, seed)

    @staticmethod
    def _make_source(split: str, **options: Any) -> Any:
        """Where problems come from."""
        return make_source(Generator, problem_in, split, fields=FIELDS, **options)

    def opening(self, problem: Problem) -> list[Message]:
        """The instruction and the problem."""
        user = {"role": "user", "content": problem.prompt}
        return [{"role": "system", "content": self._system}, user] if self._system else [user]

