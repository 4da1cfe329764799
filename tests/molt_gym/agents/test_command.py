import asyncio
import os
import resource
import secrets
import signal
import subprocess
import sys
import time

import pytest

from molt_gym import EnvFailure, PromptTooLong
from molt_gym.agents import CommandAgent, Result
from molt_gym.strays import end_all

SECRETS = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OPENAI_ORG_ID", "DATABASE_URL", "ANTHROPIC_AUTH_TOKEN")

ASK = """
import json, os, urllib.request, sys
def ask(text):
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def python(code, **kwargs):
    return CommandAgent([sys.executable, "-c", code], **kwargs)


def shell(line, **kwargs):
    return CommandAgent(["bash", "-c", line], **kwargs)


async def failure_of(play, agent, *args, **kwargs):
    with pytest.raises(EnvFailure) as caught:
        await play(agent, *args, **kwargs)
    return caught.value


async def test_a_program_talks_to_the_model_and_prints_its_result(play):
    code = ASK + 'print("log"); print(json.dumps({"reward": len(ask("hi")), "score": 0.5, "info": {"a": 1}}))'
    assert await play(python(code)) == Result(2.0, 0.5, {"a": 1})


async def test_a_script_with_curl_speaks_anthropics_wire(play):
    line = """
        curl -sf "$ANTHROPIC_BASE_URL/v1/messages" -H "x-api-key: $ANTHROPIC_API_KEY" \\
            -H 'Content-Type: application/json' -H 'anthropic-version: 2023-06-01' \\
            -d '{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}' | grep -c '"ok"'
    """
    assert await play(shell(line)) == Result(1.0)


@pytest.mark.parametrize(
    ("printed", "result"),
    [
        ("3", Result(3.0)),
        ("noise\n-1.5e0\n\n", Result(-1.5)),
        ("true", Result(1.0)),
        ('{"reward": 1, "truncated": true}', Result(1.0, truncated=True)),
        ('{"reward": 1, "score": null, "info": null, "truncated": null}', Result(1.0)),
        ('{"reward": 0, "info": {"text": "\u2028\x85"}}', Result(0.0, info={"text": "\u2028\x85"})),
    ],
)
async def test_the_last_line_is_the_result(play, printed, result):
    assert await play(CommandAgent(["printf", "%s", printed])) == result


@pytest.mark.parametrize(
    "printed", ["", "done", '"1"', "[1]", "null", "{}", '{"score": 1}', '{"reward": null}',
                '{"reward": 1, "rewards": 2}', "{" * 5000])
async def test_what_is_no_result_is_a_failure_of_the_agent(play, printed):
    failure = await failure_of(play, shell(f"echo >&2 complaint; printf '%s' '{printed}'"))
    assert failure.reason == "agent" and "the last line that it printed is" in failure.detail
    assert "complaint" in failure.detail and "Traceback" not in failure.detail


@pytest.mark.parametrize("printed", ["NaN", "1e999", '{"reward": "1"}', '{"reward": 1, "score": NaN}'])
async def test_a_reward_that_is_no_finite_number_is_a_failure(play, printed):
    assert (await failure_of(play, CommandAgent(["echo", printed]))).reason == "reward"


async def test_an_exit_code_is_a_failure_whatever_was_printed(play):
    failure = await failure_of(play, shell("echo 1; echo the reason >&2; exit 7"))
    assert failure.reason == "agent" and "exit code 7" in failure.detail and "the reason" in failure.detail
    assert "exit code -9" in (await failure_of(play, shell("echo 1; kill -9 $$"))).detail


async def test_a_program_that_is_not_there_is_a_failure(play):
    assert "cannot start 'no-such-program'" in (await failure_of(play, CommandAgent("no-such-program"))).detail


async def test_the_task_comes_in_a_variable_and_on_standard_input(play):
    task = {"text": "é\u2028\x00\ud800", "n": [1]}
    code = "import json, os, sys; a = sys.stdin.read(); print(json.dumps({'reward': 1, 'info': json.loads(a)}))"
    both = code.replace("print", "assert a == os.environ['MOLT_GYM_TASK']; print")
    assert (await play(python(both, tasks=[0, task]), index=1)).info == task
    large = "x" * 3_000_000
    assert (await play(python("print(len(input()))", tasks=[large]))).reward == len(large) + 2


async def test_a_task_that_is_no_json_is_a_failure(play):
    assert "the task {1, 2} is no JSON" in (await failure_of(play, CommandAgent("cat", tasks=[{1, 2}]))).detail


async def test_a_program_sees_no_variable_that_is_not_its_business(play, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("LANG", "C.UTF-8")
    code = "import json, os; print(json.dumps({'reward': 1, 'info': dict(os.environ)}))"
    seen = (await play(python(code, env={"MINE": 7, "TZ": "UTC"}))).info
    assert "canary" not in seen.values() and (seen["MINE"], seen["TZ"], seen["LANG"]) == ("7", "UTC", "C.UTF-8")
    assert seen["PATH"] == os.environ["PATH"] and seen["OPENAI_BASE_URL"].endswith("/v1")


async def test_a_program_inherits_no_file(play, tmp_path):
    line = "ls /proc/self/fd | wc -l"
    inherited = open(tmp_path / "open", "w")
    os.set_inheritable(inherited.fileno(), True)
    assert (await play(shell(line))).reward <= 5
    inherited.close()


async def test_it_runs_where_it_is_told(play, tmp_path):
    (tmp_path / "here").touch()
    assert (await play(shell("ls | wc -l", cwd=tmp_path))).reward == 1


async def test_odd_bytes_are_no_trouble(play):
    line = r"printf '\xf0\n\xe9\x00\x1b[0m\n'; printf '\xff' >&2; echo 2"
    assert (await play(shell(line))).reward == 2
    assert "�" in (await failure_of(play, shell(r"printf '\xf0'; printf 'x\xff' >&2"))).detail


async def test_huge_output_takes_little_memory(play):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = "head -c 300M /dev/zero | tr '\\0' a & head -c 300M /dev/zero >&2; wait; echo; echo 4"
    assert (await play(shell(line))).reward == 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def tagged(tag, name="environ"):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                found += [pid] if tag.encode() in file.read() else []
        except OSError:
            pass
    return found


TREE = "(setsid sleep 60 &) ; (trap '' TERM; sleep 60) & sleep 60 & echo ready >&2; "


@pytest.mark.parametrize("end", ["deadline", "cancel", "exit"])
async def test_nothing_that_a_program_started_outlives_its_run(start, end):
    tag = secrets.token_hex(8)
    agent = shell(TREE + ("echo 1; exit 0" if end == "exit" else "wait"), env={"CANARY": tag})
    run, session, _ = start(agent, timeout=1.0 if end == "deadline" else 30.0)
    begin = time.monotonic()
    if end == "cancel":
        while len(tagged(tag)) < 3:
            await asyncio.sleep(0.02)
        run.cancel()
    try:
        outcome = (await asyncio.wait_for(asyncio.wrap_future(run.future), 10)).reward
    except EnvFailure as failure:
        outcome = failure.reason
    assert outcome == {"deadline": "timeout", "cancel": "cancelled", "exit": 1.0}[end]
    assert await asyncio.to_thread(run.join, 5) and time.monotonic() - begin < 5
    assert tagged(tag) == []
    session.close()


SCRIPT = """
import os, sys, threading
import molt_gym
molt_gym.register("Tree-v0", "molt_gym:AgentEnv", kwargs={
    "agent": "molt_gym:CommandAgent", "command": ["bash", "-c", sys.argv[1]], "env": {"CANARY": sys.argv[2]}})
threading.Thread(target=molt_gym.make("Tree-v0").reset, daemon=True).start()
sys.stdin.read()
if sys.argv[3] != "0":
    os.kill(os.getpid(), int(sys.argv[3]))
"""


@pytest.mark.parametrize("number", [0, signal.SIGTERM, signal.SIGKILL])
def test_nothing_that_a_program_started_outlives_a_script_that_ends_or_is_killed(number):
    tag, bare = secrets.token_hex(8), f"60.{secrets.randbelow(10**9):09d}"
    command = [sys.executable, "-c", SCRIPT, f"{TREE} env -i sleep {bare} & wait", tag, str(int(number))]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as script:
        until(lambda: len(tagged(tag)) >= 4 and tagged(bare, "cmdline"))
        script.communicate(timeout=30)
    assert script.returncode == -number
    until(lambda: tagged(tag) + tagged(bare, "cmdline") == [])


NESTED = """
import os, subprocess, sys
from molt_gym.strays import marked
environment, _ = marked(dict(os.environ))
subprocess.run(["sleep", sys.argv[1]], env=environment, start_new_session=True)
"""


def test_what_a_program_that_is_ended_had_marked_itself_ends_too():
    tag, bare = secrets.token_hex(8), f"60.{secrets.randbelow(10**9):09d}"
    environment = {**os.environ, "MOLT_GYM_RUN": tag}
    with subprocess.Popen([sys.executable, "-c", NESTED, bare], env=environment, start_new_session=True) as script:
        until(lambda: len(tagged(bare, "cmdline")) == 2)
        end_all(f"MOLT_GYM_RUN={tag}")
        assert script.wait(10) == -signal.SIGKILL
    until(lambda: tagged(bare, "cmdline") == [])


async def test_a_program_that_used_up_the_context_is_cut_off(play):
    def full(call):
        raise PromptTooLong("9 tokens, and the context has 8")

    assert await play(python(ASK + "ask('hi')"), full) == Result(truncated=True)


async def test_programs_leave_no_file_open(play):
    await play(CommandAgent(["echo", "1"]))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await play(CommandAgent(["echo", "1"]))
        await failure_of(play, CommandAgent(["false"]))
        await failure_of(play, CommandAgent(["no-such-program"]))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_line_is_split_like_a_shells():
    assert CommandAgent("python 'my agent.py' --x=1").command == ["python", "my agent.py", "--x=1"]
    assert CommandAgent("a", tasks=[1, 2, 3]).num_tasks == 3 and CommandAgent("a").num_tasks is None
    with pytest.raises(ValueError, match="command: ''"):
        CommandAgent("")


def test_a_variable_without_a_value_is_refused():
    with pytest.raises(ValueError, match="env: 'B' is None; write its text"):
        CommandAgent("a", env={"A": 1, "B": None})


