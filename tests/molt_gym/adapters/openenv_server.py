"""A server of OpenEnv's own package with three envs: `python openenv_server.py PORT [SESSIONS] [PING SECONDS]`.

/guess takes text, /walk an action of several fields, /sum calls of MCP tools.
"""

import sys
import time
from typing import Literal

import fastapi
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_app,
)
from openenv.core.rubrics import Rubric
from pydantic import Field


class Guess(Action):
    """What is guessed."""

    message: str = Field(min_length=1)


class Heard(Observation):
    """What is said to a guess."""

    text: str


class Closeness(Rubric):
    """1 for the number, else -0.1."""

    def forward(self, action, observation):
        return 1.0 if observation.text == "Right." else -0.1


class GuessEnv(Environment):
    """A number from 0 to 9, five guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    open = 0

    def __init__(self):
        super().__init__(rubric=Closeness())
        self.tries = 0
        GuessEnv.open += 1

    def close(self):
        GuessEnv.open -= 1

    def reset(self, seed=None, episode_id=None, bonus=0):
        self.secret, self.tries = (seed + bonus) * 7 % 10, 0
        return Heard(text=f"Guess number {seed}.", metadata={"session": id(self)})

    def step(self, action, timeout_s=None, **kwargs):
        self.tries += 1
        right = action.message.strip() == str(self.secret)
        heard = Heard(text="Right." if right else f"Not {action.message[:20]}.", done=right or self.tries == 5)
        heard.reward = self._apply_rubric(action, heard)
        return heard

    @property
    def state(self):
        return State(step_count=self.tries)


class Move(Action):
    """One move on a line."""

    direction: Literal["left", "right"]
    steps: int = Field(default=1, ge=1, le=3)
    note: str = ""


class Place(Observation):
    """Where one stands and has to go."""

    at: int
    goal: int


class WalkEnv(GuessEnv):
    """Go from 0 to the goal; the tasks are those of two splits."""

    def reset(self, split="train", index=0, seed=None, episode_id=None):
        self.at, self.goal = 0, index + 1 if split == "train" else -index - 1
        return Place(at=0, goal=self.goal)

    def step(self, action, timeout_s=None, **kwargs):
        if action.note == "crash":
            raise RuntimeError("the floor gave way")
        time.sleep(8.0 if action.note == "sleep" else 0.0)
        self.at += action.steps if action.direction == "right" else -action.steps
        return Place(at=self.at, goal=self.goal, reward=self.at == self.goal, done=self.at == self.goal)

    def list_splits(self):
        return ["train", "test"]

    def num_tasks(self, split):
        return {"train": 4, "test": 2}[split]


class SumEnv(MCPEnvironment):
    """Add numbers to a total with one tool, and hand it in with another."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("sum")
        self.total, self.goal, self.handed_in = 0, 0, False

        @mcp.tool
        def add(number: int) -> str:
            """Adds a number to the total."""
            self.total += number
            return f"The total is {self.total}."

        @mcp.tool
        def hand_in() -> int:
            """Ends the task."""
            self.handed_in = True
            return self.total

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.total, self.goal, self.handed_in = 0, (seed or 0) % 100, False
        return Observation(metadata={"task": f"Make the total {self.goal}."})

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s, **kwargs)
        if isinstance(seen, CallToolObservation) and self.handed_in:
            seen.done, seen.reward = True, float(self.total == self.goal)
        return seen

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("tools only")

    @property
    def state(self):
        return State()


def main(port, sessions="64", ping="20"):
    """Serves until it is killed."""
    app = fastapi.FastAPI()
    for path, env, action, seen in [("guess", GuessEnv, Guess, Heard), ("walk", WalkEnv, Move, Place),
                                    ("sum", SumEnv, CallToolAction, CallToolObservation)]:
        app.mount(f"/{path}", create_app(env, action, seen, env_name=path, max_concurrent_envs=int(sessions)))
    app.get("/open")(lambda: {"guess": GuessEnv.open})
    uvicorn.run(app, port=int(port), log_level="error", ws_ping_interval=float(ping), ws_ping_timeout=float(ping))


if __name__ == "__main__":
    main(*sys.argv[1:])
