"""Judge: the policy writes, and a judging model grades what it wrote, or compares it with a reference."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from molt_gym.env import ChatEnv, Turn
from molt_gym.errors import ConfigError, EnvFailure
from molt_gym.judge import Calls, Judge
from molt_gym.judge_prompts import pairwise
from molt_gym.judge_source import Source
from molt_gym.messages import Message, text_of
from molt_gym.rewards import Reward

from ..families import FamilyGenerator
from ..thinking import without_thinking
from .demonstrations import demonstrations
from .tasks import Task, task_source

__all__ = ["JudgeEnv"]

RUBRIC = "Does the reply do what the task asks for, all of it, in good and plain language?"
_LONGEST = 500


class JudgeEnv(ChatEnv):
    """Write what a task asks for; a judging model says how good it is.

    Tasks are generated, or the rows of a dataset: a column `prompt`, and if there are any `rubric` and `reference`. One
    reply ends the episode; the judge is not shown what is thought in it. Its reward, from 0 to 1, is the judge's score;
    of a rubric with several criteria `info["reward/NAME"]` tells each. `info["verdict"]` is the judge's reasoning. A
    judge that fails is a failure of the env.

    Args:
        split: "train" or "test"; no generated task is in both.
        judge: who judges, as for `molt_gym.Judge`: "frozen" is the model with which the run began.
        judge_model: its name, where `judge` is an http address.
        rubric: what is looked for where a row does not say; or several criteria by name.
        mode: "score", or "compare" for the reply against the reference: 1 where it is better, 0.5 for a tie.
        calls: settings of `molt_gym.judge.Calls`, such as {"deadline": 60}, and `repeats` and `scale` of the judge.
        system: the system message; None: there is none.
        render_mode: None or "ansi".
        **source: `families` (names in `tasks.FAMILIES`; all by default) and `difficulty` (from 1 on) of generated
            tasks; or `dataset` and the other options of `molt_gym.tasks.load_tasks`, with `prompt_column`,
            `rubric_column` and `reference_column`.

    Raises:
        ConfigError: an argument makes no sense.
        TypeError: there is no such option.
    """

    presets = {
        "": {"rollout": {"max_tokens": 256, "step_timeout": 300}},
        "tiny": {"rollout": {"max_tokens": 24}},
    }

    def __init__(
        self,
        *,
        split: str = "train",
        judge: Source = "frozen",
        judge_model: str | None = None,
        rubric: str | Mapping[str, str] = RUBRIC,
        mode: Literal["score", "compare"] = "score",
        calls: Mapping[str, Any] | None = None,
        system: str | None = None,
        render_mode: str | None = None,
        **source: Any,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if mode not in ("score", "compare"):
            raise ConfigError(f"mode: {mode!r}; write 'score' or 'compare'")
        self._source = task_source(split, **source)
        self._mode, self._system = mode, system
        self.judge = _judge(judge, rubric, judge_model, **(calls or {}))
        self.num_tasks = self._source.num_tasks

    def begin(self, index: int) -> list[Message]:
        """The task.

        Raises:
            EnvFailure: reason "task": a row of the dataset holds none, or no reference to compare with.
        """
        self._task: Task = self._source.task(index)
        if self._mode == "compare" and self._task.reference is None:
            raise EnvFailure("task", f"task {index} has no reference to compare with; write one, or mode = 'score'")
        return self._opening(self._task)

    def answer(self, message: Message) -> Turn:
        """Asks the judge.

        Raises:
            EnvFailure: reason "judge".
        """
        task, text = self._task, without_thinking(text_of(message))
        if self._mode == "compare":
            found = self.judge.compare(task.prompt, text, task.reference, rubric=task.rubric)
            reward = Reward(found.score)
        else:
            found = self.judge.score(task.prompt, text, reference=task.reference, rubric=task.rubric)
            reward = Reward(found.score, {f"reward/{name}": value for name, value in found.parts.items()})
        return Turn(reward=reward, terminated=True, info={"verdict": found.reasoning[:_LONGEST]})

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        """Noisy conversations to warm up a small policy with, fixed by the seed; see `demonstrations.py`.

        Raises:
            ValueError: the tasks are those of a dataset.
        """
        if not isinstance(self._source, FamilyGenerator):
            raise ValueError("demonstrations: there are none for a dataset")
        return demonstrations(self._source, self._opening, self._judging, count, seed)

    def _opening(self, task: Task) -> list[Message]:
        user = {"role": "user", "content": task.prompt}
        return [{"role": "system", "content": self._system}, user] if self._system else [user]

    def _judging(self, task: Task, reply: str, worth: float) -> tuple[list[Message], dict[str, object]]:
        rubric = task.rubric or self.judge.rubric
        if self._mode == "compare":
            return pairwise(task.prompt, reply, task.reference or "", rubric), {"winner": "tie" if worth == 1 else "B"}
        low, high = self.judge.scale
        score = round(low + worth * (high - low))
        return (self.judge.question(task.prompt, reply, rubric, task.reference),
                {"score": score} if isinstance(rubric, str) else {"scores": dict.fromkeys(rubric, score)})


def _judge(
    source: Source, rubric: Any, model: str | None, *, repeats: int = 1, scale: Any = (1, 10), **calls: Any
) -> Judge:
    known = ["repeats", "scale", *(field.name for field in fields(Calls))]
    if unknown := calls.keys() - set(known):
        raise ConfigError(f"calls.{min(unknown)}: unknown; write {', '.join(known)}")
    return Judge(source, rubric, model=model, scale=scale, repeats=repeats, calls=Calls(**calls))
