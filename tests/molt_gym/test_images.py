"""What may stand for an image in a message, and what is refused."""

import base64
import io
import json
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import molt_gym
from molt_gym import ChatEnv, Turn, image_part
from molt_gym.images import ImageSpan, images_of, inline_images, keyed, open_image
from molt_gym.tokens import Row, Trajectory, read_jsonl, write_jsonl

RED = Image.new("RGB", (8, 6), "red")


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def url_of(part: dict) -> str:
    return part["image_url"]["url"]


def huge(side: int) -> bytes:
    """A PNG file of a few bytes that says it has side x side pixels."""
    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\x00")) + chunk(b"IEND", b"")


def test_a_picture_may_be_given_in_many_ways(tmp_path: Path):
    (tmp_path / "red.png").write_bytes(encoded(RED))
    ways = [RED, np.asarray(RED), encoded(RED), tmp_path / "red.png", str(tmp_path / "red.png"),
            f"file://{tmp_path}/red.png", uri(encoded(RED))]
    parts = [image_part(way) for way in ways]
    assert all(part == parts[0] for part in parts)
    assert np.array_equal(np.asarray(open_image(url_of(parts[0]))), np.asarray(RED))


def test_a_file_stays_as_it_is_and_its_type_is_what_it_holds(tmp_path: Path):
    (tmp_path / "misnamed.png").write_bytes(encoded(RED, "JPEG"))
    assert url_of(image_part(tmp_path / "misnamed.png")) == uri(encoded(RED, "JPEG"), "jpeg")


def test_a_photo_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    RED.save(file, "JPEG", exif=exif)
    assert open_image(url_of(image_part(file.getvalue()))).size == (6, 8)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_on_white(mode: str):
    picture = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    picture.putpixel((1, 0), (0, 0, 0, 255))
    seen = open_image(url_of(image_part(picture.convert(mode))))
    assert (seen.mode, seen.getpixel((0, 0)), seen.getpixel((1, 0))) == ("RGB", (255, 255, 255), (0, 0, 0))


@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_a_colour_that_a_file_calls_transparent_is_white(mode: str):
    picture = Image.new(mode, (2, 1))
    clear = picture.getpixel((0, 0))
    picture.putpixel((1, 0), (99, 99, 99) if mode == "RGB" else 99)
    file = io.BytesIO()
    picture.save(file, "PNG", transparency=clear)
    assert open_image(url_of(image_part(file.getvalue()))).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["array", "file"])
def test_of_16_bits_the_upper_8_are_seen(kind: str):
    greys = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
    picture = greys if kind == "array" else encoded(Image.fromarray(greys))
    assert np.asarray(open_image(url_of(image_part(picture))))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize(("image", "words"), [
    ("https://a.b/c.png", "would have to be fetched, which is not done"),
    ("http://127.0.0.1/c.png", "would have to be fetched"),
    ("/nowhere/at/all.png", "cannot be read (No such file"),
    (b"GIF89a, not really", "18 bytes that are no PNG, JPEG"),
    (b"", "no PNG, JPEG"),
    (b"<svg/>", "no PNG, JPEG"),
    (encoded(Image.effect_noise((64, 64), 50))[:-500], "cannot be decoded"),
    (huge(9000), "9000 x 9000 pixels, and at most 67,108,864 are taken"),
    (huge(60000), "cannot be decoded"),
    (Image.new("F", (2, 2)), "of mode F, which has no white; convert it"),
    (3, "is no image"),
    (None, "is no image"),
])
def test_what_is_no_image_is_refused_by_name(image: object, words: str):
    with pytest.raises(ValueError, match="^messages\\[1\\].content\\[1\\]: ") as caught:
        inline_images([{"role": "system", "content": "x"}, {"role": "user", "content": [
            {"type": "text", "text": "x"}, {"type": "image", "image": image}]}])
    assert words in str(caught.value)


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path):
    with open(tmp_path / "large.png", "wb") as file:
        file.truncate(30 << 20)
    with pytest.raises(ValueError, match="31,457,280 bytes; at most 20,971,520"):
        image_part(tmp_path / "large.png")
    with pytest.raises(ValueError, match="more than 20,971,520 bytes"):
        open_image("data:image/png;base64," + "A" * (30 << 20))


def test_equal_images_are_one_string_in_memory():
    a, b = (inline_images([{"role": "user", "content": [{"type": "image", "image": RED.copy()}]}]) for _ in range(2))
    assert images_of(a)[0] is images_of(b)[0] is images_of(json.loads(json.dumps(a)))[0]


def test_tokens_of_different_images_are_told_apart():
    a, b = url_of(image_part(RED)), url_of(image_part(Image.new("RGB", (8, 6), "blue")))
    ids = [1, 5, 5, 2, 5]
    assert keyed(ids, []) == ids
    first, second = keyed(ids, [ImageSpan(1, 2, a)]), keyed(ids, [ImageSpan(1, 2, b)])
    assert first[0] == 1 and first[3:] == [2, 5] and first[1] == first[2] < 0 and second[1] != first[1]


class Shows(ChatEnv):
    def begin(self, index):
        return [{"role": "user", "content": [{"type": "image", "image": RED}, {"type": "text", "text": "?"}]}]

    def answer(self, message):
        return Turn([{"role": "user", "content": [{"type": "image", "image": "nothing.png"}]}])


def test_an_env_says_pictures_and_its_observation_is_json():
    env = Shows()
    observation, _ = env.reset()
    assert env.observation_space.contains(json.loads(json.dumps(observation)))
    assert observation["messages"][0]["content"][0] == image_part(RED)
    with pytest.raises(ValueError, match=r"messages\[0\].content\[0\]: nothing.png cannot be read"):
        env.step({"role": "assistant", "content": "x"})


def test_recorded_images_are_files_of_their_own_once_each(tmp_path: Path):
    part, other = image_part(RED), image_part(Image.new("L", (4, 4)))
    tricky = f'"url":"{url_of(part)}"'
    messages = [{"role": "user", "content": [part, {"type": "text", "text": tricky}, other]}]
    row = Row([1, 5, 5], [0, 0, 1], [0.0, 0.0, -1.0], [-1, -1, 0], images=[ImageSpan(1, 1, url_of(part))])
    played = [Trajectory("Env-v0", 0, messages=messages, rows=[row], reward=1.0) for _ in range(2)]
    write_jsonl(tmp_path / "a.jsonl", played)
    write_jsonl(tmp_path / "b.jsonl", played)
    text = (tmp_path / "a.jsonl").read_text()
    assert len(list((tmp_path / "images").iterdir())) == 2
    assert text.count(url_of(part)) == 2, "only what is no image"
    assert read_jsonl(tmp_path / "a.jsonl") == read_jsonl(tmp_path / "b.jsonl") == played
    assert pickle.loads(pickle.dumps(row)).images == row.images
    assert molt_gym.image_part is image_part
