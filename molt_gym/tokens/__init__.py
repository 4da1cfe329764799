"""Token-exact records of a rollout: chat template to ids and back, the graph of turns, the rows to train on.

Promise: a trained token is a token that the policy sampled, in exactly the context it was sampled in. Text is never
turned back into ids.
"""

from .generation import Generation, Sampling
from .graph import Prompt, TokenGraph
from .renderer import Renderer
from .template import ChatTemplateError
from .trajectory import Failure, Row, RowRef, Trajectory, read_jsonl, write_jsonl

__all__ = [
    "ChatTemplateError", "Failure", "Generation", "Prompt", "Renderer", "Row", "RowRef", "Sampling", "TokenGraph",
    "Trajectory", "read_jsonl", "write_jsonl",
]
