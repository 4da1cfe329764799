"""A Ray of this machine for the session, and a tiny model that ranks and vLLM both take."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A running Ray of 8 CPUs, whether or not there are so many; `add_node` adds to it."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder, \
            pytest.MonkeyPatch.context() as patch:
        # Sockets lie within, and their paths must be short. Others of this machine do not find this one.
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        sizes = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 100_000_000}
        made = Cluster(initialize_head=True, head_node_args=sizes)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="session")
def wide_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose attention has heads of 32, the least that vLLM takes on CPUs."""
    path = tmp_path_factory.mktemp("wide")
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, initializer_range=0.3,
        tie_word_embeddings=True, eos_token_id=2, pad_token_id=0, bos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).float().save_pretrained(path)
    return path
