"""The steps of a run, simulated event by event; `scale_simulation.py` says with which figures.

Events are rollouts that start and end, batches, updates and weights. An engine gives each sequence it decodes a token a
step, whose length is `a + b × sequences`; the pool dispatches groups as `molt_gym.trainers.rollout.pool` does.
"""

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(frozen=True)
class Run:
    """What is simulated. Seconds unless said otherwise.

    groups: of a batch, of `size` rollouts. stale: versions that a group may lag behind. a, b: of an engine's step, see
    above. slots: sequences that an engine decodes at once. mean, longest: tokens of a reply; `spread` is the deviation
    of its logarithm. driver: of the driver for each rollout, one at a time. pause: for which engines wait for weights.
    together: whether engines wait while the actor trains, too.
    """

    groups: int
    size: int
    stale: int
    engines: int
    a: float
    b: float
    train: float
    pause: float
    mean: float
    longest: float
    spread: float = 0.0
    slots: int = 1 << 20
    driver: float = 0.0
    together: bool = False


@dataclass
class Decoder:
    """An engine: how many tokens a sequence has had until `since`, counted from the beginning, and at which count each
    ends. A `since` that lies ahead is the end of a pause."""

    run: Run
    done: float = 0.0
    since: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    waiting: list[tuple[float, int]] = field(default_factory=list)

    def advance(self, now: float) -> None:
        """Decode until now."""
        if now > self.since:
            self.done += (now - self.since) / self._step() if self.ends else 0
            self.since = now

    def add(self, tokens: float, group: int) -> None:
        """Begin a reply, or let it wait."""
        if len(self.ends) < self.run.slots:
            heapq.heappush(self.ends, (self.done + tokens, group))
        else:
            self.waiting.append((tokens, group))

    def next_end(self) -> float:
        """When the next reply ends if nothing changes."""
        if not self.ends:
            return math.inf
        return self.since + max(0.0, self.ends[0][0] - self.done) * self._step()

    def pop(self) -> int:
        """The group of the reply that has ended; another one takes its place."""
        group = heapq.heappop(self.ends)[1]
        if self.waiting:
            tokens, other = self.waiting.pop()
            heapq.heappush(self.ends, (self.done + tokens, other))
        return group

    def _step(self) -> float:
        return self.run.a + self.run.b * len(self.ends)


class Simulation:
    """The loop of a run: `steps()` yields seconds, mean staleness and dropped groups of each step."""

    def __init__(self, run: Run, seed: int = 0) -> None:
        self._run, self._random = run, random.Random(seed)
        self._engines = [Decoder(run) for _ in range(run.engines)]
        self._targets, self._numbers = itertools.cycle(range(run.engines)), itertools.count()
        self._stamps = [0] * run.engines
        self._ends: list[tuple[float, int, int]] = []
        self._now, self._version, self._free, self._dropped = 0.0, 0, 0.0, 0
        self._playing: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        self._stock: list[int] = []

    def steps(self) -> Iterator[tuple[float, float, int]]:
        """Without end."""
        run, began = self._run, 0.0
        while True:
            self._dropped = 0
            finished, self._stock = self._stock, []
            for group in finished:
                self._keep(group)
            while len(self._stock) < run.groups:
                self._dispatch(run.stale + 1)
                self._end_one(math.inf)
            batch, self._stock = self._stock[:run.groups], self._stock[run.groups:]
            stale = fmean(self._version - self._begun.pop(group) for group in batch)
            self._now = max(self._now, self._free)
            self._let_pass(run.train, blocked=run.together)
            self._let_pass(run.pause, blocked=True)
            self._version += 1
            yield self._now - began, stale, self._dropped
            began = self._now

    def _keep(self, group: int) -> None:
        if self._version - self._begun[group] > self._run.stale:
            self._dropped += 1
        else:
            self._stock.append(group)

    def _let_pass(self, seconds: float, *, blocked: bool) -> None:
        until = self._now + seconds
        if not blocked:
            while self._run.stale:
                self._dispatch(self._run.stale)
                if not self._end_one(until):
                    break
        else:
            for number, engine in enumerate(self._engines):
                engine.advance(self._now)
                engine.since = until
                self._watch(number)
        self._now = until

    def _dispatch(self, batches: int) -> None:
        """Let play what so many batches may take, whose age is then allowed."""
        run = self._run
        most = max(run.groups, run.groups * run.stale + 1)
        while len(self._playing) < most and len(self._playing) + len(self._stock) < run.groups * batches:
            group = next(self._numbers)
            self._playing[group], self._begun[group] = run.size, self._version
            for _ in range(run.size):
                number = next(self._targets)
                self._engines[number].advance(self._now)
                self._engines[number].add(self._length(), group)
                self._watch(number)

    def _watch(self, number: int) -> None:
        self._stamps[number] += 1
        heapq.heappush(self._ends, (self._engines[number].next_end(), self._stamps[number], number))

    def _length(self) -> float:
        run = self._run
        drawn = self._random.lognormvariate(math.log(run.mean) - run.spread**2 / 2, run.spread)
        return min(run.longest, drawn)

    def _end_one(self, until: float) -> bool:
        while self._ends[0][1] != self._stamps[self._ends[0][2]]:
            heapq.heappop(self._ends)
        end, _, number = self._ends[0]
        if end > until:
            return False
        self._now = end
        self._engines[number].advance(end)
        group = self._engines[number].pop()
        self._watch(number)
        # The driver takes one rollout after the other.
        self._free = max(self._free, end) + self._run.driver
        self._playing[group] -= 1
        if not self._playing[group]:
            del self._playing[group]
            self._keep(group)
        return True


def simulate(run: Run, steps: int = 8, seed: int = 0) -> tuple[float, float, float]:
    """Seconds of a step, mean staleness and share of groups dropped, without the first two steps."""
    found = list(itertools.islice(Simulation(run, seed).steps(), steps + 2))[2:]
    dropped = sum(step[2] for step in found)
    return fmean(step[0] for step in found), fmean(step[1] for step in found), dropped / (steps * run.groups + dropped)
