import io
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from molt_gym.trainers.config import load_config
from molt_gym.trainers.progress import Progress, make_progress
from molt_gym.trainers.progress_live import braille

STEP = {
    "step": 3, "reward/mean": 0.25, "pass/at_1": 0.2, "perf/rollout_tokens_per_s": 1234.5, "staleness/max": 1,
    "mismatch/abs_diff_mean": 0.0024, "time/rollout": 5.0, "time/train": 3.0, "time/weights": 0.01, "time/step": 9.0,
}  # fmt: skip


@pytest.fixture
def lines():
    """What a run prints without a terminal."""
    stream = io.StringIO()
    progress = make_progress(stream)
    progress.start(load_config("CodeExec-v0", model="tiny", overrides={"steps": 12}), "runs/x")

    def after(call):
        stream.truncate(stream.seek(0))
        call(progress)
        return stream.getvalue().splitlines()

    return after


def test_without_a_terminal_a_step_is_one_line_that_says_what_matters(lines):
    (line,) = lines(lambda p: p.step(STEP))
    for part in ("step  3/12", "reward 0.250", "1,234 tok/s", "9.0 s (rollout 5.0, train 3.0, other 1.0)", "stale 1"):
        assert part in line


def test_lines_of_steps_are_aligned(lines):
    found = lines(lambda p: [p.step(STEP | {"step": s, "reward/mean": r}) for s, r in ((9, 0.25), (10, math.nan))])
    assert found[0].index("tok/s") == found[1].index("tok/s")


def test_what_is_missing_or_not_finite_is_a_dash(lines):
    (line,) = lines(lambda p: p.step({"step": 1, "reward/mean": math.nan}))
    assert "reward     –" in line and "pass@1     –" in line


def test_a_number_of_any_size_fits_the_line(lines):
    (line,) = lines(lambda p: p.step({"step": 1, "reward/mean": -1.5e308, "pass/at_1": 12345.0}))
    assert "reward -1.5e+308  pass@1 12,345.000" in line


def test_lost_rollouts_are_shown_with_their_reasons(lines):
    (line,) = lines(lambda p: p.step(STEP | {"rollout/failed/sandbox": 2, "rollout/dropped/stale": 0.0}))
    assert line.endswith("failed sandbox 2")


def test_the_held_out_pass_rate_is_shown_before_and_after(lines):
    found = lines(lambda p: [p.evaluation("E-v0", when, {"pass_at_1": rate, "episodes": 64})
                             for when, rate in (("before", 0.25), ("after", 0.875))])  # fmt: skip
    assert found == ["held-out E-v0 before: pass@1 0.250, 64 prompts",
                     "held-out E-v0 after: pass@1 0.875 (from 0.250), 64 prompts"]  # fmt: skip


def test_a_log_whose_reader_has_gone_does_not_end_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    Progress(stream).message("nobody listens")
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_lines_that_several_threads_tell_do_not_mix():
    class Slow(io.StringIO):
        def write(self, text):
            count = super().write(text)
            time.sleep(0.001)
            return count

    stream = Slow()
    progress = Progress(stream)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(progress.message, ["a line"] * 40))
    assert stream.getvalue() == "a line\n" * 40


def test_a_log_of_another_encoding_gets_escapes_not_errors():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(stream).message("→ \ud800")
    assert stream.buffer.getvalue() == b"\\u2192 \\ud800\n"


def test_a_curve_rises_from_the_lower_left_to_the_upper_right():
    assert braille({1: 0.0, 4: 1.0}, 4, width=2, rows=1, low=0.0, high=1.0) == ["⡠⠊"]


def test_the_curve_of_an_unfinished_run_ends_where_the_run_is():
    (line,) = braille({1: 0.0, 2: 0.0}, 10, width=5, rows=1, low=0.0, high=1.0)
    assert line[0] != "⠀" and line[3:] == "⠀⠀"


def test_the_curve_of_a_long_run_fits():
    lines = braille({step: step % 2 for step in range(1, 1000)}, 999, width=3, rows=2, low=0.0, high=1.0)
    assert lines == ["⣿⣿⣿", "⣿⣿⣿"]


RUN = """
from molt_gym.trainers.config import load_config
from molt_gym.trainers.progress import make_progress
with make_progress() as progress:
    print(type(progress).__name__)
    progress.message("a note")
    progress.start(load_config("CodeExec-v0", model="tiny"), "runs/x", history=[{"step": 1, "reward/mean": 0.5}])
    progress.evaluation("CodeExec-v0", "before", {"pass_at_1": 0.25})
    progress.rollout_done(3, 8)
    progress.step({"step": 2, "reward/mean": 2.5, "time/step": 1.0, "time/train": 1.0, "rollout/failed/judge": 2})
    progress.evaluation("CodeExec-v0", "after", {"pass_at_1": 0.75})
    FINALLY
"""


def on_terminal(code, **environment):
    master, slave = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "90", "LINES": "40"} | environment
    process = subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    output = b""
    try:
        while chunk := os.read(master, 65536):
            output += chunk
    except OSError:
        pass  # Linux says EIO when the other end is closed.
    os.close(master)
    return process.wait(timeout=60), output.decode(errors="replace")


def test_a_terminal_gets_the_live_display():
    code, text = on_terminal(RUN.replace("FINALLY", "progress.finish({'held-out': 0.75})"))
    assert code == 0 and "LiveProgress" in text
    last = text[text.rindex("╭") :]
    for part in ("step 2/40", "2.500", "0.25 → 0.75", "failed judge 2", "▓" * 20, "2.5 ┤", "held-out", "runs/x"):
        assert part in last


def test_an_error_leaves_the_cursor_shown_and_the_traceback_below_the_display():
    code, text = on_terminal(RUN.replace("FINALLY", "raise ZeroDivisionError"))
    assert code == 1 and text.rindex("╰") < text.rindex("ZeroDivisionError")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_no_colour_is_used_where_none_is_wanted():
    _, text = on_terminal(RUN.replace("FINALLY", ""), NO_COLOR="1")
    assert "LiveProgress" in text and "\x1b[36m" not in text and "\x1b[32m" not in text


@pytest.mark.parametrize("kind", [{"TERM": "dumb"}, {"PYTHONIOENCODING": "latin-1"}])
def test_a_terminal_that_cannot_show_the_display_gets_plain_lines(kind):
    code, text = on_terminal(RUN.replace("FINALLY", "progress.finish({})"), **kind)
    assert code == 0 and "LiveProgress" not in text and "\x1b" not in text and "step  2/40" in text


def test_names_that_no_encoding_holds_are_shown_with_escapes():
    run = RUN.replace('model="tiny"', 'model="odd-\\udcff"')
    code, text = on_terminal(run.replace("FINALLY", "progress.finish({})"))
    assert code == 0 and "odd-\\udcff" in text


def test_a_terminal_that_is_closed_does_not_end_the_run():
    code = RUN.replace("FINALLY", """
    import os, pty, sys
    ours, theirs = pty.openpty()
    os.environ["TERM"] = "xterm"
    with make_progress(os.fdopen(theirs, "w")) as live:
        live.start(load_config("CodeExec-v0", model="tiny"), "runs/y")
        os.close(ours)
        live.message("nobody listens")
        live.step({"step": 1})
        live.finish({"held-out": 0.75})
    print(type(live).__name__, "is closed", file=sys.stderr)
    os._exit(0)  # What is left in the stream's buffer can be written nowhere.
""")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.endswith("LiveProgress is closed\n"), done.stderr


def test_a_run_without_a_standard_output_goes_on_without_a_word():
    code = "import os, sys; os.close(1); sys.stdout = None\n" + RUN.replace("FINALLY", "progress.finish({})")
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
