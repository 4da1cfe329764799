"""`slurm/launch.sh` under a real Slurm of two nodes, which are two slurmd of this machine."""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
MISSING = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]
needs_slurm = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.skipif(
    bool(MISSING), reason=f"no {', '.join(MISSING)}; apt-get install slurm-wlm munge")]
LAUNCH = Path(__file__).parents[3] / "slurm" / "launch.sh"
TOYS = Path(__file__).parents[1] / "toys"
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
MessageTimeout=60
BatchStartTimeout=300
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
KillWait=10
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=9
"""
SETTLED = timedelta(seconds=3)
SETTINGS = """\
#SBATCH --cpus-per-task=2
#SBATCH --time=20
env = "toy_envs:Letters-v0"
eval = {before = false, after = false}
checkpoint = {every = 50}
actor = {dtype = "float32"}
rollout = {groups_per_step = 2, group_size = 4, max_tokens = 8, max_context = 256, dtype = "float32"}
"""


def until(true: Callable[[], object], what: str | Callable[[], str], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.2)


class Slurm:
    """A cluster with its state in a folder; `folder/log` has what its daemons say."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, []
        self.env = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin", "VENV": sys.prefix,
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TOYS), "TOYS_PAUSE": "0.2", "OMP_NUM_THREADS": "1"}
        for name in ("state", "n1", "n2"):
            (folder / name).mkdir()
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [taken.getsockname()[1] for taken in sockets]
        for taken in sockets:
            taken.close()
        (folder / "slurm.conf").write_text(CONF.format(
            host=socket.gethostname().partition(".")[0], user=getpass.getuser(), folder=folder, ports=ports))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock",
                    f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed")
        until((folder / "munge.sock").exists, "munged does not start")
        self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node)
        until(lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout.split() == ["idle", "2"], self.said)

    def _start(self, *words: str) -> None:
        with (self.folder / "log").open("a") as log:
            self.daemons.append(subprocess.Popen(words, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def said(self) -> str:
        return (self.folder / "log").read_text()

    def run(self, *words: str | Path, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(words, env=self.env | env, cwd=self.folder, capture_output=True, text=True,
                              timeout=120, check=False)

    def launch(self, *words: str | Path, **env: str) -> str:
        """Submit; the number of the job."""
        done = self.run(LAUNCH, *words, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def shown(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job).stdout))

    def close(self) -> None:
        self.run("scancel", "--user", getpass.getuser())
        until(lambda: not self.run("squeue", "-h").stdout, "jobs do not end", 120)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(60)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        # Every user's tasks go through it.
        Path(folder).chmod(0o755)
        cluster = Slurm(Path(folder))
        try:
            yield cluster
        finally:
            cluster.close()


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.is_file() else [])
    return [line["step"] for line in lines if "time/step" in line]


def went_on(slurm: Slurm, job: str, run: Path, steps: int, interrupt: Callable[[], object]) -> None:
    """The job is interrupted in its second step or later, saves, is requeued, and ends as if nothing had been."""
    def log() -> str:
        return (run.parent / f"{run.name}.slurm" / f"{job}.log").read_text()

    def runs(true: Callable[[], object]) -> None:
        until(lambda: true() or slurm.shown(job).get("JobState") in ("FAILED", "CANCELLED", "TIMEOUT"), log)
        assert true(), f"{log()}\n{slurm.shown(job)}\n{slurm.said()[-3000:]}"

    runs(lambda: len(steps_of(run)) >= 2)
    interrupt()
    runs(lambda: "has ended with 143" in log())
    saved = len(steps_of(run))
    assert saved < steps

    def again() -> bool:
        shown = slurm.shown(job)
        asked = datetime.fromisoformat(shown["SubmitTime"])
        if shown["JobState"] == "PENDING" and datetime.now() - asked > SETTLED:
            # Else Slurm waits until the credentials of the first start have expired. In the second in which it ended
            # the first start a node refuses the next, and the job fails.
            slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        return shown["Restarts"] == "1" and shown["JobState"] == "COMPLETED"

    runs(again)
    assert steps_of(run) == list(range(1, steps + 1))
    assert f"resumed after step {saved}" in log()
    assert (run / "model" / "config.json").is_file()


class TestJobs:
    pytestmark = needs_slurm

    @pytest.mark.skipif(not (find_spec("ray") and find_spec("vllm")), reason="Ray or vLLM is not installed")
    def test_a_run_on_two_nodes_that_is_preempted_saves_and_goes_on_when_it_gets_them_again(
            self, slurm, wide_path, tmp_path):
        recipe = tmp_path / "recipe.toml"
        recipe.write_text("#SBATCH --nodes=2\nplacement = \"ray\"\n" + SETTINGS.replace(
            "rollout = {", "rollout = {engine = \"vllm\", "))
        run = tmp_path / "run"
        job = slurm.launch("--partition=low", "train", recipe, run, "--model", wide_path, "--steps", "12")
        went_on(slurm, job, run, 12, lambda: slurm.run(
            "sbatch", "--partition=high", "--nodes=2", "--cpus-per-task=2", "--output=/dev/null", "--wrap=sleep 1"))
        assert slurm.shown(job)["NumNodes"] == "2"

    @pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap")
    def test_a_run_in_a_container_that_reaches_the_time_limit_requeues_itself(self, slurm, tiny_path, tmp_path):
        recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
        recipe.write_text(SETTINGS)
        job = slurm.launch("train", recipe, run, "--model", tiny_path, "--steps", "30",
                           WRAP=f"bwrap --dev-bind / / --setenv PYTHONPATH {TOYS}")
        # What Slurm sends before the limit, to whom it sends it.
        went_on(slurm, job, run, 30, lambda: slurm.run("scancel", "--batch", "--signal=TERM", job))

    def test_a_run_that_fails_is_not_repeated(self, slurm, tmp_path):
        (tmp_path / "recipe.toml").write_text(SETTINGS)
        job = slurm.launch("train", tmp_path / "recipe.toml", tmp_path / "run", "--model", tmp_path / "none")
        until(lambda: slurm.shown(job).get("JobState") == "FAILED", slurm.said)
        assert slurm.shown(job)["ExitCode"] == "2:0"
        assert "model" in (tmp_path / "run.slurm" / f"{job}.log").read_text()


@pytest.mark.parametrize(("words", "said"), [
    ((), "usage: slurm/launch.sh"),
    (("train", "none.toml", "run"), "recipe: no file 'none.toml'"),
    (("learn", "none.toml", "run"), "verb: got 'learn'; write train, distill or sft"),
])
def test_words_that_make_no_job_are_refused(words, said, tmp_path):
    refused = subprocess.run([LAUNCH, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert said in refused.stderr


def test_options_reach_sbatch_however_they_are_written_those_of_the_recipe_first(tmp_path):
    (tmp_path / "recipe.toml").write_text("""\
#SBATCH --nodes=2 --mem 10G  # two words\r
# SBATCH --not=this
#SBATCH -C 'fast disk'
#SBATCH\t-n 4
steps = 3
#SBATCH # nothing
#SBATCHING --neither
""")
    for name in ("molt-gym", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin").symlink_to(tmp_path)
    env = os.environ | {"VENV": str(tmp_path), "WRAP": "", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given = ["-p", "gpu", "--account=mine", "--exclusive", "--qos", "high"]
    done = subprocess.run([LAUNCH, *given, "train", "recipe.toml", "run %j"], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=60, check=True)
    words = done.stdout.splitlines()
    assert words[words.index("--nodes=2") - 1:] == [
        f"--output={tmp_path}/run %%j.slurm/%j.log", "--nodes=2", "--mem", "10G", "-C", "fast disk", "-n", "4", *given,
        str(LAUNCH), "--inside", "train", str(tmp_path / "recipe.toml"), str(tmp_path / "run %j")]


def test_a_quote_that_is_not_closed_is_refused(tmp_path):
    (tmp_path / "recipe.toml").write_text("#SBATCH --comment='half of it\n")
    refused = subprocess.run([LAUNCH, "train", "recipe.toml", "run"], cwd=tmp_path, capture_output=True, text=True,
                             timeout=60, check=False, env=os.environ | {"WRAP": "true"})
    assert refused.returncode == 2 and "recipe: #SBATCH lines of 'recipe.toml'" in refused.stderr


def test_a_missing_environment_is_named(tmp_path):
    (tmp_path / "recipe.toml").touch()
    refused = subprocess.run([LAUNCH, "train", "recipe.toml", "run"], cwd=tmp_path, capture_output=True, text=True,
                             timeout=60, check=False, env=os.environ | {"VENV": "none", "WRAP": ""})
    assert refused.returncode == 2
    assert f"no molt-gym in {tmp_path}/none" in refused.stderr
