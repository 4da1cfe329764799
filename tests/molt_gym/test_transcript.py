"""Pictures on a terminal: what is printed says that they are there, and who plays by hand can look at them."""

import io
import re
from pathlib import Path

from PIL import Image
from rich.console import Console

import molt_gym
from molt_gym import image_part
from molt_gym.tokens import Trajectory, read_jsonl
from molt_gym.transcript import play, print_trajectory

SEEN = re.compile(r"\[image, 128 x 128 pixels: (\S+)\]")


def screen() -> Console:
    return Console(file=io.StringIO(), width=200, highlight=False)


def test_a_transcript_says_where_images_are_and_how_large():
    console = screen()
    content = [{"type": "text", "text": "Is"}, image_part(Image.new("RGB", (8, 6))), {"type": "text", "text": "it?"},
               {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    print_trajectory(console, Trajectory("Env-v0", 0, messages=[{"role": "user", "content": content}]))
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert lines[2:5] == ["Is", "[image, 8 x 6 pixels]", "it?"] and "3 bytes that are no PNG" in lines[5]


def test_who_plays_by_hand_can_look_at_the_picture_until_the_episode_ends(monkeypatch):
    console, looked = screen(), []
    image = molt_gym.make("Geo3k-v0").unwrapped.task(0).images[0]

    def reply() -> str:
        if looked:
            return "."
        looked.append(SEEN.search(console.file.getvalue())[1])
        assert Image.open(looked[0]).size == image.size
        return "\\boxed{1}"

    monkeypatch.setattr("builtins.input", reply)
    assert play("Geo3k-v0", seed=3, console=console) in (0.0, 1.0)
    assert not Path(looked[0]).exists()


def test_rollouts_that_the_command_writes_have_their_pictures_beside_them(tmp_path, capsys, monkeypatch):
    from molt_gym.cli import main

    played = molt_gym.rollout("Geo3k-v0", lambda observation: "\\boxed{1}", 2)
    monkeypatch.setattr(molt_gym, "rollout", lambda *_, **__: played)
    assert main(["rollout", "Geo3k-v0", "-n", "2", "--out", str(tmp_path / "played.jsonl")]) == 0
    assert capsys.readouterr().out.count("[image, 128 x 128 pixels]") == 2
    assert len(list((tmp_path / "images").iterdir())) == 2 and "base64" not in (tmp_path / "played.jsonl").read_text()
    assert read_jsonl(tmp_path / "played.jsonl") == played
