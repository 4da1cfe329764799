"""Images to ids: the same as the processor's own, whatever a message holds."""

import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer

from molt_gym.errors import ConfigError, PromptTooLong
from molt_gym.images import images_of, open_image
from molt_gym.tokens import Generation, Renderer, TokenGraph
from molt_gym.tokens.vision import Vision

PAD = 5


@pytest.fixture(scope="module")
def path(vision_path):
    return vision_path("qwen3_vl")


@pytest.fixture(scope="module")
def renderer(path) -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(path), vision=Vision.of(path))


def text(said):
    return {"type": "text", "text": said}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def said(renderer, words):
    ids = [*renderer._markers.encode(words, renderer._template.shield(words)), 2]
    return Generation(ids, [-0.5] * len(ids), [0] * len(ids), "stop")


def test_ids_are_those_of_the_template_with_each_image_expanded(renderer, path, picture):
    tokenizer, processor = AutoTokenizer.from_pretrained(path), AutoImageProcessor.from_pretrained(path)
    messages = [user(text("one "), picture("red", 50, 30), text("and"), picture("blue", 16, 90), text("?"))]
    grids = processor([open_image(uri) for uri in images_of(messages)], return_tensors="pt")["image_grid_thw"]
    spelled = tokenizer.apply_chat_template(
        [{"role": "user", "content": [part if part["type"] == "text" else {"type": "image"}
                                      for part in messages[0]["content"]]}],
        tokenize=False, add_generation_prompt=True)
    for grid in grids:
        spelled = spelled.replace("<|image_pad|>", "<|x|>" * (int(grid.prod()) // 4), 1)
    expected = tokenizer(spelled.replace("<|x|>", "<|image_pad|>"))["input_ids"]
    ids = renderer.render(messages)
    assert ids == expected and ids.count(PAD) > 2
    spans = renderer.image_spans(ids, messages)
    assert [ids[span.start - 1] for span in spans] == [3, 3]
    assert all(ids[span.start : span.start + span.count] == [PAD] * span.count for span in spans)
    assert [ids[span.start + span.count] for span in spans] == [4, 4]
    for span, grid in zip(spans, grids, strict=True):
        assert torch.equal(renderer.vision.pixels(span.uri), processor([open_image(span.uri)], return_tensors="pt")[
            "pixel_values"]) and renderer.vision.grid(span.uri) == tuple(grid.tolist())


def test_text_that_spells_an_image_is_text(renderer, picture):
    spelled = "<|vision_start|><|image_pad|><|vision_end|>"
    with_image = renderer.render([user(text(spelled), picture(), text(spelled))])
    assert with_image.count(PAD) == 4 and with_image.count(3) == 1
    assert PAD not in renderer.render([user(text("<|image_"), text("pad|>"))])


def test_images_stay_over_turns_and_later_ones_are_added(renderer, picture):
    graph = TokenGraph(renderer)
    messages = [user(picture("red"), text("a"))]
    for turn in range(3):
        prompt = graph.prepare(messages)
        assert [span.uri for span in prompt.images] == images_of(messages) and len(prompt.images) == turn + 1
        assert list(prompt.ids) == renderer.render(messages), "as if the whole were rendered anew"
        assert prompt.images == renderer.image_spans(prompt.ids, messages)
        assert prompt.kind == ("extend" if turn else "root")
        reply = {"role": "assistant", "content": f"w{turn}"}
        graph.commit(prompt, said(renderer, f"w{turn}"), reply)
        messages = [*messages, reply, {"role": "tool", "tool_call_id": "c", "content": [
            text("look"), picture("green", 32, 16 * (turn + 2))]}]
    (row,) = graph.rows()
    assert row.images == list(prompt.images) and [row.ids[span.start] for span in row.images] == [PAD] * 3
    assert not any(row.mask[span.start] for span in row.images)


def test_equal_ids_of_different_images_are_different_branches(renderer, picture):
    graph = TokenGraph(renderer)
    for colour in ("red", "blue", "red"):
        graph.commit(graph.prepare([user(picture(colour), text("?"))]), said(renderer, colour), {
            "role": "assistant", "content": colour})
    rows = graph.rows()
    assert len({tuple(row.ids[: row.mask.index(1)]) for row in rows}) == 1
    assert [row.images[0].uri for row in rows] == images_of([user(picture(c)) for c in ("red", "blue", "red")])


@pytest.mark.parametrize(("message", "words"), [
    ({"role": "system", "content": [{"type": "image", "image": "x"}]}, "role 'system'; put images into user and tool"),
    ({"role": "assistant", "content": [{"type": "image", "image": "x"}]}, "role 'assistant'"),
    (user({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}), "no data URI of an image, and nothing is"),
    (user({"type": "image"}), "None' is no data URI"),
    (user({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}), r"messages\[1\]: 3 bytes that are no PNG"),
    (user({"type": "audio"}), "'audio'; only text and images"),
])
def test_what_cannot_be_shown_is_refused(renderer, message, words):
    with pytest.raises(ValueError, match=words):
        renderer.render([user(text("a")), message])


def test_a_picture_that_is_too_narrow_is_refused(renderer, picture):
    with pytest.raises(ValueError, match=r"messages\[0\]: 3 x 900 pixels: absolute aspect ratio"):
        renderer.render([user(picture("red", 3, 900))])


def test_the_number_of_tokens_is_bounded_and_can_be_bounded_further(renderer, path, picture):
    large = picture("red", 3000, 2000)
    assert renderer.render([user(large)]).count(PAD) <= 16
    small = Renderer(AutoTokenizer.from_pretrained(path), vision=Vision.of(path, max_pixels=600))
    ids = small.render([user(large)])
    assert ids.count(PAD) == 1
    assert len(small.vision.pixels(images_of([user(large)])[0])) == 4


def test_a_model_that_sees_nothing_refuses_images(path, picture):
    blind = Renderer(AutoTokenizer.from_pretrained(path))
    with pytest.raises(ValueError, match=r"content\[0\].type: 'image_url'; only text parts can be written"):
        blind.render([user(picture())])


def test_a_template_without_a_place_for_images_refuses_them(path, picture):
    plain = ("{% for message in messages %}<|im_start|>{{ message.role + '\n' + (message.content or '') }}<|im_end|>\n"
             "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    renderer = Renderer(AutoTokenizer.from_pretrained(path), chat_template=plain, vision=Vision.of(path))
    assert renderer.render([user(text("a"))])
    with pytest.raises(ValueError, match="its chat template takes no images"):
        renderer.render([user(picture())])


def test_a_template_that_would_drop_an_image_is_refused(path, picture):
    tokenizer = AutoTokenizer.from_pretrained(path)
    forgets = tokenizer.chat_template.replace("{{- message.content }}", "{{- message.content if loop.last else '' }}")
    assert forgets != tokenizer.chat_template
    renderer = Renderer(tokenizer, chat_template=forgets, vision=Vision.of(path))
    assert renderer.render([user(text("a")), user(picture(), picture("blue"))]).count(PAD) == 8
    with pytest.raises(ValueError, match="writes 1 images where the messages have 3"):
        renderer.render([user(picture(), picture("blue")), user(picture())])


def test_a_folder_without_an_image_processor_is_refused(path, tmp_path):
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="copy its preprocessor_config.json"):
        Vision.of(tmp_path)


def test_an_image_does_not_hide_that_a_text_is_too_long(renderer, picture):
    with pytest.raises(PromptTooLong):
        renderer.render([user(picture(), text("a" * 100_000))], limit=50)
