from molt_gym.trainers.rollout.vllm_process import telling

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
