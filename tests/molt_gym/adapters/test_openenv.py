"""OpenEnv, on servers of its own package that run in processes of their own."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import molt_gym
from molt_gym import EnvFailure, cli

pytest.importorskip("openenv")
SCRIPT = "molt_gym/adapters/openenv_server.py"


@pytest.fixture(scope="module")
def server(serve):
    """Room for many."""
    return serve(SCRIPT)


@pytest.fixture(scope="module")
def narrow(serve):
    """Room for one of each kind, and pings every second."""
    return serve(SCRIPT, "1", "1")


@pytest.fixture
def make():
    """`make(url, **kwargs)`; the envs are closed after the test."""
    made = []

    def make_one(url, **kwargs):
        made.append(molt_gym.make("openenv/Remote-v0", url=url, **kwargs))
        return made[-1]

    yield make_one
    for env in made:
        env.close()


def say(text="", *calls):
    called = [{"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
              for n, (name, arguments) in enumerate(calls)]
    return {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})


def last(step):
    return step[0]["messages"][-1]["content"]


def play(env, index, wrong):
    """Guesses wrong that often, then right; the rewards."""
    env.reset(options={"index": index})
    secret, rewards, over = index * 7 % 10, [], False
    for guess in [(secret + 1) % 10] * wrong + [secret]:
        if not over:
            _, reward, over, _, _ = env.step(say(str(guess)))
            rewards.append(reward)
    assert over
    return rewards


# What is played

def test_fifty_episodes_return_what_the_servers_own_rubric_gives(server, make):
    env = make(f"{server.url}/guess")
    for index in range(50):
        wrong = index % 6
        assert play(env, index, wrong) == pytest.approx([-0.1] * min(wrong, 5) + [1.0] * (wrong < 5))


def test_text_is_the_one_field_of_the_action_and_of_the_observation(server, make):
    env = make(f"{server.url}/guess", system="One digit.")
    observation, info = env.reset(options={"index": 3})
    assert observation == {"messages": [{"role": "system", "content": "One digit."},
                                        {"role": "user", "content": "Guess number 3."}], "tools": []}
    step = env.step(say("9" * 30))
    assert last(step) == f"Not {'9' * 20}." and step[1:4] == (-0.1, False, False) and info == {"task_index": 3}


def test_train_and_test_have_no_seed_in_common_and_more_arguments_reach_reset(server, make):
    assert last((make(f"{server.url}/guess", split="test").reset(options={"index": 3})[0],)) == (
        "Guess number 1000000003.")
    env = make(f"{server.url}/guess", reset={"bonus": 1})
    env.reset(options={"index": 3})
    assert env.step(say("8"))[1:3] == (1.0, True)


def test_an_action_of_several_fields_is_the_arguments_of_a_tool(server, make):
    env = make(f"{server.url}/walk")
    observation, _ = env.reset(options={"index": 3})
    assert last((observation,)) == "at: 0\ngoal: 4" and env.unwrapped.num_tasks == 4
    tool = observation["tools"][0]["function"]
    assert (tool["name"], tool["description"]) == ("Move", "One move on a line.")
    assert tool["parameters"]["required"] == ["direction"] and "metadata" not in tool["parameters"]["properties"]
    step = env.step(say("", ("Move", '{"direction": "right", "steps": 3}'), ("Move", '{"direction": "right"}')))
    assert step[1:3] == (1.0, True)


def test_tasks_are_those_that_the_server_lists_in_the_split(server, make):
    env = make(f"{server.url}/walk", split="test")
    assert env.unwrapped.num_tasks == 2 and last((env.reset(options={"index": 1})[0],)) == "at: 0\ngoal: -2"
    with pytest.raises(molt_gym.ConfigError, match="split: 'dev'; the server has 'train', 'test'"):
        make(f"{server.url}/walk", split="dev")
    with pytest.raises(molt_gym.ConfigError, match="split: 'dev'; the server lists no tasks, so write 'train' or"):
        make(f"{server.url}/guess", split="dev")


def test_a_refused_action_changes_nothing_and_the_third_in_a_row_ends_the_episode(server, make):
    env = make(f"{server.url}/walk")
    env.reset(options={"index": 0})
    step = env.step(say("", ("Move", '{"direction": "up"}'), ("Jump", "{}"), ("Move", "[")))
    assert step[1:3] == (0.0, False) and step[4]["illegal"]
    assert [message["content"] for message in step[0]["messages"][-3:]] == [
        "That is no legal action: direction: Input should be 'left' or 'right'.", "There is no tool 'Jump'; call Move.",
        "The arguments are no JSON object."]
    assert last(env.step(say("", ("Move", '{"direction": "left"}')))) == "at: -1\ngoal: 1"
    assert last(env.step(say("hm"))) == "Call Move." and not env.step(say("hm"))[2]
    assert env.step(say("hm"))[1:3] == (0.0, True)


def test_mcp_tools_are_listed_and_called_and_a_reply_without_a_call_is_the_last(server, make):
    env = make(f"{server.url}/sum")
    observation, _ = env.reset(options={"index": 5})
    assert last((observation,)) == "Make the total 5."
    assert [tool["function"]["name"] for tool in observation["tools"]] == ["add", "hand_in"]
    assert observation["tools"][0]["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}
    calls = [("add", '{"number": 3}'), ("add", '{"number": "x"}'), ("nope", "{}"), ("add", '{"number": 2}')]
    step = env.step(say("", *calls))
    told = [message["content"] for message in step[0]["messages"][-4:]]
    assert (told[0], told[3]) == ("The total is 3.", "The total is 5.") and told[1].startswith("Error: 1 validation")
    assert told[2] == "Error: Unknown tool: 'nope'" and step[1:3] == (0.0, False)
    assert env.step(say("", ("hand_in", "")))[1:3] == (1.0, True)
    env.reset(options={"index": 5})
    step = env.step(say("It is done."))
    assert step[1:3] == (0.0, True) and not step[4]["illegal"]


def test_users_functions_take_the_place_of_either_side(server, make):
    def move(text):
        if not text.strip("<>"):
            return {"direction": "left" if "<" in text else "right", "steps": len(text)}
        raise ValueError("write < or >, up to three")

    env = make(f"{server.url}/walk", action=move, describe=lambda seen: f"{seen['goal'] - seen['at']} to go")
    assert last((env.reset(options={"index": 3})[0],)) == "4 to go"
    assert last(env.step(say("?"))) == "That is no legal reply: write < or >, up to three."
    assert last(env.step(say(">>>"))) == "1 to go" and env.step(say(">"))[1:3] == (1.0, True)


# Many at a time

def test_concurrent_sessions_do_not_mix(server, make):
    def many(number):
        env = make([f"{server.url}/guess", f"{server.url}/guess/"])
        return [(sum(play(env, index, index % 3)), index % 3) for index in range(number, number + 40, 8)]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(many, range(8)):
            assert all(total == pytest.approx(1.0 - 0.1 * wrong) for total, wrong in found)


def test_servers_are_taken_in_turn_and_one_that_is_away_is_passed_over(server, narrow, make):
    urls = [f"{server.url}/guess", f"{narrow.url}/guess"]
    env = make(urls)
    seen = []
    for index in range(4):
        env.reset(options={"index": index})
        seen.append(env.unwrapped._session.url)
    assert sorted(seen) == sorted(urls * 2) and seen[0] != seen[1]
    env = make(["http://127.0.0.1:9/none", f"{server.url}/guess"], timeout=5)
    assert [sum(play(env, index, 0)) for index in range(4)] == [1.0] * 4


def test_a_server_without_a_free_session_is_asked_until_one_is_free(narrow, make):
    first, second = make(f"{narrow.url}/guess"), make(f"{narrow.url}/guess", timeout=2)
    first.reset(options={"index": 0})
    with pytest.raises(EnvFailure, match="capacity: .*: reset: .*1/1") as failure:
        second.reset(options={"index": 1})
    assert failure.value.reason == "capacity"
    patient = make(f"{narrow.url}/guess")
    timer = threading.Timer(0.5, first.close)
    timer.start()
    assert sum(play(patient, 2, 0)) == 1.0
    # An episode that is over has given its session back.
    assert sum(play(make(f"{narrow.url}/guess"), 3, 0)) == 1.0


# Trouble

def test_a_session_outlives_a_long_thought(narrow, make):
    env = make(f"{narrow.url}/guess")
    env.reset(options={"index": 1})
    time.sleep(3.0)
    assert env.step(say("7"))[1:3] == (1.0, True)


@pytest.mark.slow
def test_a_server_that_is_killed_fails_the_episode_and_serves_again_when_it_is_back(narrow, make):
    env = make(f"{narrow.url}/guess", timeout=5)
    env.reset(options={"index": 0})
    narrow.kill()
    with pytest.raises(EnvFailure) as failure:
        env.step(say("0"))
    assert failure.value.reason == "server_gone"
    with pytest.raises(EnvFailure, match="server_gone: .*Cannot connect"):
        env.reset(options={"index": 0})
    narrow.start()
    assert play(env, 4, 1) == [-0.1, 1.0]


def test_an_env_that_raises_or_hangs_is_a_failure_and_the_next_episode_is_played(server, make):
    env = make(f"{server.url}/walk", timeout=3)
    for note, reason in [("crash", "server_error"), ("sleep", "timeout")]:
        env.reset(options={"index": 0})
        with pytest.raises(EnvFailure) as failure:
            env.step(say("", ("Move", f'{{"direction": "left", "note": "{note}"}}')))
        assert failure.value.reason == reason
        with pytest.raises(Exception, match="no episode is running"):
            env.step(say("", ("Move", '{"direction": "right"}')))
    env.reset(options={"index": 0})
    assert env.step(say("", ("Move", '{"direction": "right"}')))[1:3] == (1.0, True)


def test_what_is_no_openenv_server_says_so(server, make):
    with pytest.raises(EnvFailure, match="server_gone: http://127.0.0.1:9/schema: .*Cannot connect"):
        make("http://127.0.0.1:9", timeout=0.3)
    with pytest.raises(EnvFailure, match="server_error: .*/schema has no schema of actions; is it an OpenEnv server?"):
        make(server.url)


def test_bad_arguments_are_named(server, make):
    url = f"{server.url}/walk"
    for kwargs, words in [({"url": "localhost:8000"}, "url: 'localhost:8000' is none; write that of a server"),
                          ({"url": []}, r"url: \[\]"), ({"url": 3}, "url: 3"), ({"timeout": 0}, "timeout: 0"),
                          ({"reset": 3}, "reset: 3"), ({"action": "talk"}, "action: 'talk'; write 'auto', 'text'"),
                          ({"action": "text"}, "action: 'text' needs .* direction, steps, note; write 'tool'"),
                          ({"action": 3}, "action: 3; write"),
                          ({"action": "no.such:thing"}, "action: 'no.such:thing'")]:
        with pytest.raises(molt_gym.ConfigError, match=words):
            make(**{"url": url} | kwargs)
    with pytest.raises(molt_gym.ConfigError, match="openenv/Remote-v0: url missing; write it as a keyword"):
        molt_gym.make("openenv/Remote-v0")


@pytest.mark.parametrize("path", ["guess", "walk", "sum"])
def test_it_keeps_to_what_training_relies_on(server, path, capsys):
    code = cli.main(["check-env", "openenv/Remote-v0", "--env-kwargs.url", f"{server.url}/{path}"])
    assert code == 0, capsys.readouterr().out
