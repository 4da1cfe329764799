"""What tests of several parts share: tiny models that see, pictures for them, and servers in processes of their own."""

import functools
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TEXTS = ["system\nYou are a helpful assistant.", "user\nWhich colour is the square? red green blue", "assistant\nred"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content or () %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}
{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


@pytest.fixture(scope="session")
def vision_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`vision_path("qwen3_vl")`: folder of a random model of this kind that sees, with a tokenizer of 300 entries.

    Its images have tokens of 16 x 16 pixels, from 1 to 16 of them. Weights are larger than a real model's, so that
    every token depends on the whole context before it; heads are as large as vLLM wants on CPUs.
    """

    @functools.cache
    def folder(kind: str = "qwen3_vl") -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForImageTextToText
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        path = tmp_path_factory.mktemp(kind)
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(path)
        newest, experts = kind.startswith("qwen3_vl"), kind.endswith("_moe")
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
        text = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048,
                "initializer_range": 0.3, "rope_parameters": rope | ({"mrope_interleaved": True} if newest else {}),
                "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": newest}
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if experts else {}
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8,
                  "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "initializer_range": 0.3}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]} if newest else {
            "window_size": 32, "fullatt_block_indexes": [1]}
        config = AutoConfig.for_model(
            kind, text_config=text, vision_config=vision, image_token_id=5, video_token_id=6, vision_start_token_id=3,
            vision_end_token_id=4, tie_word_embeddings=newest)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForImageTextToText.from_config(config).float().save_pretrained(path)
        Qwen2VLImageProcessorPil(patch_size=8, temporal_patch_size=2, merge_size=2, size={
            "shortest_edge": 256, "longest_edge": 4096}).save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def picture() -> Callable[..., dict]:
    """`picture(colour, width, height)`: a part of a message, a frame of that colour around a white field."""
    from PIL import Image

    from molt_gym import image_part

    @functools.cache
    def draw(colour: str = "red", width: int = 32, height: int = 32) -> dict:
        image = Image.new("RGB", (width, height), colour)
        image.paste("white", (width // 3, height // 4, width // 2, height // 2))
        return image_part(image)

    return draw


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., "Served"]]:
    """`serve(script, *arguments)` starts a script of this folder that serves at a port, its first argument.

    What it gives has a `url`, and can `kill()` and `start()` it. It is killed after the last test.
    """
    started = []

    def start(script: str, *arguments: str) -> Served:
        started.append(Served(script, *arguments))
        return started[-1]

    yield start
    for served in started:
        served.kill()


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", clean_up_tokenization_spaces=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with the files of long timeouts and many slow tests, so that none ends long after the others."""
    if not hasattr(config, "workerinput"):
        return
    weights = Counter[Path]()
    for item in items:
        if item.get_closest_marker("slow"):
            timeout = item.get_closest_marker("timeout")
            weights[item.path] += timeout.args[0] if timeout else 1
    items.sort(key=lambda item: -weights[item.path])


class Served:
    """A script that serves at a port, its first argument; ready once it is there.

    Args:
        script: below this folder.
        *arguments: after the port.
    """

    def __init__(self, script: str, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, str(Path(__file__).parent / script), str(self.port), *arguments]
        self.start()

    def start(self, seconds: float = 120.0) -> None:
        """Starts it, at the same port, and waits until it takes connections."""
        self._process = subprocess.Popen(self._command)
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise RuntimeError(f"{self._command[1]} does not serve") from None
                time.sleep(0.05)

    def kill(self) -> None:
        """Ends it without a word, as the kernel would."""
        self._process.kill()
        self._process.wait(30)
