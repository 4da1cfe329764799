"""CodeExec-v0 as a policy and a user meet it; every program really runs."""

import json
import multiprocessing
import os
import subprocess
import threading
import time
import warnings

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

import molt_gym
from molt_gym.envs.code_exec import CodeExecEnv
from molt_gym.envs.code_exec.fences import program_in
from molt_gym.envs.code_exec.generator import Generator
from molt_gym.errors import ConfigError, EnvFailure

RIGHT = Generator().task(0).right


def say(content):
    return {"role": "assistant", "content": content}


def write(code):
    return say(f"```python\n{code}\n```")


@pytest.fixture
def env():
    with gym.make("CodeExec-v0", render_mode="ansi") as env:
        env.reset(seed=0, options={"index": 0})
        yield env


@pytest.fixture
def rows(tmp_path):
    """Makes an env of the given rows."""

    def make(*tasks, **kwargs):
        path = tmp_path / f"{time.monotonic_ns()}.jsonl"
        path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        return CodeExecEnv(dataset=str(path), dataset_split="all", **kwargs)

    return make


def feedback(env, action):
    observation, reward, terminated, truncated, info = env.step(action)
    assert env.observation_space.contains(observation)
    assert json.loads(json.dumps(observation))
    assert (reward, terminated) == (0.0, False)
    return observation["messages"][-1]["content"]


class TestEpisodes:
    def test_the_prompt_is_short(self, env):
        observation, _ = env.reset(options={"index": 0})
        system, user = observation["messages"]
        assert system == {"role": "system", "content": "Reply with only a ```python code block."}
        assert user["role"] == "user" and user["content"].startswith("Print ") and len(user["content"]) < 40

    def test_a_right_program_ends_the_episode_with_reward_one(self, env):
        _, reward, terminated, truncated, info = env.step(write(f"print({RIGHT})"))
        assert (reward, terminated, truncated, info["outcome"]) == (1.0, True, False, "passed")

    def test_a_wrong_program_is_told_its_output(self, env):
        assert feedback(env, write("print('no')\nprint(2)")) == "Output: no\n2\nWrong, try again."

    def test_a_program_without_output_is_told_so(self, env):
        assert feedback(env, write("17 + 25")) == "No output. Wrong, try again."

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            ("print(x)", "NameError: name 'x' is not defined"),
            ("print(1", "SyntaxError: '(' was never closed"),
            ("import sys; sys.exit(3)", "exit code 3"),
            ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
            ("x = bytearray(8 << 30)", "MemoryError"),
        ],
    )
    def test_a_failing_program_is_told_its_error(self, env, code, error):
        assert feedback(env, write(code)) == f"Error: {error}"

    def test_right_output_before_an_error_does_not_pass(self, env):
        assert feedback(env, write(f"print({RIGHT})\n1 / 0")).startswith("Error: ZeroDivision")

    def test_a_program_that_runs_too_long_has_no_reward(self):
        with CodeExecEnv(seconds=0.5) as env:
            env.reset(options={"index": 0})
            assert feedback(env, write("while True: pass")) == "Error: time limit of 0.5 s"

    def test_a_second_try_can_pass(self, env):
        feedback(env, write("print(0)"))
        assert env.step(write(f"print({RIGHT})"))[1:3] == (1.0, True)

    def test_three_turns_are_all(self, env):
        ends = [env.step(write("print(0)"))[2:4] for _ in range(3)]
        assert ends == [(False, False), (False, False), (False, True)]

    def test_space_at_the_ends_of_lines_does_not_count(self, rows):
        env = rows({"prompt": "p", "tests": [{"input": "", "output": "a\nb\n"}]})
        env.reset(options={"index": 0})
        assert env.step(write("print('a  \\nb\\t\\n\\n')"))[1] == 1.0
        env.reset(options={"index": 0})
        assert env.step(write("print(' a\\nb')"))[1] == 0.0

    def test_the_transcript_can_be_read(self, env):
        env.step(write("print(0)"))
        assert "[assistant]\n```python\nprint(0)\n```" in env.render() and "Wrong, try again." in env.render()


class TestReplies:
    @pytest.mark.parametrize(
        ("text", "program"),
        [
            ("```python\nprint(1)\n```", "print(1)"),
            ("Sure!\n```py\nprint(1)\n```\nDone.", "print(1)"),
            ("```\nprint(1)\n```", "print(1)"),
            ("  ```Python \n  if 1:\n      x\n  ```", "if 1:\n    x"),
            ("1. So:\n   ```python\n   print(1)\n\n   print(2)\n   ```", "print(1)\n\nprint(2)"),
            ("\t```python3.11\n\tprint(1)\n\t```", "print(1)"),
            ("    ```python\nprint(1)\n```", "print(1)"),
            ("~~~python\nprint(1)\n~~~", "print(1)"),
            ("````python\nprint(1)\n````", "print(1)"),
            ("````python\nprint(1)\n```", None),
            ("```f(x)``` is\n```python\nprint(1)\n```", "print(1)"),
            ("```python\nf\n```python\nprint(1)\n```", "print(1)"),
            ("```python\nx = \"\"\"\n```sh\nls\n```\n\"\"\"\n```", "x = \"\"\"\n```sh\nls\n```\n\"\"\""),
            ("```python\nx = \"\"\"\n    ```\n    ls\n    ```\"\"\"\n```",
             "x = \"\"\"\n    ```\n    ls\n    ```\"\"\""),
            ("```python\ndef f():\n    \"\"\"\n    ```\n    f()\n    ```\n    \"\"\"\n```",
             "def f():\n    \"\"\"\n    ```\n    f()\n    ```\n    \"\"\""),
            ("<think>\n```python\nprint(1)\n```\n</think>\nI cannot.", None),
            ("<think>\n```python\nprint(1)\n</think>\n```python\nprint(2)\n```", "print(2)"),
            ("```python\nprint(1)\n```\n<think>\n```python\nprint(2)\n```", "print(1)"),
            ("```python\nprint(1)\n```\nor\n```python\nprint(2)\n```", "print(2)"),
            ("```python\nprint(1)\n```\n```bash\nls\n```", "print(1)"),
            ("```python\nprint(1)\n```\n```python\nprint(2)", "print(1)"),
            ("```python\nprint('```')\n```", "print('```')"),
            ("```python\r\nprint(1)\r\n```", "print(1)\r"),
            ("```python\n```", ""),
            ("```python\nprint(1)", None),
            ("```python\nprint(1)```", None),
            ("```python print(1)\n```", ""),
            ("```python\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)"),
            ("```python\nprint(1)\n```\n```\n$ python main.py\n```\n```py\nprint(2)\n```", "print(2)"),
            ("```\nprint(1)\n```\n```\nprint(2)\n```", "print(2)"),
            ("```Python 3\nprint(1)\n```", "print(1)"),
            ("```python title=\"main.py\"\nprint(1)\n```", "print(1)"),
            ("```python:main.py\nprint(1)\n```", "print(1)"),
            ("```{.python .numberLines}\nprint(1)\n```", "print(1)"),
            ("- ```python\n  if 1:\n      x\n  ```", "if 1:\n    x"),
            ("1. ```py\n   print(1)\n   ```", "print(1)"),
            ("<answer>```python\nprint(1)\n```</answer>", "print(1)"),
            ("<answer>\n```python\nprint('<answer>')\n```\n</answer>", "print('<answer>')"),
            ("```python-repl\nx\n```", None),
            ("```pycon\nx\n```", None),
            ("```javascript\nx\n```", None),
            ("print(1)", None),
            ("```", None),
            ("", None),
        ],
    )
    def test_the_last_closed_block_counts(self, text, program):
        assert program_in(text) == program

    @pytest.mark.parametrize("piece", ["```python\n", "```\n", "~~~\n```\n", "    ```\n```p\n", "````\n```\n", "a\n"])
    def test_a_text_of_a_million_characters_takes_no_time(self, piece):
        begin = time.process_time()
        program_in(piece * (1_000_000 // len(piece)))
        program_in("~~~p\n" * 100_000 + "```\n" * 100_000)
        assert time.process_time() - begin < 10

    @pytest.mark.parametrize("message", [say("hello"), say("```python\nprint(1)"), say(None), {"role": "assistant"}])
    def test_no_block_is_told(self, env, message):
        assert feedback(env, message) == "No closed ```python code block."

    def test_reasoning_is_no_answer(self, env):
        code = f"```python\nprint({RIGHT})\n```"
        assert feedback(env, {"role": "assistant", "content": "", "reasoning_content": code}).startswith("No closed")

    def test_whatever_is_said_the_env_goes_on(self, env):
        env.action_space.seed(0)
        for _ in range(20):
            env.reset(options={"index": 0})
            observation, *_ = env.step(env.action_space.sample())
            assert env.observation_space.contains(observation)


class TestOddOutput:
    @pytest.mark.parametrize(
        ("code", "output"),
        [
            ("import os; os.write(1, b'\\xf0')", "\ufffd"),
            ("import os; os.write(1, b'clean\\n\\xe9\\nafter')", "clean\n\ufffd\nafter"),
            ("print('a\\0b')", "a\0b"),
            ("print('\\x1b[31mred')", "\x1b[31mred"),
            ("print('😀' * 3)", "😀😀😀"),
            ("import sys; sys.stdout.buffer.write('\\ud800'.encode('utf-8', 'surrogatepass'))", "\ufffd" * 3),
        ],
    )
    def test_it_is_in_the_observation_space_and_can_be_encoded(self, env, code, output):
        assert feedback(env, write(code)) == f"Output: {output}\nWrong, try again."

    def test_much_output_is_cut_and_the_cut_is_told(self, env):
        said = feedback(env, write("print('a' * 100_000_000)"))
        assert said == f"Output: {'a' * 150}\n[... 99999701 bytes cut ...]\n{'a' * 149}\nWrong, try again."

    def test_a_long_error_is_cut(self, env):
        said = feedback(env, write("raise ValueError('x' * 1000)"))
        assert len(said) < 400 and "cut" in said

    def test_a_long_output_that_is_expected_passes(self, rows):
        env = rows({"prompt": "p", "tests": [{"output": "7\n" * 50_000}]})
        env.reset(options={"index": 0})
        assert env.step(write("print('7\\n' * 50_000)"))[1] == 1.0


class TestSecrets:
    def test_nothing_of_the_host_is_told(self, env, monkeypatch, tmp_path):
        monkeypatch.setenv("OPENAI_API_KEY", "canary-key")
        (tmp_path / "secret").write_text("canary-file")
        program = f"""
import os, pathlib
for find in (lambda: dict(os.environ), lambda: pathlib.Path({str(tmp_path / "secret")!r}).read_text(),
             lambda: open("/proc/{os.getpid()}/environ").read(), lambda: os.listdir({str(tmp_path)!r})):
    try:
        print(find())
    except OSError as error:
        print("refused")
"""
        said = feedback(env, write(program))
        assert "canary" not in said and "OPENAI" not in said and said.count("refused") == 3


class TestGymnasium:
    def test_the_checker_has_no_complaint(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(gym.make("CodeExec-v0", render_mode="ansi").unwrapped)

    def test_it_can_be_made_by_the_names_of_the_readme(self):
        for env_id in ("CodeExec-v0", "molt_gym:CodeExec-v0"):
            env = molt_gym.make(env_id, families=["add"], split="test")
            assert " plus " in env.reset(seed=1)[0]["messages"][-1]["content"]
            again = gym.make(type(env.spec).from_json(env.spec.to_json()))
            assert again.reset(seed=1)[0] == env.reset(seed=1)[0]

    def test_a_seed_fixes_the_task(self):
        env = CodeExecEnv()
        first, again, other = (env.reset(seed=seed) for seed in (5, 5, 6))
        assert first == again and first != other

    def test_many_envs_step_at_once(self):
        envs = gym.make_vec("CodeExec-v0", num_envs=4)
        envs.reset(seed=0)
        _, rewards, *_ = envs.step([write("print(0)")] * 4)
        assert list(rewards) == [0.0] * 4
        envs.close()

    def test_closing_ends_what_runs(self):
        env = CodeExecEnv(seconds=30)
        env.reset(options={"index": 0})
        failures = []

        def step():
            try:
                env.step(write("import time\ntime.sleep(30)"))
            except EnvFailure as failure:
                failures.append(failure.reason)

        thread = threading.Thread(target=step)
        begin = time.monotonic()
        thread.start()
        while failures == [] and thread.is_alive() and time.monotonic() - begin < 5:
            time.sleep(0.1)
            env.close()
        thread.join(5)
        assert failures == ["sandbox"] and time.monotonic() - begin < 5


class TestSettings:
    def test_the_lesser_sandbox_must_be_asked_for(self):
        with CodeExecEnv(sandbox="subprocess") as env:
            env.reset(options={"index": 0})
            assert feedback(env, write("import os; print(os.path.exists('/etc/passwd'))")).startswith("Output: True")

    def test_without_bubblewrap_it_refuses_and_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
            gym.make("CodeExec-v0")

    def test_a_sandbox_that_stops_working_is_no_reward(self, env, monkeypatch):
        def fail(*args, **kwargs):
            raise BlockingIOError("no more processes")

        monkeypatch.setattr(subprocess, "Popen", fail)
        with pytest.raises(EnvFailure, match="sandbox: cannot start a program: no more processes"):
            env.step(write("print('not run before')"))

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"families": ["plus"]}, r"families: \['plus'\]; choose from add, subtract"),
            ({"families": []}, "families: none"),
            ({"difficulty": 0}, "difficulty: 0; write an integer from 1"),
            ({"split": "dev"}, "split: 'dev'; write one of 'train', 'test'"),
            ({"sandbox": "docker"}, "sandbox: 'docker'; write one of"),
            ({"seconds": 0}, "seconds: 0; write a positive number"),
            ({"seconds": 1e12}, "seconds: 1000000000000.0; write a positive number below"),
            ({"memory_mb": 10**15}, "memory_mb: 1000000000000000; write a positive integer below"),
            ({"shown_tests": 2}, "shown_tests: this is for a dataset"),
            ({"shown_tests": -1}, "shown_tests: -1; write an integer from 0 on"),
            ({"dataset": "x.jsonl", "families": ["add"]}, "leave out families or dataset"),
            ({"dataset": "x.jsonl", "split": "dev"}, "split: 'dev'"),
        ],
    )
    def test_settings_that_make_no_sense_are_refused(self, kwargs, message):
        with pytest.raises(ConfigError, match=message):
            CodeExecEnv(**kwargs)

    def test_the_system_message_can_be_left_out(self):
        assert [m["role"] for m in CodeExecEnv(system=None).reset(seed=0)[0]["messages"]] == ["user"]


class TestReuse:
    @pytest.fixture
    def runs(self, monkeypatch):
        """Grows by one at each start of a program."""
        runs, start = [], subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: runs.append(1) or start(*args, **kwargs))
        return runs

    def play(self, env, code, times=3):
        for _ in range(times):
            env.reset(options={"index": 0})
            env.step(write(code))

    def test_equal_programs_run_once(self, runs):
        self.play(CodeExecEnv(), f"print({time.monotonic_ns()})")
        assert len(runs) == 1

    def test_it_can_be_turned_off(self, runs):
        self.play(CodeExecEnv(reuse=False), f"print({time.monotonic_ns()})")
        assert len(runs) == 3

    def test_other_limits_are_another_run(self, runs):
        code = f"print({time.monotonic_ns()})"
        for seconds in (1, 2):
            self.play(CodeExecEnv(seconds=seconds), code)
        assert len(runs) == 2

    @pytest.mark.parametrize("code", ["import random\nprint(random.random())", "print(id(0))", "print(__file__)"])
    def test_programs_that_may_vary_run_each_time(self, code, runs):
        self.play(CodeExecEnv(), code)
        assert len(runs) == 3

    def test_a_long_output_is_not_kept(self, runs):
        self.play(CodeExecEnv(output_chars=20_000), f"print('{time.monotonic_ns()}' * 1000)", times=2)
        assert len(runs) == 2

    def test_a_child_does_not_wait_for_threads_that_it_does_not_have(self, runs):
        code = f"print({time.monotonic_ns()})\nwhile True: pass"
        thread = threading.Thread(target=self.play, args=(CodeExecEnv(), code, 1))
        thread.start()
        while not runs:
            time.sleep(0.01)
        child = multiprocessing.get_context("fork").Process(target=self.play, args=(CodeExecEnv(), code, 1))
        child.start()
        child.join(40)
        thread.join(40)
        assert child.exitcode == 0

    def test_a_time_limit_is_not_kept(self, runs):
        self.play(CodeExecEnv(seconds=0.3), "while True: pass", times=2)
        assert len(runs) == 2

    def test_equal_programs_at_the_same_time_share_one_run(self, runs):
        code = f"print({time.monotonic_ns()})"
        threads = [threading.Thread(target=self.play, args=(CodeExecEnv(), code, 1)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(runs) == 1
