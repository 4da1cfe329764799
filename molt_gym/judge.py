"""Judge: a reward by a model that grades replies by a rubric, or compares two of them.

Invariants: a judge that fails is an EnvFailure, never a score; scores are from 0 to 1; a judge holds settings alone, so
it may be used from any thread, loop or process, by any number of envs at the same time.
"""

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from .agreement import krippendorff_alpha, standard_error
from .errors import ConfigError
from .judge_calls import Question, judge_loop, judged, meter, rehearsing
from .judge_prompts import Judgement, Prompt, Rubric, Scale, pairwise, pointwise, read_scores, read_winner
from .judge_source import USUAL, Calls, Source, check_source, seat
from .messages import Message

__all__ = ["Agreement", "Calls", "Comparison", "Judge", "Verdict"]

_SETTINGS = ("source", "model", "rubric", "scale", "repeats", "swap", "calls")


@dataclass(frozen=True)
class Verdict:
    """What a judge makes of a reply.

    score: the mean over judgements and criteria, from 0 to 1. parts: of each criterion, if the rubric names several.
    error: the standard error of the score over repeated judgements, NaN for one. reasoning: of the first of them.
    """

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    error: float = math.nan
    reasoning: str = ""
    judgements: tuple[Judgement, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Comparison:
    """Which of two replies is better.

    score: of `a`, the mean over judgements of 1 where it won, 0.5 for a tie, 0 where `b` won. winner: by the score.
    consistent: the share of pairs of judgements, one in each order, that agree; NaN if there was but one order. error,
    reasoning: as of `Verdict`. judgements: of `a`, first those in which it stood first.
    """

    winner: Literal["a", "b", "tie"]
    score: float
    consistent: float = math.nan
    error: float = math.nan
    reasoning: str = ""
    judgements: tuple[Judgement, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Agreement:
    """How far repeated judgements agree, over several things that were judged.

    mean: of all scores. error: the mean of their standard errors. alpha: Krippendorff's α, of the interval kind, or
    nominal for comparisons. consistent: the mean of `Comparison.consistent`; NaN for scores.
    """

    mean: float
    error: float
    alpha: float
    consistent: float = math.nan
    verdicts: list[Verdict] | list[Comparison] = field(default_factory=list, repr=False)


class Judge:
    """Grades by a rubric.

    Args:
        source: who judges: the address of an OpenAI-compatible API (key in OPENAI_API_KEY); "policy" or "frozen", the
            model that is being trained, or as it was at the start, on the engines of the run; the name or folder of
            another model; or what `as_policy` takes.
        rubric: what is looked for, in words; or several criteria by name, each of which gets a score.
        model: its name at that address.
        scale: the worst and the best score that the judge may give; a verdict has them as 0 and 1.
        repeats: judgements of each thing.
        swap: whether pairs are judged in both orders, against a bias for one position.
        calls: how it is asked.

    Raises:
        ConfigError: an argument makes no sense.
    """

    def __init__(
        self, source: Source, rubric: Rubric, *, model: str | None = None, scale: Scale = (1, 10), repeats: int = 1,
        swap: bool = True, calls: Calls = USUAL,
    ) -> None:
        check_source(source, model)
        _checked(rubric)
        if not isinstance(scale, tuple | list) or len(scale) != 2 or not all(map(_is_finite, scale)) or (
                scale[0] >= scale[1]):
            raise ConfigError(f"judge.scale: {scale!r}; write the worst and the best score, such as (1, 10)")
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise ConfigError(f"judge.repeats: {repeats!r}; write an integer from 1 on")
        if repeats > 1 and calls.temperature == 0:
            raise ConfigError(f"judge.repeats: {repeats} greedy judgements are all the same; write a "
                              "calls.temperature above 0, or None")
        temperature = float(repeats > 1) if calls.temperature is None else calls.temperature
        self.source: Any = os.fspath(source) if isinstance(source, os.PathLike) else source
        self.model, self.rubric, self.scale = model, rubric, (float(scale[0]), float(scale[1]))
        self.repeats, self.swap, self.calls = repeats, swap, replace(calls, temperature=temperature)

    def score(
        self, prompt: Prompt, reply: str, *, reference: str | None = None, rubric: Rubric | None = None
    ) -> Verdict:
        """Grades a reply; blocks, as envs and sync agents may.

        Args:
            prompt: what was asked: a text, or a conversation, of which the judge reads the texts.
            reply: what is graded.
            reference: an answer that the judge may compare with.
            rubric: in the place of the judge's own.

        Raises:
            EnvFailure: reason "judge".
        """
        return self._verdict(self._waited([self._about(prompt, reply, reference, rubric)])[0])

    async def score_async(
        self, prompt: Prompt, reply: str, *, reference: str | None = None, rubric: Rubric | None = None
    ) -> Verdict:
        """`score` for coroutines, on any loop."""
        work = self._judgements([self._about(prompt, reply, reference, rubric)])
        return self._verdict((await _elsewhere(work))[0])

    def compare(
        self, prompt: Prompt, a: str, b: str, *, reference: str | None = None, rubric: Rubric | None = None
    ) -> Comparison:
        """Says which of two replies is better; for arguments and errors see `score`."""
        return self._comparison(self._waited([self._between(prompt, a, b, reference, rubric)])[0])

    async def compare_async(
        self, prompt: Prompt, a: str, b: str, *, reference: str | None = None, rubric: Rubric | None = None
    ) -> Comparison:
        """`compare` for coroutines, on any loop."""
        work = self._judgements([self._between(prompt, a, b, reference, rubric)])
        return self._comparison((await _elsewhere(work))[0])

    def agreement(self, rows: Iterable[Mapping[str, Any]]) -> Agreement:
        """How far repeated judgements of each row agree; of comparisons also those in the two orders.

        Args:
            rows: arguments of `score`, or of `compare`, by name; one kind or the other.

        Raises:
            ConfigError: there are no rows, or there is but one judgement of each.
            EnvFailure: reason "judge".
        """
        table = [dict(row) for row in rows]
        pairs = bool(table) and "a" in table[0]
        if not table:
            raise ConfigError("judge.agreement: there are no rows; give arguments of score, or of compare, by name")
        if self.repeats < 2 and not (pairs and self.swap):
            raise ConfigError("judge.repeats: 1 judgement of each row, which agrees with itself; write at least 2")
        about = self._between if pairs else self._about
        found = self._waited([about(**{"reference": None, "rubric": None} | row) for row in table])
        verdicts: list[Any] = [(self._comparison if pairs else self._verdict)(judgements) for judgements in found]
        scores = [[judgement.score for judgement in judgements] for judgements in found]
        return Agreement(
            fmean(verdict.score for verdict in verdicts), fmean(verdict.error for verdict in verdicts),
            krippendorff_alpha(scores, "nominal" if pairs else "interval"),
            fmean(verdict.consistent for verdict in verdicts) if pairs else math.nan, verdicts)

    def question(self, prompt: Prompt, reply: str, rubric: Rubric, reference: str | None) -> list[Message]:
        """What is asked about one reply. A judge model with a form of its own overrides this and `read`."""
        return pointwise(prompt, reply, rubric, self.scale, reference)

    def read(self, text: str, rubric: Rubric) -> Judgement:
        """The judgement in what the model replied. Raises ValueError if there is none, and the model is told why."""
        return read_scores(text, rubric, self.scale)

    def _about(self, prompt: Prompt, reply: str, reference: str | None, rubric: Rubric | None) -> list[Question]:
        looked_for = self._rubric(rubric)
        messages = self.question(prompt, reply, looked_for, reference)
        # What a subclass has beside the usual settings may change how it reads.
        own = {name: value for name, value in vars(self).items() if name not in _SETTINGS}
        reader = type(self), self.scale, repr((looked_for, own))
        usual = Judgement(0.5, parts={} if isinstance(looked_for, str) else dict.fromkeys(looked_for, 0.5))
        return [Question(messages, lambda text: self.read(text, looked_for), reader, n, usual) for n in self._numbers]

    def _between(
        self, prompt: Prompt, a: str, b: str, reference: str | None, rubric: Rubric | None
    ) -> list[Question]:
        looked_for = self._rubric(rubric)
        orders = [(a, b, read_winner), (b, a, _read_second)][: 1 + self.swap]
        return [Question(pairwise(prompt, first, second, looked_for, reference), read, read.__name__, n)
                for first, second, read in orders for n in self._numbers]

    def _rubric(self, rubric: Rubric | None) -> Rubric:
        return self.rubric if rubric is None else _checked(rubric)

    @property
    def _numbers(self) -> Sequence[int | None]:
        return range(self.repeats) if self.repeats > 1 else (None,)

    def _waited(self, about: list[list[Question]]) -> list[list[Judgement]]:
        if asyncio._get_running_loop() is judge_loop():
            raise RuntimeError("a judge that asks another one would wait for itself; await its score_async")
        return asyncio.run_coroutine_threadsafe(self._judgements(about), judge_loop()).result()

    def _judgements(self, about: list[list[Question]]) -> Coroutine[Any, Any, list[list[Judgement]]]:
        """To run on the judges' loop; what depends on who asks is looked up here and now."""
        if rehearsing.get():
            return _rehearsed([[question.usual for question in questions] for questions in about])
        who, counted = seat(self.source, self.model, self.calls), meter.get(Counter())

        async def ask() -> list[list[Judgement]]:
            started = time.perf_counter()
            try:
                return await asyncio.gather(*(asyncio.gather(*(
                    judged(who, question, self.calls, counted) for question in questions)) for questions in about))
            finally:
                counted["judge/seconds"] += time.perf_counter() - started

        return ask()

    def _verdict(self, judgements: Sequence[Judgement]) -> Verdict:
        scores = [judgement.score for judgement in judgements]
        parts = {name: fmean(judgement.parts[name] for judgement in judgements) for name in judgements[0].parts}
        return Verdict(fmean(scores), parts, standard_error(scores), judgements[0].reasoning, tuple(judgements))

    def _comparison(self, judgements: Sequence[Judgement]) -> Comparison:
        scores = [judgement.score for judgement in judgements]
        score = fmean(scores)
        winner: Literal["a", "b", "tie"] = "tie" if score == 0.5 else "a" if score > 0.5 else "b"
        pairs = list(zip(scores[: self.repeats], scores[self.repeats :], strict=False))
        consistent = fmean(one == other for one, other in pairs) if pairs else math.nan
        return Comparison(winner, score, consistent, standard_error(scores), judgements[0].reasoning,
                          tuple(judgements))


async def _rehearsed(judgements: list[list[Judgement]]) -> list[list[Judgement]]:
    return judgements


async def _elsewhere(work: Coroutine[Any, Any, list[list[Judgement]]]) -> list[list[Judgement]]:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, judge_loop()))


def _read_second(text: str) -> Judgement:
    found = read_winner(text)
    return replace(found, score=1 - found.score)


def _checked(rubric: Any) -> Rubric:
    texts = [rubric] if isinstance(rubric, str) else [*rubric, *rubric.values()] if isinstance(rubric, Mapping) else []
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f"judge.rubric: {rubric!r:.200}; write what is looked for, or several criteria by name, such "
                          "as {'clear': 'Is it easy to follow?'}")
    return rubric


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
