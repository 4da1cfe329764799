import pytest

from molt_gym.envs.tool_use.demonstrations import demonstrations
from molt_gym.envs.tool_use.tasks import DEFAULT_FAMILIES, FAMILIES, Generator
from molt_gym.envs.tool_use.tools import run_tool
from molt_gym.errors import ConfigError


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("difficulty", [1, 3])
def test_right_calls_lead_to_the_answer_and_wrong_ones_elsewhere(family, difficulty):
    generator = Generator([family], difficulty)
    mistaken = 0
    for index in range(30):
        task = generator.task(index)
        right, wrong = ([run_tool(call.name, call.arguments, task.table) for call in calls]
                        for calls in (task.right, task.wrong))
        assert int(right[-1]) == task.answer and not any(result.startswith("Error") for result in right + wrong)
        mistaken += int(wrong[-1]) == task.answer
    assert mistaken < 4


@pytest.mark.parametrize("family", DEFAULT_FAMILIES)
def test_an_answer_is_hard_to_guess(family):
    generator = Generator([family])
    answers = [generator.task(index).answer for index in range(200)]
    assert max(map(answers.count, answers)) < 12


def test_a_question_is_in_one_split():
    train, test = Generator(), Generator(split="test")
    questions = {train.task(index).prompt for index in range(2000)}
    assert questions.isdisjoint(test.task(index).prompt for index in range(1000))


def test_a_task_is_a_function_of_its_index():
    assert Generator().task(11) == Generator().task(11) != Generator().task(19)


def test_difficulty_makes_numbers_longer():
    sizes = [len(str(Generator(["times"], difficulty).task(0).answer)) for difficulty in (1, 2, 4)]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"families": ["plus"]}, r"families: \['plus'\]; choose from times, "),
        ({"families": []}, "families: none"),
        ({"difficulty": 0}, "difficulty: 0; write an integer from 1"),
        ({"split": "dev"}, "split: 'dev'; write one of 'train', 'test'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Generator(**arguments)


def demonstrate(count, seed=0):
    return demonstrations(Generator(), lambda task: [{"role": "user", "content": task.prompt}], count, seed)


@pytest.fixture(scope="module")
def conversations():
    return demonstrate(1000)


class TestDemonstrations:
    def test_they_are_fixed_by_the_seed(self, conversations):
        assert demonstrate(20) == conversations[:20] != demonstrate(20, seed=1)

    def test_a_call_is_followed_by_what_it_gave(self, conversations):
        for conversation in conversations:
            for message, result in zip(conversation, conversation[1:], strict=False):
                for call in message.get("tool_calls") or ():
                    assert result["role"] == "tool" and result["tool_call_id"] == call["id"]
                    if call["function"]["name"] == "calculate":
                        function = call["function"]
                        assert result["content"] == run_tool(function["name"], function["arguments"], {})

    def test_mistakes_are_likelier_than_right_answers(self, conversations):
        squares = [c for c in conversations if "square" in c[0]["content"]]
        first = [c[1]["tool_calls"][0]["function"]["arguments"] for c in squares if c[1].get("tool_calls")]
        right, wrong = (sum(power in arguments for arguments in first) for power in ("**2", "**3"))
        assert 0.15 < right / len(squares) < wrong / len(squares) < 0.6

    def test_all_end_with_words_of_the_assistant(self, conversations):
        for conversation in conversations:
            assert conversation[-1]["role"] == "assistant" and conversation[-1]["content"]
