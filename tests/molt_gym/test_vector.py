import gc
import pickle
import threading
import time
import warnings
import weakref

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import molt_gym
from molt_gym.vector import ChatVectorEnv, VectorEnvFailure


@pytest.fixture
def make_vec(echo):
    """Makes and in the end closes vector envs of Echo-v0."""
    made = []

    def make(num_envs=3, **kwargs):
        made.append(gym.make_vec(echo, num_envs=num_envs, **kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture
def says(say):
    return lambda *texts: tuple(map(say, texts))


def last_words(observations):
    return [observation["messages"][-1]["content"] for observation in observations]


def test_make_vec_gives_a_chat_vector_env_without_a_warning(make_vec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make_vec()
    assert isinstance(env, ChatVectorEnv)
    assert env.num_envs == 3 and env.spec.id == "Echo-v0"
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert env.single_observation_space == molt_gym.Conversation()
    assert env.single_action_space == molt_gym.AssistantMessage()


def test_batches_are_tuples_in_the_batched_spaces(make_vec):
    env = make_vec()
    observations, infos = env.reset(seed=0)
    assert isinstance(observations, tuple) and observations in env.observation_space
    env.action_space.seed(0)
    actions = env.action_space.sample()
    assert len({str(action) for action in actions}) > 1
    observations, rewards, terminated, truncated, infos = env.step(actions)
    assert observations in env.observation_space
    assert rewards.dtype == np.float64 and terminated.dtype == truncated.dtype == np.bool_
    assert rewards.shape == terminated.shape == truncated.shape == infos["task_index"].shape == (3,)


def test_it_plays_the_same_episodes_as_gymnasiums_own_vector_env(make_vec, says):
    ours, theirs = make_vec(), make_vec(vectorization_mode="sync")
    assert isinstance(theirs, SyncVectorEnv)
    pairs = [(ours.reset(seed=5), theirs.reset(seed=5))]
    for words in (("a", "bb", "stop"), ("a", "bb", "c"), ("", "", ""), ("x", "stop", "stop"), ("y", "y", "y")):
        pairs.append((ours.step(says(*words)), theirs.step(says(*words))))
    for mine, gymnasiums in pairs:
        np.testing.assert_equal(mine, gymnasiums)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_does_as_gymnasiums_own_vector_env(make_vec, says, mode):
    ours = make_vec(autoreset_mode=mode)
    theirs = make_vec(vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    assert ours.metadata["autoreset_mode"] is mode
    np.testing.assert_equal(ours.reset(seed=1), theirs.reset(seed=1))
    for words in (("a", "stop", "b"), ("c", "c", "c"), ("d", "d", "stop"), ("e", "e", "e")):
        mine, gymnasiums = ours.step(says(*words)), theirs.step(says(*words))
        np.testing.assert_equal(mine, gymnasiums)
        over = mine[2] | mine[3]
        if mode is AutoresetMode.DISABLED and over.any():
            np.testing.assert_equal(
                ours.reset(options={"reset_mask": over}), theirs.reset(options={"reset_mask": over.copy()})
            )


def test_with_same_step_the_end_is_kept_in_the_infos(make_vec, says):
    env = make_vec(2, autoreset_mode="SameStep")
    env.reset(seed=0)
    observations, rewards, terminated, _, infos = env.step(says("stop", "on"))
    assert terminated.tolist() == [True, False] and rewards.tolist() == [4.0, 2.0]
    assert infos["final_obs"][0]["messages"][-1]["content"] == "heard stop" and infos["final_obs"][1] is None
    assert infos["final_info"]["said"][0] == "stop" and infos["_final_info"].tolist() == [True, False]
    assert [len(observation["messages"]) for observation in observations] == [1, 3]


def test_with_next_step_the_action_of_an_env_that_is_over_is_ignored(make_vec, say):
    env = make_vec(2)
    env.reset(seed=0)
    env.step([say("stop"), say("on")])
    observations, rewards, terminated, _, _ = env.step([None, say("on")])
    assert [len(observation["messages"]) for observation in observations] == [1, 5]
    assert rewards.tolist() == [0.0, 2.0] and not terminated.any()


def test_when_disabled_an_env_that_is_over_has_to_be_reset(make_vec, says):
    env = make_vec(2, autoreset_mode=AutoresetMode.DISABLED)
    env.reset(seed=0)
    env.step(says("stop", "on"))
    with pytest.raises(ResetNeeded, match=r"envs \[0\] have no episode running"):
        env.step(says("on", "on"))
    options = {"reset_mask": np.array([True, False]), "index": 4}
    observations, infos = env.reset(options=options)
    assert "reset_mask" in options
    assert [len(observation["messages"]) for observation in observations] == [1, 3]
    assert infos["task_index"].tolist() == [4, 0] and infos["_task_index"].tolist() == [True, False]
    assert last_words(env.step(says("on", "on"))[0]) == ["heard on", "heard on"]


def test_the_spec_of_a_vector_env_survives_json(make_vec):
    env = make_vec(2, autoreset_mode="SameStep", prefix="sent")
    again = gym.make_vec(EnvSpec.from_json(env.spec.to_json()))
    np.testing.assert_equal(again.reset(seed=2), env.reset(seed=2))
    assert isinstance(again, ChatVectorEnv) and again.autoreset_mode is AutoresetMode.SAME_STEP
    again.close()


def test_the_cap_on_turns_holds_and_can_be_set(make_vec, says):
    for cap, kwargs in ((3, {}), (2, {"max_episode_steps": 2})):
        env = make_vec(2, **kwargs)
        env.reset(seed=0)
        truncated = [env.step(says("on", "on"))[3].all() for _ in range(cap)]
        assert truncated == [False] * (cap - 1) + [True]


def test_arguments_reach_the_envs(make_vec):
    env = make_vec(2, prefix="given", render_mode="ansi")
    env.reset(seed=0)
    assert env.render_mode == "ansi"
    assert all(text.startswith("[user]\ngiven ") for text in env.render())


def test_seeds_and_tasks_can_be_given_for_each_env(make_vec, echo):
    env = make_vec(3)
    observations, infos = env.reset(seed=[3, 4, 5], options={"index": [7, 8, 7]})
    assert infos["task_index"].tolist() == [7, 8, 7]
    single = gym.make(echo)
    for seed, index, observation in zip([3, 4, 5], [7, 8, 7], observations, strict=True):
        assert single.reset(seed=seed, options={"index": index})[0] == observation
    assert env.reset(options={"index": 9})[1]["task_index"].tolist() == [9, 9, 9]
    for bad in ({"seed": [1]}, {"options": {"index": [1, 2]}}):
        with pytest.raises(ValueError, match="for 3 envs; write one for each"):
            env.reset(**bad)


def test_steps_of_envs_overlap(make_vec, says):
    env = make_vec(6)
    env.reset(seed=0)
    started = time.monotonic()
    env.step(says(*["sleep:0.5"] * 6))
    assert time.monotonic() - started < 1.5


def test_each_env_stays_in_its_own_thread(make_vec, says):
    env = make_vec(2)
    env.reset(seed=0)
    seen = [env.step(says("thread", "thread"))[4]["thread"].tolist() for _ in range(2)]
    assert seen == [["Echo-v0[0]", "Echo-v0[1]"]] * 2


class Jealous(molt_gym.ChatEnv):
    """Wants a process of its own."""

    own_process = True

    def begin(self, index):
        return [{"role": "user", "content": "hi"}]

    def answer(self, message):
        return molt_gym.Turn(info={"thread": threading.get_ident()})


def test_envs_that_want_processes_of_their_own_play_one_after_the_other(says):
    molt_gym.register("Jealous-v0", Jealous)
    env = gym.make_vec("Jealous-v0", num_envs=3)
    env.reset(seed=0)
    assert len(set(env.step(says("a", "b", "c"))[4]["thread"].tolist())) == 1
    env.close()


@pytest.mark.parametrize(
    "notes", [(1, 0.5), (0.5, 1), (True, 2), (1, None), (1, "text"), ("text", 1), (1, [2, 3]), (None, 2.5),
              (1, {}), ({}, 1), ({}, "text"), (1, 10**30), (10**30, 0.5)]
)
def test_infos_of_different_types_keep_their_values(make_vec, says, notes):
    env = make_vec(2)
    env.reset(seed=0)
    infos = env.step(says(*(f"note:{note!r}" for note in notes)))[4]
    assert infos["note"].tolist() == list(notes)


def test_a_failure_can_be_sent_between_processes(make_vec, says):
    env = make_vec(2)
    env.reset(seed=0)
    with pytest.raises(VectorEnvFailure) as caught:
        env.step(says("fail:judge", "on"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) == "judge: env 0: judge: on request"
    assert again.reason == "judge" and again.failures[0].detail == "on request"


def test_a_failure_in_one_env_loses_nothing_of_the_others(make_vec, says):
    env = make_vec(3)
    env.reset(seed=0)
    with pytest.raises(VectorEnvFailure, match="env 1: judge: on request") as caught:
        env.step(says("one", "fail:judge", "stop"))
    failure = caught.value
    assert isinstance(failure, molt_gym.EnvFailure) and failure.reason == "judge" and list(failure.failures) == [1]
    observations, rewards, terminated, _, infos = failure.results
    assert last_words(observations)[::2] == ["heard one", "heard stop"] and len(observations[1]["messages"]) == 1
    np.testing.assert_equal(rewards, [3.0, np.nan, 4.0])
    assert terminated.tolist() == [False, False, True] and infos["_said"].tolist() == [True, False, True]
    with pytest.raises(ResetNeeded, match=r"envs \[1\]"):
        env.step(says("two", "two", "two"))
    env.reset(options={"reset_mask": np.array([False, True, False])})
    observations = env.step(says("two", "two", "two"))[0]
    assert [len(observation["messages"]) for observation in observations] == [5, 3, 1]


def test_envs_whose_first_reset_failed_go_on_after_another(make_vec, says):
    env = make_vec(2)
    with pytest.raises(ValueError, match="'index' is 100"):
        env.reset(options={"index": [3, 100]})
    env.reset(seed=0)
    assert env.step(says("one", "two"))[1].tolist() == [3, 3]


def test_a_bug_in_an_env_comes_through_with_the_number_of_the_env(make_vec, says):
    env = make_vec(2)
    env.reset(seed=0)
    with pytest.raises(KeyError) as caught:
        env.step(says("fail:judge", "bug"))
    assert "raised in env 1 of" in caught.value.__notes__[0]


def test_an_env_that_hangs_fails_at_the_deadline_and_the_others_go_on(make_vec, says):
    env = make_vec(2, deadline=0.5)
    env.reset(seed=0)
    started = time.monotonic()
    with pytest.raises(VectorEnvFailure, match="env 0: timeout: no answer within 0.5 s") as caught:
        env.step(says("sleep:2", "on"))
    assert last_words(caught.value.results[0])[1] == "heard on"
    with pytest.raises(VectorEnvFailure, match="env 0: timeout: an earlier call"):
        env.reset()
    assert time.monotonic() - started < 2
    time.sleep(2)
    env.reset()
    assert last_words(env.step(says("on", "on"))[0]) == ["heard on", "heard on"]


def test_actions_are_checked_before_any_env_is_stepped(make_vec, say):
    env = make_vec(2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"actions\[1\]: action.role: 'user'"):
        env.step([say("on"), {"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="actions: 1 for 2 envs"):
        env.step([say("on")])
    assert [len(observation["messages"]) for observation in env.step([say("a"), say("a")])[0]] == [3, 3]


def test_a_step_before_a_reset_is_refused(make_vec, says):
    env = make_vec(2)
    with pytest.raises(ResetNeeded, match=r"envs \[0, 1\]"):
        env.step(says("on", "on"))
    with pytest.raises(ResetNeeded, match="the first reset"):
        env.reset(options={"reset_mask": np.array([True, False])})


@pytest.mark.parametrize("mask", [[True, False], np.array([1, 0]), np.array([True]), np.array([False, False])])
def test_a_mask_that_is_none_is_refused(make_vec, mask):
    env = make_vec(2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"options\['reset_mask'\]"):
        env.reset(options={"reset_mask": mask})


def test_observations_are_copies(make_vec, says):
    env = make_vec(2, autoreset_mode="Disabled")
    first, _ = env.reset(seed=0)
    first[1]["messages"].clear()
    observations, _ = env.reset(options={"reset_mask": np.array([True, False])})
    assert len(observations[1]["messages"]) == 1


def test_wrong_arguments_are_refused_and_leave_no_thread_behind(echo):
    before = set(threading.enumerate())
    for kwargs, error in (
        ({"num_envs": 0}, ValueError),
        ({"num_envs": True}, ValueError),
        ({"num_envs": "2"}, ValueError),
        ({"prefx": 1}, molt_gym.ConfigError),
        ({"autoreset_mode": "x"}, ValueError),
        ({"deadline": None}, ValueError),
        ({"deadline": float("nan")}, ValueError),
        ({"deadline": float("inf")}, ValueError),
    ):
        with pytest.raises(error):
            gym.make_vec(echo, **kwargs)
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_an_env_that_is_forgotten_is_closed(echo, says):
    env = gym.make_vec(echo, num_envs=2)
    env.reset(seed=0)
    env.step(says("on", "on"))
    alive = weakref.ref(env)
    del env
    gc.collect()
    assert alive() is None


def test_closing_closes_each_env_once(make_vec, echo_module):
    env = make_vec(2)
    closed = []
    for number, single in enumerate(env.envs):
        single.unwrapped.close = lambda number=number: closed.append(number)
    env.close()
    env.close()
    assert sorted(closed) == [0, 1]


def test_what_is_closed_says_so_at_once(make_vec, says):
    env = make_vec(2)
    env.reset(seed=0)
    env.close()
    for call in (env.reset, lambda: env.step(says("on", "on")), env.render):
        with pytest.raises(ClosedEnvironmentError, match=r"Echo-v0, num_envs=2\) was closed"):
            call()


def test_gymnasiums_vector_wrappers_work(make_vec, says):
    env = gym.wrappers.vector.RecordEpisodeStatistics(make_vec(2))
    env.reset(seed=0)
    infos = env.step(says("stop", "on"))[4]
    assert infos["episode"]["r"].tolist() == [4.0, 0.0]


@pytest.mark.slow
def test_gymnasiums_async_vector_env_needs_to_share_no_memory(echo_module, echo, say):
    env = gym.make_vec(
        f"{echo_module}:{echo}", num_envs=2, vectorization_mode="async", vector_kwargs={"shared_memory": False}
    )
    try:
        env.reset(seed=0)
        assert last_words(env.step((say("a\nb"), say("😀")))[0]) == ["heard a\nb", "heard 😀"]
        with pytest.raises(molt_gym.EnvFailure, match="judge: on request") as caught:
            env.step((say("on"), say("fail:judge")))
        assert (caught.value.reason, caught.value.detail) == ("judge", "on request")
    finally:
        env.close()
    with pytest.raises(ValueError, match="shared_memory"):
        gym.make_vec(f"{echo_module}:{echo}", num_envs=2, vectorization_mode="async")


def test_no_other_name_is_an_attribute_of_the_module():
    with pytest.raises(AttributeError, match="no env is registered as 'Nothing-v0'"):
        getattr(molt_gym.vector, "Nothing-v0")
