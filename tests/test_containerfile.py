"""The Containerfile is one, and installs what the lock, the project and the documents say."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Containerfile").read_text()
INSTRUCTIONS = [line.split(maxsplit=1) for line in
                re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines() if line.strip()]


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==([\w.]+)$", text, re.MULTILINE))


LOCK = pins((ROOT / "slurm" / "gpu.lock").read_text())
BESIDE = dict(re.findall(r"([\w-]+)==([\w.]+)", TEXT))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [Requirement(text) for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
          for text in texts]


def of(name: str) -> list[str]:
    return [words for instruction, words in INSTRUCTIONS if instruction == name]


def test_it_has_instructions_alone_and_begins_with_a_pinned_image():
    assert {instruction for instruction, _ in INSTRUCTIONS} <= {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}
    assert INSTRUCTIONS[0][0] == "FROM"
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", INSTRUCTIONS[0][1])
    assert json.loads(of("CMD")[-1]) == ["molt-gym", "doctor"]


@pytest.mark.parametrize("command", of("RUN"))
def test_commands_are_shell(command):
    assert subprocess.run(["sh", "-n", "-c", command], check=False).returncode == 0


def test_what_it_copies_is_in_the_repository_and_all_that_is_installed():
    sources = {source for words in of("COPY") for source in words.split()[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    assert {*folders, PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml"} <= sources


def test_its_pins_are_what_the_project_asks_for():
    both = LOCK | BESIDE
    named = {wanted.name for wanted in WANTED}
    assert {"torch", "transformers", "vllm", "ray", "nemo-automodel"} <= named & both.keys()
    for wanted in WANTED:
        assert wanted.name not in both or wanted.specifier.contains(both[wanted.name]), wanted


def test_its_pins_are_those_of_the_locks_for_cpus_where_the_device_makes_no_difference():
    cpu = pins((ROOT / "cpu.lock").read_text()) | pins((ROOT / "cpu-engines.lock").read_text())
    both = LOCK | BESIDE
    assert {name: both[name] for name in ("transformers", "ray", "nemo-automodel")} == {
        name: cpu[name] for name in ("transformers", "ray", "nemo-automodel")}


@pytest.mark.parametrize("place", ["docs/moe.md", "slurm/gpu.lock"])
def test_documents_name_the_same_versions(place):
    told = dict(re.findall(r"\b(nemo-automodel|torchao)==([\d.]*\d)", (ROOT / place).read_text()))
    assert told == BESIDE
