import copy
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_gym import AgentEnv, ChatEnv, EnvFailure, Result, Rewards, Turn, text_of
from molt_gym.errors import ConfigError
from molt_gym.rewards import Reward, add_parts, parts_of

NUMBERS = st.floats(-1e6, 1e6)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from("abcde"), st.tuples(NUMBERS, NUMBERS), min_size=1))
def test_a_reward_is_the_weighted_sum_of_parts_that_it_tells(parts):
    reward = Rewards({name: weight for name, (weight, _) in parts.items()})(
        **{name: value for name, (_, value) in parts.items()})
    assert reward == pytest.approx(sum(weight * value for weight, value in parts.values()))
    assert parts_of(reward) == {f"reward/{name}": value for name, (_, value) in parts.items()}
    for again in (copy.deepcopy(reward), pickle.loads(pickle.dumps(reward))):
        assert again == reward and parts_of(again) == parts_of(reward)


def test_a_part_may_be_computed():
    assert Rewards(right=1, style=0.5)(right=True, style=lambda: 0.5) == 1.25


def lost():
    raise EnvFailure("judge", "unreachable")


@pytest.mark.parametrize(("part", "reason", "words"), [
    (math.nan, "reward", "part 'style' of the reward is nan"),
    (None, "reward", "part 'style' of the reward is None"),
    (lambda: "high", "reward", "part 'style' of the reward is 'high'"),
    (lambda: {}["key"], "reward", "part 'style' of the reward raised KeyError: 'key'"),
    (lost, "judge", "part 'style' of the reward: unreachable"),
])
def test_a_part_that_fails_fails_the_rollout_by_its_name(part, reason, words):
    with pytest.raises(EnvFailure, match=words) as caught:
        Rewards(right=1, style=0.0)(right=1, style=part)
    assert caught.value.reason == reason


@pytest.mark.parametrize("parts", [{"right": 1}, {"right": 1, "style": 1, "length": 1}, {"right": 1, "stile": 1}])
def test_all_parts_are_given_and_no_others(parts):
    with pytest.raises(TypeError, match="missing or unknown; give a value for each of right, style"):
        Rewards(right=1, style=1)(**parts)


@pytest.mark.parametrize("weights", [{}, {"mean": 1}, {"a-b": 1}, {"right": math.inf}, {"right": "1"}, {3: 1}])
def test_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(ConfigError, match="^rewards: "):
        Rewards(weights)


def test_what_is_summed_is_summed_over_turns_and_the_rest_is_the_last_turns():
    first = {"reward/right": 1.0, "judge/requests": 2, "said": "a", "gone": 1}
    assert add_parts(first, {"reward/style": 0.5, "judge/requests": 1, "said": "b"}) == {
        "reward/right": 1.0, "reward/style": 0.5, "judge/requests": 3, "said": "b"}


class Graded(ChatEnv):
    rewards = Rewards(right=1.0, style=0.1)

    def begin(self, index):
        return [{"role": "user", "content": "Say yes."}]

    def answer(self, message):
        text = text_of(message)
        return Turn(reward=self.rewards(right=text == "yes", style=len(text)), terminated=True, info={"said": text})


def test_the_info_of_a_turn_shows_the_parts():
    env = Graded()
    env.reset(seed=0)
    _, reward, _, _, info = env.step({"role": "assistant", "content": "yes"})
    assert reward == pytest.approx(1.3) and type(reward) is float
    assert info == {"reward/right": 1.0, "reward/style": 3.0, "said": "yes", "task_index": info["task_index"]}


def agent(ctx, ending):
    rewards = Rewards(right=1.0, style=0.5)
    client = ctx.openai(asynchronous=False)
    for _ in range(2):
        client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": "Hi."}])
        ctx.add_reward(rewards(right=1, style=2))
    return ending(rewards(right=0, style=4))


@pytest.mark.parametrize("ending", [float, Reward, lambda reward: reward, lambda reward: Result(reward)])
def test_an_agents_parts_are_told_with_the_step_after_which_it_earned_them(ending):
    env = AgentEnv(lambda ctx: agent(ctx, ending))
    env.reset(seed=0)
    steps = [env.step({"role": "assistant", "content": "x"}) for _ in range(2)]
    env.close()
    last = steps[1][4]
    assert [step[1] for step in steps] == [2.0, 4.0] and steps[0][4]["reward/style"] == 2.0
    whole = ending(Reward(2.0, {"reward/style": 4.0}))
    kept = isinstance(whole, Reward) and bool(whole.info) or isinstance(whole, Result)
    assert last["reward/style"] == (6.0 if kept else 2.0)
