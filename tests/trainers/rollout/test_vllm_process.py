import os
import signal
import tempfile

import pytest

from molt_gym.trainers.rollout.vllm_process import HostProcess, telling
from molt_gym.trainers.rollout.vllm_spec import HostSpec

LOG = """\
(EngineCore pid=77) INFO 11-29 20:20:13 [core.py:402] init engine took 0.02 s
(EngineCore pid=77) ERROR 11-29 20:20:14 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=77) ERROR 11-29 20:20:14 [core.py:1512]   File "core.py", line 1496, in run_engine_core
(EngineCore pid=77) ERROR 11-29 20:20:14 [core.py:1512]
(EngineCore pid=77) ERROR 11-29 20:20:14 [core.py:1512] RuntimeError: Unsupported CPU attention configuration
(MainProcess pid=76) ERROR 11-29 20:20:14 [async_llm.py:906] AsyncLLM output_handler failed.
Traceback (most recent call last):
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
"""


def test_of_a_log_the_error_of_vllms_own_process_is_told():
    assert telling(LOG).splitlines() == [
        "Traceback (most recent call last):", 'File "core.py", line 1496, in run_engine_core',
        "RuntimeError: Unsupported CPU attention configuration"]


def test_without_one_the_end_of_the_log_is_told():
    lines = [f"line {i}" for i in range(40)]
    assert telling("\n".join(lines)).splitlines() == lines[25:]


@pytest.mark.parametrize("words, option", [
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
     "rollout.engine_args.kv_cache_memory_bytes"),
    ("ValueError: Free memory on device cuda:0 (9.1/139.8 GiB) on startup is less than desired GPU memory utilization",
     "rollout.engine_args.gpu_memory_utilization"),
    ("ValueError: To serve at least one request with the models's max seq len (4096), (0.44 GiB KV cache is needed, "
     "which is larger than the available KV cache memory (0.12 GiB).", "rollout.max_context"),
])
def test_where_memory_is_missing_the_option_to_write_is_told_by_its_name_here(words, option):
    told = telling(f"(EngineCore pid=77) ERROR 11-29 20:20:14 [core.py:1512] {words}\n").splitlines()
    assert told[0] == words and option in told[1] and len(told) == 2


def test_sockets_find_room_where_the_folder_of_temporary_files_has_a_long_path(tmp_path, monkeypatch):
    folder = tmp_path / ("long-" * 12)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    host = HostProcess(HostSpec(str(tmp_path), "float32", 64, 1, (2,), "gloo", cpu=True))
    host.close(RuntimeError("enough"))
    # A socket is named by 36 characters.
    assert len(str(host.scratch / ("x" * 36))) < 107
    assert not host.scratch.exists()


@pytest.mark.timeout(60)
def test_who_calls_a_process_that_is_frozen_is_not_held_up_and_told_when_it_is_given_up(tmp_path):
    host = HostProcess(HostSpec(str(tmp_path), "float32", 64, 1, (2,), "gloo", cpu=True))
    os.killpg(host.pid, signal.SIGSTOP)
    # More than there is room for on the way.
    calls = [host.call("generate", list(range(100_000))) for _ in range(20)]
    calls[0].cancel()
    host.close(RuntimeError("enough"))
    for call in calls[1:]:
        with pytest.raises(RuntimeError, match="enough"):
            call.result(10)
