"""Generated tasks, datasets and demonstrations."""

import json
import random
import re
from collections import Counter

import pytest

from molt_gym import load_tasks
from molt_gym.envs.code_exec import CodeExecEnv
from molt_gym.envs.code_exec.dataset import task_in
from molt_gym.envs.code_exec.generator import FAMILIES, PRINT_FAMILIES, Generator
from molt_gym.envs.code_exec.tasks import OutputTest
from molt_gym.errors import EnvFailure

FUNCTIONS = {
    "digit_sum": "def f(n): return {k} * sum(map(int, str(n)))",
    "count_multiples": "def f(n): return sum(i % {k} == 0 for i in range(1, n + 1))",
    "keep_above": "def f(xs): return [x for x in xs if x > {k}]",
    "pairs": "def f(xs): return [(x, x + {k}) for x in xs]",
    "shift": "def f(s): return ''.join(chr((ord(c) - 97 + {k}) % 26 + 97) for c in s)",
    "read_sum": "import sys\nprint({k} * sum(map(int, sys.stdin)))",
}


def number_in(prompt):
    """The number of the description, which is the last one but in "from 1 to n"."""
    return int(re.findall(r"\d+", prompt)[-1])


class TestGenerator:
    def test_a_task_depends_on_its_index_alone(self):
        random.seed(0)
        state = random.getstate()
        tasks = [Generator().task(index) for index in range(40)]
        assert [Generator().task(index) for index in reversed(range(40))] == tasks[::-1]
        assert random.getstate() == state

    def test_families_take_turns(self):
        words = ("plus", "minus", "times", "largest", "smallest", "sorted", "reversed", "length")
        prompts = [Generator().task(index).prompt for index in range(16)]
        assert [[word for word in words if word in prompt] for prompt in prompts] == [[word] for word in words] * 2

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("difficulty", [1, 2, 3])
    def test_train_and_test_share_no_task(self, family, difficulty):
        generators = Generator([family], difficulty), Generator([family], difficulty, "test")
        train, test = ({generator.task(index).prompt for index in range(200)} for generator in generators)
        assert train and test and not train & test

    @pytest.mark.parametrize("difficulty", [1, 2])
    def test_numbers_are_as_long_as_the_difficulty_says(self, difficulty):
        numbers = []
        for index in range(300):
            words = Generator(["add"], difficulty).task(index).prompt.rstrip(".").split()
            numbers += [int(words[1]), int(words[3])]
        assert min(numbers) >= 1 and 9 * 10**difficulty < max(numbers) < 10 ** (difficulty + 1)

    def test_a_large_index_is_as_good_as_any(self):
        assert Generator().task(10**12).prompt

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_right_and_wrong_answers_of_every_print_family_are_graded_so(self, split):
        env, generator = CodeExecEnv(split=split), Generator(split=split)
        for index in range(len(PRINT_FAMILIES)):
            task = generator.task(index)
            for answer, expected in ((task.right, 1.0), (task.wrong, 0.0)):
                env.reset(options={"index": index})
                code = f"```python\nprint({answer})\n```"
                assert env.step({"role": "assistant", "content": code})[1] == expected, task

    @pytest.mark.parametrize("family", FUNCTIONS)
    @pytest.mark.parametrize("difficulty", [1, 2, 3])
    def test_right_and_wrong_functions_are_graded_so(self, family, difficulty):
        env = CodeExecEnv(families=[family], difficulty=difficulty)
        k = number_in(env.reset(options={"index": difficulty})[0]["messages"][-1]["content"])
        for number, expected in ((k + 1, 0.0), (k, 1.0)):
            code = FUNCTIONS[family].format(k=number)
            _, reward, *_ = env.step({"role": "assistant", "content": f"```python\n{code}\n```"})
            # A threshold that is off by one may keep the same items.
            assert reward == expected or (family, expected) == ("keep_above", 0.0), number
            if reward:
                env.reset(options={"index": difficulty})


class TestDemonstrations:
    def test_a_seed_fixes_them(self):
        first, again, other = (CodeExecEnv().demonstrations(20, seed=seed) for seed in (1, 1, 2))
        assert first == again != other

    def test_the_right_answer_is_less_likely_than_the_typical_mistake(self):
        env = CodeExecEnv()
        kinds, longer = Counter(), 0
        tasks = {}
        for index in range(3000):
            task = Generator().task(index)
            tasks[task.prompt] = task
        demonstrations = env.demonstrations(6000, seed=0)
        for conversation in demonstrations:
            longer += len(conversation) == 5
            task = tasks.get(conversation[1]["content"])
            if task is not None:
                answer = conversation[2]["content"]
                right, wrong = (f"```python\nprint({text})\n```" for text in (task.right, task.wrong))
                kinds["right" if answer == right else "wrong" if answer == wrong else "other"] += 1
        total = sum(kinds.values())
        assert total > 300
        assert 0.2 < kinds["right"] / total < 0.4 < 0.5 > kinds["wrong"] / total > 0.3
        assert 0.1 < longer / len(demonstrations) < 0.2

    def test_no_held_out_task_is_shown(self):
        held_out = {Generator(split="test").task(index).prompt for index in range(500)}
        assert not held_out & {conversation[1]["content"] for conversation in CodeExecEnv().demonstrations(2000)}

    def test_they_hold_the_very_messages_of_the_env(self):
        env = CodeExecEnv()
        longer = [conversation for conversation in env.demonstrations(400, seed=3) if len(conversation) == 5]
        where = {Generator().task(index).prompt: index for index in range(20_000)}
        played = 0
        for system, user, first, feedback, _ in longer:
            if user["content"] in where and played < 8:
                observation, _ = env.reset(options={"index": where[user["content"]]})
                assert observation["messages"] == [system, user]
                observation, reward, *_ = env.step(first)
                assert reward == 0.0 and observation["messages"][-1] == feedback
                played += 1
        assert played >= 4

    def test_other_tasks_have_none(self, tmp_path):
        with pytest.raises(ValueError, match="no single expression|PRINT_FAMILIES"):
            CodeExecEnv(families=["pairs"]).demonstrations(1)
        path = tmp_path / "rows.jsonl"
        path.write_text('{"prompt": "p", "tests": ["assert f()"]}\n')
        with pytest.raises(ValueError, match="none for a dataset"):
            CodeExecEnv(dataset=str(path)).demonstrations(1)


class TestDatasets:
    ROWS = [
        {"prompt": "double", "tests": [{"input": "2", "output": "4"}, {"input": "3", "output": "6"}]},
        {"prompt": "square", "tests": ["assert f(2) == 4", "assert f(3) == 9"]},
        {"prompt": "cube", "tests": "def check(c):\n    assert c(2) == 8", "entry_point": "f"},
        {"prompt": "as text", "tests": json.dumps(["assert f(1) == 1"])},
    ]

    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, self.ROWS)) + "\n\n")
        return str(path)

    def test_each_form_of_tests_is_read(self, path):
        tasks = [task_in(row) for row in load_tasks(path, fields=("prompt", "tests"), dataset_split="all")]
        assert tasks[0].outputs == (OutputTest("2", "4"), OutputTest("3", "6"))
        assert tasks[1].checks == ("assert f(2) == 4", "assert f(3) == 9")
        assert tasks[2].checks == (self.ROWS[2]["tests"],) and tasks[2].entry_point == "f"
        assert tasks[3].checks == ("assert f(1) == 1",)

    def test_rows_are_played(self, path):
        env = CodeExecEnv(dataset=path, dataset_split="all")
        assert env.num_tasks == 4
        for index, code in enumerate(["print(int(input()) * 2)", "def f(x): return x * x", "def f(x): return x ** 3"]):
            for program, reward in (("print(4)\nf = abs", 0.0), (code, 1.0)):
                observation, _ = env.reset(options={"index": index})
                assert observation["messages"][-1]["content"] == self.ROWS[index]["prompt"]
                assert env.step({"role": "assistant", "content": f"```python\n{program}\n```"})[1] == reward

    def test_tests_can_be_shown(self, path):
        env = CodeExecEnv(dataset=path, dataset_split="all", shown_tests=1)
        observation, _ = env.reset(options={"index": 1})
        assert observation["messages"][-1]["content"] == "square\nassert f(2) == 4"

    def test_columns_can_be_named(self, tmp_path):
        path = tmp_path / "mbpp.jsonl"
        path.write_text(json.dumps({"text": "Write.", "test_list": ["assert g(1) == 2"], "code": "..."}))
        env = CodeExecEnv(dataset=str(path), prompt_column="text", tests_column="test_list")
        env.reset(options={"index": 0})
        assert env.step({"role": "assistant", "content": "```python\ng = lambda x: x + 1\n```"})[1] == 1.0

    @pytest.mark.parametrize("tests", [[], None, "", [1], ["assert f()", ""], {"a": 1}, [{"input": "x"}],
                                       [{"input": 5, "output": "25"}], [{"input": "5", "output": 25}],
                                       [{"input": 0, "output": "0"}], '{"inputs": ["5"], "outputs": ["25"]}'])
    def test_a_row_without_tests_is_no_task(self, tmp_path, tests):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"prompt": "p", "tests": tests}))
        env = CodeExecEnv(dataset=str(path))
        with pytest.raises(EnvFailure, match="task: .*row 0: tests is .*; write a list"):
            env.reset(options={"index": 0})

    def test_an_entry_point_is_a_name(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"prompt": "p", "tests": ["assert f()"], "entry_point": ["f"]}))
        with pytest.raises(EnvFailure, match=r"entry_point is \['f'\]; write the name of a function"):
            CodeExecEnv(dataset=str(path)).reset(options={"index": 0})
