import json
import random

import gymnasium as gym
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import molt_gym
from molt_gym.errors import ConfigError
from molt_gym.tokens import Generation, Renderer, TokenGraph
from molt_gym.trainers.models import resolve_model
from molt_gym.trainers.models.tiny_tokenizer import VOCABULARY, Example, encode_examples, train_tokenizer
from molt_gym.trainers.models.warm_start import train_on_examples


def talk(count, seed=0):
    """Conversations in which the assistant repeats a number."""
    rng = random.Random(seed)
    numbers = [rng.randint(1, 99) for _ in range(count)]
    return [[{"role": "system", "content": "Repeat the number."}, {"role": "user", "content": f"Say {n}."},
             {"role": "assistant", "content": f"It is {n}"}] for n in numbers]


class RepeatEnv(molt_gym.ChatEnv):
    """Repeat a number."""

    def __init__(self, *, demonstrated=64, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.demonstrated = demonstrated

    def begin(self, index):
        return talk(1, index)[0][:2]

    def answer(self, message):
        return molt_gym.Turn(terminated=True)

    def demonstrations(self, count, seed=0):
        return talk(min(count, self.demonstrated), seed)


TOOLS = [{"type": "function", "function": {"name": name, "description": "Says a number.", "parameters": {
    "type": "object", "properties": {parameter: {"type": "integer"} for parameter in parameters}}}}
    for name, parameters in (("say", ("number", "loudly")), ("hush", ()))]


def calls(count, seed=0):
    """Conversations in which the assistant has a tool repeat the number."""
    conversations = []
    for system, user, _ in talk(count, seed):
        number = user["content"][4:-1]
        function = {"name": "say", "arguments": json.dumps({"number": int(number)})}
        conversations.append([
            system, user,
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c", "content": number},
            {"role": "assistant", "content": f"It is {number}"}])
    return conversations


class Caller(molt_gym.ChatAgent):
    """Repeat a number with a tool."""

    tools = TOOLS

    def run(self, ctx):
        return 0.0

    def demonstrations(self, count, seed=0):
        return calls(min(count, 64), seed)


class SilentEnv(RepeatEnv):
    """No demonstrations."""

    demonstrations = None


@pytest.fixture(autouse=True)
def at_hand(monkeypatch, tmp_path):
    monkeypatch.setenv("MOLT_GYM_CACHE", str(tmp_path / "cache"))
    gym.register("RepeatTest-v0", entry_point=RepeatEnv)
    gym.register("SilentTest-v0", entry_point=SilentEnv)
    gym.register("CallTest-v0", entry_point="molt_gym:AgentEnv", kwargs={"agent": Caller})
    yield
    for env_id in ("RepeatTest-v0", "SilentTest-v0", "CallTest-v0"):
        del gym.registry[env_id]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(talk(600))


@given(st.text())
def test_any_text_comes_back_from_its_ids(tokenizer, text):
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert max(ids, default=0) < len(tokenizer) and tokenizer.decode(ids) == text


def test_whole_numbers_and_words_are_single_tokens(tokenizer):
    assert all(len(tokenizer.tokenize(str(n))) == 1 for n in range(1, 100))
    assert tokenizer.tokenize("Say 42.") == ["Say", "Ġ", "42", "."]


def test_examples_hold_what_the_renderer_gives_and_mark_what_the_assistant_said(tokenizer):
    renderer = Renderer(tokenizer)
    again = [{"role": "user", "content": "\n 7, again?"}, {"role": "assistant", "content": " \n`7` "}]
    for conversation in (*talk(5), talk(1)[0] + again):
        [example] = encode_examples(tokenizer, [conversation])
        assert example.ids == renderer.render(conversation, add_generation_prompt=False)
        said = [i for i, own in zip(example.ids, example.mask, strict=True) if own]
        assert renderer.decode(said) == "".join(
            message["content"] + "<|im_end|>" for message in conversation if message["role"] == "assistant")


def test_tools_and_their_calls_are_written_as_the_renderer_writes_them():
    tokenizer = train_tokenizer(calls(600), TOOLS)
    renderer = Renderer(tokenizer)
    twice = calls(1)[0]
    twice[2] = twice[2] | {"content": "Well:", "tool_calls": twice[2]["tool_calls"] * 2}
    for conversation in (*calls(5), twice, calls(1)[0][1:], talk(1)[0]):
        for tools in (TOOLS, ()):
            [example] = encode_examples(tokenizer, [conversation], tools)
            assert example.ids == renderer.render(conversation, tools, add_generation_prompt=False)
    text = renderer.decode(renderer.render(twice, TOOLS))
    assert "Repeat the number.\ntools: say(number, loudly), hush()<|im_end|>" in text
    number = twice[3]["content"]
    call = f'<tool_call>\n{{"name": "say", "arguments": {{"number": {number}}}}}\n</tool_call>'
    assert f"<|im_start|>assistant\nWell:\n{call}\n{call}<|im_end|>\n<|im_start|>tool\n{number}<|im_end|>" in text


def test_a_call_is_read_and_its_result_extends_what_was_sampled():
    tokenizer = train_tokenizer(calls(600), TOOLS)
    renderer = Renderer(tokenizer)
    system, user, call, result, _ = calls(1)[0]
    arguments = call["tool_calls"][0]["function"]["arguments"]
    said = f'<tool_call>\n{{"name": "say",  "arguments": {arguments}}}\n</tool_call>'
    sampled = [*tokenizer(said, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    graph = TokenGraph(renderer)
    prompt = graph.prepare([system, user], TOOLS)
    reply = renderer.parse(sampled, prompt.messages, TOOLS)
    assert reply["tool_calls"][0]["function"] == call["tool_calls"][0]["function"] and not reply["content"]
    graph.commit(prompt, Generation(sampled, [-0.1] * len(sampled), [0] * len(sampled), "stop"), reply)
    following = graph.prepare([system, user, reply, result], TOOLS)
    assert following.kind == "extend" and list(following.ids)[: -len(following.context)] == [*prompt.ids, *sampled]


def test_markers_of_calls_are_single_tokens_where_there_are_calls(tokenizer):
    caller = train_tokenizer(calls(600), TOOLS)
    for marker in ("<tool_call>", "</tool_call>"):
        assert caller.tokenize(marker) == [marker] and len(tokenizer.tokenize(marker)) > 1
    assert len(caller) <= VOCABULARY and caller.decode(caller("<tool_call>x").input_ids) == "<tool_call>x"


def test_only_what_the_assistant_said_is_learnt():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, initializer_range=0.2))
    rng = random.Random(0)
    noise = [[rng.randrange(8) for _ in range(rng.randint(1, 9))] for _ in range(32 * 40)]
    examples = [Example([1, *ids, 9, 10, 11], [0] * (1 + len(ids)) + [0, 1, 1]) for ids in noise]
    losses = train_on_examples(model, examples)
    assert len(losses) == 40 and losses[0] > 1.5 and losses[-1] < 0.1
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 9, 10]])).logits[0]
    assert logits[3:].argmax(-1).tolist() == [10, 11] and logits[:3].argmax(-1).tolist() != [2, 3, 9]


def test_tiny_is_made_once_for_an_env_its_arguments_and_a_seed():
    said = []
    first = resolve_model("tiny", env="RepeatTest-v0", say=said.append)
    assert said[0] == first.note and "tiny" in said[0] and "warm start" in said[1]
    assert resolve_model("tiny", env="RepeatTest-v0", say=said.append) == first and len(said) == 3
    others = [resolve_model("tiny", env="RepeatTest-v0", say=said.append, **changed).path
              for changed in ({"seed": 1}, {"env_kwargs": {"demonstrated": 63}})]
    assert len({first.path, *others}) == 3


def test_making_tiny_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    resolve_model("tiny", env="RepeatTest-v0", say=str)
    assert torch.equal(torch.rand(1), expected)


def test_transformers_loads_tiny(tmp_path):
    path = resolve_model("tiny", env="RepeatTest-v0", say=str).path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert 4e5 < sum(p.numel() for p in model.parameters()) < 6e5 and model.dtype == torch.float32
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert Renderer(tokenizer).stop_token_ids == (tokenizer.eos_token_id,)
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen3"


def test_an_agent_is_asked_for_its_demonstrations_and_tools():
    path = resolve_model("tiny", env="CallTest-v0", say=str).path
    assert "<tool_call>" in AutoTokenizer.from_pretrained(path).get_vocab()


def test_an_env_without_demonstrations_is_told_what_to_add():
    with pytest.raises(ConfigError, match="SilentTest-v0 has no method demonstrations.*or choose another model"):
        resolve_model("tiny", env="SilentTest-v0", say=str)


@pytest.mark.parametrize(("demonstrated", "complaint"), [(0, "there are none"), (-1, "no assistant message")])
def test_demonstrations_that_teach_nothing_are_refused(monkeypatch, demonstrated, complaint):
    if demonstrated:
        monkeypatch.setattr(RepeatEnv, "demonstrations", lambda self, count, seed: [self.begin(0)])
    with pytest.raises(ConfigError, match=f"demonstrations of RepeatTest-v0: .*{complaint}"):
        resolve_model("tiny", env="RepeatTest-v0", env_kwargs={"demonstrated": 0}, say=str)


@pytest.mark.slow
def test_the_warm_start_teaches_the_form_of_an_answer_but_not_the_answers():
    path = resolve_model("tiny", env="CodeExec-v0", env_kwargs={"sandbox": "subprocess"}, say=str).path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    renderer = Renderer(tokenizer)
    env = molt_gym.make("CodeExec-v0", split="test", sandbox="subprocess")
    passed, fenced = 0, 0
    torch.manual_seed(0)
    for index in range(64):
        observation, _ = env.reset(options={"index": index})
        prompt = torch.tensor([renderer.render(observation["messages"])])
        ids = model.generate(prompt, max_new_tokens=40, do_sample=True, top_k=0)[0, prompt.shape[1] :].tolist()
        reply = renderer.parse(ids)
        fenced += reply["content"].startswith("```python\nprint(")
        passed += env.step(reply)[1]
    env.close()
    assert fenced > 40 and 6 < passed < 34
