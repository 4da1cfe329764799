import signal
import subprocess
import sys

import pytest

from molt_gym.errors import ConfigError
from molt_gym.trainers.models.cache import cache_root, cached_folder, is_cached

SLOW_BUILD = """
import sys, time
from molt_gym.trainers.models.cache import cached_folder

def build(folder):
    (folder / "half").write_text("written")
    print("building", flush=True)
    time.sleep(float(sys.argv[1]))
    (folder / "whole").write_text("written")

print(cached_folder("name", build))
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MOLT_GYM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(seconds):
    return subprocess.Popen([sys.executable, "-c", SLOW_BUILD, str(seconds)], stdout=subprocess.PIPE, text=True)


def build(folder):
    (folder / "whole").write_text("written")


def never(folder):
    raise AssertionError("built again")


def test_a_folder_is_built_once():
    folder = cached_folder("name", build)
    assert folder == cached_folder("name", never) and is_cached("name")
    assert (folder / "whole").read_text() == "written"


def test_the_cache_is_where_the_environment_says(cache, monkeypatch):
    assert cached_folder("name", build).is_relative_to(cache)
    monkeypatch.delenv("MOLT_GYM_CACHE")
    assert cache_root().parts[-2:] == (".cache", "molt-gym")


def test_a_build_that_fails_leaves_nothing_behind(cache):
    def fail(folder):
        (folder / "half").write_text("written")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        cached_folder("name", fail)
    assert not is_cached("name") and [path.name for path in cache.rglob("*")] in (["name"], ["name", "lock"])
    assert cached_folder("name", build).is_dir()


def test_what_a_killed_process_half_built_is_never_taken_and_goes(cache):
    process = start(60)
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert not is_cached("name") and list(cache.rglob("half"))
    folder = cached_folder("name", build)
    assert [path.name for path in folder.iterdir()] == ["whole"] and not list(cache.rglob("half"))


def test_of_two_processes_one_builds_and_both_have_it():
    outputs = [process.communicate(timeout=60)[0].split() for process in (start(0.5), start(0.5))]
    assert sorted(map(len, outputs)) == [1, 2] and outputs[0][-1] == outputs[1][-1]


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOLT_GYM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=f"cache folder {tmp_path}/file: .*set MOLT_GYM_CACHE"):
        cached_folder("name", build)
