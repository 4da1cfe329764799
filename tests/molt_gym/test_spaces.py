import copy
import hashlib
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import molt_gym
from molt_gym.messages import validate_conversation, validate_message

SPACES = [molt_gym.Conversation, molt_gym.AssistantMessage]
ODD_TEXTS = [
    "",
    "hello world",
    "a\nb",
    "héllo",
    "e\u0301",
    "😀",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "\u2028",
    "x" * 100_000,
]


@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_every_string_is_inside(text):
    message = {"role": "assistant", "content": text}
    assert message in molt_gym.AssistantMessage()
    assert {"messages": [{"role": "user", "content": text}, message], "tools": []} in molt_gym.Conversation()


@given(st.text(st.characters(codec=None)))
def test_every_string_of_any_code_points_is_inside_and_survives_json(text):
    space = molt_gym.AssistantMessage()
    message = {"role": "assistant", "content": text, "reasoning_content": text}
    assert message in space
    back = space.from_jsonable(json.loads(json.dumps(space.to_jsonable([message]))))
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert back == [{"role": "assistant", "content": joined, "reasoning_content": joined}]


@pytest.mark.parametrize(
    "alien", [None, "text", [], {}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": 1}]
)
def test_what_is_no_assistant_message_is_outside(alien):
    assert alien not in molt_gym.AssistantMessage()
    assert alien not in molt_gym.Conversation()


@pytest.mark.parametrize("make", SPACES)
def test_samples_are_legal_and_cover_tools_and_reasoning(make):
    space = make(seed=0)
    samples = [space.sample() for _ in range(200)]
    assert all(sample in space for sample in samples)
    text = json.dumps(samples)
    assert all(
        mark in text for mark in ('"reasoning_content"', '"tool_calls"', "\\u0000", "<|im_end|>", '"content": ""')
    )


@pytest.mark.parametrize("make", SPACES)
def test_a_seed_fixes_the_samples_in_every_process(make):
    script = (
        "import hashlib, json, molt_gym\n"
        f"space = molt_gym.{make.__name__.removesuffix('Space')}(seed=7)\n"
        "print(hashlib.sha256(json.dumps([space.sample() for _ in range(50)]).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    space = make()
    space.seed(7)
    here = hashlib.sha256(json.dumps([space.sample() for _ in range(50)]).encode()).hexdigest()
    assert digests == {here}


@pytest.mark.parametrize("make", SPACES)
def test_samples_survive_json(make):
    space = make(seed=1)
    samples = [space.sample() for _ in range(50)]
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples)))) == samples


@pytest.mark.parametrize("make", SPACES)
def test_json_forms_are_copies_and_checked(make):
    space = make(seed=1)
    sample = space.sample()
    assert space.to_jsonable([sample])[0] is not sample
    with pytest.raises(ValueError, match="role|conversation"):
        space.from_jsonable([{"role": "robot"}])


@pytest.mark.parametrize("make", SPACES)
def test_a_space_is_small_equal_to_its_kind_and_can_be_pickled_and_copied(make):
    space = make(seed=3)
    assert space == make() and space != object()
    assert len(pickle.dumps(space)) < 5_000
    twin, copied = pickle.loads(pickle.dumps(space)), copy.deepcopy(space)
    assert space.sample() == twin.sample() == copied.sample()
    assert repr(space) == f"{make.__name__.removesuffix('Space')}()"
    assert not space.is_np_flattenable
    assert space.shape is None and space.dtype is None


def test_the_two_spaces_differ():
    assert molt_gym.Conversation() != molt_gym.AssistantMessage()


@pytest.mark.parametrize("make", SPACES)
@pytest.mark.parametrize("argument", ["mask", "probability"])
def test_a_mask_or_a_probability_is_refused(make, argument):
    with pytest.raises(ValueError, match="no mask"):
        make().sample(**{argument: 1})


def test_validation_says_what_keeps_an_action_out():
    space = molt_gym.AssistantMessage()
    with pytest.raises(ValueError, match="action.role: 'user'; write 'assistant'"):
        space.validate({"role": "user", "content": "hi"})
    validate_message(space.sample())
    validate_conversation(molt_gym.Conversation().sample())
