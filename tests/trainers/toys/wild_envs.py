"""Envs and agents that change what belongs to their whole process, hang, end it and start others."""

import os
import subprocess
import sys
import time

import molt_gym
from molt_gym import ChatAgent, ChatEnv, EnvFailure, Turn
from molt_gym.messages import Message, text_of


def sleeper(folder: str, **options) -> None:
    """Start a process that outlives whoever does not kill it, and write down its number."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"], **options)
    with open(os.path.join(folder, f"pid-{process.pid}"), "w"):
        pass


class Unforeseen(Exception):
    """An error that cannot be made from its message."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


class JudgeIsAway(EnvFailure):
    """A failure that cannot be made from a reason and a detail."""

    def __init__(self, *, url):
        super().__init__("judge", f"{url} does not answer")


class Wild(ChatEnv):
    """Does what its `deeds` say for the index of its task, and tells where it is."""

    own_process = True

    def __init__(self, *, folder: str = ".", deeds: dict | None = None) -> None:
        super().__init__()
        self.folder, self.deeds = folder, deeds or {}
        if self.deeds.get("make") == "refuse":
            raise FileNotFoundError("tasks.json")

    def begin(self, index: int) -> list[Message]:
        self.index = index
        os.makedirs(os.path.join(self.folder, str(index)), exist_ok=True)
        os.chdir(os.path.join(self.folder, str(index)))
        os.environ["WILD"] = str(index)
        return [{"role": "user", "content": f"task {index}"}]

    def answer(self, message: Message) -> Turn:
        deed = self.deeds.get(str(self.index), "")
        if "child" in deed:
            sleeper(self.folder)
        if "daemon" in deed:
            sleeper(self.folder, start_new_session=True)
        if "exit" in deed:
            os._exit(7)
        if "hang" in deed:
            time.sleep(300)
        if "judge" in deed:
            raise EnvFailure("judge", "no route")
        if "away" in deed:
            raise JudgeIsAway(url="http://judge")
        if "raise" in deed:
            raise Unforeseen("this", "that")
        if "quit" in deed:
            sys.exit(3)
        info = {"cwd": os.path.basename(os.getcwd()), "env": os.environ["WILD"], "pid": os.getpid(),
                "said": text_of(message)}
        return Turn([], 1.0, True, info)

    def close(self) -> None:
        with open(os.path.join(self.folder, f"closed-{os.getpid()}"), "w"):
            pass


class WildAgent(ChatAgent):
    """The same as an agent with an SDK's client."""

    own_process = True

    def __init__(self, folder: str = ".", deeds: dict | None = None) -> None:
        self.folder, self.deeds = folder, deeds or {}

    def run(self, ctx):
        deed = self.deeds.get(str(ctx.index), "")
        os.environ["WILD"] = str(ctx.index)
        client = ctx.openai()

        def ask():
            completion = client.chat.completions.create(
                model=ctx.model, messages=[{"role": "user", "content": f"task {ctx.index}"}])
            return completion.choices[0].message.content

        said = ask()
        ctx.add_reward(0.25)
        if "daemon" in deed:
            sleeper(self.folder, start_new_session=True)
        if "exit" in deed:
            os._exit(7)
        if "hang" in deed:
            time.sleep(300)
        if "greedy" in deed:
            try:
                ask()
            except Exception:  # noqa: BLE001  an agent that does not take no for an answer
                time.sleep(300)
        if "more" in deed:
            ask()
        if "raise" in deed:
            raise KeyError("board")
        ctx.report(info={"env": os.environ["WILD"], "pid": os.getpid(), "said": said})
        return 0.5


molt_gym.register("Wild-v0", Wild, max_episode_steps=4)
molt_gym.register("WildAgent-v0", "molt_gym:AgentEnv", max_episode_steps=1, kwargs={"agent": "wild_envs:WildAgent"})
