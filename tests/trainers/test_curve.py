import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
from PIL import Image

from molt_gym.trainers.api import draw_curve
from molt_gym.trainers.curve import draw, main, smooth
from molt_gym.trainers.run_dir import RunDir

BLUE, ORANGE = (37, 99, 235), (234, 88, 12)


def make_run(path, seed=0, rewards=(0.1, math.nan, 0.5)):
    with RunDir(path) as run:
        run.write_config(f'env = "CodeExec-v0"\nmodel = "tiny"\nseed = {seed}\n')
        run.append_metrics({"step": 0, "eval/when": "before", "eval/CodeExec-v0/pass_at_1": 0.25})
        for step, reward in enumerate(rewards, start=1):
            run.append_metrics({"step": step, "reward/mean": reward, "time/step": 2.0})
    return path


def colours(path):
    with Image.open(path) as image:
        assert image.width > 1000 and image.height > 600
        return {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}


def test_a_run_has_a_picture_of_its_curve(tmp_path):
    run = make_run(tmp_path / "run")
    assert draw(run) == run / "curve.png"
    assert BLUE in colours(run / "curve.png") and ORANGE not in colours(run / "curve.png")


def test_several_runs_share_one_picture_in_colours_of_their_own(tmp_path):
    runs = [make_run(tmp_path / str(seed), seed) for seed in (0, 1)]
    assert {BLUE, ORANGE} <= colours(draw(runs, tmp_path / "both.png"))


def test_one_step_and_a_reward_outside_0_and_1_can_be_drawn(tmp_path):
    draw(make_run(tmp_path / "run", rewards=[-30.0]))


def test_a_run_without_rewards_is_refused_and_leaves_no_picture(tmp_path):
    run = make_run(tmp_path / "run", rewards=[math.nan])
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(run)
    assert not (run / "curve.png").exists()


def test_smoothing_averages_neighbours_and_skips_what_is_not_finite():
    assert smooth([1.0, 3.0, math.nan, 5.0], 1) == [2.0, 2.0, 4.0, 5.0]
    assert math.isnan(smooth([math.nan], 1)[0]) and smooth([1.5e308, 1.5e308], 1) == [1.5e308, 1.5e308]


def test_the_command_draws_and_says_where(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    main([str(run), "--out", str(tmp_path / "p.png")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "p.png") and (tmp_path / "p.png").exists()


def test_the_command_refuses_a_folder_without_metrics_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main([str(tmp_path)])
    assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_importing_the_module_does_not_load_matplotlib():
    code = "import sys, molt_gym.trainers.curve; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(("rewards", "said"), [((), []), ((math.nan,), ["no curve.png: no finite reward or loss"])])
def test_a_run_that_ended_before_its_first_step_says_nothing_of_a_curve(rewards, said, tmp_path):
    make_run(tmp_path / "run", rewards=rewards)
    messages = []
    with RunDir(tmp_path / "run", resume=True) as run:
        draw_curve(run, SimpleNamespace(message=messages.append))
    assert len(messages) == len(said) and all(map(str.startswith, messages, said))


@pytest.mark.filterwarnings("error")
def test_names_are_no_formulas(tmp_path):
    run = make_run(tmp_path / "run")
    with RunDir(run, resume=True) as opened:
        opened.write_config('env = "CodeExec-v0"\nmodel = \'mine/$\\wrong$\'\n')
    assert draw(run) == run / "curve.png"
