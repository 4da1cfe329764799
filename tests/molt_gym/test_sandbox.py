"""Real programs in real sandboxes: what they may not do, and that nothing of them is left."""

import http.server
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from molt_gym.errors import ConfigError, EnvFailure
from molt_gym.sandbox import SANDBOXES, Limits, Sandbox, check_bubblewrap, make_sandbox
from molt_gym.sandbox.output import read_until
from molt_gym.sandbox.seccomp import filter_program
from molt_gym.strays import end_all

SECRETS = {
    "OPENAI_API_KEY": "canary-openai",
    "ANTHROPIC_API_KEY": "canary-anthropic",
    "AWS_SECRET_ACCESS_KEY": "canary-cloud",
    "HF_TOKEN": "canary-hub",
    "DATABASE_URL": "canary-database",
    "SLACK_WEBHOOK_URL": "canary-webhook",
    "OPENAI_BASE_URL": "canary-endpoint-a",
    "ANTHROPIC_BASE_URL": "canary-endpoint-b",
}


@pytest.fixture(params=SANDBOXES)
def sandbox(request) -> Sandbox:
    return make_sandbox(request.param)


@pytest.fixture
def bubblewrap() -> Sandbox:
    return make_sandbox("bubblewrap")


def processes(marker: str) -> list[int]:
    """Processes with a marker among their arguments."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [int(pid)] if marker.encode() in arguments else []
    return found


def wait_until_gone(marker: str) -> list[int]:
    deadline = time.monotonic() + 2
    while (left := processes(marker)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def ancestor(pid: int) -> int:
    """The child of this process from which another one descends."""
    while (parent := int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])) != os.getpid():
        pid = parent
    return pid


def sleeper(marker: str, seconds: int = 10, **options: object) -> str:
    """Code that starts a child with a marker in its arguments."""
    command = f"[sys.executable, '-c', 'import time; time.sleep({seconds})', {marker!r}]"
    return f"import subprocess, sys\nsubprocess.Popen({command}, **{options!r})\n"


def peak_rss(reset: bool = False) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def judged(program: bytes, architecture: int, number: int, argument: int) -> int:
    """What the kernel makes of a system call by a filter."""
    data, at, loaded = {0: number, 4: architecture, 16: argument}, 0, 0
    while True:
        code, then, otherwise, value = struct.unpack_from("=HBBI", program, 8 * at)
        if code == 0x06:
            return value
        tests = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}
        loaded = data[value] if code == 0x20 else loaded
        at += 1 + (0 if code == 0x20 else then if tests[code] else otherwise)


def reap(pidfd: tuple[int, ...]) -> bool:
    """Waits for any child, as some supervisors do, where a program has ended."""
    ended = bool(pidfd) and "pidfd" in os.readlink(f"/proc/self/fd/{pidfd[0]}")
    return not ended or bool(os.waitpid(-1, 0))


class TestResults:
    def test_a_program_reads_stdin_and_writes_stdout_and_stderr(self, sandbox):
        code = "import sys\nprint(input()[::-1])\nprint('oh', file=sys.stderr)\nsys.exit(3)"
        result = sandbox.run(code, stdin="héllo\n")
        assert (result.stdout, result.stderr, result.exit_code, result.timed_out) == ("olléh\n", "oh\n", 3, False)

    def test_a_program_without_stdin_reads_the_end_of_it(self, sandbox):
        assert sandbox.run("import sys; print(repr(sys.stdin.read()))").stdout == "''\n"

    def test_an_error_is_told_as_python_tells_it(self, sandbox):
        result = sandbox.run("def f():\n    return x\nf()")
        assert result.exit_code == 1
        assert result.stderr.splitlines()[1:] == [
            '  File "main.py", line 3, in <module>',
            '  File "main.py", line 2, in f',
            "NameError: name 'x' is not defined",
        ]

    @pytest.mark.parametrize("code", ["def f(:", "x = '\0'", "print('\ud800')", "(" * 500, "\x00", "return 1"])
    def test_a_program_that_does_not_compile_is_the_fault_of_the_program(self, sandbox, code):
        result = sandbox.run(code)
        assert result.exit_code == 1 and "Error" in result.stderr

    @pytest.mark.parametrize("first", ["# -*- coding: latin-1 -*-", "# coding: unheard-of", "\ufeff", "\r"])
    def test_a_program_is_text_whatever_it_says_of_its_encoding(self, sandbox, first):
        assert sandbox.run(f"{first}\nprint('é')").stdout == "é\n"

    @pytest.mark.parametrize(("code", "exit_code"), [("exit()", 0), ("quit(3)", 3), ("import sys; sys.exit('no')", 1)])
    def test_a_program_may_exit_in_the_usual_ways(self, sandbox, code, exit_code):
        assert sandbox.run(code).exit_code == exit_code

    def test_whole_numbers_of_any_length_can_be_printed(self, sandbox):
        assert sandbox.run("print(10**9000)").stdout == f"1{'0' * 9000}\n"

    def test_a_death_by_signal_is_an_exit_code(self, sandbox):
        assert sandbox.run("import os; os.kill(os.getpid(), 9)").exit_code == 128 + 9
        assert sandbox.run("import os; os.abort()").exit_code == 128 + 6

    def test_the_empty_program_succeeds_without_output(self, sandbox):
        result = sandbox.run("")
        assert (result.stdout, result.stderr, result.exit_code) == ("", "", 0)

    def test_a_program_is_the_main_module_and_may_import_the_standard_library(self, sandbox):
        code = """
            import __main__, collections, ctypes, decimal, json, multiprocessing, sqlite3, ssl, zlib
            from dataclasses import dataclass
            @dataclass
            class P:
                x: int
            import pickle
            if __name__ == "__main__":
                print(pickle.loads(pickle.dumps(__main__.P(3))))
        """
        assert sandbox.run("if 1:" + code).stdout == "P(x=3)\n"

    def test_threads_and_processes_work_within_the_limits(self, sandbox):
        code = "from multiprocessing import Pool\nwith Pool(2) as pool: print(pool.map(abs, [-1, -2]))"
        assert sandbox.run(code, limits=Limits(seconds=10)).stdout == "[1, 2]\n"

    def test_order_of_a_set_is_the_same_in_every_run(self, sandbox):
        assert len({sandbox.run("print({'a', 'b', 'c', 'd', 'e', 'f'})").stdout for _ in range(4)}) == 1

    def test_no_installed_package_can_be_imported(self, sandbox):
        assert "ModuleNotFoundError" in sandbox.run("import gymnasium").stderr

    def test_runs_are_independent(self, sandbox):
        assert sandbox.run("open('x', 'w').write('1'); import os; print(os.listdir('.'))").stdout == "['x']\n"
        assert sandbox.run("import os; print(os.listdir('.'))").stdout == "[]\n"

    def test_many_threads_get_their_own_results(self, sandbox):
        with ThreadPoolExecutor(32) as pool:
            results = pool.map(lambda n: sandbox.run(f"print({n})", limits=Limits(seconds=20)).stdout, range(64))
        assert list(results) == [f"{n}\n" for n in range(64)]


class TestTime:
    @pytest.mark.parametrize(
        "code",
        [
            "while True: pass",
            "import time; time.sleep(60)",
            "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()",
            "import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass",
            "9 ** 9 ** 9",
            "import atexit, time; atexit.register(time.sleep, 60)",
        ],
        ids=["loop", "sleep", "ignores SIGTERM", "closed streams", "inside C", "at exit"],
    )
    def test_a_call_returns_soon_after_the_limit(self, sandbox, code):
        begin = time.monotonic()
        result = sandbox.run(code, limits=Limits(seconds=0.5))
        assert time.monotonic() - begin <= 10
        assert result.timed_out and result.exit_code is None

    def test_a_child_in_the_background_does_not_hold_the_call(self, sandbox):
        result = sandbox.run(sleeper("background-child", 60), limits=Limits(seconds=30))
        assert result.exit_code == 0 and result.seconds < 30
        assert wait_until_gone("background-child") == []

    @pytest.mark.parametrize("ending", ["", "import time; time.sleep(60)"])
    def test_a_child_in_its_own_session_does_not_outlive_the_call(self, sandbox, ending, tmp_path):
        marker, name = tmp_path / "marker", f"own-session-{os.getpid()}"
        writer = f"import time; time.sleep(3); open({str(marker)!r}, 'w')"
        command = f"[sys.executable, '-c', {writer!r}, {name!r}]"
        sandbox.run(
            f"import subprocess, sys\nsubprocess.Popen({command}, start_new_session=True)\n{ending}",
            limits=Limits(seconds=0.5),
        )
        assert wait_until_gone(name) == []
        assert not marker.exists()

    def test_a_daemon_that_has_left_its_parent_is_ended(self, sandbox):
        fork = "import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        sandbox.run(fork + sleeper("daemon"), limits=Limits(seconds=1))
        assert wait_until_gone("daemon") == []

    def test_cancelling_ends_all_that_runs_and_the_next_call_works(self, sandbox):
        begin = time.monotonic()
        with ThreadPoolExecutor(12) as pool:
            code = sleeper("cancelled") + "while True: pass"
            calls = [pool.submit(sandbox.run, code, limits=Limits(seconds=30)) for _ in range(12)]
            while len(processes("cancelled")) < 12 and time.monotonic() - begin < 15:
                time.sleep(0.05)
            sandbox.cancel()
            cancelled = time.monotonic()
            for call in calls:
                with pytest.raises(EnvFailure, match="sandbox: cancelled"):
                    call.result()
        assert time.monotonic() - cancelled < 3
        assert wait_until_gone("cancelled") == []
        assert sandbox.run("print(1)").stdout == "1\n"

    def test_nothing_is_left_of_a_start_that_is_cancelled(self, bubblewrap, tmp_path):
        program = tmp_path / "bwrap"
        program.symlink_to(bubblewrap._program)
        bubblewrap._program = str(program)
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(bubblewrap.run, "while True: pass", limits=Limits(seconds=30)) for _ in range(80)]
            while not all(call.done() for call in calls):
                bubblewrap.cancel()
                time.sleep(0.003)
        assert {str(call.exception()) for call in calls} == {"sandbox: cancelled"}
        assert wait_until_gone(str(program)) == []

    def test_cancelling_ends_what_waits_for_its_turn_too(self, bubblewrap, monkeypatch):
        monkeypatch.setattr("molt_gym.sandbox.base._slots", threading.BoundedSemaphore(2))
        with ThreadPoolExecutor(8) as pool:
            code = sleeper("waiting", 60) + "while True: pass"
            calls = [pool.submit(bubblewrap.run, code, limits=Limits(seconds=60)) for _ in range(8)]
            deadline = time.monotonic() + 30
            while len(processes("waiting")) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            bubblewrap.cancel()
            for call in calls:
                with pytest.raises(EnvFailure, match="sandbox: cancelled"):
                    call.result(timeout=30)

    def test_a_limit_of_years_is_one(self, bubblewrap):
        assert bubblewrap.run("print(1)", limits=Limits(seconds=2**31 - 1)).stdout == "1\n"

    def test_twelve_at_once_all_return_in_time(self, sandbox):
        begin = time.monotonic()
        with ThreadPoolExecutor(12) as pool:
            results = list(pool.map(lambda _: sandbox.run("while True: pass", limits=Limits(seconds=1)), range(12)))
        assert all(result.timed_out for result in results)
        assert time.monotonic() - begin <= 3 + 1

    @pytest.mark.parametrize("name", SANDBOXES)
    def test_nothing_outlives_a_host_that_is_killed(self, name):
        code = sleeper("orphan", 60) + "while True: pass"
        script = f"from molt_gym.sandbox import *; make_sandbox({name!r}).run({code!r}, limits=Limits(seconds=60))"
        host = subprocess.Popen([sys.executable, "-c", script])
        deadline = time.monotonic() + 20
        while not processes("orphan") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes("orphan")
        host.kill()
        host.wait()
        assert wait_until_gone("orphan") == []


class TestResources:
    def test_a_fork_loop_is_refused(self, bubblewrap):
        code = """if 1:
            import os, time
            n = 0
            try:
                for n in range(500):
                    if os.fork() == 0:
                        time.sleep(30)
                        os._exit(0)
            except OSError as error:
                print(n, type(error).__name__)
        """
        result = bubblewrap.run(code, limits=Limits(seconds=5, processes=10))
        assert result.stdout == "9 BlockingIOError\n"

    def test_the_limit_on_processes_counts_each_run_for_itself(self, bubblewrap):
        code = """if 1:
            import os, time
            for _ in range(5):
                if not os.fork():
                    time.sleep(.5)
                    os._exit(0)
            print("ok")
            time.sleep(.5)
        """
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda _: bubblewrap.run(code, limits=Limits(seconds=10, processes=8)), range(6)))
        assert [result.stdout for result in results] == ["ok\n"] * 6

    def test_threads_are_limited_too(self, bubblewrap):
        start = "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
        code = f"import threading, time\nfor n in range(500): {start}"
        assert "can't start new thread" in bubblewrap.run(code).stderr

    @pytest.mark.parametrize("code", ["x = bytearray(8 << 30)", "x = []\nwhile True: x.append(bytes(1 << 20))"])
    def test_memory_is_refused(self, sandbox, code):
        result = sandbox.run(code)
        assert result.exit_code == 1 and "MemoryError" in result.stderr

    def test_disk_is_limited(self, bubblewrap):
        code = "for n in range(100):\n    with open(f'{n}', 'wb') as f: f.write(bytes(1 << 20))"
        assert "No space left" in bubblewrap.run(code, limits=Limits(disk_mb=4)).stderr

    def test_a_file_cannot_grow_beyond_the_limit(self, sandbox):
        assert "File too large" in sandbox.run("open('x', 'wb').write(bytes(32 << 20))").stderr

    def test_open_files_are_limited(self, sandbox):
        code = "import os\nfds = []\nwhile True: fds.append(os.dup(0))"
        assert "Too many open files" in sandbox.run(code).stderr

    def test_the_limit_on_processor_time_is_told_from_a_death_by_other_causes(self, sandbox):
        code = "import resource as r\nsoft, hard = r.getrlimit(r.RLIMIT_CPU)\nprint(soft, hard, flush=True)\n"
        burn = "r.setrlimit(r.RLIMIT_CPU, (hard - soft, hard))\nwhile True: pass"
        result = sandbox.run(code + burn, limits=Limits(seconds=60))
        assert result.stdout == "61 62\n" and result.timed_out and result.seconds < 60

    @pytest.mark.parametrize("call", ["unshare(0x10000000)", "shmget(0, 1 << 20, 0o1600)", "memfd_create(b'x', 0)"])
    def test_ways_around_the_limits_are_refused(self, bubblewrap, call):
        code = f"import ctypes; print(ctypes.CDLL(None, use_errno=True).{call}, ctypes.get_errno())"
        assert bubblewrap.run(code).stdout == "-1 1\n"

    def test_no_memory_is_had_by_attributes_of_files(self, bubblewrap):
        code = """if 1:
            import os, shutil
            open("x", "w").close()
            for file in ("x", os.open("x", os.O_RDWR)):
                try:
                    os.setxattr(file, "user.a", bytes(60_000))
                    print("set")
                except PermissionError:
                    print("refused")
            shutil.copy2("x", "y")
        """
        assert bubblewrap.run(code).stdout == "refused\nrefused\n"

    def test_a_new_user_namespace_cannot_be_cloned(self, bubblewrap):
        code = "import ctypes; print(ctypes.CDLL(None).syscall({}, 0x10000000 | 17, 0, 0, 0, 0))"
        number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
        assert bubblewrap.run(code.format(number)).stdout == "-1\n"

    @pytest.mark.parametrize(
        ("machine", "architecture", "clone", "make_socket"),
        [("x86_64", 0xC000003E, 56, 41), ("aarch64", 0xC00000B7, 220, 198)])
    def test_the_filter_of_each_machine_refuses_what_it_says(self, machine, architecture, clone, make_socket):
        allowed, refused, missing, killed = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
        asked = [(0, 0, allowed), (clone, 17, allowed), (clone, 0x10000011, refused), (435, 0, missing),
                 (425, 0, refused), (0x40000000, 0, killed)]
        asked += [(make_socket, family, allowed if family in (1, 2, 10, 16) else refused) for family in range(46)]
        for number, argument, verdict in asked:
            assert judged(filter_program(machine), architecture, number, argument) == verdict, (number, argument)
        assert judged(filter_program(machine), 3, 0, 0) == killed

    @pytest.mark.parametrize(
        ("name", "value"), [("seconds", 0), ("seconds", float("inf")), ("memory_mb", 99.5), ("processes", True)]
    )
    def test_limits_that_make_no_sense_are_refused(self, name, value):
        with pytest.raises(ConfigError, match=f"{name}: .*; write a positive"):
            Limits(**{name: value})


class TestIsolation:
    def test_no_variable_of_the_host_is_inherited(self, sandbox, monkeypatch):
        for name, value in SECRETS.items():
            monkeypatch.setenv(name, value)
        result = sandbox.run("import os\nfor item in os.environ.items(): print(*item)")
        assert result.exit_code == 0
        assert not [text for item in SECRETS.items() for text in item if text in result.stdout]
        assert "canary" not in result.stdout

    def test_the_environment_of_the_host_process_cannot_be_read(self, bubblewrap):
        code = "import os, glob\nprint(glob.glob('/proc/*'))\nopen(f'/proc/{os.getppid()}/environ').read()"
        result = bubblewrap.run(code)
        assert result.stdout == "[]\n" and "FileNotFoundError" in result.stderr
        assert "FileNotFoundError" in bubblewrap.run(f"open('/proc/{os.getpid()}/environ')").stderr

    def test_files_of_the_host_cannot_be_read(self, bubblewrap, tmp_path):
        secret = tmp_path / "checkpoint" / "secret"
        secret.parent.mkdir()
        secret.write_text("canary")
        code = "import os\nprint(os.listdir(path) if os.path.isdir(path) else open(path).read())"
        for path in (secret, Path.home() / ".bashrc", "/etc/passwd", "/etc/hostname", __file__, sys.prefix, Path.cwd()):
            result = bubblewrap.run(f"path = {str(path)!r}\n{code}")
            assert result.exit_code == 1 and result.stdout == "", path

    def test_of_the_home_folder_only_the_interpreter_is_there(self, bubblewrap):
        code = "import os\nprint(sorted(os.listdir(path)) if os.path.isdir(path) else [])"
        home, base = Path.home(), Path(sys.base_prefix)
        expected = [base.relative_to(home).parts[0]] if base.is_relative_to(home) else []
        assert bubblewrap.run(f"path = {str(home)!r}\n{code}").stdout == f"{expected}\n"

    def test_packages_of_the_host_cannot_be_read(self, bubblewrap):
        code = "import glob, sys; print(glob.glob(sys.base_prefix + '/lib/python*/*-packages/*'))"
        assert bubblewrap.run(code).stdout == "[]\n"

    def test_nothing_can_be_written_outside_the_folder(self, bubblewrap, tmp_path):
        code = """if 1:
            import os, sys
            wrote = []
            library = os.path.dirname(os.__file__)
            for folder in ("/", "/usr", "/root", "/dev", "/etc", sys.base_prefix, library, path, "/dev/shm", "."):
                try:
                    os.makedirs(folder, exist_ok=True)
                    open(os.path.join(folder, "mark"), "w").write("x")
                    if folder != path:
                        wrote.append(folder)
                except OSError:
                    pass
            print(wrote)
        """
        assert bubblewrap.run(f"path = {str(Path.cwd())!r}\n{code}").stdout == "['/dev/shm', '.']\n"
        # Where the working folder is below /tmp, the program may have made one of that name in its own.
        assert not (Path.cwd() / "mark").exists()
        # A folder of the same name in the program's own /tmp.
        code = f"import os\nos.makedirs({str(tmp_path)!r})\nopen({str(tmp_path / 'mark')!r}, 'w')"
        assert bubblewrap.run(code).exit_code == 0
        assert list(tmp_path.iterdir()) == []

    def test_no_server_of_the_host_is_reached(self, bubblewrap):
        hits = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                hits.append(self.path)
                self.send_error(404)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        code = f"""if 1:
            import socket, urllib.request
            for host in ("127.0.0.1", "localhost", "::1", {socket.gethostname()!r}):
                try:
                    urllib.request.urlopen(f"http://{{host}}:{port}/", timeout=1)
                    print("reached", host)
                except OSError as error:
                    print("no")
        """
        try:
            assert set(bubblewrap.run(code, limits=Limits(seconds=8)).stdout.split()) == {"no"}
            assert hits == []
        finally:
            server.shutdown()
            server.server_close()

    def test_sockets_in_the_abstract_namespace_are_its_own(self, bubblewrap):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0molt-gym-test-{os.getpid()}")
            listener.listen()
            code = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0molt-gym-test-{os.getpid()}')"
            assert "ConnectionRefusedError" in bubblewrap.run(code).stderr

    def test_sockets_that_no_namespace_keeps_from_the_host_are_refused(self, bubblewrap):
        code = """if 1:
            import socket
            for family in range(1, 46):
                try:
                    socket.socket(family, socket.SOCK_STREAM).close()
                    print(family)
                except OSError as error:
                    assert family in (1, 2, 10) or error.errno == 1 or family == 16, (family, error)
        """
        result = bubblewrap.run(code)
        assert {"1", "2"} <= set(result.stdout.split()) <= {"1", "2", "10"} and result.stderr == ""
        assert bubblewrap.run("import socket; a, b = socket.socketpair(); a.send(b'x'); b.recv(1)").exit_code == 0

    def test_neither_the_log_nor_the_name_of_the_host_can_be_read(self, bubblewrap):
        code = "import ctypes, os\nprint(os.uname().nodename, ctypes.CDLL(None).klogctl(10, None, 0))"
        assert bubblewrap.run(code).stdout == "sandbox -1\n"

    def test_no_file_descriptor_is_inherited(self, sandbox, tmp_path):
        with open(tmp_path / "open", "w") as file:
            os.set_inheritable(file.fileno(), True)
            code = """if 1:
                import os
                found = []
                for fd in range(1024):
                    try:
                        os.fstat(fd)
                        found.append(fd)
                    except OSError:
                        pass
                print(found)
            """
            assert sandbox.run(code).stdout == "[0, 1, 2]\n"

    def test_no_process_of_the_host_can_be_signalled(self, bubblewrap):
        code = f"import os\nprint(os.getpid() < 10)\nos.kill({os.getpid()}, 0)"
        result = bubblewrap.run(code)
        assert result.stdout == "True\n" and "ProcessLookupError" in result.stderr

    def test_it_is_nobody_without_rights(self, bubblewrap):
        code = """if 1:
            import os, ctypes
            print(os.getuid() == 0, os.getgroups(), ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))
            for call in (lambda: os.setuid(0), lambda: os.chroot("."), lambda: os.mknod("d", 0o20600, 259)):
                try:
                    call()
                    print("allowed")
                except OSError:
                    pass
        """
        lines = bubblewrap.run(code).stdout.splitlines()
        assert lines[0].startswith("False [") and lines[0].endswith(" 1") and lines[1:] == []

    def test_ordinary_users_get_a_sandbox_too(self, tmp_path):
        if os.geteuid() != 0 or not os.access("/usr/bin/python3", os.X_OK):
            return  # an ordinary user is running all the other tests
        copied = tmp_path / "copy"
        shutil.copytree(Path(make_sandbox.__code__.co_filename).parent, copied / "molt_gym" / "sandbox")
        for part in (EnvFailure.__init__, end_all):
            shutil.copy(Path(part.__code__.co_filename), copied / "molt_gym")
        (copied / "molt_gym" / "__init__.py").touch()
        (copied / "gymnasium").mkdir()
        (copied / "gymnasium" / "error.py").write_text("class UnregisteredEnv(Exception): pass")
        script = """if 1:
            import sys
            from molt_gym.sandbox import Limits, make_sandbox
            fork = "import os, time\\nprint(os.getuid())\\nfor n in range(500):\\n    if not os.fork(): time.sleep(30)"
            result = make_sandbox().run(fork, limits=Limits(processes=8))
            print(result.stdout.strip(), "BlockingIOError" in result.stderr)
        """
        for path in (*tmp_path.parents[:3], tmp_path):
            path.chmod(path.stat().st_mode | 0o55)
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", script]
        result = subprocess.run(command, cwd=copied, env={"PATH": "/usr/bin"}, capture_output=True, text=True)
        assert result.stdout == "65534 True\n", result.stderr


class TestOutput:
    def test_bytes_that_are_no_utf8_are_replaced(self, sandbox):
        code = "import os; os.write(1, b'\\xf0'); os.write(2, b'clean\\n\\xe9\\nafter\\n')"
        result = sandbox.run(code)
        assert (result.stdout, result.stderr) == ("\ufffd", "clean\n\ufffd\nafter\n")

    @pytest.mark.parametrize(
        ("written", "text"),
        [
            (b"a\0b\0", "a\0b\0"),
            (b"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
            (b"\xed\xa0\x80", "\ufffd" * 3),
            ("é中😀".encode(), "é中😀"),
            (b"", ""),
            (b"\r\n", "\r\n"),
        ],
        ids=["nul", "ansi", "surrogate", "wide", "nothing", "line ends"],
    )
    def test_odd_output_arrives(self, sandbox, written, text):
        assert sandbox.run(f"import os; os.write(1, {written!r})").stdout == text

    def test_a_gibibyte_is_cut_and_takes_no_memory(self, sandbox):
        code = "import os\nleft = 1 << 30\nblock = b'a' * (1 << 16)\nwhile left: left -= os.write(1, block[:left])"
        before = peak_rss(reset=True)
        result = sandbox.run(code, limits=Limits(seconds=30, output_chars=10_000))
        assert result.exit_code == 0
        assert peak_rss() - before < 64 << 20
        marker = f"\n[... {(1 << 30) - 10_000} bytes cut ...]\n"
        assert result.stdout == "a" * 5000 + marker + "a" * 5000

    def test_two_full_pipes_do_not_block(self, sandbox):
        code = """if 1:
            import os
            lines = b"ab\\n" * 10_000
            for _ in range(1000):
                for fd in (1, 2):
                    left = lines
                    while left: left = left[os.write(fd, left):]
        """
        result = sandbox.run(code, limits=Limits(seconds=30, output_chars=100, error_chars=100))
        assert result.exit_code == 0
        assert result.stdout == result.stderr and f"[... {30_000_000 - 100} bytes cut ...]" in result.stdout

    @pytest.mark.parametrize("character", ["é", "中", "😀"])
    @pytest.mark.parametrize("count", [99, 100, 101, 399, 400, 401, 5000])
    @pytest.mark.parametrize("prefix", ["", "a"])
    def test_a_cut_is_between_characters_and_counted(self, bubblewrap, character, count, prefix):
        text = prefix + character * count
        result = bubblewrap.run(f"print({text!r}, end='')", limits=Limits(output_chars=100))
        if len(text) <= 100:
            assert result.stdout == text
            return
        kept = text[:50] + text[-50:]
        cut = len(text.encode()) - len(kept.encode())
        assert result.stdout == f"{text[:50]}\n[... {cut} bytes cut ...]\n{text[-50:]}"

    def test_output_before_the_time_limit_is_kept(self, sandbox):
        result = sandbox.run("print('so far', flush=True)\nwhile True: pass", limits=Limits(seconds=2))
        assert result.timed_out and result.stdout == "so far\n"

    def test_an_endless_writer_is_ended_in_time(self, sandbox):
        begin = time.monotonic()
        result = sandbox.run("while True: print('x' * 1000)", limits=Limits(seconds=1))
        assert result.timed_out and time.monotonic() - begin < 10


class TestPairs:
    ECHO = "import os, sys\nr, w = map(int, sys.argv[1:])\nwhile line := os.read(r, 100): os.write(w, line.upper())"

    def test_two_programs_talk_over_pipes(self, sandbox):
        code = "import os, sys\nr, w = map(int, sys.argv[1:])\nos.write(w, b'hello')\nprint(os.read(r, 100))"
        first, second = sandbox.run_pair(code, self.ECHO)
        assert first.stdout == "b'HELLO'\n" and first.exit_code == 0

    def test_the_end_of_one_is_seen_by_the_other(self, sandbox):
        code = "import os, sys; print(os.read(int(sys.argv[1]), 100))"
        first, second = sandbox.run_pair(code, "1 / 0")
        assert first.stdout == "b''\n" and "ZeroDivisionError" in second.stderr

    def test_both_share_one_time_limit(self, sandbox):
        begin = time.monotonic()
        code = "import sys, os; os.read(int(sys.argv[1]), 1)"
        first, _ = sandbox.run_pair(code, "while True: pass", limits=Limits(seconds=1))
        assert first.timed_out and time.monotonic() - begin < 10

    def test_neither_sees_the_processes_and_files_of_the_other(self, bubblewrap):
        code = 'import os, sys\nopen("m", "w")\nr, w = map(int, sys.argv[1:])\nos.write(w, b"x")\nprint(os.read(r, 99))'
        peer = """if 1:
            import os, sys
            os.read(int(sys.argv[1]), 1)
            pids = []
            for pid in range(1, 400):
                try:
                    os.kill(pid, 0)
                    pids.append(pid)
                except ProcessLookupError:
                    pass
                except PermissionError:
                    pass
            os.write(int(sys.argv[2]), repr((set(pids) <= {1, os.getpid()}, os.listdir("."))).encode())
        """
        assert bubblewrap.run_pair(code, peer)[0].stdout == "b'(True, [])'\n"


class TestFailures:
    def test_a_sandbox_that_is_killed_is_no_result(self, bubblewrap):
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(bubblewrap.run, sleeper("victim", 30) + "while True: pass", limits=Limits(seconds=30))
            deadline = time.monotonic() + 10
            while not processes("victim") and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(ancestor(processes("victim")[0]), 9)
            with pytest.raises(EnvFailure, match="sandbox: bubblewrap was killed by signal 9"):
                call.result()
        assert wait_until_gone("victim") == []

    def test_a_program_cannot_pretend_that_the_sandbox_failed(self, bubblewrap):
        for code in (
            "import sys; print('bwrap: No permissions', file=sys.stderr); sys.exit(1)",
            "import os; os.kill(os.getppid(), 9); os.kill(1, 9); os.kill(-1, 9); os.kill(os.getpid(), 9)",
            "import os; os.closerange(0, 1024); os._exit(255)",
        ):
            assert isinstance(bubblewrap.run(code).exit_code, int)

    def test_a_sandbox_that_cannot_start_is_no_result(self, bubblewrap, monkeypatch, tmp_path):
        broken = tmp_path / "bwrap"
        broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(ConfigError, match="No permissions to create new namespace.*unprivileged_userns_clone"):
            make_sandbox("bubblewrap")

    @pytest.mark.parametrize("call", ["subprocess.Popen", "os.memfd_create", "os.pipe", "os.pidfd_open"])
    def test_a_sandbox_that_stops_working_is_no_result(self, sandbox, monkeypatch, call):
        def fail(*args, **kwargs):
            raise OSError("no more of them")

        with monkeypatch.context() as patched:
            patched.setattr(call, fail)
            for run in (lambda: sandbox.run("print(1)"), lambda: sandbox.run_pair("print(1)", "")):
                with pytest.raises(EnvFailure, match="sandbox: cannot start a program: no more of them"):
                    run()
        assert sandbox.run("print(1)").stdout == "1\n"

    def test_an_exit_code_that_nobody_can_know_is_no_success(self, sandbox, monkeypatch):
        handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            for run in (lambda: sandbox.run("1 / 0"), lambda: sandbox.run_pair("1 / 0", "")):
                with pytest.raises(EnvFailure, match=r"sandbox: this process ignores SIGCHLD.*; write signal\.signal"):
                    run()
        finally:
            signal.signal(signal.SIGCHLD, handler)
        with monkeypatch.context() as patched:
            patched.setattr("molt_gym.sandbox.base.read_until", lambda *given: read_until(*given) and reap(given[2:]))
            with pytest.raises(EnvFailure, match="sandbox: something in this process waits for children"):
                sandbox.run("1 / 0")
        assert sandbox.run("1 / 0").exit_code == 1

    def test_a_check_that_failed_once_is_made_again(self, monkeypatch):
        monkeypatch.setattr("molt_gym.sandbox.bubblewrap._working", set())
        with monkeypatch.context() as patched:
            patched.setattr("molt_gym.sandbox.base._START_SECONDS", 0.0)
            assert "does not work here: not started" in check_bubblewrap()
        assert check_bubblewrap() is None

    def test_a_missing_bubblewrap_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "apt-get install bubblewrap" in check_bubblewrap()
        with pytest.raises(ConfigError, match='apt-get install bubblewrap.*sandbox="subprocess"'):
            make_sandbox("bubblewrap")
        assert make_sandbox("subprocess").run("print(1)").stdout == "1\n"

    def test_less_memory_than_python_needs_is_refused(self):
        with pytest.raises(ConfigError, match="memory_mb: 8; write at least 64"):
            Limits(memory_mb=8)

    def test_the_least_memory_is_enough_to_run(self, sandbox):
        assert sandbox.run("import json; print(json.dumps(1))", limits=Limits(memory_mb=64)).stdout == "1\n"

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(ConfigError, match="sandbox: 'docker'; write one of 'bubblewrap', 'subprocess'"):
            make_sandbox("docker")

    @pytest.mark.parametrize(
        "code",
        [
            "for _ in range(1200): os.mkdir('d'); os.chdir('d')",
            "os.mkdir('d'); os.mkdir('d/d'); os.chmod('d/d', 0); os.chmod('d', 0)",
            "os.symlink(path, 'link'); os.mkdir('0'); os.symlink(path, '0/0'); os.mkdir('0/1')",
        ],
        ids=["deep", "locked", "links"],
    )
    def test_no_folder_is_left_behind(self, sandbox, monkeypatch, tmp_path, code):
        kept = tmp_path / "kept" / "file"
        kept.parent.mkdir()
        kept.touch()
        folders = tmp_path / "temporary"
        folders.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folders))
        assert sandbox.run(f"import os; path = {str(kept.parent)!r}\n{code}", limits=Limits(seconds=20)).exit_code == 0
        assert list(folders.iterdir()) == [] and kept.exists()

    def test_no_file_descriptor_is_left_behind(self, sandbox):
        sandbox.run("print(1)")
        before = len(os.listdir("/proc/self/fd"))
        for code in ("print(1)", "1 / 0"):
            sandbox.run(code, stdin="x")
            sandbox.run_pair(code, "")
        assert len(os.listdir("/proc/self/fd")) == before
