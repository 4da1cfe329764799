"""Geo3k: Math with a picture in every problem, and Python to calculate with, for who wants that."""

from typing import Any

from molt_gym.env import Turn
from molt_gym.errors import ConfigError
from molt_gym.images import inline_images, with_images
from molt_gym.messages import Message
from molt_gym.tasks import TaskRow

from ..math.dataset import problem_in
from ..math.env import MathEnv
from ..math.problems import Problem
from ..sources import make_source
from .demonstrations import with_calls
from .figures import Figure, FigureGenerator
from .python_tool import TOOL, PythonTool, Usage

__all__ = ["FIELDS", "Geo3kEnv", "figure_in"]

FIELDS = {"prompt": "problem", "answer": "answer", "image": "images"}
_PLACE = "<image>"


class Geo3kEnv(MathEnv):
    r"""Solve problems of geometry whose numbers stand in a figure; for models that see.

    Figures are drawn here, or come with the rows of a dataset, such as hiyouga/geometry3k. Graded as Math-v0. At
    difficulty 1 the width of rectangles on squared paper is counted; from 2 on, figures of all families are drawn.

    With `python`, replies may call a tool that runs programs in a sandbox, each from nothing; what they print comes
    back in tool messages, and counts as no try. Once all calls are used up, a reply that calls is graded as it is. So
    an episode has at most `calls + turns` replies. `info` then has the numbers of "tool_calls" and "tool_errors" too.

    Args:
        split: "train" or "test"; no figure is in both.
        python: whether there is the tool.
        calls: how many programs may run in an episode.
        sandbox: "bubblewrap", or "subprocess", which isolates neither files nor network nor processes.
        python_seconds: time limit of a program.
        **options: those of `MathEnv`; `families` are names in `figures.FAMILIES`, and of a dataset `image_column` has a
            picture or a list of them, which stand where the prompt says "<image>", or before it.

    Raises:
        ConfigError: as `MathEnv`.
    """

    presets = {
        "": {"rollout": {"max_tokens": 256}},
        "tiny": {"steps": 24, "rollout": {"max_tokens": 32}},
    }

    def __init__(
        self, *, split: str = "train", python: bool = False, calls: int = 4, sandbox: str = "bubblewrap",
        python_seconds: float = 2.0, **options: Any,
    ) -> None:
        super().__init__(split=split, **options)
        if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
            raise ConfigError(f"calls: {calls!r}; write an integer from 1 on")
        self.calls, self.turns = calls, self._turns
        self.python = PythonTool(sandbox, python_seconds) if python else None
        self.tools = [TOOL] if python else []

    def begin(self, index: int) -> list[Message]:
        """The instruction, the picture and the question. Raises as `MathEnv.begin`."""
        self._usage = Usage(self.calls)
        return super().begin(index)

    def answer(self, message: Message) -> Turn:
        """Runs what a reply calls, or grades it.

        Raises:
            EnvFailure: reason "grader": no worker could be had to compare answers; "sandbox": it did not work.
        """
        if self.python is None or not message.get("tool_calls"):
            return self._with_usage(super().answer(message))
        tried = not self._usage.left
        results = self._usage.run(self.python, message["tool_calls"])
        turn = super().answer(message) if tried else Turn(info={"outcome": "no_answer"})
        turn.messages = [] if turn.terminated else [*results, *turn.messages]
        return self._with_usage(turn)

    def task(self, index: int) -> Problem:
        """The problem of an index. Raises as `begin`."""
        return self._source.task(index)

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        """Noisy conversations to warm up a small policy with, fixed by the seed; with `python`, some call it.

        Raises:
            ValueError: the problems are those of a dataset.
        """
        played = super().demonstrations(count, seed)
        return with_calls(played, seed) if self.python else played

    def close(self) -> None:
        """Ends what is running."""
        if self.python is not None:
            self.python.cancel()
        super().close()

    def _with_usage(self, turn: Turn) -> Turn:
        turn.info |= self._usage.info if self.python else {}
        return turn

    @staticmethod
    def _make_source(split: str, **options: Any) -> Any:
        return make_source(FigureGenerator, figure_in, split, fields=FIELDS, **options)

    def opening(self, problem: Problem) -> list[Message]:
        """The instruction, the pictures and the question."""
        texts = problem.question.split(_PLACE)
        content: list[dict[str, Any]] = []
        for number, text in enumerate(texts):
            content += [{"type": "image"}] if number else []
            content += [{"type": "text", "text": text}] if text else []
        messages: list[Message] = [{"role": "user", "content": content}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        return inline_images(with_images(messages, problem.images))


def figure_in(row: TaskRow) -> Figure:
    """The problem of a row with its pictures.

    Raises:
        EnvFailure: reason "task": the row has no prompt, no answer of a known form, or what is no picture.
    """
    problem, images = problem_in(row), tuple(image["image_url"]["url"] for image in row.images("image"))
    if problem.prompt.count(_PLACE) not in (0, len(images)):
        raise row.refused("image", f"as many images as the prompt has {_PLACE}", f"{len(images)} images")
    return Figure(problem.prompt, problem.answer, question=problem.prompt, images=images)
