"""What supervised fine-tuning takes, how it names what it refuses, and which rollouts it keeps."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from molt_gym import ConfigError, image_part
from molt_gym.tokens import Failure, Renderer, Row, Trajectory, write_jsonl
from molt_gym.trainers.config import load_settings
from molt_gym.trainers.sft_config import SftConfig
from molt_gym.trainers.sft_data import Example, load_examples

PICTURE = image_part(np.zeros((4, 4, 3), np.uint8))
CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": None}}}


def row(reply: str = "seven", question: str = "What is 3 + 4?") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]}


@pytest.fixture
def load(renderer: Renderer) -> Callable[..., list[Example]]:
    def load(data: Any, *, left_out: Counter | None = None, limit: int = 1000, **options: Any) -> list[Example]:
        config = load_settings(SftConfig, {}, overrides=options)
        return load_examples(data, config, renderer, limit, Counter() if left_out is None else left_out)

    return load


Load = Callable[..., list[Example]]


def spelled(example: Example, renderer: Renderer) -> list[str]:
    """What is trained of each row."""
    return [renderer.decode([i for i, bit in zip(r.ids, r.mask, strict=True) if bit]) for r in example.rows]


def played(ids: list[int], reward: float | None, *, group: int = 0, **fields: Any) -> Trajectory:
    """A rollout whose one message is the text of its ids; the last two are sampled."""
    mask = [0] * (len(ids) - 2) + [1, 1]
    versions = [0 if bit else -1 for bit in mask]
    return Trajectory("Any-v0", group, group, rows=[Row(ids, mask, [-1.0 * bit for bit in mask], versions)],
                      reward=reward, **fields)


def test_rows_come_from_a_file_a_list_and_a_dataset(load: Load, renderer: Renderer, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [row("one"), row("two")]
    lines = tmp_path / "chats.jsonl"
    lines.write_text("".join(json.dumps(r) + "\n" for r in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "chats.parquet")
    (tmp_path / "folder").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "folder" / "train.parquet")
    expected = load(rows)
    for data in (tmp_path / "folder", lines, str(tmp_path / "chats.parquet"), datasets.Dataset.from_list(rows),
                 iter(rows)):
        assert load(data) == expected
    assert load([lines, lines]) == expected * 2
    with pytest.raises(ConfigError, match="dataset.split: 'test' .* of the file .*chats.parquet, which has none"):
        load(tmp_path / "chats.parquet", dataset__split="test")
    table = datasets.Dataset.from_list(rows).to_pandas()
    with pytest.raises(ConfigError, match=r"data\[0\]: got 'messages' .str.; write {'messages'"):
        load(table)
    assert [spelled(example, renderer) for example in expected] == [["one<|im_end|>"], ["two<|im_end|>"]]


def test_a_reply_without_weight_is_context_alone(load: Load, renderer: Renderer) -> None:
    chat = row("wrong")["messages"] + row("right")["messages"]
    whole, = load([{"messages": chat}])
    chat[1]["weight"], chat[3]["weight"] = 0, None
    example, = load([{"messages": chat}])
    assert example.rows[0].ids == whole.rows[0].ids and spelled(example, renderer) == ["right<|im_end|>"]
    chat[3]["weight"] = 0.5
    with pytest.raises(ConfigError, match=r"data\[0\].messages\[3\].weight: got 0.5; write 0"):
        load([{"messages": chat}])
    chat[3]["weight"] = 0.0
    with pytest.raises(ConfigError, match="no reply in them has anything to learn"):
        load([{"messages": chat}])


def test_columns_may_have_other_names(load: Load) -> None:
    chat = row("one")["messages"]
    assert load([{"talk": chat}], dataset__messages="talk") == load([row("one")])
    pair = {"q": "What is 3 + 4?", "a": "one"}
    assert load([pair], dataset__prompt="q", dataset__completion="a") == load([row("one")])
    with pytest.raises(ConfigError, match=r"data\[0\].messages: is missing; the columns are 'talk'; write dataset.me"):
        load([{"talk": chat}])
    with pytest.raises(ConfigError, match=r"data\[0\].a: got 3 \(int\); write text"):
        load([{"q": "x", "a": 3}], dataset__prompt="q", dataset__completion="a")


def test_tools_and_calls_may_be_spelled_as_datasets_do(load: Load) -> None:
    messages = [{"role": "user", "content": "3 + 4?", "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "7"}, {"role": "assistant", "content": "7"}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with pytest.warns(UserWarning, match="drops tools"):
        as_text, as_list = load([{"messages": messages, "tools": json.dumps([tool])},
                                 {"messages": messages, "tools": [tool]}])
    assert as_text == as_list and as_list.trained > 2


@pytest.mark.parametrize(("bad", "message"), [
    ({"messages": []}, r"data\[1\].messages: \[\]; write a list of at least one message"),
    ({"messages": "hello"}, r"data\[1\].messages: 'hello'; write a list"),
    ({"messages": [{"role": "robot", "content": "x"}]}, r"data\[1\].messages\[0\].role: 'robot' is none of system"),
    ({"messages": [{"role": "user", "content": 3}]}, r"data\[1\].messages\[0\].content: 3; write a string"),
    ({"messages": [{"role": "user", "content": "x"}]}, r"data\[1\].messages: no reply in them has anything to learn"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, r"data\[1\].messages\[0\].role: 'assistant' answers nothi"),
    ({**row(), "images": ["x.png"]}, r"data\[1\].messages\[0\].content\[0\]: x.png cannot be read"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                   {"role": "assistant", "content": "x"}]},
     r"data\[1\].messages\[0\].content\[0\]: x cannot be read"),
    ({"messages": [{"role": "user", "content": [PICTURE]}, {"role": "assistant", "content": "x"}]},
     r"data\[1\].messages\[0\].content\[0\].type: 'image_url'; only text parts can be written"),
    ({**row(), "messages": [{"role": "user", "content": [{"type": "image"}]}], "images": [PICTURE, PICTURE]},
     r"data\[1\].images: 2 for 1 parts of type 'image'"),
    ({"messages": [row()["messages"][0], {"role": "assistant", "content": None, "function_call": {"name": "add"}}]},
     r"data\[1\].messages\[1\].function_call: is the form before tool_calls; write those"),
    ({**row(), "tools": "{"}, r"data\[1\].tools: is no JSON"),
    ({**row(), "tools": [3]}, r"data\[1\].tools\[0\]: 3 is no tool schema"),
    (3, r"data\[1\]: got 3 \(int\); write {'messages'"),
])
def test_a_bad_row_is_refused_by_its_place_and_field(load: Load, bad: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load([row(), bad])


def test_a_bad_line_is_refused_by_its_number_and_a_cut_one_is_dropped(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    odd = row("a\u2028b\u0085c\x0bd\x0ce\x00\ud800")
    raw = json.dumps(odd, ensure_ascii=False).encode("utf-8", "surrogatepass")
    file.write_bytes(json.dumps(odd).encode() + b"\n" + raw + b"\n" + b'{"messages": [{"ro')
    with pytest.warns(UserWarning, match="chats.jsonl:3: dropped the last row"):
        first, second = load(file)
    assert first == second
    file.write_text(json.dumps(row()) + "\n{]\n")
    with pytest.raises(ConfigError, match="chats.jsonl:2: .* write one JSON object a line"):
        load(file)


def test_folders_that_hold_no_rows_are_refused(load: Load, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    SftConfig().to_toml(tmp_path / "run" / "config.toml")
    with pytest.raises(ConfigError, match="data: the run in .* has no rollouts; name one of train"):
        load(tmp_path / "run")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "rows.json").write_text("{]")
    with pytest.raises(ConfigError, match="data: .* cannot be loaded as a dataset"):
        load(tmp_path / "broken")


@pytest.mark.parametrize(("data", "message"), [
    ("nowhere.jsonl", "data: there is no file nowhere.jsonl"), ([], "data: nothing to learn from; give some rows"),
    (row(), "data: got {'messages'.*write a file, a list of rows"), (3, r"data: got 3 \(int\)"), ("", "data: got ''"),
])
def test_data_that_are_none_are_refused(load: Load, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(data)


def test_rows_that_are_too_long_are_refused_dropped_or_cut(load: Load) -> None:
    rows, left_out = [row("1"), row("2" * 100)], Counter()
    limit = len(load(rows)[0].rows[0].ids) + 4
    with pytest.raises(ConfigError, match=rf"data\[1\]: \d+ tokens are more than max_context = {limit}; write too_"):
        load(rows, limit=limit)
    assert load(rows, limit=limit, too_long="drop", left_out=left_out) == load(rows[:1])
    assert left_out["too long"] == 1
    short, cut = load(rows, limit=limit, too_long="cut", left_out=left_out)
    assert len(cut.rows[0].ids) == limit and cut.trained < 100 and left_out["cut"] == 1


def test_rollouts_are_trained_in_the_ids_that_were_sampled(load: Load, renderer: Renderer, tmp_path: Path) -> None:
    # These bytes would be fewer tokens if their text were encoded.
    ids = [renderer.render(row()["messages"])[0], *renderer.render([{"role": "user", "content": "x"}])[1:3], 50, 51, 52]
    trajectory = played(ids, 1.0, messages=[{"role": "user", "content": renderer.decode(ids[-3:])}])
    write_jsonl(tmp_path / "rollouts.jsonl", [trajectory])
    for data in ([trajectory], tmp_path / "rollouts.jsonl", tmp_path):
        (example,) = load(data)
        assert example.rows == trajectory.rows and example.trained == 2


def test_rollouts_without_a_token_that_can_be_scored_are_left_out(load: Load) -> None:
    left_out = Counter()
    idle = Trajectory("Any-v0", 0, rows=[Row([40, 41], [1, 0], [-1.0, 0.0], [0, -1])], reward=1.0)
    assert len(load([idle, played([40, 50, 51], 1.0)], left_out=left_out)) == 1
    assert left_out["nothing to train"] == 1


def test_rejection_sampling_keeps_what_is_good_enough_and_the_best_of_each_group(load: Load) -> None:
    rewards = [(0, 0.2), (0, 0.9), (0, 0.9), (1, 0.4), (1, None), (2, 0.1)]
    rollouts = [played([40, 50 + number, 51], reward, group=group) for number, (group, reward) in enumerate(rewards)]
    rollouts.append(played([40, 60, 51], 1.0, failure=Failure("timeout", "", "")))

    def kept(**options: Any) -> tuple[list[int], Counter]:
        left_out = Counter()
        examples = load(rollouts, left_out=left_out, **options)
        return [example.rows[0].ids[1] - 50 for example in examples], +left_out

    # What was recorded outside of an env has no reward.
    lost = {"failed": 1, "no reward": 1}
    assert kept() == ([0, 1, 2, 3, 4, 5], {"failed": 1})
    assert kept(rollouts__min_reward=0.4) == ([1, 2, 3], lost | {"reward too low": 2})
    assert kept(rollouts__best_of_group=1) == ([1, 3, 5], lost | {"not among the best": 2})
    assert kept(rollouts__best_of_group=1, rollouts__min_reward=0.3)[0] == [1, 3]
    with pytest.raises(ConfigError, match=r"\(left out: failed 1, no reward 1, reward too low 5\)"):
        kept(rollouts__min_reward=2.0)


def test_a_threshold_for_data_without_rollouts_is_refused(load: Load) -> None:
    almost = played([1, 2, 3], 0.7 + 0.1 + 0.1 + 0.1)
    assert almost.reward < 1 and len(load([almost], rollouts__min_reward=1.0)) == 1
    with pytest.raises(ConfigError, match="rollouts.min_reward: the data hold no rollouts"):
        load([row()], rollouts__min_reward=1.0)


@pytest.mark.parametrize("ids", [[40, 50, 51], [40, 10**9, 51]])
def test_rollouts_of_a_model_with_another_tokenizer_are_refused(load: Load, ids: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"data\[0\]: its ids do not spell its messages"):
        load([played(ids, 1.0, messages=[{"role": "user", "content": "something else"}])])
