"""The byte-level BPE tokenizer of the tiny model, its ChatML template, and conversations as ids to train on.

Invariant: any text comes back from its ids unchanged. Only the size of the vocabulary splits a run of digits or
letters: numbers and words that are frequent in the texts it learnt from are single tokens, which a tiny model can copy.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from molt_gym.messages import Message, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["VOCABULARY", "Example", "encode_examples", "train_tokenizer"]

VOCABULARY = 768
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_WORDS = r" ?[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]+ ?|\s"
_HEADER = f"{START}assistant\n"
_TEMPLATE = (
    "{% for message in messages %}{{ '" + START + "' + message['role'] + '\n' + (message['content'] or '') + '" + END
    + "\n' }}{% endfor %}{% if add_generation_prompt %}{{ '" + START + "assistant\n' }}{% endif %}"
)


class Example(NamedTuple):
    """A conversation: its ids, and 1 for each id that the assistant said, its end of turn included."""

    ids: list[int]
    mask: list[int]


def train_tokenizer(conversations: Sequence[Sequence[Message]]) -> "PreTrainedTokenizerFast":
    """A tokenizer with 768 entries, learnt from the conversations."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        (f"{message['role']}\n{text_of(message)}" for conversation in conversations for message in conversation),
        trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, special_tokens=[END_OF_TEXT, START, END],
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=_TEMPLATE, eos_token=END, pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False)


def encode_examples(
    tokenizer: "PreTrainedTokenizerFast", conversations: Sequence[Sequence[Message]]
) -> list[Example]:
    """The ids that the chat template gives, encoded in one go, which is far faster than by the template."""
    pieces = [piece for conversation in conversations for piece in _pieces(conversation)]
    encoded = iter(tokenizer.backend_tokenizer.encode_batch([text for text, _ in pieces], add_special_tokens=False))
    examples = []
    for conversation in conversations:
        example = Example([], [])
        for _, said in _pieces(conversation):
            ids = next(encoded).ids
            example.ids.extend(ids)
            example.mask.extend([int(said)] * len(ids))
        examples.append(example)
    return examples


def _pieces(conversation: Sequence[Message]) -> Iterator[tuple[str, bool]]:
    """The rendered conversation, cut where the assistant begins and ends: (text, whether the assistant said it)."""
    for message in conversation:
        if message["role"] == "assistant":
            yield _HEADER, False
            yield text_of(message) + END, True
            yield "\n", False
        else:
            yield f"{START}{message['role']}\n{text_of(message)}{END}\n", False
