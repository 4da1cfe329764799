"""The options of supervised fine-tuning, read as those of `train` are.

Invariant: importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from .config_actor import ActorConfig, Schedule
from .config_schema import CheckpointConfig
from .config_types import Count, Folder, Natural, Number, Positive, Section, Seed, Share, Table, Text


class DatasetConfig(Section):
    """Where chat rows are found in the data."""

    split: Text = "train"
    """Split of a dataset that has a name."""
    subset: Text | None = None
    """Subset (configuration) of a dataset that has a name."""
    messages: Text = "messages"
    """Column of the conversation."""
    tools: Text = "tools"
    """Column of the tools, which may be missing; a list, or JSON text."""
    prompt: Text | None = None
    """Column of a question in plain text, in place of messages; needs dataset.completion."""
    completion: Text | None = None
    """Column of the answer to it."""


class RolloutsConfig(Section):
    """Which recorded rollouts are learnt from; those that failed never are."""

    min_reward: Number | None = None
    """Lowest reward of a rollout that is kept."""
    best_of_group: Count | None = None
    """How many rollouts of each group are kept, those with the highest rewards."""


class SftActorConfig(ActorConfig):
    """The model being trained and its optimizer."""

    lr: Positive = 1e-5
    """Peak learning rate; with adapters, 10 times as much unless it is set."""
    schedule: Schedule = "cosine"
    """Course of the learning rate after the warm-up."""


class SftEvalConfig(Section):
    """Loss on conversations that are not trained on."""

    data: Text | None = None
    """Their file or dataset."""
    split: Text | None = None
    """Split of eval.data, if that has a name; without it, dataset.split."""
    share: Share = 0.0
    """Share of the data that is held out, drawn by the seed, in place of eval.data."""
    every: Natural = 0
    """Steps between evaluations; 0: only before and after."""


class SftConfig(Section):
    """All that a run needs to know."""

    model: Text | None = None
    """Hub name, local folder or name of a model at hand; without it, smollm2-135m."""
    data: Text | None = None
    """What is learnt from, for the record: a file, a run's folder or a dataset."""
    out: Folder | None = None
    """Folder of the run; without it, a new one under runs/."""
    epochs: Count = 1
    """Passes over the data."""
    steps: Count | None = None
    """Optimizer updates, in place of epochs."""
    seed: Seed = 0
    """Fixes the order and what is held out."""
    batch_size: Count = 16
    """Conversations (or rollouts) of an update."""
    max_context: Count | None = None
    """Most tokens of a row; without it, what the model can take."""
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    """What becomes of a conversation with a longer row: the run stops, it is left out, or the row ends early."""
    template_kwargs: Table = {}
    """Extra variables of the chat template, such as enable_thinking."""
    dataset: DatasetConfig = DatasetConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    actor: SftActorConfig = SftActorConfig()
    eval: SftEvalConfig = SftEvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _consistent(self) -> SftConfig:
        problems = []
        if (self.dataset.prompt is None) != (self.dataset.completion is None):
            problems.append("dataset.prompt: goes with dataset.completion; write both columns or neither")
        if self.eval.data is not None and self.eval.share:
            problems.append(f"eval.share: {self.eval.share} with eval.data = {self.eval.data!r}; write one of the two")
        if self.eval.split is not None and self.eval.data is None:
            problems.append(f"eval.split: {self.eval.split!r} without eval.data, of which it is one; write both")
        if self.eval.every and self.eval.data is None and not self.eval.share:
            problems.append(f"eval.every: {self.eval.every}, but nothing is held out; write eval.data or eval.share")
        if problems:
            raise ValueError("\n".join(problems))
        return self
