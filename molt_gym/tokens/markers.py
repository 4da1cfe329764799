"""Control markers: the added tokens of a tokenizer that steer the model, such as `<|im_end|>` or `<think>`.

Invariant: a control id in a prompt was written by the chat template, never by text that spells it. Text is shielded
before the template sees it: every marker in it, and every edge that could complete one together with its surroundings,
gives way to a private-use character that occurs nowhere else. What the tokenizer then recognises as a marker is the
template's; all else gets its characters back and is encoded by a tokenizer that knows no added tokens.

Added tokens that are mere vocabulary (words, white space) are no markers and work in any text as the library does.
"""

import functools
import math
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from ..errors import PromptTooLong
from .spellers import PLACES, speller

_PRIVATE_USE = range(0xE000, 0xF900)
_PRIVATE_ESCAPE = re.compile(r"\\u([eE][\da-fA-F]{3}|[fF][0-8][\da-fA-F]{2})")
_CACHED_PIECE = 2000
_CACHED_TEXT = 20_000

# Characters that other threads may have to wait for.
_STEP = 10_000

# Characters that Unicode's NFC may make one of.
_MOST_COMPOSED = 4

# Templates compare tool schemas with these words, so they reach the template as they are.
_SCHEMA_WORDS = frozenset(
    "type function name description parameters properties required items enum default arguments id text "
    "object string number integer boolean array null true false".split()
)


class Markers:
    """Finds, shields, encodes and decodes the markers of one tokenizer.

    ids: id of every marker by its text. special: the markers that the tokenizer flags special.
    """

    def __init__(self, backend: Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        markers = {i: token for i, token in added.items() if token.special or re.search(r"[^\w\s]", token.content)}
        self.ids = {token.content: i for i, token in markers.items()}
        self._text_of = {i: text for text, i in self.ids.items()}
        self._backend = backend
        self._splitter = _Scanner(added, backend.normalizer)
        plain = {i: AddedToken(token.content, normalized=token.normalized) for i, token in markers.items()}
        self.all = _MarkerSet(plain, backend.normalizer)
        self.special = _MarkerSet({i: plain[i] for i, token in markers.items() if token.special}, backend.normalizer)
        unknown = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
        self._control = frozenset(self._text_of) - {unknown}
        self._added = frozenset(added)
        self._spellers = {after: speller(backend, after) for after in PLACES}
        self._cached_piece = functools.lru_cache(maxsize=4096)(self._encode_piece)
        self._cached_spans = functools.lru_cache(maxsize=256)(self._find_spans)

    def encode(
        self, text: str, shield: "Shield", *, after: Sequence[int] | None = None, limit: float = math.inf
    ) -> list[int]:
        """Ids of rendered text. `after`: ids that it follows; None if it begins a sequence.

        Raises:
            PromptTooLong: it is plain without encoding it that the text takes more than `limit` ids.
        """
        if len(text) > limit and len(text) > limit * self._widest:
            fewest = max(math.ceil(len(text) / self._widest), 1)
            raise PromptTooLong(
                f"the prompt: its {len(text)} new characters take at least {fewest} tokens, and there is room for "
                f"{max(limit, 0)}; shorten the messages"
            )
        ids: list[int] = []
        position, place = 0, "nothing" if after is None else "token" if {*after[-1:]} & self._added else "text"
        for marker, start, end in [*self._splitter.find(text), (None, len(text), len(text))]:
            if start > position:
                piece = shield.lift(text[position:start])
                encode = self._cached_piece if len(piece) < _CACHED_PIECE else self._encode_piece
                ids.extend(encode(piece, place))
            if marker is not None:
                ids.append(marker)
            position, place = end, "token"
        return ids

    def leading(self, text: str) -> tuple[int, int] | None:
        """The added token that rendered text begins with, white space aside, and where it ends."""
        head = len(text) - len(text.lstrip()) + self._splitter.longest if self._splitter.literal else None
        marker, start, end = next(iter(self._splitter.find(text[:head])), (0, 0, 0))
        return (marker, end) if end and not text[:start].strip() else None

    def spans(self, text: str, *, special_only: bool = False) -> Sequence[tuple[int, int]]:
        """Where markers, or those flagged special, are spelled out."""
        return (self._cached_spans if len(text) < _CACHED_TEXT else self._find_spans)(text, special_only)

    def segments(self, ids: Sequence[int]) -> Iterator[tuple[bool, str]]:
        """The text of ids, cut at control ids: (whether it is one, text). Bytes that are no UTF-8 become U+FFFD."""
        run: list[int] = []
        for i in ids:
            if i in self._text_of:
                if run:
                    yield False, self._backend.decode(run, skip_special_tokens=False)
                yield True, self._text_of[i]
                run = []
            else:
                run.append(i)
        if run:
            yield False, self._backend.decode(run, skip_special_tokens=False)

    @functools.cached_property
    def _widest(self) -> float:
        """The most characters that one id may stand for; infinite where the tokenizer may drop some."""
        backend = self._backend
        steps = bytes(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer is not None else b""
        by_bytes = isinstance(backend.model, models.BPE) and b'"ByteLevel"' in steps and b'"Removed"' not in steps
        composes = isinstance(backend.normalizer, normalizers.NFC)
        if not by_bytes or not self._splitter.literal or not (composes or backend.normalizer is None):
            return math.inf
        vocabulary = backend.get_vocab()
        if any(character not in vocabulary for character in pre_tokenizers.ByteLevel.alphabet()):
            return math.inf
        return max(map(len, vocabulary)) * (_MOST_COMPOSED if composes else 1)

    def _find_spans(self, text: str, special_only: bool) -> Sequence[tuple[int, int]]:
        markers = self.special if special_only else self.all
        return [(start, end) for _, start, end in markers.find(text)]

    def _encode_piece(self, text: str, after: str) -> tuple[int, ...]:
        known = self._spellers[after]
        # `encode` would hold the interpreter's lock all the while, and takes longer.
        ids = known.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._control.isdisjoint(ids):
            return tuple(ids)
        (encoding,) = known.encode_batch([text], add_special_tokens=False)
        start, end = next(span for i, span in zip(ids, encoding.offsets, strict=True) if i in self._control)
        if end - start < 2:
            raise ValueError(f"text {text[start:end]!r}: the tokenizer can only write it as a control token")
        return self._encode_piece(text[: start + 1], after) + self._encode_piece(text[start + 1 :], "text")


class Shield:
    """The private-use stand-ins of one request; `data` and `reserved` are everything they must not occur in."""

    def __init__(self, markers: Markers, *data: Any, reserved: Container[str] = ()) -> None:
        self._markers = markers
        self._free = _unused(data, reserved)
        self._stand_ins: dict[str, str] = {}
        self._table: dict[str, str] = {}

    def sentinel(self) -> str:
        """A character that occurs nowhere else."""
        if (character := next(self._free, None)) is None:
            raise ValueError("messages: the text uses every private-use character (U+E000 to U+F8FF); leave some out")
        return character

    def text(self, text: str, *, special_only: bool = False) -> str:
        """Text in which nothing is, or could become, a marker. `special_only`: leave those not flagged special."""
        markers = self._markers.special if special_only else self._markers.all
        text = _without_lone_surrogates(text)
        text = self._replace(text, self._markers.spans(text, special_only=special_only))
        return self._replace(text, markers.dangling(text))

    def whole(self, text: str) -> str:
        """Text in which no marker is spelled out."""
        return self._replace(text, self._markers.spans(text))

    def value(self, value: Any) -> Any:
        """A copy of a JSON value with all its strings and keys shielded."""
        if isinstance(value, str):
            return value if value in _SCHEMA_WORDS else self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list | tuple) else value

    def lift(self, value: Any) -> Any:
        """Text, or the text in a JSON value, as it was before; also where a template wrote it as an escape in JSON."""
        if not self._table:
            return value
        if isinstance(value, dict):
            return {key: self.lift(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.lift(item) for item in value]
        if not isinstance(value, str):
            return value
        escaped = "\\u" in value
        for character, raw in self._table.items():
            value = value.replace(character, raw)
            if escaped:
                value = value.replace(f"\\u{ord(character):04x}", raw)
        return value

    def _replace(self, text: str, spans: Iterable[tuple[int, int]]) -> str:
        parts, position = [], 0
        for start, end in spans:
            parts += [text[position:start], self._stand_in(text[start:end])]
            position = end
        return "".join([*parts, text[position:]]) if parts else text

    def _stand_in(self, raw: str) -> str:
        if raw not in self._stand_ins:
            self._stand_ins[raw] = character = self.sentinel()
            self._table[character] = raw
        return self._stand_ins[raw]


class _Scanner:
    """The library's own search for added tokens: leftmost, longest, with its rules on white space and normal forms."""

    def __init__(self, tokens: dict[int, AddedToken], normalizer: Any) -> None:
        self._scanner = Tokenizer(models.WordLevel({"\0": 0}, unk_token="\0"))
        if normalizer is not None:
            self._scanner.normalizer = normalizer
        self._scanner.add_tokens(list(tokens.values()))
        self._ids = {self._scanner.token_to_id(token.content): i for i, token in tokens.items()}
        exact = normalizer is None or not any(token.normalized for token in tokens.values())
        self._firsts = {token.content[:1] for token in tokens.values()} if exact else None
        self._spelled = {token.content: i for i, token in tokens.items()}
        self.longest = max(map(len, self._spelled), default=0)
        longest_first = sorted(map(re.escape, self._spelled), key=len, reverse=True)
        literal = exact and not any(token.lstrip or token.rstrip or token.single_word for token in tokens.values())
        self.literal = literal and len({token.normalized for token in tokens.values()}) == 1
        self._pattern = re.compile("|".join(longest_first)) if self.literal else None

    def find(self, text: str) -> list[tuple[int, int, int]]:
        """(id, start, end) of every added token in the text."""
        if self._firsts is not None and not any(first in text for first in self._firsts):
            return []
        if self._pattern is not None:
            return list(self._search(self._pattern, text))
        (encoding,) = self._scanner.encode_batch([text], add_special_tokens=False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [(self._ids[i], start, end) for i, (start, end) in found if i in self._ids]

    def _search(self, pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int, int]]:
        """In steps, between which other threads have their turn."""
        position = 0
        for stop in range(_STEP, len(text) + _STEP, _STEP):
            while (match := pattern.search(text, position, stop + self.longest)) and match.start() < stop:
                position = match.end()
                yield self._spelled[match[0]], match.start(), position
            position = max(position, stop)


class _MarkerSet(_Scanner):
    """Markers whose spelling is searched in text."""

    def __init__(self, tokens: dict[int, AddedToken], normalizer: Any) -> None:
        super().__init__(tokens, normalizer)
        texts = [token.content for token in tokens.values()]
        self._prefixes = _grouped({text[:k] for text in texts for k in range(1, len(text))}, -1)
        self._suffixes = _grouped({text[k:] for text in texts for k in range(1, len(text))}, 0)
        self._joined = "\0".join(texts)

    def dangling(self, text: str) -> Iterator[tuple[int, int]]:
        """Spans of one character to shield so that no neighbour of the text can complete a marker with it."""
        core = text.strip()
        if not core:
            return
        start = text.index(core)
        end = start + len(core)
        inside = len(core) < self.longest and core in self._joined
        if inside or core.startswith(self._suffixes.get(core[0], ())):
            yield start, start + 1
            start += 1
        if start < end and core.endswith(self._prefixes.get(core[-1], ())):
            yield end - 1, end


def _grouped(texts: Iterable[str], place: int) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for text in texts:
        groups[text[place]] = (*groups.get(text[place], ()), text)
    return groups


def private_use(data: Any) -> frozenset[str]:
    """The private-use characters in data, also those that are spelled as JSON escapes."""
    # ascii() shows a character and its JSON escape spelled out in text alike.
    return frozenset(chr(int(code, 16)) for code in _PRIVATE_ESCAPE.findall(ascii(data)))


def _unused(data: Any, reserved: Container[str]) -> Iterator[str]:
    used = private_use(data)
    yield from (free for free in map(chr, _PRIVATE_USE) if free not in used and free not in reserved)


def _without_lone_surrogates(text: str) -> str:
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        pass
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
