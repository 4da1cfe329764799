import errno
import os
import shutil
from contextlib import nullcontext

import pytest

from molt_gym.trainers.atomic import atomic_path, recover


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_file_appears_only_when_complete(tmp_path):
    with atomic_path(tmp_path / "a.txt") as temporary:
        temporary.write_text("whole")
        assert not (tmp_path / "a.txt").exists()
    assert (tmp_path / "a.txt").read_text() == "whole" and names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, error):
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(type(error)), atomic_path(tmp_path / "a.txt") as temporary:
        temporary.write_text("ha")
        raise error
    assert (tmp_path / "a.txt").read_text() == "old" and names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(("number", "of_folders", "fails"), [
    (errno.EINVAL, True, False), (errno.EIO, True, True), (errno.EINVAL, False, True)])
def test_a_file_system_that_cannot_flush_folders_will_do_and_one_that_fails_will_not(
    tmp_path, monkeypatch, number, of_folders, fails
):
    def fsync(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}") == of_folders:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError) if fails else nullcontext(), atomic_path(tmp_path / "model") as temporary:
        temporary.mkdir()
        (temporary / "weights").write_text("new")
    assert (tmp_path / "model" / "weights").exists() or fails


def test_a_folder_replaces_a_folder_whole(tmp_path):
    for text in ("old", "new"):
        with atomic_path(tmp_path / "model") as temporary:
            (temporary / "sub").mkdir(parents=True)
            (temporary / "sub" / f"{text}.txt").write_text(text)
    assert names(tmp_path) == ["model"] and names(tmp_path / "model" / "sub") == ["new.txt"]


def test_a_kill_at_any_moment_of_a_replacement_leaves_the_old_or_the_new_folder(tmp_path, monkeypatch):
    """Copy what lies on disk after each file operation, as a kill would leave it, and recover the copy."""
    folder, copies = tmp_path / "run", []
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_text("old")

    def then_copy(operation):
        def call(*args):
            result = operation(*args)
            copies.append(shutil.copytree(folder, tmp_path / f"killed-{len(copies)}"))
            return result

        return call

    monkeypatch.setattr(os, "rename", then_copy(os.rename))
    monkeypatch.setattr(os, "fsync", then_copy(os.fsync))
    with atomic_path(folder / "model") as temporary:
        temporary.mkdir()
        (temporary / "weights").write_text("new")
    monkeypatch.undo()
    found = []
    for copy in copies:
        recover(copy)
        assert names(copy) == ["model"]
        found.append((copy / "model" / "weights").read_text())
    assert len(found) >= 5 and found == sorted(found, reverse=True) and set(found) == {"old", "new"}
