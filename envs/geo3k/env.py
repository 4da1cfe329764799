"""Geo3k: Math with a picture in every problem."""

from typing import Any

from molt_gym.errors import ConfigError, EnvFailure
from molt_gym.images import inline_images, with_images
from molt_gym.messages import Message

from ..math.dataset import Dataset
from ..math.env import MathEnv
from ..math.problems import Problem
from .figures import Figure, FigureGenerator

__all__ = ["Geo3kEnv"]

_PLACE = "<image>"


class Geo3kEnv(MathEnv):
    r"""Solve problems of geometry whose numbers stand in a figure; for models that see.

    Figures are drawn here, or come with the rows of a dataset, such as hiyouga/geometry3k. Graded as Math-v0.

    Args:
        **options: those of `MathEnv`; `families` are names in `figures.FAMILIES`, and of a dataset `image_column` has a
            picture or a list of them, which stand where the prompt says "<image>", or before it.

    Raises:
        ConfigError: as `MathEnv`.
    """

    presets = {"": {"rollout": {"max_tokens": 256}}}
    # A tiny model that is made for an env sees nothing.
    demonstrations = None  # type: ignore[assignment]

    @staticmethod
    def _make_source(split: str, **options: Any) -> Any:
        if options.get("dataset") is None:
            if given := sorted(options.keys() - {"dataset", "families", "difficulty"}):
                raise ConfigError(f"{', '.join(given)}: this is for a dataset; write dataset too")
            return FigureGenerator(options.get("families"), options.get("difficulty", 1), split)
        column = options.pop("image_column", "images")
        return _Illustrated(MathEnv._make_source(split, **{"prompt_column": "problem"} | options), column)

    def _opening(self, problem: Problem) -> list[Message]:
        texts = problem.question.split(_PLACE)
        content: list[dict[str, Any]] = []
        for number, text in enumerate(texts):
            content += [{"type": "image"}] if number else []
            content += [{"type": "text", "text": text}] if text else []
        messages: list[Message] = [{"role": "user", "content": content}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        try:
            return inline_images(with_images(messages, problem.images))
        except ValueError as error:
            raise EnvFailure("task", f"{problem.question!r:.100}: {error}") from error


class _Illustrated:
    """A dataset's problems with their pictures."""

    def __init__(self, problems: Dataset, column: str) -> None:
        self._problems, self._column, self.num_tasks = problems, column, problems.num_tasks
        if column not in problems.row(0):
            raise ConfigError(f"image_column: there is no column {column!r}; choose from "
                              f"{', '.join(problems.row(0))}")

    def task(self, index: int) -> Figure:
        """The problem of a row."""
        problem, images = self._problems.task(index), self._problems.row(index).get(self._column)
        images = tuple(images) if isinstance(images, list | tuple) else () if images is None else (images,)
        return Figure(problem.prompt, problem.answer, question=problem.prompt, images=images)
