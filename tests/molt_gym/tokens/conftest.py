"""A toy byte-level tokenizer, chat templates of several families, and an engine that plays a script."""

import functools

import pytest
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from molt_gym.tokens import Generation, Renderer

# The time of an example says nothing on a machine that others use too.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|bos|>"]
PLAIN = ["<think>", "</think>"]
MERGES = ["\n\n", "he", "ll", "llo", "hello", "ok"]
PARTS = {
    "\n\n": ("\n", "\n"),
    "he": ("h", "e"),
    "ll": ("l", "l"),
    "llo": ("ll", "o"),
    "hello": ("he", "llo"),
    "ok": ("o", "k"),
}

CHATML = """
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' -}}{% endif -%}
"""

# Reasoning of assistant messages before the last user message is dropped.
TOY = """
{%- set turn = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set turn.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set content = message.content -%}
  {%- if message.role == 'assistant' and loop.index0 < turn.last_user and '</think>' in content -%}
    {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
  {%- endif -%}
  {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' -}}{% endif -%}
"""

# Knows tools, tool calls and reasoning; shows reasoning since the last user message only.
TOOLS = """
{%- if tools -%}
  {{- '<|im_start|>system\nTools:' -}}
  {%- for tool in tools %}{{- '\n' + tool | tojson -}}{% endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- set turn = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set turn.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if message.reasoning_content and loop.index0 > turn.last_user -%}
      {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}
    {%- endif -%}
    {{- message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '\n' if message.content or not loop.first else '' -}}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson -}}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' -}}{% endif -%}
"""

# A turn has no end marker: the marker of the next role ends it.
ROLE_MARKERS = """
{%- for message in messages -%}
{{- '<|' + {'tool': 'observation'}.get(message.role, message.role) + '|>\n' + message.content -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' -}}{% endif -%}
"""

TEMPLATES = {
    "chatml": CHATML,
    "toy": TOY,
    "tools": TOOLS,
    "role markers": ROLE_MARKERS,
    "bos": "{{- bos_token -}}" + CHATML,
    "trimming": CHATML.replace("message.content", "message.content | trim"),
    "nothing after a turn": CHATML.replace("<|im_end|>\n", "<|im_end|>"),
    "no markers": "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    "opens thinking": CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"),
}


def byte_characters() -> dict[int, str]:
    """The characters that byte-level tokenizers write bytes as."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


@functools.cache
def make_tokenizer(template: str, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Ids 0-255 bytes, 256-258 special, 259-260 added but not special, 261-266 merges, then `extra` markers."""
    characters = byte_characters()

    def spelled(text: str) -> str:
        return "".join(characters[byte] for byte in text.encode())

    markers = [*SPECIAL, *PLAIN]
    tokens = [*(characters[byte] for byte in range(256)), *markers, *map(spelled, MERGES), *extra]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    merges = [(spelled(PARTS[merge][0]), spelled(PARTS[merge][1])) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(m, special=m in SPECIAL or "|" in m, normalized=False) for m in [*markers, *extra]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=TEMPLATES.get(template, template),
    )


@functools.cache
def make_renderer(template: str = "toy", extra: tuple[str, ...] = ()) -> Renderer:
    if template == "tools":
        extra = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    if template == "role markers":
        extra = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
    return Renderer(make_tokenizer(template, extra))


class ScriptedEngine:
    """Returns what it is told to, and remembers what it was given."""

    def __init__(self) -> None:
        self.received: list[list[int]] = []
        self.logprob = 0.0

    def generate(self, ids: list[int], sampled: list[int], finish_reason: str = "stop", version: int = 0) -> Generation:
        """Every sampled id gets a log-probability of its own, so that a test can tell it from all others."""
        self.received.append(list(ids))
        logprobs = []
        for _ in sampled:
            self.logprob -= 1.0
            logprobs.append(self.logprob)
        return Generation(list(sampled), logprobs, [version] * len(sampled), finish_reason)


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    return TEMPLATES


@pytest.fixture(scope="session")
def tokenizer_of():
    return make_tokenizer


@pytest.fixture(scope="session")
def renderer_of():
    return make_renderer


@pytest.fixture(scope="session")
def prompt_ids() -> list[int]:
    """The prompt for one user message "ok" in the toy template, with the header of the reply."""
    return [256, *b"user\n", 266, 257, 10, 256, *b"assistant\n"]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="session")
def new_engine():
    return ScriptedEngine
