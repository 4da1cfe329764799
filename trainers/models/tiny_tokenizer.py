"""The byte-level BPE tokenizer of the tiny model, its ChatML template, and conversations as ids to train on.

Tools are listed by name and parameters, and called in the form of Hermes. The two markers of a call are in the
vocabulary only if the conversations hold calls, and those of an image only if they hold images.

Invariant: any text comes back from its ids unchanged. Only the size of the vocabulary splits a run of digits or
letters: numbers and words that are frequent in the texts it learnt from are single tokens, which a tiny model can copy.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from molt_gym.images import ImageSpan, images_of
from molt_gym.messages import Message, text_of
from molt_gym.tokens.parsing import join_tool_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["VISION_MARKERS", "VOCABULARY", "Example", "encode_examples", "train_tokenizer"]

VOCABULARY = 768
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_WORDS = r" ?[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]+ ?|\s"
_HEADER = f"{START}assistant\n"
_CALL_MARKERS = ("<tool_call>", "</tool_call>")
VISION_MARKERS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_TEMPLATE = """\
{%- if tools %}{% set listed %}{{ 'tools: ' }}{% for tool in tools %}
{{- tool.function.name }}({{ (tool.function.parameters or {}).properties | join(', ') }})
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{% endset %}
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\n' + listed + '<|im_end|>\\n' }}{% endif %}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if tools and loop.first and message.role == 'system' %}{{ '\\n' + listed }}{% endif %}
{%- for call in message.tool_calls or () %}{{ '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": ' }}{{ call.function.name | tojson }}{{ ', "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_PARTS = """\
{%- macro parts(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content or () %}
{{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}{% endif %}
{%- endmacro %}"""
_SEEING_TEMPLATE = _PARTS + _TEMPLATE.replace("(message.content or '')", "parts(message.content)")

Tools = Sequence[Mapping[str, Any]]


class Example(NamedTuple):
    """A conversation: its ids, 1 for each id that the assistant said, its end of turn included, and its images."""

    ids: list[int]
    mask: list[int]
    images: Sequence[ImageSpan] = ()


def train_tokenizer(conversations: Sequence[Sequence[Message]], tools: Tools = ()) -> "PreTrainedTokenizerFast":
    """A tokenizer with 768 entries, learnt from the conversations, in which `tools` are offered."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    calls = any(message.get("tool_calls") for conversation in conversations for message in conversation)
    markers = [AddedToken(marker, normalized=False) for marker in _CALL_MARKERS if calls]
    sees = any(map(images_of, conversations))
    backend.train_from_iterator(
        (text for conversation in conversations for text in _texts(conversation, tools)),
        trainers.BpeTrainer(vocab_size=VOCABULARY - len(markers), show_progress=False,
                            special_tokens=[END_OF_TEXT, START, END, *(VISION_MARKERS if sees else ())],
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    backend.add_tokens(markers)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=_SEEING_TEMPLATE if sees else _TEMPLATE, eos_token=END,
        pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False)


def encode_examples(
    tokenizer: "PreTrainedTokenizerFast", conversations: Sequence[Sequence[Message]], tools: Tools = ()
) -> list[Example]:
    """The ids that the chat template gives, encoded in one go, which is far faster than by the template; no images."""
    pieces = [list(_pieces(conversation, tools)) for conversation in conversations]
    texts = [text for conversation in pieces for text, _ in conversation]
    encoded = iter(tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False))
    examples = []
    for conversation in pieces:
        example = Example([], [])
        for _, said in conversation:
            ids = next(encoded).ids
            example.ids.extend(ids)
            example.mask.extend([int(said)] * len(ids))
        examples.append(example)
    return examples


def _pieces(conversation: Sequence[Message], tools: Tools) -> Iterator[tuple[str, bool]]:
    """The rendered conversation, cut where the assistant begins and ends: (text, whether the assistant said it)."""
    for role, text in _turns(conversation, tools):
        if role == "assistant":
            yield _HEADER, False
            yield text + END, True
            yield "\n", False
        else:
            yield f"{START}{role}\n{text}{END}\n", False


def _texts(conversation: Sequence[Message], tools: Tools) -> Iterator[str]:
    """What a tokenizer learns from; the markers, which are entries of their own, would be learnt in pieces."""
    for role, text in _turns(conversation, tools):
        for marker in _CALL_MARKERS:
            text = text.replace(marker, "")
        yield f"{role}\n{text}"


def _turns(conversation: Sequence[Message], tools: Tools) -> Iterator[tuple[str, str]]:
    """Role and text of each message as the template writes it, that of the tools included."""
    listed = "tools: " + ", ".join(map(_signature, tools)) if tools else ""
    if tools and conversation[0]["role"] != "system":
        yield "system", listed
    for number, message in enumerate(conversation):
        text = text_of(message)
        if tools and number == 0 and message["role"] == "system":
            text += f"\n{listed}"
        for call in message.get("tool_calls") or ():
            text = join_tool_call(text, call["function"]["name"], call["function"]["arguments"])
        yield message["role"], text


def _signature(tool: Mapping[str, Any]) -> str:
    function = tool["function"]
    return f"{function['name']}({', '.join((function.get('parameters') or {}).get('properties') or ())})"
