"""A taskset of verifiers that pays for every letter e."""

import verifiers.v1 as vf


class Letter(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Say it."""

    @vf.reward
    async def share(self, trace) -> float:
        """How much of the reply is the letter."""
        text = trace.branches[-1].messages[-1].content or ""
        return text.count("e") / max(1, len(text))


class Letters(vf.Taskset[Letter, vf.TasksetConfig]):
    """Twenty of them."""

    def load(self):
        """All the same."""
        return [Letter(vf.TaskData(prompt=f"Write e, number {index}.")) for index in range(20)]


__all__ = ["Letters"]
