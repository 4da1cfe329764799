import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_gym.tokens import Failure, Row, RowRef, Trajectory, read_jsonl, write_jsonl
from molt_gym.tokens.trajectory import RowStats, json_line

ANY_TEXT = st.text(
    st.characters(codec=None) | st.characters(categories=["Cs", "Cc"]) | st.sampled_from("\u2028\u2029\x85")
)
ODD_LINES = "a\u2028b\u0085c\x0bd\x0ce"


def trajectory(text: str = "hello", **fields) -> Trajectory:
    return Trajectory(
        "CodeExec-v0",
        7,
        messages=[{"role": "user", "content": text}],
        rows=[Row([1, 2, 3], [0, 1, 1], [0.0, -0.25, -0.1], [-1, 4, 5])],
        reward=0.5,
        **fields,
    )


def test_records_with_odd_line_ends_are_read_back_equal(tmp_path):
    records = [trajectory(), trajectory(ODD_LINES), trajectory("\ud800 \x00 \ud83d\ude00")]
    assert len(ODD_LINES.splitlines()) == 5
    write_jsonl(tmp_path / "rollouts.jsonl", records)
    assert read_jsonl(tmp_path / "rollouts.jsonl") == records


@given(text=ANY_TEXT, key=ANY_TEXT)
def test_any_text_survives_json(text, key):
    record = trajectory(text, info={key: text}, failure=Failure("judge", text, text))
    line = record.to_json()
    assert "\n" not in line
    assert Trajectory.from_json(line.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")) == record


def test_text_is_written_as_ascii_that_any_tool_reads():
    assert trajectory("déjà \ud800\u2028").to_json().isascii()


def test_a_cut_last_line_is_dropped_with_a_warning_and_the_others_stay(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    records = [trajectory(), trajectory("é" * 20)]
    write_jsonl(path, records)
    whole = path.read_bytes()
    for length in range(whole.index(b"\n") + 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.warns(UserWarning, match=r"rollouts\.jsonl:2"):
            assert read_jsonl(path) == records[:1]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_jsonl(path, [trajectory(), trajectory()])
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_jsonl(path)) == 2


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"env": "a"}', b'{"env": NaN}', b"\xff"])
def test_a_corrupt_line_in_the_middle_is_named(tmp_path, line):
    path = tmp_path / "rollouts.jsonl"
    record = trajectory().to_json().encode()
    path.write_bytes(record + b"\n" + line + b"\n" + record + b"\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:2"):
        read_jsonl(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan"), np.array([1.0, math.nan])])
def test_a_number_that_is_none_is_not_written(value):
    with pytest.raises(ValueError):
        trajectory(info={"score": value}).to_json()


def test_numpy_numbers_are_written_as_plain_ones():
    info = {"a": np.float32(1.5), "b": np.int64(3), "c": np.arange(2), "d": np.bool_(True), "e": np.float64(0.1)}
    assert json.loads(trajectory(info=info).to_json())["info"] == {"a": 1.5, "b": 3, "c": [0, 1], "d": True, "e": 0.1}


def test_what_has_no_json_form_is_refused_with_a_remedy():
    with pytest.raises(TypeError, match="info"):
        trajectory(info={"object": object()}).to_json()


def test_a_row_whose_lists_differ_in_length_is_refused():
    with pytest.raises(ValueError, match=r"row\.logprobs"):
        Row([1, 2], [0, 1], [0.0], [-1, 0])


# Rows and records elsewhere

@pytest.mark.parametrize(("mask", "versions", "expected"), [
    ([0, 0], [-1, -1], RowStats(2, 0, 0, -1, 0)), ([], [], RowStats(0, 0, 0, -1, 0)),
    ([0, 1, 1, 0, 1], [-1, 4, 5, -1, 5], RowStats(5, 3, 2, 4, 14)), ([1, 0, 1, 1, 1], [9, -1, 0, 2, 2],
                                                                     RowStats(5, 4, 3, 0, 13))])
def test_a_row_tells_its_statistics(mask, versions, expected):
    assert Row([7] * len(mask), mask, [0.0] * len(mask), versions).stats == expected


def test_a_record_from_elsewhere_is_written_as_it_is_and_without_it_what_is_here(tmp_path):
    whole = trajectory(ODD_LINES)
    told = Trajectory("CodeExec-v0", 7, rows=[RowRef("there", 0, whole.rows[0].stats)], reward=0.5)
    told.record = lambda: json_line(whole)
    lost = Trajectory("CodeExec-v0", 7, rows=told.rows, reward=0.5)
    lost.record = lambda: None
    path = tmp_path / "rollouts.jsonl"
    write_jsonl(path, [whole, told, lost])
    one, two, three = path.read_bytes().splitlines(keepends=True)
    assert one == two and read_jsonl(path)[1] == whole
    assert read_jsonl(path)[2] == Trajectory("CodeExec-v0", 7, reward=0.5)
    assert told.fetched() == whole and lost.fetched() is lost and whole.fetched() is whole
