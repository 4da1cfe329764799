"""NeMo Gym's two protocols, against a server that speaks them in a process of its own."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

import molt_gym
from molt_gym import EnvFailure
from molt_gym.adapters.nemo_gym_wire import conversation_of, filled
from molt_gym.conformance import check

pytest.importorskip("fastapi")
pytest.importorskip("itsdangerous")
ADD = {"type": "function", "name": "add", "description": "Adds.", "strict": True, "parameters": {
    "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}}
BREAK = {"type": "function", "name": "break_down", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server(serve):
    return serve("molt_gym/adapters/nemo_gym_server.py")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """One file for both protocols: 20 tasks."""
    path = tmp_path_factory.mktemp("rows") / "tasks.jsonl"
    path.write_text("".join(json.dumps(row(n)) + "\n" for n in range(20)))
    return str(path)


def row(n, **more):
    asked = {"input": [{"role": "developer", "content": "Use the tool."}, {"role": "user", "content": f"Add {n}."}],
             "tools": [ADD, BREAK], "parallel_tool_calls": False, "temperature": 0.5}
    return {"responses_create_params": asked, "initial": 3, "expected": 3 + n, "secret": n % 10,
            "agent_ref": {"type": "responses_api_agents", "name": "any"}} | more


@pytest.fixture
def make(server, rows):
    """`make(path, **kwargs)`; the envs are closed after the test."""
    made = []

    def make_one(path, **kwargs):
        settings = {"url": f"{server.url}/{path}", "dataset": rows, "dataset_split": "all"} | kwargs
        made.append(molt_gym.make("nemo_gym/Remote-v0", **settings))
        return made[-1]

    yield make_one
    for env in made:
        env.close()


def say(text="", *calls, **more):
    called = [{"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
              for n, (name, arguments) in enumerate(calls)]
    return {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {}) | more


def add(number):
    return "add", json.dumps({"number": number})


def tail(step, count):
    return [(message["role"], message["content"]) for message in step[0]["messages"][-count:]]


def still_open(server):
    with urllib.request.urlopen(f"{server.url}/open", timeout=10) as answer:
        return json.load(answer)


# The classic protocol

def test_fifty_episodes_of_the_classic_protocol_return_what_verify_gives(make):
    env = make("count")
    for episode in range(50):
        index, right = episode % 20, episode % 3 > 0
        env.reset(options={"index": index})
        env.step(say("First.", add(index)))
        step = env.step(say("", add(0 if right else 1), reasoning_content="Hm."))
        assert tail(step, 1) == [("tool", json.dumps({"count": 3 + index + (not right)}, separators=(",", ":")))]
        _, reward, over, _, info = env.step(say("Done."))
        assert (reward, over, info["reward/calls"]) == (float(right), True, 2)


def test_a_task_is_its_instructions_input_and_tools(make):
    observation, info = make("count").reset(options={"index": 7})
    assert [(message["role"], message["content"]) for message in observation["messages"]] == [
        ("developer", "Use the tool."), ("user", "Add 7.")]
    assert observation["tools"][0] == {"type": "function", "function": {
        "name": "add", "description": "Adds.", "parameters": ADD["parameters"]}} and info == {"task_index": 7}
    asked = {"instructions": "Be brief.", "input": "Hi", "tools": None, "temperature": 0.5}
    assert conversation_of(asked) == (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], [])


def test_what_a_table_filled_with_null_is_left_out():
    said = {"role": "user", "content": "Hi", "type": None}
    asked = {"input": [said], "tools": [BREAK | {"strict": None}], "user": None}
    assert filled(asked) == {"input": [{"role": "user", "content": "Hi"}], "tools": [BREAK]}


def test_earlier_turns_of_a_task_are_messages():
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Add 1."}]},
             {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"number": 1}'},
             {"type": "function_call_output", "call_id": "c", "output": "4"}]
    messages, _ = conversation_of({"input": items})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"number": 1}'}


def test_the_errors_of_tools_are_told_and_no_other_path_is_reached(make):
    env = make("count")
    env.reset(options={"index": 0})
    step = env.step(say("", ("add", "{}"), ("add", "["), ("verify", "{}"), ("../count/seed_session", "{}"), add(0)))
    assert [text for _, text in tail(step, 5)] == [
        '{"detail":"number: write an integer"}', '{"error": "Invalid tool call arguments: no JSON object"}',
        '{"error": "There is no tool \'verify\'"}', '{"error": "There is no tool \'../count/seed_session\'"}',
        '{"count":3}']
    assert env.step(say("So."))[1:3] == (1.0, True)


def test_the_last_of_the_turns_is_verified_with_its_results(make):
    env = make("count", turns=2)
    env.reset(options={"index": 2})
    assert not env.step(say("", add(1)))[2]
    assert env.step(say("", add(1)))[1:3] == (1.0, True)


def test_a_verdict_that_the_server_takes_back_is_a_failure(make, tmp_path):
    path = tmp_path / "masked.jsonl"
    path.write_text(json.dumps(row(1, masked=True)))
    env = make("count", dataset=str(path))
    env.reset()
    with pytest.raises(EnvFailure, match="judge: it sleeps"):
        env.step(say("Done."))


# The gymnasium protocol

def test_fifty_episodes_of_the_gymnasium_protocol_return_the_servers_rewards(server, make):
    env = make("guess")
    for episode in range(50):
        secret, wrong = episode % 10, episode % 5
        observation, _ = env.reset(options={"index": secret})
        assert observation["messages"][-1]["content"] == "A number below 10."
        rewards, over = [], False
        for text in ["x"] * wrong + [str(secret)]:
            if not over:
                step = env.step(say(text))
                rewards.append(step[1])
                over = step[2] or step[3]
        assert rewards == [-0.25] * min(wrong, 3) + [-1.0 if wrong == 4 else 1.0]
        assert step[2:4] == (wrong < 4, wrong == 4) and step[4]["tries"] == min(wrong + 1, 4)
    assert still_open(server)["guess"] == 0


def test_results_of_tools_and_what_is_observed_are_messages(make):
    env = make("guess")
    env.reset(options={"index": 5})
    assert tail(env.step(say("", add(1), add(2))), 2) == [("tool", "add helps little")] * 2
    assert tail(env.step(say("3")), 1) == [("user", "higher")]


def test_a_session_is_closed_with_its_env(server, make):
    env = make("guess")
    env.reset(options={"index": 5})
    assert still_open(server)["guess"] == 1
    env.close()
    assert still_open(server)["guess"] == 0


# Both

def test_concurrent_sessions_do_not_mix(make):
    def play(number):
        env = make("count" if number % 2 else "guess")
        for index in range(number, 20, 8):
            env.reset(options={"index": index})
            if number % 2:
                env.step(say("", add(index)))
            assert env.step(say(str(index % 10)))[1] == 1.0

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(play, range(8)))


@pytest.mark.slow
def test_a_server_that_is_killed_fails_the_episode_and_serves_again_when_it_is_back(server, make):
    env = make("guess", timeout=5)
    env.reset(options={"index": 3})
    server.kill()
    with pytest.raises(EnvFailure) as failure:
        env.step(say("3"))
    assert failure.value.reason == "server_gone"
    with pytest.raises(EnvFailure, match="server_gone: .*Cannot connect"):
        env.reset(options={"index": 3})
    server.start()
    env.reset(options={"index": 0})
    assert env.step(say("0"))[1] == 1.0


def test_a_server_that_hangs_has_no_room_or_refuses_a_row_is_a_failure_by_its_reason(make, tmp_path):
    env = make("count", timeout=3)
    for call, reason in [(("add", '{"number": 1, "seconds": 60}'), "timeout"), (("break_down", "{}"), "capacity")]:
        env.reset(options={"index": 0})
        with pytest.raises(EnvFailure) as failure:
            env.step(say("", call))
        assert failure.value.reason == reason
    path = tmp_path / "short.jsonl"
    path.write_text(json.dumps({"responses_create_params": {"input": "Hi"}}))
    with pytest.raises(EnvFailure, match="server_error: .*/count/seed_session: HTTP 500"):
        make("count", dataset=str(path)).reset()


def test_a_row_that_cannot_be_played_is_named_with_its_column(make, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"responses_create_params": {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": "https://example.com/a.png"}]}]}}))
    with pytest.raises(EnvFailure, match=r"task: .*bad.jsonl, row 0: responses_create_params: input\[0\].content\[0\]"):
        make("count", dataset=str(path)).reset()
    path.write_text('{"prompt": "Hi"}')
    with pytest.raises(molt_gym.ConfigError, match="has no column 'responses_create_params'; choose from prompt"):
        make("count", dataset=str(path))


def test_bad_arguments_are_named(server, make):
    for kwargs, words in [({"protocol": "new"}, "protocol: 'new'; write 'auto', 'classic' or 'gymnasium'"),
                          ({"url": server.url}, "protocol: .* does not say which it speaks"),
                          ({"turns": 0}, "turns: 0"), ({"url": "nowhere"}, "url: 'nowhere'"),
                          ({"timeout": True}, "timeout: True")]:
        with pytest.raises(molt_gym.ConfigError, match=words):
            make("count", **kwargs)


@pytest.mark.parametrize("path", ["count", "guess"])
def test_it_keeps_to_what_training_relies_on(server, rows, path):
    findings = check("nemo_gym/Remote-v0", url=f"{server.url}/{path}", dataset=rows)
    assert [finding for finding in findings if finding.problem] == []
