"""Real games of PettingZoo as chat envs, and the games here as its ParallelEnvs."""

import warnings
from collections import defaultdict
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Text

import molt_gym
from molt_gym import ConfigError, EnvFailure, NotAChatEnv, PettingZooEnv
from molt_gym.conformance import check
from molt_gym.multi_agent import FORFEIT

pettingzoo = pytest.importorskip("pettingzoo")
GAMES = {"pettingzoo/tictactoe-v3": "classic/tictactoe-v3", "pettingzoo/connect_four-v3": "classic/connect_four-v3",
         "pettingzoo/rps-v2": "classic/rps-v2"}
OURS = ["TicTacToe-v0", "ConnectFour-v0", "Negotiation-v0"]


def say(text):
    return {"role": "assistant", "content": text}


class Words(pettingzoo.ParallelEnv):
    """Two agents say a word at the same time, three rounds; "b" leaves after two. The longest word gets 1."""

    metadata = {"name": "words_v0", "render_modes": []}
    possible_agents = ["a", "b"]
    render_mode = None

    def __init__(self):
        self.spaces = {agent: Text(20, min_length=0) for agent in self.possible_agents}

    def observation_space(self, agent):
        return self.spaces[agent]

    def action_space(self, agent):
        return self.spaces[agent]

    def reset(self, seed=None, options=None):
        self.agents, self.rounds, self.seed = list(self.possible_agents), 0, seed
        return {agent: "say" for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        self.rounds += 1
        most = max(map(len, actions.values()))
        rewards = {agent: float(len(actions[agent]) == most) for agent in self.agents}
        ended = {agent: agent == "b" and self.rounds == 2 for agent in self.agents}
        cut = {agent: self.rounds == 3 for agent in self.agents}
        heard = {agent: " ".join(actions.values()) for agent in self.agents}
        infos = {agent: {} for agent in self.agents}
        self.agents = [agent for agent in self.agents if not ended[agent] and not cut[agent]]
        return heard, rewards, ended, cut, infos


def played(env, choose, index):
    """The sums of rewards of a game, the actions in their order, and its last step."""
    _, info = env.reset(options={"index": index})
    totals, actions, over = defaultdict(float), [], False
    while not over:
        actions.append(choose(info["seat"]))
        *_, terminated, truncated, info = env.step(say(actions[-1]))
        for seat, reward in info["rewards"].items():
            totals[seat] += reward
        over = terminated or truncated
    return totals, actions, (terminated, truncated, info)


@pytest.mark.parametrize("env_id", GAMES)
def test_rewards_are_those_that_the_game_itself_gives_for_the_same_actions(env_id: str) -> None:
    env = molt_gym.make(env_id).unwrapped
    for index in range(5):
        rng = np.random.default_rng(index)
        choose = partial(env.random_move, rng=rng)
        totals, actions, (terminated, truncated, _) = played(env, choose, index)
        plain, left, theirs = pettingzoo.make("aec", GAMES[env_id]), list(actions), defaultdict(float)
        plain.reset(seed=index)
        ends = set()
        for agent in plain.agent_iter():
            _, reward, ended, cut, _ = plain.last()
            theirs[agent] += reward
            ends |= {(ended, cut)} if ended or cut else set()
            plain.step(None if ended or cut else int(left.pop(0)))
        assert totals == theirs and not left and ends == {(terminated, truncated)}


@pytest.mark.slow
@pytest.mark.parametrize("env_id", GAMES)
def test_they_keep_to_what_training_relies_on(env_id: str) -> None:
    assert [finding for finding in check(env_id) if finding.problem] == []


def test_boards_are_told_as_grids_with_the_legal_actions_and_others_are_not_taken() -> None:
    env = PettingZooEnv("classic/tictactoe-v3")
    env.reset(options={"index": 0})
    env.step(say("I take the middle.\n4"))
    observation, *_ = env.step(say("0"))
    text = observation["messages"][-1]["content"]
    assert text == "O . .\n. X .\n. . .\nLegal actions: 1, 2, 3, 5, 6, 7, 8."
    system = observation["messages"][0]["content"]
    assert "take turns marking spaces" in system and system.endswith("Actions: an integer from 0 to 8.")
    observation, *_, info = env.step(say("4"))
    assert observation["messages"][-1]["content"] == "That is no legal move: 4 is not among 1, 2, 3, 5, 6, 7, 8."
    env.step(say("nonsense"))
    _, reward, terminated, _, info = env.step(say("99"))
    assert (reward, terminated, info["rewards"]) == (FORFEIT, True, {"player_1": FORFEIT, "player_2": 0.0})
    env.close()


def test_in_a_parallel_game_seats_speak_by_turns_and_hear_of_a_round_only_when_it_is_over() -> None:
    env = PettingZooEnv(Words)
    observation, info = env.reset(options={"index": 3})
    assert info["seat"] == "a" and env.env.unwrapped.seed == 3
    observation, *_, info = env.step(say("long"))
    assert info["seat"] == "b" and observation["messages"][-1]["content"] == "say"
    observation, *_, info = env.step(say("no"))
    assert observation["messages"][-1]["content"] == "long no"
    env.step(say("x"))
    *_, info = env.step(say("longer"))
    assert info["seat"] == "a"
    _, _, terminated, truncated, info = env.step(say("alone"))
    assert (terminated, truncated) == (False, True) and info["results"] == {"a": "win", "b": "loss"}


def test_a_parallel_games_rewards_reach_each_seat() -> None:
    totals, *_ = played(PettingZooEnv(Words), lambda seat: "long" if seat == "a" else "no", 0)
    assert totals == {"a": 3.0, "b": 0.0}


class Counting(pettingzoo.AECEnv):
    """By turns "a" and "b" name a number; the second one wins 1. abrupt: agents leave without a last turn."""

    metadata = {"name": "counting_v0", "render_modes": []}
    possible_agents = ["a", "b"]
    render_mode = None

    def __init__(self, space, mask=None, abrupt=False):
        self.space, self.mask, self.abrupt, self.taken = space, mask, abrupt, []

    def observation_space(self, agent):
        return Text(20, min_length=0)

    def action_space(self, agent):
        return self.space

    def observe(self, agent):
        return "name a number"

    def reset(self, seed=None, options=None):
        self.agents, self.agent_selection = list(self.possible_agents), "a"
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0), dict.fromkeys(self.agents, 0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {"action_mask": self.mask} if self.mask is not None else {} for agent in self.agents}

    def step(self, action):
        if self.terminations[self.agent_selection]:
            return self._was_dead_step(action)
        self.taken.append(action)
        if self.agent_selection == "b":
            self.rewards = {"a": -1, "b": 1}
            self._accumulate_rewards()
            self.terminations = dict.fromkeys(self.agents, True)
            self.agents = [] if self.abrupt else self.agents
        self.agent_selection = "b" if self.agent_selection == "a" else "a"


def test_a_mask_counts_from_where_the_actions_begin() -> None:
    env = PettingZooEnv(lambda: Counting(Discrete(3, start=5), np.array([1, 0, 1], np.int8)))
    observation, _ = env.reset()
    assert observation["messages"][-1]["content"] == "name a number\nLegal actions: 5, 7."
    observation, *_ = env.step(say("6"))
    assert observation["messages"][-1]["content"] == "That is no legal move: 6 is not among 5, 7."
    env.step(say("7"))
    *_, terminated, _, info = env.step(say("5"))
    assert terminated and env.env.unwrapped.taken == [7, 5] and info["results"] == {"a": "loss", "b": "win"}
    env.reset()
    assert {env.random_move("a", np.random.default_rng(seed)) for seed in range(20)} == {"5", "7"}


def test_a_mask_of_several_numbers_leaves_a_game_playable() -> None:
    mask = (np.array([1, 0], np.int8), np.array([1, 1], np.int8))
    for opponent in ("self", "random"):
        totals, actions, _ = played(PettingZooEnv(lambda: Counting(MultiDiscrete([2, 2]), mask), opponent=opponent),
                                    lambda seat: "0 1", 0)
        assert set(actions) == {"0 1"} and sorted(totals.values()) == [-1, 1]


def test_a_game_that_drops_its_agents_with_their_rewards_is_a_failure() -> None:
    env = PettingZooEnv(lambda: Counting(Discrete(3), abrupt=True))
    env.reset()
    env.step(say("0"))
    with pytest.raises(EnvFailure, match="a, b left without a turn to get their last rewards"):
        env.step(say("1"))


def test_describe_and_parse_of_the_user_take_the_place_of_either_side() -> None:
    def describe(env, agent, observation, info):
        return f"{agent} sees {int(observation['observation'].sum())} marks"

    def parse(env, agent, text):
        if text not in "ABCDEFGHI":
            raise ValueError("write a letter from A to I")
        return "ABCDEFGHI".index(text)

    env = PettingZooEnv("classic/tictactoe-v3", describe=describe, parse=parse, instructions="Letters.")
    env.reset()
    observation, *_ = env.step(say("E"))
    assert observation["messages"][0]["content"].startswith("Letters.\n\nYou are player_2.")
    assert observation["messages"][1]["content"].startswith("player_2 sees 1 marks")
    observation, *_ = env.step(say("5"))
    assert "write a letter from A to I" in observation["messages"][-1]["content"]


def test_what_is_described_may_be_content_parts() -> None:
    parts = [{"type": "text", "text": "a board"}]
    env = PettingZooEnv("classic/tictactoe-v3", describe=lambda *given: parts)
    said = env.reset()[0]["messages"][-1]["content"]
    assert said[0] == parts[0] and said[1]["text"].startswith("Legal actions: 0, 1")


class Wide(Words):
    def __init__(self):
        self.spaces = {agent: Box(0, 1, (9, 9)) for agent in self.possible_agents}


@pytest.mark.parametrize(("env", "error", "words"), [
    (Wide, NotAChatEnv, "give parse='module:function'"),
    (lambda: Discrete(2), ConfigError, "write a function that makes an AECEnv or a ParallelEnv"),
    ("classic/checkers-v9", ConfigError, "checkers"),
    ("no_such_module:env", ConfigError, "env: 'no_such_module:env' is no module:function"),
])
def test_what_cannot_be_played_is_refused(env, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        PettingZooEnv(env)


@pytest.mark.parametrize("env_id", OURS)
def test_our_games_pass_pettingzoos_own_test(env_id: str) -> None:
    from pettingzoo.test import parallel_api_test

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(molt_gym.parallel_env(env_id), num_cycles=60)


@pytest.mark.parametrize("env_id", OURS)
def test_through_either_interface_of_pettingzoo_a_game_goes_as_here(env_id: str) -> None:
    from pettingzoo.utils.conversions import parallel_to_aec

    game = molt_gym.make(env_id).unwrapped
    rng = np.random.default_rng(0)
    totals, actions, (*_, info) = played(game, lambda seat: game.random_move(seat, rng), 7)
    parallel = molt_gym.parallel_env(env_id)
    _, infos = parallel.reset(options={"index": 7})
    sums, left = defaultdict(float), list(actions)
    while parallel.agents:
        chosen = {agent: say(left[0] if infos[agent]["turn"] else "ignored") for agent in parallel.agents}
        del left[0]
        _, rewards, ends, _, infos = parallel.step(chosen)
        sums = {agent: sums[agent] + reward for agent, reward in rewards.items()} if sums else dict(rewards)
    assert sums == totals and not left and all(ends.values())
    assert {agent: own["result"] for agent, own in infos.items()} == info["results"]
    aec, left, sums = parallel_to_aec(molt_gym.parallel_env(env_id)), list(actions), defaultdict(float)
    aec.reset(options={"index": 7})
    for agent in aec.agent_iter():
        observation, reward, ended, cut, about = aec.last()
        sums[agent] += reward
        assert ended or cut or observation in aec.observation_space(agent)
        aec.step(None if ended or cut else say(left.pop(0) if about["turn"] else "ignored"))
    assert sums == totals and not left


def test_an_id_of_a_suite_may_be_named_with_this_package() -> None:
    for env_id in [env_id for env_id in gym.registry if env_id.startswith("pettingzoo/")]:
        del gym.registry[env_id]
    assert molt_gym.make("molt_gym:pettingzoo/rps-v2").spec.id == "pettingzoo/rps-v2"


def test_the_cap_on_turns_holds_in_a_parallel_env() -> None:
    env = molt_gym.parallel_env("TicTacToe-v0", max_episode_steps=2)
    env.reset(seed=0)
    assert not any(env.step({agent: say("1") for agent in env.agents})[3].values())
    assert all(env.step({agent: say("2") for agent in env.agents})[3].values()) and not env.agents


def test_what_is_no_game_is_no_parallel_env() -> None:
    with pytest.raises(ConfigError, match="opponent: 'random'; all seats are agents here"):
        molt_gym.parallel_env("TicTacToe-v0", opponent="random")
    with pytest.raises(ConfigError, match="Math-v0 has no seats"):
        molt_gym.parallel_env("Math-v0")
    env = molt_gym.parallel_env("TicTacToe-v0", render_mode="ansi")
    with pytest.raises(ValueError, match="unknown reset option 'indx'"):
        env.reset(options={"indx": 3})
    env.reset(seed=0)
    with pytest.raises(ValueError, match="there is none for 'X', whose turn it is"):
        env.step({"O": say("1")})
    assert "=== X" in env.render()
    env.close()
