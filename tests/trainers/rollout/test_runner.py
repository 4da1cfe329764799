import asyncio
import json
import threading
import time
from concurrent import futures

import gymnasium as gym
import numpy as np
import pytest

from molt_gym import EnvFailure, Turn, as_policy
from molt_gym.spaces import AssistantMessageSpace, ConversationSpace
from molt_gym.tokens import Generation, Sampling, Trajectory
from molt_gym.trainers.rollout.gate import OpenGate
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import PolicySeat, TokenSeat
from molt_gym.trainers.rollout.table import Table
from molt_gym.trainers.rollout.ticket import Ticket

USER = {"role": "user", "content": "hi"}
TICKET = Ticket(index=3, group=5, rollout=2, seed=7, step=1)


def runner_of(make, policy=lambda observation: "yes", limits=None, **options):
    policy = as_policy(policy)
    return Runner("Test-v0", make, lambda ticket, attempt: PolicySeat(policy), limits or Limits(), **options)


async def play(make, ticket=TICKET, **options):
    return await asyncio.wait_for(runner_of(make, **options).play(ticket), 10)


@pytest.fixture
def token_runner(engine, renderer):
    """Makes runners on the tiny model with some replies of `max_tokens`."""

    def make_runner(make, max_tokens=8, max_context=256, **limits):
        gate, sampling = OpenGate(engine), Sampling(max_tokens=max_tokens)
        return Runner("Test-v0", make, lambda ticket, attempt: TokenSeat(
            renderer, "rerender", sampling, max_context, ticket, attempt, gate), Limits(**limits), live=gate.rollout)

    return make_runner


class Raw(gym.Env):
    """An env that returns from reset and step what it is told to, unchecked."""

    observation_space, action_space = ConversationSpace(), AssistantMessageSpace()
    first = ({"messages": [USER], "tools": []}, {})

    def __init__(self, reset=None, step=None):
        self.to_reset, self.to_step = reset or self.first, step

    def reset(self, *, seed=None, options=None):
        return self.to_reset

    def step(self, action):
        return self.to_step


# Rollouts that end

async def test_a_rollout_is_played_to_its_end_and_written_down(scripted):
    def answer(env, message):
        return Turn([USER] if len(env.messages) < 5 else [], reward=0.25, terminated=len(env.messages) >= 5,
                    info={"length": len(env.messages)})

    trajectory = await play(scripted(answer))
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant"] * 3
    assert trajectory.messages[0]["content"] == "What is 3?"
    assert (trajectory.env, trajectory.index, trajectory.group) == ("Test-v0", 3, 5)
    assert (trajectory.rollout, trajectory.step) == (2, 1)
    assert (trajectory.reward, trajectory.turns, trajectory.terminated, trajectory.truncated) == (0.75, 3, True, False)
    assert trajectory.info == {"length": 6, "task_index": 3} and trajectory.failure is None and trajectory.rows == []


class OneList(Raw):
    """Keeps one conversation, in which it goes on."""

    def __init__(self):
        self.messages = []

    def reset(self, *, seed=None, options=None):
        self.messages[:] = [{"role": "user", "content": f"task {seed}"}]
        return {"messages": self.messages, "tools": []}, {}

    def step(self, action):
        self.messages += [action, USER]
        return {"messages": self.messages, "tools": []}, 1.0, True, False, {}


async def test_what_was_written_down_stays_where_an_env_goes_on_with_the_same_list():
    runner = runner_of(OneList)
    played = [await asyncio.wait_for(runner.play(Ticket(index, index)), 10) for index in (1, 2)]
    assert [trajectory.messages[0]["content"] for trajectory in played] == ["task 1", "task 2"]
    assert [len(trajectory.messages) for trajectory in played] == [3, 3]


async def test_the_cap_on_turns_truncates(scripted):
    trajectory = await play(scripted(lambda env, message: Turn([USER], reward=1.0), max_turns=3))
    assert (trajectory.truncated, trajectory.terminated, trajectory.length_limited) == (True, False, False)
    assert (trajectory.turns, trajectory.reward) == (3, 3.0)


async def test_an_end_at_the_cap_on_turns_is_no_cut(scripted):
    trajectory = await play(scripted(lambda env, message: Turn(reward=1.0, terminated=True), max_turns=1))
    assert (trajectory.truncated, trajectory.terminated) == (False, True)


async def test_rollouts_of_a_group_open_alike_and_groups_differ(scripted):
    def begin(env, index):
        return [{"role": "user", "content": str(env.np_random.integers(10**9))}]

    def opening(group, rollout):
        return play(scripted(begin=begin), Ticket(3, group, rollout))

    played = await asyncio.gather(*(opening(group, rollout) for group in (0, 1) for rollout in (0, 1)))
    texts = [trajectory.messages[0]["content"] for trajectory in played]
    assert texts[0] == texts[1] != texts[2] == texts[3]


async def test_everyone_who_ends_is_reported_once(scripted):
    ended, live = [], []

    class Live:
        def __enter__(self):
            live.append(1)

        def __exit__(self, *_):
            live.append(-1)

    trajectory = await play(scripted(), done=ended.append, live=Live)
    assert ended == [trajectory] and live == [1, -1]


# With tokens

async def test_rows_hold_what_the_engine_saw_and_sampled(token_runner, scripted, tiny_model, expected):
    make = scripted(lambda env, message: Turn([USER], reward=1.0), max_turns=3)
    trajectory = await token_runner(make).play(TICKET)
    assert trajectory.turns == 3 and trajectory.failure is None
    for row in trajectory.rows:
        sampled = [position for position, bit in enumerate(row.mask) if bit]
        plain = expected(tiny_model, row.ids[:1], row.ids[1:])
        assert [row.logprobs[p] for p in sampled] == pytest.approx([plain[p - 1] for p in sampled], abs=1e-4)
        assert {row.versions[p] for p in sampled} == {0}
    assert sum(sum(row.mask) for row in trajectory.rows) >= 3


async def test_a_first_prompt_that_is_too_long_fails(token_runner, scripted):
    make = scripted(begin=lambda env, index: [{"role": "user", "content": "7 " * 300}])
    trajectory = await token_runner(make).play(TICKET)
    assert trajectory.failure.reason == "prompt_too_long" and "rollout.max_context" in trajectory.failure.message
    assert trajectory.reward is None


async def test_a_later_prompt_that_is_too_long_truncates_and_keeps_the_reward(token_runner, scripted):
    make = scripted(lambda env, message: Turn([{"role": "user", "content": "7 " * 300}], reward=0.5))
    trajectory = await token_runner(make).play(TICKET)
    assert trajectory.failure is None and trajectory.reward == 0.5 and trajectory.turns == 1
    assert (trajectory.truncated, trajectory.length_limited) == (True, True)
    assert len(trajectory.messages) == 3 and sum(trajectory.rows[0].mask) > 0


async def test_a_reply_that_is_cut_marks_the_rollout(token_runner, scripted):
    trajectory = await token_runner(scripted(), max_tokens=1).play(TICKET)
    assert trajectory.length_limited == (trajectory.rows[0].ids[-1] != 2)
    assert (trajectory.terminated, trajectory.reward) == (True, 1.0)


@pytest.mark.filterwarnings("ignore:chat template")
async def test_tool_calls_of_later_turns_have_ids_of_their_own(renderer, scripted):
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "5"}}\n</tool_call>'
    schema = {"type": "function", "function": {"name": "look", "parameters": {
        "type": "object", "properties": {"at": {"type": "string"}}}}}
    ids = renderer.render([{"role": "user", "content": call}])[3:-5]

    class Script:
        async def generate(self, request):
            return Generation(list(ids), [-1.0] * len(ids), [0] * len(ids), "stop")

    def answer(env, message):
        calls = message.get("tool_calls")
        return Turn([{"role": "tool", "tool_call_id": calls[0]["id"], "content": "seen"}])

    def make():
        env = scripted(answer, max_turns=2)()
        env.unwrapped.tools = [schema]
        return env

    seat = TokenSeat(renderer, "rerender", Sampling(), 1024, TICKET, 0, Script())
    trajectory = await Runner("Test-v0", make, lambda ticket, attempt: seat, Limits()).play(TICKET)
    calls = [message["tool_calls"][0] for message in trajectory.messages if message.get("tool_calls")]
    assert len(calls) == 2 and calls[0]["id"] != calls[1]["id"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"at": "5"}


# Rollouts that fail

def raises(error):
    def function(*_):
        raise error
    return function


@pytest.mark.parametrize(("options", "reason", "message"), [
    ({"begin": raises(KeyError("board"))}, "reset_error", "Test-v0: reset raised KeyError: 'board'"),
    ({"answer": raises(ZeroDivisionError("oh"))}, "step_error", "Test-v0: step raised ZeroDivisionError: oh"),
    ({"answer": raises(StopIteration("over"))}, "step_error", "StopIteration: over"),
    ({"answer": raises(SystemExit(2))}, "step_error", "SystemExit: 2"),
    ({"answer": raises(futures.CancelledError())}, "step_error", "CancelledError"),
    ({"begin": raises(asyncio.CancelledError())}, "reset_error", "CancelledError"),
    ({"answer": raises(TimeoutError("judge"))}, "step_error", "TimeoutError: judge"),
    ({"answer": raises(EnvFailure("sandbox", "it died"))}, "sandbox", "sandbox: it died"),
    ({"begin": lambda env, index: [{"role": "robot", "content": ""}]}, "reset_error", "'robot'"),
    ({"answer": lambda env, message: Turn(reward=float("nan"))}, "reward", "nan"),
    ({"answer": lambda env, message: Turn(reward="1")}, "reward", "'1'"),
    ({"answer": lambda env, message: Turn(reward=None)}, "reward", "None"),
    ({"answer": lambda env, message: "good"}, "step_error", "'good'"),
])
async def test_an_env_that_errs_fails_its_rollout_with_the_reason(scripted, options, reason, message):
    trajectory = await play(scripted(**options))
    assert trajectory.failure.reason == reason and message in trajectory.failure.message
    assert "Traceback" in trajectory.failure.traceback and trajectory.reward is None
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


@pytest.mark.parametrize(("reset", "step", "reason", "message"), [
    (({}, {}), None, "reset_error", "observation"),
    (None, ({"messages": [USER]}, 1.0, True, False, {}), "step_error", "observation"),
    (None, (None, 1.0, True, False, {}), "step_error", "observation"),
    (({"messages": [USER | {"x": object()}], "tools": []}, {}), None, "reset_error", "messages[0]"),
    (None, (Raw.first[0], 1.0, True, {}), "step_error", "unpack"),
    ("nothing", None, "reset_error", "unpack"),
    (None, (Raw.first[0], 1.0, True, False, None), "step_error", "None"),
    (None, (Raw.first[0], float("inf"), True, False, {}), "reward", "inf"),
    (None, (Raw.first[0], "1", True, False, {}), "reward", "'1' (str)"),
    (None, (Raw.first[0], 10**400, True, False, {}), "reward", "finite real number"),
])
async def test_an_env_that_returns_nonsense_fails_its_rollout(reset, step, reason, message):
    trajectory = await play(lambda: Raw(reset, step))
    assert trajectory.failure.reason == reason and message in trajectory.failure.message
    trajectory.to_json()


async def test_rewards_that_add_up_to_infinity_fail(scripted):
    trajectory = await play(scripted(lambda env, message: Turn([USER], reward=1.5e308), max_turns=2))
    assert trajectory.failure.reason == "reward" and trajectory.reward is None


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1), np.bool_(True)])
async def test_numbers_of_any_kind_are_rewards(reward):
    trajectory = await play(lambda: Raw(step=(Raw.first[0], reward, np.bool_(True), np.bool_(False), {})))
    assert type(trajectory.reward) is float and trajectory.reward == 1
    assert trajectory.terminated is True and trajectory.truncated is False


async def test_an_env_that_cannot_be_made_fails_its_rollouts():
    trajectory = await play(raises(FileNotFoundError("tasks.json")))
    assert trajectory.failure.reason == "reset_error" and "tasks.json" in trajectory.failure.message


async def test_infos_are_kept_where_json_can_hold_them(scripted):
    info = {"float": np.float32(0.5), "int": np.int64(3), "bool": np.bool_(True), "text": "x", 5: 1,
            "nan": float("nan"), "inf": np.float64("inf"), "huge": 10**400, "object": object(),
            "array": np.zeros(2), "none": None, "surrogate": "\ud800"}
    trajectory = await play(scripted(lambda env, message: Turn(terminated=True, info=info)))
    assert trajectory.info == {"float": 0.5, "int": 3, "bool": True, "text": "x", "5": 1, "surrogate": "\ud800",
                               "task_index": 3}
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


@pytest.mark.parametrize("own", [
    {"seat": 5}, {"seat": "12A", "player": "me"}, {"rewards": 2, "results": "good"}, {"seat": "n", "rewards": "many"}])
async def test_keys_of_games_mean_nothing_in_the_info_of_another_env(scripted, own):
    trajectory = await play(scripted(lambda env, message: Turn([USER], 1.0, len(env.messages) > 2, info=dict(own))))
    assert trajectory.failure is None and trajectory.reward == 2.0 and trajectory.seat == ""
    assert trajectory.info.items() >= own.items()


async def test_parts_that_are_no_numbers_in_every_turn_are_not_added_up(scripted):
    parts = iter([1.0, "none", 2.0, 3.0])
    trajectory = await play(scripted(lambda env, message: Turn(
        [USER], 1.0, len(env.messages) > 6, info={"reward/style": next(parts)})))
    assert trajectory.failure is None and trajectory.info["reward/style"] == 5.0


async def test_what_goes_wrong_anywhere_in_a_rollout_fails_that_alone(scripted, monkeypatch):
    monkeypatch.setattr(Table, "earn", raises(AssertionError("a bug")))
    trajectory = await play(scripted())
    assert (trajectory.failure.reason, trajectory.failure.message) == ("error", "AssertionError: a bug")


@pytest.mark.parametrize(("policy", "message"), [
    (raises(OSError("no route")), "OSError: no route"), (raises(TimeoutError("slow")), "TimeoutError: slow"),
    (raises(futures.CancelledError()), "CancelledError"), (raises(asyncio.CancelledError()), "CancelledError"),
    (lambda observation: 5, "5"), (lambda observation: {"role": "user", "content": "me"}, "user")])
async def test_a_policy_that_errs_fails_its_rollout(scripted, policy, message):
    trajectory = await play(scripted(), policy=policy)
    assert trajectory.failure.reason == "policy_error" and message in trajectory.failure.message


async def test_a_policy_that_returns_no_message_is_the_one_to_blame(scripted):
    class Silent:
        async def reply(self, messages, tools):
            return None

    trajectory = await play(scripted(), policy=Silent())
    assert trajectory.failure.reason == "policy_error"


# Retries

async def test_an_env_failure_is_tried_again_and_counted(scripted):
    tries = []

    def answer(env, message):
        tries.append(env.messages[0]["content"])
        if len(tries) < 3:
            raise EnvFailure("sandbox")
        return Turn(reward=1.0, terminated=True)

    runner = runner_of(scripted(answer), limits=Limits(retries=2))
    trajectory = await runner.play(TICKET)
    assert trajectory.failure is None and trajectory.reward == 1.0 and trajectory.turns == 1
    assert tries == ["What is 3?"] * 3 and runner.retried == {"sandbox": 2}


async def test_retries_come_to_an_end(scripted):
    tries = []

    def answer(env, message):
        tries.append(1)
        raise EnvFailure("judge")

    runner = runner_of(scripted(answer), limits=Limits(retries=2))
    assert (await runner.play(TICKET)).failure.reason == "judge"
    assert len(tries) == 3 and runner.retried == {"judge": 2}


async def test_a_bug_of_the_env_is_not_tried_again(scripted):
    tries = []

    def answer(env, message):
        tries.append(1)
        raise KeyError

    await play(scripted(answer), limits=Limits(retries=3))
    assert len(tries) == 1


async def test_an_attempt_samples_anew(token_runner, scripted):
    replies = []

    def answer(env, message):
        replies.append(message["content"])
        if len(replies) == 1:
            raise EnvFailure("sandbox")
        return Turn(terminated=True)

    trajectory = await token_runner(scripted(answer)).play(TICKET)
    assert trajectory.failure is None and replies[0] != replies[1] and trajectory.turns == 1


# Deadlines

@pytest.mark.parametrize(("where", "reason"), [("begin", "reset_timeout"), ("answer", "step_timeout")])
async def test_a_hung_env_fails_its_rollout_at_the_deadline(scripted, where, reason):
    release = threading.Event()
    make = scripted(**{where: lambda *_: release.wait(30)})
    started = time.monotonic()
    trajectory = await play(make, limits=Limits(reset_timeout=0.1, step_timeout=0.1))
    release.set()
    assert trajectory.failure.reason == reason and f"rollout.{reason}" in trajectory.failure.message
    assert time.monotonic() - started < 10


async def test_a_policy_that_does_not_answer_fails_its_rollout(scripted):
    async def silent(observation):
        await asyncio.sleep(30)

    trajectory = await play(scripted(), policy=silent, limits=Limits(generate_timeout=0.1))
    assert trajectory.failure.reason == "generate_timeout"
    assert "rollout.generate_timeout" in trajectory.failure.message


async def test_a_rollout_that_does_not_end_fails_at_its_deadline(scripted):
    make = scripted(lambda env, message: Turn([USER]), max_turns=10**9)
    trajectory = await play(make, limits=Limits(episode_timeout=0.3))
    assert trajectory.failure.reason == "episode_timeout" and "0.3 s" in trajectory.failure.message
    assert "rollout.episode_timeout" in trajectory.failure.message


async def test_a_reply_past_its_deadline_leaves_the_engine(make_engine, scripted, renderer):
    engine = make_engine(max_sequences=1, max_context=1024)
    gate = OpenGate(engine)
    sampling = Sampling(max_tokens=1000, temperature=0)
    runner = Runner("Test-v0", scripted(), lambda ticket, attempt: TokenSeat(
        renderer, "rerender", sampling, 1024, ticket, attempt, gate), Limits(generate_timeout=0.05))
    assert (await runner.play(TICKET)).failure.reason == "generate_timeout"
    await asyncio.sleep(0.1)
    busy = engine.busy_seconds
    await asyncio.sleep(0.1)
    assert engine.busy_seconds == busy


# Together

async def test_rollouts_that_fail_leave_the_others_alone_and_their_slots_free(scripted):
    release = threading.Event()
    faults = {0: raises(KeyError("reset")), 5: raises(ValueError("step")), 9: lambda *_: release.wait(60),
              14: lambda env, message: Turn(reward="much"), 20: raises(EnvFailure("judge", "busy"))}

    def begin(env, index):
        return faults[0]() if index == 0 else [USER]

    def answer(env, message):
        return faults[env.index](env, message) if env.index in faults else Turn(reward=1.0, terminated=True)

    runner = runner_of(scripted(answer, begin=begin), limits=Limits(step_timeout=0.3))
    for _ in range(2):
        started = time.monotonic()
        played = await asyncio.wait_for(asyncio.gather(*(runner.play(Ticket(i, i)) for i in range(32))), 10)
        assert time.monotonic() - started < 3
        failures = {trajectory.index: trajectory.failure.reason for trajectory in played if trajectory.failure}
        assert failures == {0: "reset_error", 5: "step_error", 9: "step_timeout", 14: "reward", 20: "judge"}
        assert [t.reward for t in played if t.failure is None] == [1.0] * 27
    release.set()
    runner.close()


async def test_cancelling_a_rollout_cancels_it(scripted):
    release = threading.Event()
    ended = []
    runner = runner_of(scripted(lambda *_: release.wait(30)), done=ended.append)
    task = asyncio.create_task(runner.play(TICKET))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 2)
    assert ended == []
    release.set()
