"""What `molt-gym envs` shows, and that the documentation shows the same."""

from pathlib import Path

import pytest

import molt_gym
from molt_gym.adapters import suites
from molt_gym.listing import as_json, as_markdown, as_text, listing

DOCS = Path(__file__).parents[2] / "docs" / "envs.md"


def test_a_suite_is_one_line_with_how_to_see_more_or_how_to_get_it(monkeypatch):
    monkeypatch.setattr(suites, "SUITES", {
        "json": suites.Suite("json", "json", "json", "none", "Braces"),
        "moon": suites.Suite("moon", "moon", "moon", "none", "Craters")})
    monkeypatch.setattr("molt_gym.listing.SUITES", suites.SUITES)
    lines = as_text(listing()).splitlines()
    assert lines[-2].split("  ")[0] == "json/…-v0" and lines[-2].endswith("Braces  (`molt-gym envs json` lists them)")
    assert lines[-1].endswith("Craters  (not installed: pip install 'molt-gym[moon]')")
    found = as_json(listing())["suites"]
    assert [suite["installed"] for suite in found] == [True, False]
    assert listing("moon").problems == ["moon is not installed: pip install 'molt-gym[moon]'"]


def test_what_an_env_cannot_be_made_without_is_said():
    found = listing("openenv")
    assert as_text(found).splitlines() == [
        "openenv/Remote-v0  An env that an OpenEnv server runs, reached by its URL.  (openenv) needs url"]
    assert [env["needs"] for env in as_json(found)["envs"]] == [("url",)]
    assert not any(env.needs for env in listing().envs)


def test_a_suite_that_there_is_not_is_refused():
    with pytest.raises(molt_gym.UnknownEnv, match="suite: 'marbles' is none; write one of"):
        listing("marbles")


def test_the_table_in_the_documentation_is_the_one_that_the_command_makes():
    ours = [line for line in as_markdown(listing()).splitlines() if line.endswith(("| molt_gym |", "| gymnasium |"))]
    assert len(ours) > 10
    assert [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line in ours] == ours
