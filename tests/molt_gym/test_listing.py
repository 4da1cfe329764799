"""What `molt-gym envs` shows, and that the documentation shows the same."""

import subprocess
import sys
from pathlib import Path

import pytest

import molt_gym
from molt_gym import cli
from molt_gym.adapters import suites
from molt_gym.listing import as_json, as_text, listing

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
    assert cli.main(["envs", "moon"]) == 1


def test_what_an_env_cannot_be_made_without_is_said():
    found = listing("openenv")
    assert as_text(found).splitlines() == [
        "openenv/Remote-v0  An env that an OpenEnv server runs, reached by its URL.  (openenv) needs url"]
    assert [env["needs"] for env in as_json(found)["envs"]] == [("url",)]
    assert not any(env.needs for env in listing().envs)


def test_a_suite_that_there_is_not_is_refused():
    with pytest.raises(molt_gym.UnknownEnv, match="suite: 'marbles' is none; write one of"):
        listing("marbles")


@pytest.mark.slow
@pytest.mark.skipif(not all(suite.installed for suite in suites.SUITES.values()), reason="a suite is not installed")
def test_the_tables_in_the_documentation_are_those_that_the_command_writes():
    # In a process of its own, as other tests register envs here.
    command = [sys.executable, "-m", "molt_gym", "envs", "--markdown"]
    written = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "| `CodeExec-v0` |" in written and "| `reasoning_gym/…-v0` |" in written
    assert DOCS.read_text(encoding="utf-8").partition("`molt-gym envs --markdown`.\n\n")[2] == written


def test_the_table_of_one_suite_has_all_its_ids(capsys):
    assert cli.main(["envs", "openenv", "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| `openenv/Remote-v0` | An env that an OpenEnv server runs, reached by its URL. (needs `url`) | openenv |"]
