"""Every recipe, as `molt-gym plan` sees it: it is read, can be cut so, and fits into the GPUs that it asks for."""

import re
import tomllib
from pathlib import Path

import pytest
from transformers import AutoConfig

from molt_gym.errors import ConfigError
from molt_gym.trainers.actor.sizes import Shape
from molt_gym.trainers.plan import MEMORY, plan

FOLDER = Path(__file__).parents[2] / "slurm" / "recipes"
RECIPES = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
BILLIONS = {"Qwen3-4B": 4.02, "Qwen3-8B": 8.19, "Qwen3-30B-A3B": 30.53, "Qwen2.5-VL-32B-Instruct": 32.76,
            "DeepSeek-V3": 671.0}
"""Parameters of the text parts, as their makers publish them."""


def test_there_is_a_recipe_for_each_kind_of_run():
    asked = r"#SBATCH --(?:nodes=|gpus-per-node=\w+:)(\d+)"
    sizes = {name: [int(number) for number in re.findall(asked, path.read_text())] for name, path in RECIPES.items()}
    assert sizes == {"dense-4b": [1, 8], "moe-30b": [2, 8], "vlm-32b": [4, 8], "moe-700b": [36, 8], "sft-4b": [1, 8],
                     "distill-4b": [1, 8]}
    assert tomllib.loads(RECIPES["moe-700b"].read_text())["actor"]["ep"] == 256


@pytest.mark.parametrize("name", RECIPES)
def test_it_fits_and_uses_every_gpu_that_it_asks_for(name):
    said = plan(RECIPES[name])
    needed, room, less = re.search(r"= ([\d.]+) of ([\d.]+)(?:, less ([\d.]+))?", said).groups()
    assert float(needed) < float(room) - float(less or 0)
    if used := re.search(r"(\d+) of (\d+) GPUs", said):
        assert used[1] == used[2]
        assert re.search(r"step      [\d.]+ s: sampling", said)


@pytest.mark.parametrize("name", RECIPES)
def test_the_longest_rollout_fits_into_a_micro_batch(name):
    """Memory is planned for micro-batches of that many tokens."""
    settings = tomllib.loads(RECIPES[name].read_text())
    longest = settings.get("rollout", settings)["max_context"]
    assert settings["actor"]["micro_batch_tokens"] >= longest


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "sft-4b"])
def test_it_leaves_memory_for_what_the_arithmetic_leaves_out(name):
    kind = re.search(r"gpus-per-node=(\w+):", RECIPES[name].read_text())[1]
    assert plan(RECIPES[name], memory=0.85 * MEMORY[kind])


def test_a_recipe_on_smaller_gpus_is_refused_with_the_arithmetic():
    with pytest.raises(ConfigError, match=r"rollout.engine_args: an engine does not fit. GiB a GPU: weights 156.2"):
        plan(RECIPES["moe-700b"], gpus="h200:8")
    with pytest.raises(ConfigError, match=r"actor: does not fit into the 40.0 GiB of a device"):
        plan(RECIPES["moe-30b"], memory=40)
    with pytest.raises(ConfigError, match=r"disaggregate: 8 actor.world_size × 1 \+ 8 rollout.engines × 1 = 16 GPU"):
        plan(RECIPES["moe-30b"], nodes=1)


@pytest.mark.parametrize("file", sorted((FOLDER / "models").glob("*.json")), ids=lambda file: file.stem)
def test_the_models_have_as_many_parameters_as_is_published(file):
    config = AutoConfig.from_pretrained(file).get_text_config()
    named = {name: getattr(config, name) for name in config.attribute_map}
    assert Shape.of(config.to_dict() | named).parameters() / 1e9 == pytest.approx(BILLIONS[file.stem], abs=0.06)
