import io
import json
import os
import resource
import subprocess
import sys

import pytest

import molt_gym
from molt_gym import EnvFailure, RunFailed
from molt_gym.cli import main
from molt_gym.tokens.trajectory import Failure, Trajectory, read_jsonl
from molt_gym.trainers.run_dir import RunDir

PARROT = '''
from molt_gym import ChatEnv, Turn, register

class Parrot(ChatEnv):
    """Say what you are told, twice."""
    num_tasks = 3

    def __init__(self, *, word="hello", **kwargs):
        super().__init__(**kwargs)
        self.word = word

    def begin(self, index):
        return [{"role": "user", "content": f"say {self.word}"}]

    def answer(self, message):
        said = message["content"] == self.word
        if len(self.messages) > 2:
            return Turn([], float(said), terminated=True)
        return Turn([{"role": "user", "content": "again"}], 0.0)

register("Parrot-v0", f"{__name__}:Parrot", max_episode_steps=4)
'''


@pytest.fixture
def parrot(tmp_path, monkeypatch):
    (tmp_path / "parrot_env.py").write_text(PARROT)
    monkeypatch.delitem(sys.modules, "parrot_env", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "parrot_env:Parrot-v0"


@pytest.fixture
def called(monkeypatch):
    """Stands in for the API and records what the command asked of it."""
    calls = []
    for verb in ("train", "distill", "evaluate", "rollout"):
        monkeypatch.setattr(
            molt_gym, verb, lambda *args, _verb=verb, **kwargs: calls.append((_verb, args, kwargs)) or []
        )
    return calls


def command(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "molt_gym", *words], capture_output=True, text=True, timeout=60, **options
    )


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("words", [["--help"], ["envs"], ["train", "--help"]])
def test_help_and_envs_are_quick_and_load_no_torch(words):
    code = f"import sys; from molt_gym.cli import main\ntry: main({words!r})\nexcept SystemExit: pass\n"
    code += "sys.exit(bool({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
    before = processor_seconds()
    assert command(*words).returncode == 0
    assert processor_seconds() - before < 1


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"molt-gym {molt_gym.__version__}\n"


def test_help_of_train_lists_the_settings():
    text = command("train", "--help").stdout
    assert "--rollout.group-size" in text and "--resume" in text and text.count("--steps") == 1
    assert "--rollout.engine, --engine: " in text


def test_envs_lists_ids_with_one_line_each():
    assert any(line.startswith("CodeExec-v0 ") for line in command("envs").stdout.splitlines())
    found = json.loads(command("envs", "--json").stdout)
    assert "CodeExec-v0" in [env["id"] for env in found["envs"]] and found["broken_plugins"] == {}


def test_envs_names_a_broken_plug_in_and_lists_the_others(tmp_path):
    info = tmp_path / "bad-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[molt_gym.envs]\nbad = bad_module\n")
    (tmp_path / "bad_module.py").write_text("raise ZeroDivisionError('oh no')")
    result = command("envs", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0 and "CodeExec-v0" in result.stdout
    assert result.stderr == "plug-in bad could not be loaded: ZeroDivisionError: oh no\n"


def test_output_whose_reader_has_gone_is_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "molt_gym", "envs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=60) == 1


@pytest.mark.slow
def test_doctor_prints_json_and_its_exit_code_says_whether_all_is_well():
    result = command("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.returncode == (0 if found["ok"] else 1) and {"name", "status", "detail", "advice"} == set(
        found["checks"][0]
    )


def test_train_passes_options_and_settings_on(called):
    words = (
        "train CodeExec-v0 --model tiny --rollout.group-size 8 --steps 3 --seed 5 --out x --env-kwargs.level=2".split()
    )
    assert main(words) == 0
    ((verb, args, kwargs),) = called
    assert (verb, args) == ("train", ("CodeExec-v0", "tiny"))
    assert kwargs == {"out": "x", "steps": 3, "seed": 5, "config": None, "rollout.group_size": 8, "env_kwargs.level": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "train CodeExec-v0"),
        (["train", "--rollout.group-size", "8", "CodeExec-v0"], "write it first"),
        (["train", "CodeExec-v0", "--rollout.group-sise", "8"], "rollout.group_size"),
        (["train", "CodeExec-v0", "--resume", "nowhere"], "no run is there"),
        (["train", "CodeExec-v0", "tiny"], "'tiny'"),
        (["train", "CodeExec-v0=1", "Math-v0"], "'Math-v0': no env with a weight; write ID=WEIGHT"),
        (["train", "CodeExec-v0=much"], "'CodeExec-v0=much'"),
        (["envs", "--all"], "--all"),
        (["train", "CodeExec-v0", "--modle", "tiny"], "nearest: algorithm.importance.mode, model"),
        (["rollout", "CodeExec-v0", "--human", "--rollout.top-k", "3"], "no effect with --human"),
        (["rollout", "CodeExec-v0", "--human", "--model", "tiny"], "--model tiny has no effect with --human"),
        (["rollout", "CodeExec-v0", "--human", "--out", "x.jsonl"], "--out x.jsonl has no effect with --human"),
        (["rollout", "CodeExec-v0", "-n", "0"], "-n 0: write how many"),
        (["export", "nowhere", "--out", "x", "--step", "last"], "step: 'last' is none of a run"),
        # Before a model is fetched, so none has to be there.
        (["sft", "nowhere.jsonl", "--model", "no/such"], "data: there is no file nowhere.jsonl"),
        (["train", "CodeExec-v0", "--model", "no/such", "--engine", "vllm", "--rollout.engine-args.max_modl_len", "9"],
         "rollout.engine"),
        (["rollout", "CodeExec-v0", "--human", "--env-kwargs.dificulty", "2"], "takes no argument 'dificulty'"),
    ],
)
def test_a_wrong_command_exits_2_with_one_message(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith(f"molt-gym {words[0]}: ") and "Traceback" not in error


def test_distill_has_a_student_and_a_teacher_and_is_otherwise_train(called, run):
    assert main("distill ToolUse-v0 --student tiny --teacher runs/x/model --steps 3 --actor.lr 1e-3".split()) == 0
    assert main(["distill", "--resume", str(run)]) == 0
    settings = {"out": None, "steps": 3, "seed": None, "config": None, "actor.lr": 1e-3}
    assert called[0] == ("distill", ("ToolUse-v0", "tiny", "runs/x/model"), settings)
    assert called[1] == ("distill", ("CodeExec-v0", None, None),
                         {"out": str(run), "steps": None, "seed": None, "config": None})


def test_train_takes_several_envs_with_weights(called, run):
    assert main("train A-v0=.7 B-v0=3 --steps 3".split()) == 0
    assert main(f"train A-v0=.7 B-v0=3 --out {run}".split()) == 0
    assert [args for _, args, _ in called] == [({"A-v0": 0.7, "B-v0": 3.0}, None)] * 2


def test_train_takes_a_mixture_from_a_file(called, tmp_path):
    (tmp_path / "mix.toml").write_text("[mixture]\n'A-v0' = 1\n'B-v0' = 2\n")
    assert main(["train", "--config", str(tmp_path / "mix.toml")]) == 0
    assert called[0][1] == ("A-v0+B-v0", None)


def test_argparse_errors_exit_2_too():
    assert command().returncode == command("train", "X-v0", "--steps", "many").returncode == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (molt_gym.ConfigError("steps: 0"), 2),
        (molt_gym.UnknownEnv("no env is registered as 'X'"), 2),
        (molt_gym.NotAChatEnv("CartPole-v1 is no chat env"), 2),
        (RunFailed("8 of 8 rollouts failed: sandbox 8"), 1),
        (EnvFailure("sandbox", "died"), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes_and_one_line(error, code, monkeypatch, capsys):
    monkeypatch.setattr(molt_gym, "train", raising(error))
    assert main(["train", "CodeExec-v0"]) == code
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and (str(error) or "interrupted") in text


def test_where_rollouts_go_is_tried_before_they_are_played(called, tmp_path, capsys):
    assert main(["rollout", "CodeExec-v0", "--model", "tiny", "--out", str(tmp_path)]) == 1
    assert "Is a directory" in capsys.readouterr().err and not called
    (tmp_path / "file").touch()
    assert main(["rollout", "CodeExec-v0", "--model", "tiny", "--out", str(tmp_path / "file" / "x.jsonl")]) == 1
    assert not called
    assert main(["rollout", "CodeExec-v0", "--model", "tiny", "--out", str(tmp_path / "new" / "x.jsonl")]) == 0
    assert len(called) == 1


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(molt_gym, "train", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["train", "CodeExec-v0"])


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunDir(tmp_path / "runs" / "CodeExec-v0-tiny-1") as run:
        run.write_config('env = "CodeExec-v0"\nseed = 7\n')
    return run.path


def test_resume_takes_the_env_from_the_run_and_leaves_seed_and_settings_to_it(run, called):
    assert main(["train", "--resume", str(run), "--steps", "90"]) == 0
    ((_, args, kwargs),) = called
    assert args == ("CodeExec-v0", None)
    assert kwargs == {"out": str(run), "steps": 90, "seed": None, "config": None}


def test_resume_auto_takes_the_latest_run_of_the_env(run, called):
    assert main(["train", "CodeExec-v0", "--resume", "auto"]) == 0
    assert called[0][2]["out"] == str(run.relative_to(os.getcwd()))


def test_resume_auto_starts_anew_where_there_is_no_run(run, called, capsys):
    assert main(["train", "Other-v0", "--resume", "auto"]) == 0
    assert called[0][2]["out"] is None and called[0][2]["config"] is None
    assert "starting a new one" in capsys.readouterr().out


def test_resume_auto_with_out_goes_on_there_whether_or_not_it_has_begun(run, called):
    assert main(["train", "CodeExec-v0", "--resume", "auto", "--out", "runs/fresh"]) == 0
    assert called[0][2]["out"] == "runs/fresh"


def test_a_person_can_play(parrot, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('hello\n.\n{"role": "assistant", "content": "hello"}\n.\n'))
    assert main(["rollout", parrot, "--human"]) == 0
    text = capsys.readouterr().out
    assert text.index("say hello") < text.index("again") < text.index("reward 1")


def test_a_person_can_set_arguments_of_the_env_and_end_the_input(parrot):
    result = command(
        "rollout",
        parrot,
        "--human",
        "--env-kwargs.word",
        "bye",
        input="bye\n.\n",
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert "say bye" in result.stdout and "again" in result.stdout
    assert result.returncode == 1 and "input ended" in result.stderr and "Traceback" not in result.stderr


def test_a_reply_that_is_no_message_can_be_given_again(parrot, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"role": "robot"}\n.\nhello\n.\nhello\n.\n'))
    assert main(["rollout", parrot, "--human"]) == 0
    text = capsys.readouterr().out
    assert "robot" in text and "reward 1" in text and text.count("say hello") == 1


MESSAGES = [{"role": "user", "content": "[bold]1+1[/bold]\x1b[2J\ud800"}, {"role": "assistant", "content": "2"}]


def test_rollout_prints_transcripts_as_they_are_and_writes_them(monkeypatch, capsys, tmp_path):
    played = [
        Trajectory("E-v0", 4, messages=MESSAGES, reward=1.0, turns=1, terminated=True),
        Trajectory("E-v0", 5, failure=Failure("sandbox", "died", "")),
    ]
    monkeypatch.setattr(molt_gym, "rollout", lambda *args, **kwargs: played)
    assert main(["rollout", "CodeExec-v0", "-n", "2", "--out", str(tmp_path / "x.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "[bold]1+1[/bold]" in text and "\x1b" not in text and "reward 1" in text and "failed: sandbox: died" in text
    assert read_jsonl(tmp_path / "x.jsonl") == played


def test_rollout_exits_1_with_counts_when_every_episode_failed(monkeypatch, capsys):
    failures = [
        Trajectory("E-v0", i, failure=Failure(reason, "", "")) for i, reason in enumerate(["judge", "sandbox", "judge"])
    ]
    monkeypatch.setattr(molt_gym, "rollout", lambda *args, **kwargs: failures)
    assert main(["rollout", "CodeExec-v0", "-n", "3"]) == 1
    assert "judge 2, sandbox 1" in capsys.readouterr().err


@pytest.fixture
def parrot_policy(monkeypatch):
    """Evaluates a function in the place of a model, really."""
    evaluate = molt_gym.evaluate

    def with_function(env, model, **kwargs):
        print("which model, and why")
        return evaluate(env, lambda observation: "hello", **kwargs)

    monkeypatch.setattr(molt_gym, "evaluate", with_function)


def test_eval_prints_what_was_found(parrot, parrot_policy, capsys):
    assert main(["eval", parrot, "--episodes", "3"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["env", parrot] in lines and ["pass_at_1", "1", "[0.439,", "1]"] in lines and ["episodes", "3"] in lines


def test_eval_prints_nothing_but_json_if_asked(parrot, parrot_policy, capsys):
    assert main(["eval", parrot, "--episodes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pass_at_1"] == 1.0 and found["episodes"] == 2 and found["failures"] == {}


PLANNER = """
import asyncio

import molt_gym

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@molt_gym.register_agent("Planner-v0")
async def plan(ctx):
    async def ask(text):
        await ctx.openai().chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], tools=[TOOL])

    await ask("first")
    await ask("second")
    return 1
"""


def test_a_person_sees_every_conversation_and_its_tools_though_it_does_not_extend_the_last(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "asks_twice.py").write_text(PLANNER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n.\ntwo\n.\n"))
    assert main(["rollout", "asks_twice:Planner-v0", "--human"]) == 0
    text = capsys.readouterr().out
    assert text.index("first") < text.index("another conversation") < text.index("second") < text.index("reward 1")
    assert text.count('"name": "look"') == 1
