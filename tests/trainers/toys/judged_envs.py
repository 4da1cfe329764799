"""Envs whose judge is a model of the run; importable as `toy_envs` is."""

import molt_gym
from molt_gym import ChatEnv, Judge, Rewards, Turn, text_of
from molt_gym.agents import register_agent
from molt_gym.judge import Calls, Judgement
from molt_gym.messages import Message

LETTERS = "abcdefghijklm"


class LetterJudge(Judge):
    """Takes whatever a model says for a verdict: the share of some letters."""

    def read(self, text: str, rubric: object) -> Judgement:
        return Judgement(sum(map(text.count, LETTERS)) / max(1, len(text)), text)


class Judged(ChatEnv):
    """Two turns, each of them judged."""

    num_tasks = 20

    def __init__(self, *, judge: str = "policy", split: str = "train") -> None:
        super().__init__()
        self.judge = LetterJudge(judge, "Is it good?", calls=Calls(max_tokens=4, retries=0))
        self.rewards = Rewards(style=0.5, length=0.01)

    def begin(self, index: int) -> list[Message]:
        return [{"role": "user", "content": f"task {index}"}]

    def answer(self, message: Message) -> Turn:
        text = text_of(message)
        found = self.judge.score("Write.", text)
        more = [] if len(self.messages) > 2 else [{"role": "user", "content": "more"}]
        return Turn(more, self.rewards(style=found.score, length=len(text)), not more, {"verdict": found.reasoning})


class JudgedTwice(ChatEnv):
    """One turn, which the policy judges as it is and as it was; info has the words of both."""

    def __init__(self) -> None:
        super().__init__()
        self.current, self.frozen = (LetterJudge(name, "Is it good?", calls=Calls(max_tokens=6))
                                     for name in ("policy", "frozen"))

    def begin(self, index: int) -> list[Message]:
        return [{"role": "user", "content": f"task {index}"}]

    def answer(self, message: Message) -> Turn:
        text = text_of(message)
        now, then = (judge.score("Write.", text) for judge in (self.current, self.frozen))
        return Turn(reward=now.score, terminated=True, info={"now": now.reasoning, "then": then.reasoning})


molt_gym.register("Judged-v0", Judged, max_episode_steps=4)
molt_gym.register("JudgedTwice-v0", JudgedTwice, max_episode_steps=1)


@register_agent("JudgedAgent-v0", max_turns=4)
async def judged_agent(ctx):
    """Asks the policy, and then a judge, which it makes itself."""
    messages = [{"role": "user", "content": f"task {ctx.index}"}]
    completion = await ctx.openai().chat.completions.create(model=ctx.model, messages=messages)
    judge = LetterJudge("policy", "Is it good?", calls=Calls(max_tokens=4))
    found = await judge.score_async(messages, completion.choices[0].message.content)
    return Rewards(style=1.0)(style=found.score)
