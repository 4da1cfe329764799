"""Wherever a save is cut off, the newest whole checkpoint is found, and it is one state, never a mix of two."""

import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from molt_gym.threads import call_in_thread
from molt_gym.trainers import checkpoint
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.atomic import recover
from molt_gym.trainers.checkpoint import (
    Checkpoints,
    best_checkpoint,
    load_state,
    mark_best,
    newest_checkpoint,
    restore_generators,
)
from molt_gym.trainers.config import load_config

KEEP = 2
AtEachWrite = Callable[[Callable[[], None]], AbstractContextManager[None]]


@pytest.fixture
def actor(tiny_path: Path) -> Iterator[LocalActor]:
    config = load_config("Any-v0", overrides={"rollout": {"max_tokens": 8, "max_context": 64}, "actor.lr": 1e-3})
    actor = LocalActor(ActorSpec(str(tiny_path), config, torch.float32, 10))
    yield actor
    actor.close()


def train(actor: LocalActor, seed: int) -> None:
    ids = torch.randint(300, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    actor.train([[TrainRow(ids, [0, *[1] * 7], [0.0, *[-5.0] * 7], 1.0, 1 / 7, 0, 0)]])


def save_checkpoint(folder: Path, step: int, actor: LocalActor, state: dict, keep: int) -> Path:
    checkpoints = Checkpoints(folder, keep, asynchronous=False)
    checkpoints.begin(step, actor, state)
    return checkpoints.finish()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def folder(actor: LocalActor, tmp_path: Path) -> Path:
    """A folder with whole checkpoints of steps 2 and 3."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (2, 3):
        train(actor, step)
        save_checkpoint(folder, step, actor, {"cursor": step * 10}, KEEP)
    return folder


def test_a_save_that_is_cut_off_at_any_write_leaves_the_old_or_the_new_one(
    actor: LocalActor, folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder, at_each_write: AtEachWrite
) -> None:
    moments = []

    def photograph() -> None:
        # What SIGKILL leaves at this moment is what is on disk: buffers of the process are lost.
        shot = tmp_path / f"moment-{len(moments)}"
        shutil.copytree(folder, shot)
        moments.append(shot)

    old = contents(folder / "step-000003")
    train(actor, 4)
    with at_each_write(photograph):
        save_checkpoint(folder, 4, actor, {"cursor": 40}, KEEP)
    new = contents(folder / "step-000004")
    assert len(moments) > 20
    found = []
    for shot in moments:
        recover(shot)
        best = newest_checkpoint(shot)
        assert best is not None
        found.append(best.name)
        assert contents(best) == (new if best.name == "step-000004" else old)
        whole = ["step-000003", "step-000004"] if best.name == "step-000004" else ["step-000002", "step-000003"]
        assert set(whole) <= {path.name for path in shot.iterdir()}
    assert set(found) == {"step-000003", "step-000004"}
    assert found == sorted(found)
    assert not recwarn.list
    assert sorted(path.name for path in folder.iterdir()) == ["step-000003", "step-000004"]


@pytest.mark.slow
def test_what_is_written_is_the_state_at_the_call_whatever_is_learnt_meanwhile_and_read_by_any_number_of_ranks(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, go = {}, threading.Event()

    def wait_and_save(*arguments: Any, original: Callable = dcp.save, **options: Any) -> None:
        assert go.wait(120)
        original(*arguments, **options)

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in actor.weights()}

    def start(ranks: int) -> LocalActor:
        overrides = {"rollout": {"max_tokens": 8, "max_context": 64, "groups_per_step": ranks}, "actor.lr": 1e-3,
                     "actor.world_size": ranks}
        return LocalActor(ActorSpec(str(tiny_path), load_config("Any-v0", overrides=overrides), torch.float32, 10))

    actor = start(2)
    try:
        checkpoints = Checkpoints(tmp_path, 1, say=lambda line: written.update({line: None}))
        train(actor, 1)
        then = weights()
        # The second rank writes its part meanwhile, with collectives of its own beside those of training.
        monkeypatch.setattr("molt_gym.trainers.actor.state.dcp.save", wait_and_save)
        checkpoints.begin(1, actor, {})
        train(actor, 2)
        later = weights()
        assert not list(tmp_path.glob("step-*")) and not written
        go.set()
        path = checkpoints.finish()
        assert list(written) == [f"step 1 saved as {path}"]
        actor.load(path / "actor")
        assert actor.updates == 1
        again = weights()
        train(actor, 2)
        assert all(torch.equal(again[name], then[name]) for name in then)
        assert all(torch.equal(tensor, later[name]) for name, tensor in actor.weights())
        # A folder that only some nodes see.
        monkeypatch.setattr("molt_gym.trainers.actor.state.dcp.save", dcp.save)
        with pytest.raises(OSError, match="elsewhere on .* file system that all nodes share"):
            actor.save(tmp_path / "elsewhere" / "actor")
        for ranks in (1, 4):
            actor.close()
            actor = start(ranks)
            actor.load(path / "actor")
            assert actor.updates == 1 and all(torch.equal(then[name], tensor) for name, tensor in actor.weights())
            train(actor, 2)
            for name, tensor in actor.weights():
                torch.testing.assert_close(tensor, later[name], rtol=0, atol=1e-6)
    finally:
        actor.close()


def test_what_draws_from_global_generators_goes_on_as_it_would_have(actor: LocalActor, tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.gauss(), float(np.random.normal()), float(torch.rand(()))]

    draw()
    path = save_checkpoint(tmp_path, 1, actor, {}, KEEP)
    expected = [draw(), draw()]
    restore_generators(load_state(path))
    assert [draw(), draw()] == expected


def test_a_step_that_could_not_be_written_can_be_tried_again(actor: LocalActor, tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(folder := tmp_path / "checkpoints", KEEP, say=said.append)
    with pytest.raises(OSError):
        checkpoints.begin(1, actor, {})
    folder.mkdir()
    checkpoints.begin(1, actor, {})
    assert checkpoints.finish() == newest_checkpoint(folder)
    assert said[0].startswith("step 1 not saved (") and said[1:] == [f"step 1 saved as {folder / 'step-000001'}"]
    checkpoints.begin(1, actor, {})
    assert len(said) == 2


def test_a_step_that_fails_at_once_can_be_tried_again(
    actor: LocalActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the caller gets to run: how soon a thread is, is up to the system."""
    def at_once(call: Callable[[], Any], name: str) -> Any:
        wait([future := call_in_thread(call, name)])
        return future

    monkeypatch.setattr(checkpoint, "call_in_thread", at_once)
    checkpoints = Checkpoints(folder := tmp_path / "checkpoints", KEEP)
    with pytest.raises(OSError):
        checkpoints.begin(1, actor, {})
    folder.mkdir()
    checkpoints.begin(1, actor, {})
    assert checkpoints.finish() == newest_checkpoint(folder)


def test_where_a_step_could_not_be_written_the_last_one_is_that_before_it(
    actor: LocalActor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(folder, KEEP)
    assert checkpoints.last() is None
    assert checkpoints.newest() == checkpoints.last() == folder / "step-000003"
    checkpoints.begin(4, actor, {})
    assert checkpoints.last() == folder / "step-000004"
    checkpoints.begin(5, actor, {"not JSON": object()})
    assert checkpoints.last() == folder / "step-000004"


def test_saving_a_step_again_keeps_the_first_until_the_second_is_there(
    actor: LocalActor, folder: Path, tmp_path: Path, at_each_write: AtEachWrite
) -> None:
    moments = []

    def photograph() -> None:
        shot = tmp_path / f"moment-{len(moments)}"
        shutil.copytree(folder, shot)
        moments.append(shot)

    old = contents(folder / "step-000003")
    train(actor, 4)
    with at_each_write(photograph):
        save_checkpoint(folder, 3, actor, {"cursor": 31}, KEEP)
    new = contents(folder / "step-000003")
    for shot in moments:
        recover(shot)
        assert contents(shot / "step-000003") in (old, new)
        assert newest_checkpoint(shot) == shot / "step-000003"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty"])
def test_a_damaged_file_of_the_right_name_is_found_out_and_named(folder: Path, damage: str, tmp_path: Path) -> None:
    for name in contents(folder / "step-000003"):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        file = copy / "step-000003" / name
        data = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            flipped = data[:-1] + bytes([data[-1] ^ 1])
            file.write_bytes({"truncated": data[:-1], "flipped": flipped, "empty": b""}[damage])
        with pytest.warns(UserWarning, match="step-000003 is not whole"):
            best = newest_checkpoint(copy)
        assert best == copy / "step-000002"
        assert load_state(best).items() >= {"step": 2, "cursor": 20}.items()
        shutil.rmtree(copy)


@pytest.mark.parametrize("text", ["[]", "{}", '{"trainer.json": 3}', "null", '{"actor/.metadata": [1, 2]}'])
def test_an_odd_manifest_is_no_checkpoint(folder: Path, text: str) -> None:
    (folder / "step-000003" / "manifest.json").write_text(text)
    with pytest.warns(UserWarning, match="step-000003 is not whole"):
        assert newest_checkpoint(folder) == folder / "step-000002"


def test_folders_without_anything_whole_have_no_checkpoint(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "step-000001").mkdir()
    with pytest.warns(UserWarning, match="step-000001 is not whole .*manifest.json"):
        assert newest_checkpoint(tmp_path) is None


def test_broken_checkpoints_of_later_steps_do_not_push_out_whole_ones(actor: LocalActor, folder: Path) -> None:
    for step in (7, 8):
        (folder / f"step-{step:06d}").mkdir()
    save_checkpoint(folder, 4, actor, {}, KEEP)
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-000003", "step-000004", "step-000007", "step-000008"]


def test_what_a_user_puts_beside_checkpoints_is_neither_loaded_nor_deleted(actor: LocalActor, folder: Path) -> None:
    mine = shutil.copytree(folder / "step-000002", folder / "step-000003-mine")
    assert newest_checkpoint(folder) == folder / "step-000003"
    for step in (4, 5):
        save_checkpoint(folder, step, actor, {}, KEEP)
    assert sorted(folder.iterdir()) == [mine, folder / "step-000004", folder / "step-000005"]


def test_the_newest_is_that_of_the_highest_number(actor: LocalActor, folder: Path) -> None:
    for step in (999_999, 1_000_000, 1_000_001):
        save_checkpoint(folder, step, actor, {}, KEEP)
        assert newest_checkpoint(folder) == folder / f"step-{step}"
    assert sorted(path.name for path in folder.iterdir()) == ["step-1000000", "step-1000001"]


def test_a_copy_of_a_run_that_has_a_folder_in_place_of_the_link_to_the_best_is_gone_on_with(
    actor: LocalActor, folder: Path
) -> None:
    shutil.copytree(folder / "step-000002", folder / "best")
    assert best_checkpoint(folder) is None
    save_checkpoint(folder, 4, actor, {}, KEEP)
    assert mark_best(folder, {3: 0.5, 4: 0.1}) == best_checkpoint(folder) == folder / "step-000003"
    assert (folder / "best").is_symlink()


def test_the_newest_few_stay(actor: LocalActor, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, actor, {}, 1)
        assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:06d}"]


@pytest.mark.parametrize("limit", [0, 100, 5_000, 100_000])
def test_a_write_that_the_system_refuses_is_an_os_error_and_leaves_what_was_there(
    actor: LocalActor, folder: Path, limit: int
) -> None:
    before = contents(folder)
    train(actor, 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError):
            save_checkpoint(folder, 4, actor, {}, KEEP)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(folder) == before
    assert save_checkpoint(folder, 4, actor, {}, KEEP) == newest_checkpoint(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for about one and a half checkpoints."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", path], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot mount a file system: {made.stderr.decode()}")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_is_reported_as_such_and_the_older_checkpoint_can_be_loaded(
    actor: LocalActor, small_disk: Path
) -> None:
    train(actor, 1)
    first = save_checkpoint(small_disk, 1, actor, {"cursor": 1}, KEEP)
    with pytest.raises(OSError, match="; 0 MB are free"):
        save_checkpoint(small_disk, 2, actor, {"cursor": 2}, KEEP)
    assert [path.name for path in small_disk.iterdir()] == ["step-000001"]
    assert newest_checkpoint(small_disk) == first
    actor.load(first / "actor")
    assert actor.updates == 1


SAVER = """
import sys
from pathlib import Path
import torch
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.checkpoint import Checkpoints
from molt_gym.trainers.config import load_config

if __name__ == "__main__":
    config = load_config("Any-v0", overrides={"rollout": {"max_tokens": 8, "max_context": 64}})
    actor = LocalActor(ActorSpec(sys.argv[1], config, torch.float32, 10))
    step, checkpoints = 0, Checkpoints(Path(sys.argv[2]), 2)
    while True:
        step += 1
        checkpoints.begin(step, actor, {"cursor": step})
        checkpoints.finish()
        print(step, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_checkpoint(tiny_path: Path, tmp_path: Path) -> None:
    script, folder = tmp_path / "saver.py", tmp_path / "checkpoints"
    script.write_text(SAVER)
    folder.mkdir()
    process = subprocess.Popen([sys.executable, script, tiny_path, folder], stdout=subprocess.PIPE, text=True)
    try:
        while (saved := int(process.stdout.readline())) < 3:
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].split()
    recover(folder)
    best = newest_checkpoint(folder)
    assert best is not None
    assert load_state(best)["step"] in (last := int(rest[-1]) if rest else saved, last + 1)


def test_the_best_stays_beside_the_newest_and_its_link_is_replaced_never_missing(
    actor: LocalActor, folder: Path, at_each_write: AtEachWrite
) -> None:
    assert mark_best(folder, {1: (0.9, 0.9), 2: (0.5, 0.1), 3: (0.2, 0.9)}) == folder / "step-000002"
    for step in (4, 5, 6):
        save_checkpoint(folder, step, actor, {}, KEEP)
    assert sorted(path.name for path in folder.iterdir()) == ["best", "step-000002", "step-000005", "step-000006"]
    assert newest_checkpoint(folder) == folder / "step-000006"
    with at_each_write(lambda: load_state(folder / "best")):
        assert mark_best(folder, {2: (0.5, 0.1), 5: (0.5, 0.2), 6: (0.5, 0.2)}) == folder / "step-000006"
    assert best_checkpoint(folder) == folder / "step-000006"
    save_checkpoint(folder, 7, actor, {}, KEEP)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000006", "step-000007"]


def test_without_a_score_of_a_checkpoint_there_is_no_best(actor: LocalActor, folder: Path) -> None:
    assert best_checkpoint(folder) is None
    nan = float("nan")
    assert mark_best(folder, {2: nan, 3: -1.0, 0: 2.0}) == folder / "step-000003"
    assert mark_best(folder, {2: (nan, nan), 3: (-1.0, -1.0)}) == folder / "step-000003"
    mark_best(folder, {2: 0.5})
    assert mark_best(folder, {0: 1.0}) is None and best_checkpoint(folder) is None
    mark_best(folder, {2: 0.5})
    shutil.rmtree(folder / "step-000002")
    assert best_checkpoint(folder) is None
    recover(folder)
