"""What makes two tokenizers one, and what does not."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, MistralConfig, PreTrainedTokenizerBase

from molt_gym.trainers.same_tokenizer import difference, load_tokenizer

Changed = Callable[..., PreTrainedTokenizerBase]


@pytest.fixture
def changed(tiny_path: Path, tmp_path: Path) -> Changed:
    """The tiny model's tokenizer after `change` was let loose on its tokenizer.json."""

    def load(change: Callable[[dict[str, Any]], None]) -> PreTrainedTokenizerBase:
        AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path)
        file = tmp_path / "tokenizer.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
        return AutoTokenizer.from_pretrained(tmp_path)

    return load


def swap_merges(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


def swap_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]


def add_token(content: dict[str, Any]) -> None:
    content["added_tokens"].append({**content["added_tokens"][0], "id": 9999, "content": "<odd>"})


def strip_around_a_marker(content: dict[str, Any]) -> None:
    content["added_tokens"][1]["lstrip"] = True


@pytest.mark.parametrize(("change", "words"), [
    (swap_ids, "'A' is 36 there and 35 here"),
    (add_token, "'<odd>' is .* there and None here"),
    (swap_merges, r"merges: number 3 is \[.* there and \[.* here"),
    (strip_around_a_marker, r"'a <\|im_start\|> b<\|im_start\|>c' becomes \[.* there and \[.* here"),
    (lambda content: content.update(normalizer={"type": "NFKC"}), "becomes .* there and .* here"),
    (lambda content: content["pre_tokenizer"].update(add_prefix_space=True), "becomes .* there and .* here"),
    (lambda content: content["model"].update(ignore_merges=True), "ignore_merges: True there and None here"),
], ids=["ids", "added token", "merges", "marker", "normalizer", "pre-tokenizer", "option"])
def test_what_ids_mean_and_how_texts_are_cut_must_be_the_same(
    tiny_path: Path, changed: Changed, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    assert re.search(words, difference(AutoTokenizer.from_pretrained(tiny_path), changed(change)) or "")


def test_templates_roles_and_names_may_differ(tiny_path: Path, changed: Changed) -> None:
    other = changed(lambda content: content["model"]["vocab"].update(
        dict(reversed(list(content["model"]["vocab"].items())))))
    other.chat_template, other.eos_token, other.padding_side = "{{ messages }}", "<|endoftext|>", "left"
    assert difference(AutoTokenizer.from_pretrained(tiny_path), other) is None


def test_a_folder_with_the_files_of_mistral_common_too_gives_the_tokenizer_of_its_tokenizer_json(tiny_path, tmp_path):
    pytest.importorskip("mistral_common")
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.save_pretrained(tmp_path)
    MistralConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    loaded = load_tokenizer(tmp_path)
    assert loaded.is_fast and loaded.chat_template and difference(tokenizer, loaded) is None
