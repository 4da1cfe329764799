"""Packages that `molt-gym new-env` and `new-agent` write: installed, found, checked and trained as a newcomer would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from molt_gym import ConfigError, cli
from molt_gym.scaffold import create


def run(*words, cwd: Path, **env: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=cwd, env=os.environ | env, capture_output=True, text=True,
                          timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["env", "agent"])
def test_a_new_package_is_found_checked_tested_and_played(kind, tmp_path, capsys):
    assert cli.main([f"new-{kind}", "MyLarger", "--out", str(tmp_path / "package")]) == 0
    assert "package/my_larger/__init__.py" in capsys.readouterr().out
    # Beside what is installed, so that nothing of it stays.
    run("pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "site"), "./package",
        cwd=tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    listed = run("molt_gym", "envs", cwd=tmp_path, PYTHONPATH=path).splitlines()
    assert any(line.startswith("MyLarger-v0 ") and line.endswith("(my_larger)") for line in listed)
    assert "WRONG" not in run("molt_gym", "check-env", "MyLarger-v0", cwd=tmp_path, PYTHONPATH=path)
    run("pytest", "-q", "-p", "no:cacheprovider", "package/tests", cwd=tmp_path, PYTHONPATH=path)
    if kind == "env":
        words = "train MyLarger-v0 --model tiny --steps 1 --out run --eval.before false --eval.after false".split()
        said = run("molt_gym", *words, cwd=tmp_path, PYTHONPATH=path)
        assert "step 1/1" in said


@pytest.mark.parametrize(("name", "module", "env_id"), [
    ("Larger", "larger", "Larger-v0"), ("my-larger", "my_larger", "MyLarger-v0"), ("HTTPGame2", "http_game2",
                                                                                  "HTTPGame2-v0")])
def test_names_become_modules_and_ids(name, module, env_id, tmp_path):
    files = create("env", name, tmp_path / "new")
    assert tmp_path / "new" / module / "__init__.py" in files
    assert f'register("{env_id}"' in (tmp_path / "new" / module / "__init__.py").read_text()


@pytest.mark.parametrize("name", ["", "1st", "a b", "../up", "class", "é", "-", "tests"])
def test_a_name_that_makes_no_package_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="name: "):
        create("env", name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["Torch", "json", "molt-gym"])
def test_a_name_that_would_hide_another_module_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="name: a module .* is here already"):
        create("env", name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("name", "env_id"), [("CodeExec", "CodeExec-v0"), ("tic-tac-toe", "TicTacToe-v0"),
                                               ("FrozenLake", "FrozenLake-v1")])
def test_a_name_whose_id_would_stand_for_another_env_is_refused(name, env_id, tmp_path):
    with pytest.raises(ConfigError, match=f"name: an env {env_id} is here already"):
        create("env", name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="has something in it"):
        create("env", "Larger", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
