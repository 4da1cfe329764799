import json
import sys

import pytest

from molt_gym import ConfigError
from molt_gym.messages import validate_message
from molt_gym.tokens import Renderer

TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
MARKERS = ("<tool_call>", "</tool_call>")
THINK, END_THINK, CALL, END_CALL, END = 259, 260, 267, 268, 257


def test_a_parser_without_vllm_is_refused(tokenizer_of, monkeypatch):
    for name in {"vllm", *(name for name in sys.modules if name.startswith("vllm."))}:
        # Others' tests may have loaded it.
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="tool_parser 'vllm:hermes'.*vLLM cannot be imported"):
        Renderer(tokenizer_of("chatml"), tool_parser="vllm:hermes")


@pytest.mark.slow
class TestWithVllm:
    @pytest.fixture(autouse=True)
    def vllm(self):
        pytest.importorskip("vllm.tool_parsers")

    @pytest.mark.parametrize("name", ["vllm:nope", "hermes"])
    @pytest.mark.parametrize("field", ["tool_parser", "reasoning_parser"])
    def test_an_unknown_parser_is_refused_with_the_list(self, tokenizer_of, field, name):
        with pytest.raises(ConfigError, match=f"{field}: '{name}' is unknown; write vllm: and one of .*qwen3"):
            Renderer(tokenizer_of("chatml"), **{field: name})

    def test_calls_and_reasoning_are_read(self, tokenizer_of):
        tokenizer = tokenizer_of("chatml", MARKERS)
        renderer = Renderer(tokenizer, tool_parser="vllm:hermes", reasoning_parser="vllm:qwen3")
        body = b'{"name": "f", "arguments": {"a": "<|im_end|>"}}'
        sampled = [THINK, *b"hm", END_THINK, *b"sure", CALL, *body, END_CALL, CALL, *body, END_CALL, END]
        message = renderer.parse(sampled, [], TOOLS)
        validate_message(message)
        assert (message["content"], message["reasoning_content"]) == ("sure", "hm")
        assert [call["id"] for call in message["tool_calls"]] == ["call00000", "call00001"]
        assert json.loads(message["tool_calls"][1]["function"]["arguments"]) == {"a": "<|im_end|>"}
        built_in = Renderer(tokenizer).parse(sampled, [], TOOLS)
        assert message == built_in
        assert renderer.parse(sampled, [message], TOOLS)["tool_calls"][0]["id"] == "call00002"

    def test_what_cannot_be_read_is_content(self, tokenizer_of):
        renderer = Renderer(tokenizer_of("chatml", MARKERS), tool_parser="vllm:hermes")
        broken = renderer.parse([CALL, *b'{"name": ', END_CALL, END], [], TOOLS)
        assert broken == {"role": "assistant", "content": '<tool_call>{"name": </tool_call>'}
        assert "tool_calls" not in renderer.parse([CALL, *b'{"name": "f", "arguments": {}}', END_CALL, END])

    def test_a_parser_of_reasoning_goes_with_the_built_in_one_of_calls(self, tokenizer_of):
        renderer = Renderer(tokenizer_of("chatml", MARKERS), reasoning_parser="vllm:qwen3")
        message = renderer.parse([THINK, *b"hm", END_THINK, CALL, *b'{"name": "f"}', END_CALL, END], [], TOOLS)
        assert message["reasoning_content"] == "hm" and message["tool_calls"][0]["function"]["name"] == "f"
