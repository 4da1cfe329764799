"""The tasks of an index are the same for ever: runs that are resumed, caches and published numbers depend on it."""

import hashlib

import pytest

from molt_gym import ConfigError
from molt_gym.envs.code_exec.generator import FAMILIES as CODE_FAMILIES
from molt_gym.envs.code_exec.generator import Generator as CodeGenerator
from molt_gym.envs.tool_use.tasks import FAMILIES as TOOL_FAMILIES
from molt_gym.envs.tool_use.tasks import Generator as ToolGenerator


@pytest.mark.parametrize(
    ("generator", "index", "prompt", "right"),
    [
        (CodeGenerator(), 0, "Print 71 plus 56.", "71+56"),
        (CodeGenerator(), 13, "Print the sorted list of 39, 37, 81.", "sorted([39,37,81])"),
        (CodeGenerator(split="test"), 5, "Print the sorted list of 97, 32, 54.", "sorted([97,32,54])"),
        (CodeGenerator(difficulty=3), 6, 'Print "catdoorcake" reversed.', '"catdoorcake"[::-1]'),
        (ToolGenerator(), 0, "What is 87 times 94?", '{"expression": "87*94"}'),
        (ToolGenerator(split="test"), 4, 'What does "blue lamp" cost?', '{"item": "blue lamp", "column": "price"}'),
    ],
)
def test_known_tasks_stay_what_they_are(generator, index, prompt, right):
    task = generator.task(index)
    assert task.prompt == prompt
    assert right == (task.right if isinstance(task.right, str) else task.right[-1].arguments)


@pytest.mark.parametrize(
    ("generator", "families", "split", "difficulty", "digest"),
    [
        (CodeGenerator, None, "train", 1, "dc522271e0839751"),
        (CodeGenerator, None, "test", 1, "7a3a8f10c6a8e1d5"),
        (CodeGenerator, None, "train", 3, "67aab38e4139a687"),
        (CodeGenerator, None, "test", 9, "e264315c9c0eda1d"),
        (CodeGenerator, CODE_FAMILIES, "train", 1, "e9695c26a922836f"),
        (CodeGenerator, CODE_FAMILIES, "test", 1, "41fd6b1e2842df11"),
        (CodeGenerator, CODE_FAMILIES, "train", 3, "3fd98b675bcf8ded"),
        (CodeGenerator, CODE_FAMILIES, "test", 9, "152b06851641b903"),
        (ToolGenerator, None, "train", 1, "98830eafcebe1982"),
        (ToolGenerator, None, "test", 1, "6c4217e4badfb2b2"),
        (ToolGenerator, None, "train", 3, "fa040a87754ebb47"),
        (ToolGenerator, None, "test", 9, "a06f6050fed14746"),
        (ToolGenerator, TOOL_FAMILIES, "train", 1, "d71cb6fc0905b185"),
        (ToolGenerator, TOOL_FAMILIES, "test", 1, "8bed064fe85182d2"),
        (ToolGenerator, TOOL_FAMILIES, "train", 3, "57672ae60b981209"),
        (ToolGenerator, TOOL_FAMILIES, "test", 9, "32db57708401f658"),
    ],
)
def test_streams_of_prompts_stay_what_they_are(generator, families, split, difficulty, digest):
    tasks = generator(families and list(families), difficulty, split)
    prompts = "\n".join(tasks.task(index).prompt for index in [*range(200), 10**12])
    assert hashlib.sha256(prompts.encode()).hexdigest()[:16] == digest


def test_a_single_family_may_be_named_by_itself():
    assert CodeGenerator("add").task(3) == CodeGenerator(["add"]).task(3)
    with pytest.raises(ConfigError, match=r"families: \['adds'\]; choose from"):
        CodeGenerator("adds")
