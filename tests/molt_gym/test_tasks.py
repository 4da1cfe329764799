"""Tasks from datasets: what is read, what is chosen of it, and what is refused, by its row and column."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_gym import ConfigError, EnvFailure, image_part, load_tasks

ROWS = [{"question": f"Is it {n}?", "answer": str(n), "level": ("easy", "hard")[n % 2]} for n in range(30)]
FIELDS = ("question", "answer")


def lines(rows):
    return "\n".join(map(json.dumps, rows))


def answers(tasks):
    return [int(task.text("answer")) for task in tasks]


@pytest.fixture
def write(tmp_path):
    """Writes the text of a file, or rows as lines, and gives its path."""

    def file(content, name="rows.jsonl"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else
                                      (content if isinstance(content, str) else lines(content)).encode())
        return str(tmp_path / name)

    return file


def saved(kind, folder):
    """Thirty rows in one of the forms that are read; its name, and whether it has splits of its own."""
    import datasets

    made, path = datasets.Dataset.from_list(ROWS), str(folder / f"rows.{kind}")
    if kind == "csv":
        (folder / "rows.csv").write_text("\ufeffquestion,answer,level\n" + "".join(
            f'"Is it {row["answer"]}?",{row["answer"]},{row["level"]}\n' for row in ROWS), encoding="utf-8")
    elif kind in ("jsonl", "json"):
        (folder / f"rows.{kind}").write_text(lines(ROWS) + "\n\n" if kind == "jsonl" else json.dumps(ROWS, indent=1))
    elif kind == "parquet":
        made.to_parquet(path)
    elif kind == "arrow":
        made.save_to_disk(path)
    else:
        parts = datasets.DatasetDict({"train": made.select(range(27)), "test": made.select(range(27, 30))})
        if kind == "splits":
            parts.save_to_disk(path)
        else:
            for name, part in parts.items():
                part.to_parquet(os.path.join(path, f"{name}.parquet"))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "splits", "hub"])
def test_each_form_gives_the_same_tasks_and_a_split_for_tests(kind, tmp_path):
    path = saved(kind, tmp_path)
    train, test = (load_tasks(path, split, fields=FIELDS) for split in ("train", "test"))
    assert answers(test) == ([27, 28, 29] if kind in ("splits", "hub") else [9, 19, 29])
    assert sorted(answers(train) + answers(test)) == list(range(30))
    assert train[3].text("question") == "Is it 3?" and train[3].get("level") == "hard"
    assert answers(load_tasks(path, dataset_split="test", fields=FIELDS)) == answers(test)
    if kind not in ("splits", "hub"):
        assert len(load_tasks(path, dataset_split="all", fields=FIELDS)) == 30
    with pytest.raises(ConfigError, match="validation"):
        load_tasks(path, dataset_split="validation", fields=FIELDS)


def test_columns_go_by_the_names_of_fields(write):
    path = write([{"q": "Why?", "extra": 1, "answer": "so"}])
    (task,) = load_tasks(path, fields=FIELDS, question_column="q", optional=("hint",), dataset_split="all")
    assert (task.text("question"), task.get("hint"), task.get("extra")) == ("Why?", None, 1)
    (task,) = load_tasks(path, fields={"question": "q"}, dataset_split="all")
    assert task.text("question") == "Why?"
    (task,) = load_tasks(path, fields="answer", optional="hint", hint_column="extra", dataset_split="all")
    assert (task.text("answer"), task.get("hint")) == ("so", 1)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(10, 60), seed=st.integers(0, 2**40), other=st.integers(0, 2**40),
       low=st.integers(0, 3), high=st.integers(0, 3))
def test_splits_share_nothing_and_a_seed_fixes_their_order_alone(tmp_path_factory, count, seed, other, low, high):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(lines([{"answer": str(n), "difficulty": n % 4} for n in range(count)]))
    for difficulty in (None, {"min": low, "max": high}, [low, high]):
        wanted = {None: {0, 1, 2, 3}}.get(difficulty) if difficulty is None else (
            set(range(low, high + 1)) if isinstance(difficulty, dict) else {low, high})
        for split in ("train", "test"):
            expected = [n for n in range(count) if (n % 10 == 9) == (split == "test") and n % 4 in wanted]

            def load(order, split=split, difficulty=difficulty):
                return answers(load_tasks(path, split, fields=["answer"], dataset_seed=order, difficulty=difficulty))

            if not expected:
                with pytest.raises(ConfigError, match="difficulty: no row"):
                    load(seed)
                continue
            assert load(None) == expected
            assert load(seed) == load(seed) and sorted(load(seed)) == sorted(load(other)) == expected


def test_seeds_shuffle(write):
    path = write(ROWS)
    orders = {tuple(answers(load_tasks(path, fields=FIELDS, dataset_seed=seed))) for seed in range(5)}
    assert len(orders) == 5
    tasks = load_tasks(path, fields=FIELDS)
    assert answers(tasks[2:4]) == [2, 3] and answers([tasks[-1]]) == [28]


@pytest.mark.parametrize(("difficulty", "expected"), [
    ("hard", [1, 3]), (["easy", "hard"], [0, 1, 2, 3]), (("easy",), [0, 2])])
def test_rows_are_chosen_by_names_of_difficulties(write, difficulty, expected):
    tasks = load_tasks(write(ROWS[:4]), fields=FIELDS, difficulty=difficulty, difficulty_column="level")
    assert answers(tasks) == expected


def test_numbers_in_a_file_of_texts_are_numbers(write):
    path = write("answer,difficulty\n1,2.5\n2,3\n3,10\n", "rows.csv")
    assert answers(load_tasks(path, fields=["answer"], difficulty={"min": 3})) == [2, 3]
    assert answers(load_tasks(path, fields=["answer"], difficulty=10)) == [3]


def test_columns_without_a_name_are_left_alone(write):
    path = write("question,answer,,\nIs it 1?,1,,\n", "rows.csv")
    assert answers(load_tasks(path, fields=FIELDS)) == [1]


def test_what_an_env_does_to_a_value_changes_no_later_task(write):
    path = write([{"messages": [{"role": "user"}]}])
    load_tasks(path, fields="messages")[0].get("messages").append("mine")
    load_tasks(path, fields="messages")[0].values["messages"].append("mine")
    assert load_tasks(path, fields="messages")[0].get("messages") == [{"role": "user"}]


def test_a_file_that_changed_is_read_anew(write):
    assert len(load_tasks(write(ROWS[:3]), fields=FIELDS)) == 3
    assert len(load_tasks(write(ROWS[:5]), fields=FIELDS)) == 5


def test_images_are_parts_of_messages_wherever_they_come_from(write, tmp_path):
    datasets = pytest.importorskip("datasets")
    dot = image_part(np.zeros((4, 4, 3), np.uint8))
    uri = dot["image_url"]["url"]
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "dot.png")
    path = write([{"image": uri}, {"image": ["dot.png", {"path": "dot.png", "bytes": None}]}, {"image": None}])
    assert [len(task.images("image")) for task in load_tasks(path, fields=["image"])] == [1, 2, 0]
    assert load_tasks(path, fields=["image"])[0].images("image") == [dot]
    made = datasets.Dataset.from_dict({"image": [str(tmp_path / "dot.png")]}).cast_column("image", datasets.Image())
    made.to_parquet(str(tmp_path / "rows.parquet"))
    (part,) = load_tasks(tmp_path / "rows.parquet", fields=["image"])[0].images("image")
    assert part["image_url"]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize("image", ["nowhere.png", "https://example.com/a.png", "data:image/png;base64,AAAA", 3,
                                   {"bytes": None, "path": None}])
def test_what_is_no_image_is_refused_by_row_and_column(write, image):
    (_, task) = load_tasks(write([{"figure": None}, {"figure": [image]}]), fields=["image"], image_column="figure")
    with pytest.raises(EnvFailure, match=r"task: .*rows.jsonl, row 1: figure: .*; write an image, or a list of them"):
        task.images("image")


def test_a_row_without_text_is_refused_by_its_number_in_the_dataset(write):
    tasks = load_tasks(write([*ROWS[:10], {"question": "", "answer": 3}]), fields=FIELDS, dataset_seed=4)
    task = next(task for task in tasks if task.get("answer") == 3)
    for column, value in (("question", "''"), ("answer", "3")):
        with pytest.raises(EnvFailure, match=f"task: .*rows.jsonl, row 10: {column} is {value}; write text"):
            task.text(column)


@pytest.mark.parametrize(("content", "options", "message"), [
    ("", {}, "has no rows$"),
    ('{"question": 1}', {"split": "test"}, "has no rows for split 'test'; try dataset_split='all'"),
    ('{"question": "p", "code": "c"}', {}, "answer_column: .* no column 'answer'; choose from question, code"),
    (ROWS[:1], {"question_column": "q"}, "question_column: .* no column 'q'; choose from question, answer, level"),
    (ROWS[:1], {"difficulty": 1}, "difficulty_column: .* no column 'difficulty'"),
    (ROWS[:4], {"difficulty": 1, "difficulty_column": "level"}, "difficulty: no row of .* has 1; there are easy, hard"),
    (ROWS[:4], {"difficulty": {"min": 1}, "difficulty_column": "level"}, "row 0: difficulty is 'easy', no number"),
    (ROWS[:4], {"difficulty": {"from": 1}, "difficulty_column": "level"}, "write numbers, as {'min': 2, 'max': 4}"),
    (ROWS[:4], {"difficulty": {"max": "2"}, "difficulty_column": "level"}, "write numbers, as {'min': 2, 'max': 4}"),
    (ROWS[:1], {"dataset_subset": "main"}, "dataset_subset: 'main'; .* has none, leave it out"),
    (ROWS[:1], {"split": "dev"}, "split: 'dev'; write one of 'train', 'test'"),
    ('{"a": 1}\n{"b"', {}, "line 2"),
    ("[1]", {}, "line 1: .* is no object"),
    ('{"question": ' + "[" * 100_000, {}, "line 1: "),
    (b"\xff\xfe{}", {}, "line 1: "),
])
def test_a_dataset_that_cannot_serve_is_refused(write, content, options, message):
    with pytest.raises(ConfigError, match=message):
        load_tasks(write(content), fields=FIELDS, **options)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("rows.json", "[{}, 3]", "row 1: 3 is no object"),
    ("rows.json", "[{}", "rows.json: "),
    ("rows.csv", "question,answer\na\n", "row 0: not 2 values"),
    ("rows.csv", "question,answer,question\na,b,c\n", "the header has question more than once"),
    ("rows.jsonl.gz", b"\x1f\x8b", "a file of a kind that is not read; write one that ends in .jsonl, "),
    ("rows.csv", "question,answer\na,b\na,b,c\n", "row 1: not 2 values"),
    ("rows.csv", 'question,answer\n"a,b\n', "rows.csv: unexpected end of data"),
    ("rows.csv", b"question,answer\n\xff,b\n", "other encodings than UTF-8"),
    ("rows.csv", "question,answer\n" + "a" * 200_000 + ",b\n", "longer values.*are for .jsonl"),
    ("rows.parquet", "PAR1 or not", "cannot load"),
])
def test_a_broken_file_is_refused(write, name, content, message):
    with pytest.raises(ConfigError, match=message):
        load_tasks(write(content, name), fields=FIELDS)


def test_what_is_nowhere_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="there is no file 'nowhere.jsonl'"):
        load_tasks("nowhere.jsonl", fields=FIELDS)
    for nothing in ("", None):
        with pytest.raises(ConfigError, match=f"dataset: {nothing!r}; write the path of a file"):
            load_tasks(nothing, fields=FIELDS)
    with pytest.raises(ConfigError, match="dataset: cannot load .*nowhere"):
        load_tasks(str(tmp_path / "nowhere"), fields=FIELDS)


def test_an_unknown_keyword_is_refused_with_those_that_there_are(write):
    with pytest.raises(TypeError, match="unknown keyword prompt_column; write one of dataset_split, .*question_column"):
        load_tasks(write(ROWS), fields=FIELDS, prompt_column="question")
