import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "count_lines.py"


@pytest.fixture(scope="module")
def counter():
    spec = importlib.util.spec_from_file_location("count_lines", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path):
    """A project laid out like this one; keys are paths."""

    def write(files):
        mapping = 'molt_gym = "molt_gym"\n"molt_gym.envs" = "envs"\n"molt_gym.trainers" = "trainers"\n'
        (tmp_path / "pyproject.toml").write_text("[tool.setuptools.package-dir]\n" + mapping)
        for folder in ("molt_gym", "envs", "trainers"):
            files.setdefault(f"{folder}/__init__.py", "")
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


def names(counter, root, *starts):
    return {module.name for module in counter.reachable(counter.find_modules(root), ["molt_gym", *starts])}


def test_blanks_comments_and_docstrings_are_no_code(counter):
    text = '"""Doc\n\nmore."""\n\n# comment\nx = 1  # too\n\ndef f():\n    """Doc."""\n    return (\n        1\n    )\n'
    assert counter.code_lines(text) == 5


def test_a_string_that_is_a_value_is_code_and_one_that_stands_alone_is_not(counter):
    assert counter.code_lines('x = """a\n\n# no comment\nb"""\n"""What x is."""\n') == 4


def test_imports_inside_functions_are_followed_across_the_mapped_folders(counter, project):
    root = project({
        "molt_gym/__init__.py": "def train():\n    from .trainers import api\n",
        "trainers/api.py": "from .loop import run\nfrom molt_gym.env import Env\nimport torch\n",
        "trainers/loop.py": "from . import metrics\n", "trainers/metrics.py": "", "trainers/unused.py": "",
        "molt_gym/env.py": "", "molt_gym/cli.py": "", "envs/game.py": "",
    })  # fmt: skip
    expected = {"molt_gym", "molt_gym.env", "molt_gym.trainers"}
    assert names(counter, root) == expected | {f"molt_gym.trainers.{name}" for name in ("api", "loop", "metrics")}
    assert "molt_gym.envs.game" in names(counter, root, "molt_gym.envs.game")


def test_packages_around_a_module_and_relative_imports_from_above_are_followed(counter, project):
    root = project({
        "molt_gym/__init__.py": "import molt_gym.trainers.rollout.pool\n",
        "trainers/rollout/__init__.py": "from .engine import Engine\n", "trainers/rollout/engine.py": "",
        "trainers/rollout/pool.py": "from ..actor import step\n", "trainers/actor.py": "",
    })  # fmt: skip
    found = names(counter, root)
    assert {"molt_gym.trainers.rollout.engine", "molt_gym.trainers.actor"} <= found


def test_imports_for_type_checkers_are_not_followed(counter, project):
    lines = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import A\nelse:\n    from .b import B\n"
    root = project({"molt_gym/__init__.py": lines, "molt_gym/a.py": "", "molt_gym/b.py": ""})
    assert names(counter, root) >= {"molt_gym.b"} and "molt_gym.a" not in names(counter, root)


def test_the_limit_decides_the_exit_code(counter, project, capsys):
    root = project({"molt_gym/__init__.py": "a = 1\nb = 2\n"})
    assert counter.main(["--root", str(root), "--limit", "2"]) == 0
    assert counter.main(["--root", str(root), "--limit", "1"]) == 1
    assert "1 over the limit of 1" in capsys.readouterr().out


def test_the_path_of_this_project_holds_the_trainer_and_the_env_contract(counter):
    found = names(counter, SCRIPT.parent.parent)
    assert {"molt_gym.env", "molt_gym.trainers.api", "molt_gym.trainers.config"} <= found
    assert "molt_gym.cli" not in found


def test_of_the_functions_of_the_package_only_the_one_that_is_called_is_followed(counter, project):
    root = project({
        "molt_gym/__init__.py": "def train():\n    from .trainers import api\n\n"
                                "def sft():\n    from .trainers import sft\n\ndef _both():\n    from . import env\n",
        "trainers/api.py": "", "trainers/sft.py": "", "molt_gym/env.py": "",
    })  # fmt: skip

    def found(verb):
        return {module.name.rpartition(".")[2] for module in counter.reachable(
            counter.find_modules(root), ["molt_gym"], verb)} - {"molt_gym", "trainers"}

    assert found("train") == {"api", "env"} and found("sft") == {"sft", "env"} and found("all") == {"api", "sft", "env"}


def test_lines_are_summed_by_package(counter, project, capsys):
    root = project({
        "molt_gym/__init__.py": "def train():\n    from .trainers.actor import head\n    from . import env\n",
        "trainers/__init__.py": "from . import api\n", "trainers/api.py": "a = 4\n", "molt_gym/env.py": "z = 3\n",
        "trainers/actor/__init__.py": "", "trainers/actor/head.py": "x = 1\ny = 2\n",
    })  # fmt: skip
    assert counter.main(["--root", str(root)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 in molt_gym 2 in molt_gym.trainers 2 in molt_gym.trainers.actor 8" in shown
