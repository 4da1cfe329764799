"""`molt-gym serve`: a model behind an endpoint, asked by the stock SDKs and by plain HTTP, and what is recorded."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch

from molt_gym import ConfigError
from molt_gym.cli import main
from molt_gym.tokens import Renderer, Row, Trajectory, read_jsonl
from molt_gym.trainers import serve as serve_module
from molt_gym.trainers.serve import Endpoint, load, serve

HELLO = {"role": "user", "content": "What is 3 + 4?"}
AGAIN = {"role": "user", "content": "No, try again."}
SMALL = {"rollout.max_context": 512, "rollout.max_tokens": 12, "actor.dtype": "float32"}


def clients_of(url: str, key: str) -> tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]:
    """Stock clients; without certificates they are made in a millisecond."""
    return (openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0,
                               http_client=openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)),
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0,
                                     http_client=anthropic.DefaultAsyncHttpxClient(verify=False, trust_env=False)))


def check_row(row: Row, temperature: float, model: Any) -> None:
    """The log-probabilities of what was sampled are those of the model, in that context."""
    assert len(row.ids) == len(row.mask) == len(row.logprobs) == len(row.versions)
    with torch.no_grad():
        logits = model(torch.tensor([row.ids])).logits[0].float() / temperature
    expected = torch.log_softmax(logits, -1)
    for place, (token, mask, logprob, version) in enumerate(zip(
            row.ids, row.mask, row.logprobs, row.versions, strict=True)):
        assert version == (0 if mask else -1)
        assert logprob == (pytest.approx(float(expected[place - 1, token]), abs=2e-4) if mask else 0.0)


def sampled(row: Row) -> int:
    return sum(row.mask)


async def test_both_sdks_are_answered_and_every_token_is_recorded(
    tiny_path: Path, tiny_model: Any, renderer: Renderer, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    async with serve(tiny_path, endpoint=Endpoint(out=out), **SMALL) as admin:
        session = admin.default.session
        chat, messages = clients_of(session.url, session.key)
        first = await chat.chat.completions.create(model="m", messages=[HELLO], temperature=0.7)
        said = first.choices[0].message.model_dump(include={"role", "content"})
        second = await chat.chat.completions.create(model="m", messages=[HELLO, said, AGAIN], temperature=0.7)
        other = await messages.messages.create(model="m", messages=[AGAIN], max_tokens=5,
                                               extra_body={"temperature": 0.7})
        assert not out.read_bytes()
    (trajectory,) = read_jsonl(out)
    one, two = trajectory.rows
    for row in (one, two):
        check_row(row, 0.7, tiny_model)
    prompt = renderer.render([HELLO])
    assert one.ids[: len(prompt)] == prompt and one.mask[: len(prompt)] == [0] * len(prompt)
    assert two.ids[: two.mask.index(1)] == renderer.render([AGAIN])
    assert sampled(one) == first.usage.completion_tokens + second.usage.completion_tokens
    assert sampled(two) == other.usage.output_tokens <= 5
    assert (trajectory.turns, trajectory.env, trajectory.reward, trajectory.failure) == (3, "serve", None, None)


async def test_requests_choose_their_sampling(tiny_path: Path, tiny_model: Any) -> None:
    async with serve(tiny_path, **SMALL) as admin:
        chat, messages = clients_of(admin.url, admin.default.session.key)
        create = chat.chat.completions.with_raw_response.create
        greedy = [await create(model="m", messages=[HELLO], temperature=0) for _ in range(2)]
        narrow = [await messages.messages.create(model="m", messages=[HELLO], max_tokens=12, extra_body={"top_k": 1})
                  for _ in range(2)]
        free = [await create(model="m", messages=[HELLO]) for _ in range(2)]
        texts = [reply.parse().choices[0].message.content for reply in greedy + free]
        assert texts[0] == texts[1] == narrow[0].content[0].text == narrow[1].content[0].text
        assert len(set(texts)) == 3
        assert all("x-molt-gym-ignored" not in reply.headers for reply in greedy)


async def test_a_seed_gives_the_same_in_all_sessions(tiny_path: Path) -> None:
    async with serve(tiny_path, **SMALL) as admin:
        texts = []
        for seed in (5, 5, 6, -5, None, None):
            chat, _ = clients_of(admin.url, admin.open().session.key)
            reply = await chat.chat.completions.create(model="m", messages=[HELLO], **({"seed": seed} if seed else {}))
            texts.append(reply.choices[0].message.content)
    assert texts[0] == texts[1] and len(set(texts)) == 5


async def test_a_policy_of_any_kind_can_be_served() -> None:
    async with serve(lambda observation: observation["messages"][-1]["content"].upper()) as admin:
        chat, messages = clients_of(admin.url, admin.default.session.key)
        reply = await chat.chat.completions.create(model="m", messages=[{"role": "user", "content": "ok"}])
        other = await messages.messages.create(model="m", messages=[{"role": "user", "content": "he"}], max_tokens=5)
        assert (reply.choices[0].message.content, other.content[0].text) == ("OK", "HE")
        assert admin.default.so_far().turns == 2


async def test_sessions_opened_over_http_are_written_as_they_end(tiny_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    async with serve(tiny_path, endpoint=Endpoint(out=out), seed=3, **SMALL) as admin:
        replies = []
        for index in range(2):
            opened = admin.answer("POST", "/sessions", json.dumps({"env": "Shop-v0", "index": index}).encode())
            chat, _ = clients_of(admin.url, opened["api_key"])
            replies.append((await chat.chat.completions.create(model="m", messages=[HELLO])).choices[0].message.content)
            admin.answer("POST", f"/sessions/{opened['id']}/end", b'{"reward": 0.5}')
            assert [(t.index, t.reward, t.turns) for t in read_jsonl(out)] == [(i, 0.5, 1) for i in range(index + 1)]
    assert replies[0] != replies[1]


async def test_another_server_goes_on_in_the_same_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        async with serve(lambda observation: "ok", endpoint=Endpoint(out=out)) as admin:
            admin.end(admin.open(), reward=1.0)
    assert [trajectory.reward for trajectory in read_jsonl(out)] == [1.0, 1.0]


@pytest.mark.parametrize(("options", "said"), [
    ({"port": 65536}, "--port 65536"), ({"port": -1}, "--port -1"), ({"host": ""}, "--host ''"),
    ({"host": "no.such.host.invalid"}, "--host no.such.host.invalid"), ({"host": "a..b"}, "--host a..b"),
    ({"host": "203.0.113.7"}, "assign"), ({"public_url": "host:80"}, "--public-url 'host:80'"),
    ({"idle_timeout": 0}, "--idle-timeout 0"), ({"idle_timeout": float("nan")}, "--idle-timeout nan"),
    ({"key": "a b"}, "MOLT_GYM_SERVE_KEY"), ({"key": "é"}, "MOLT_GYM_SERVE_KEY"), ({"key": "a\nb"}, "MOLT_GYM"),
])
async def test_a_wrong_endpoint_is_refused_before_anything_is_loaded(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        async with serve("no/model/at/all", endpoint=Endpoint(**options)):
            pass
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("host", "local"), [("127.0.0.1", True), ("0.0.0.0", False)])
async def test_whether_others_can_reach_it_is_known(host: str, local: bool) -> None:
    assert await Endpoint(host=host).check() is local


def test_a_port_in_use_is_one_line(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(tiny_path), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"--port {port}: Address already in use" in error


@pytest.mark.parametrize("words", [["--model", "tiny"], ["--model=tiny", "--port", "0"]])
def test_tiny_without_an_env_says_what_to_write(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *words]) == 2
    assert "molt-gym serve CodeExec-v0 --model tiny" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["No-v0"], ["--rollout.max-tokns", "3"], ["--port", "0", "--model", "/no/folder"]])
def test_a_wrong_command_exits_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_env_gives_its_settings_and_its_name(tiny_path: Path, toys: Path) -> None:
    player = load(tiny_path, env="toy_envs:Letters-v0", **SMALL)
    try:
        assert player.env == "toy_envs:Letters-v0"
    finally:
        asyncio.run(player.close())


@pytest.mark.parametrize("content", [b'{"env": "E', b"{}\n{}"])
def test_a_file_that_ends_within_a_line_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cut off"):
        serve_module.Recorder(path)
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "out.jsonl"):
        with pytest.raises(ConfigError, match="--out"):
            serve_module.Recorder(path)


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 1,000 bytes, that of the test's own output included, so nothing may be printed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_trajectory_for_which_there_is_no_room_leaves_no_part_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with serve_module.Recorder(path) as record:
        record(Trajectory("E-v0", 0))
        with small_files(), pytest.raises(OSError, match="too large"):
            record(Trajectory("E-v0", 1, info={"text": "x" * 2000}))
        record(Trajectory("E-v0", 2))
    assert [trajectory.index for trajectory in read_jsonl(path)] == [0, 2]


class Served:
    """The command, in a process of its own."""

    def __init__(self, *words: str, **environ: str) -> None:
        small = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "molt_gym", "serve", "--port", "0", *words, *small], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environ)
        self.printed = []
        while not self.printed or "Ctrl-C" not in self.printed[-1]:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            self.printed.append(line.rstrip("\n"))
        shell = "\n".join([*self.printed, "env -0"])
        found = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
        self.variables = dict(entry.split("=", 1) for entry in found.stdout.split("\0") if "=" in entry)
        self.url, self.key = self.variables["ANTHROPIC_BASE_URL"], self.variables["OPENAI_API_KEY"]

    def post(self, path: str, body: Any = None, *, key: str, method: str = "POST") -> Any:
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode(),
                                         {"Authorization": f"Bearer {key}"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())

    def stop(self, number: int) -> str:
        """Sends a signal; what was said on stderr."""
        self.process.send_signal(number)
        _, error = self.process.communicate(timeout=30)
        return error


@pytest.fixture
def served() -> Iterator[Any]:
    started = []

    def start(*words: str, **environ: str) -> Served:
        started.append(Served(*words, **environ))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.communicate()


@pytest.mark.slow
async def test_the_command_serves_until_ctrl_c_and_leaves_whole_records(
    served: Any, tiny_path: Path, tiny_model: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    server = served("--model", str(tiny_path), "--out", str(out), MOLT_GYM_SERVE_KEY="mine")
    assert not any("mine" in line for line in server.printed)
    assert server.variables["OPENAI_BASE_URL"] == f"{server.url}/v1"
    assert server.variables["ANTHROPIC_API_KEY"] == server.key
    curl = next(line for line in server.printed if "curl" in line).removeprefix("# ")
    body = json.loads(curl[curl.index("'") + 1 : curl.rindex("'")])
    assert "$OPENAI_BASE_URL/chat/completions" in curl
    raw = server.post("/v1/chat/completions", body, key=server.key)
    assert raw["choices"][0]["message"]["role"] == "assistant"

    opened = server.post("/sessions", {"max_turns": 2, "metadata": {"name": "a"}}, key="mine")
    chat, _ = clients_of(server.url, opened["api_key"])
    _, messages = clients_of(server.url, opened["api_key"])
    first = await chat.chat.completions.create(model="m", messages=[HELLO])
    second = await messages.messages.create(model="m", messages=[AGAIN], max_tokens=8)
    tokens = first.usage.completion_tokens + second.usage.output_tokens
    state = server.post(f"/sessions/{opened['id']}", key="mine", method="GET")
    assert state == {"id": opened["id"], "open": True, "turns": 2, "tokens": tokens}
    with pytest.raises(urllib.error.HTTPError, match="401"):
        server.post(f"/sessions/{opened['id']}/end", {}, key=opened["api_key"])
    summary = server.post(f"/sessions/{opened['id']}/end", {"reward": 1, "info": {"won": True}}, key="mine")
    assert summary == {"id": opened["id"], "turns": 2, "rows": 2, "trained_tokens": tokens}
    left = server.post("/sessions", key="mine")
    (trajectory,) = read_jsonl(out)
    assert trajectory.reward == 1.0 and trajectory.info["won"] is True

    assert "Traceback" not in server.stop(signal.SIGINT) and server.process.returncode == 0
    ended, *others = read_jsonl(out)
    assert ended == trajectory
    assert {t.info["session"]: t.failure and t.failure.reason for t in others}[left["id"]] == "shutdown"
    assert sorted((t.turns, t.failure is None) for t in others) == [(0, False), (1, True)]
    for row in [row for t in (ended, *others) for row in t.rows]:
        check_row(row, 1.0, tiny_model)


@pytest.mark.slow
def test_sigterm_ends_it_as_well_and_other_hosts_are_warned_of(served: Any, tiny_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    server = served("--model", str(tiny_path), "--out", str(out), "--host", "0.0.0.0",
                    "--public-url", "http://127.0.0.1:1/a b")
    assert server.url == "http://127.0.0.1:1/a b"
    error = server.stop(signal.SIGTERM)
    assert server.process.returncode == 0 and "Traceback" not in error
    assert "warning: --host 0.0.0.0" in error and "plain http" in error and read_jsonl(out) == []


@pytest.mark.slow
def test_a_crash_loses_open_sessions_only(served: Any, tiny_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    server = served("--model", str(tiny_path), "--out", str(out))
    admin = next(line for line in server.printed if "admin key" in line).rpartition(" ")[2]
    server.post("/v1/chat/completions", {"model": "m", "messages": [HELLO]}, key=server.key)
    server.post("/sessions/default/end", {"reward": 1}, key=admin)
    server.post("/v1/chat/completions", {"model": "m", "messages": [AGAIN]}, key=server.key)
    server.stop(signal.SIGKILL)
    (trajectory,) = read_jsonl(out)
    assert trajectory.reward == 1.0 and trajectory.messages[0] == HELLO
