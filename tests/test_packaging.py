"""What is in the repository is what gets installed."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOMES = {"molt_gym": "molt_gym", "molt_gym.envs": "envs", "molt_gym.trainers": "trainers"}


def test_every_folder_with_code_is_an_installed_package():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for package, folder in HOMES.items():
        for file in (ROOT / folder).rglob("*.py"):
            inner = file.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *inner]))
    assert found == listed


def test_nothing_at_the_top_level_is_imported_by_a_generic_name():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == HOMES


def test_types_are_told_to_type_checkers():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-data"] == {"molt_gym": ["py.typed"]} and (ROOT / "molt_gym" / "py.typed").is_file()
