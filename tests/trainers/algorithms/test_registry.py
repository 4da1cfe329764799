import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from molt_gym.errors import ConfigError
from molt_gym.trainers.algorithms.advantages import EstimatorOptions, TokenBatch, estimate_token_advantages
from molt_gym.trainers.algorithms.losses import policy_loss
from molt_gym.trainers.algorithms.registry import (
    ESTIMATORS,
    LOSSES,
    EstimatorTraits,
    LossTraits,
    Registry,
    register_estimator,
    register_loss,
)
from molt_gym.trainers.algorithms.validation import Settings, problems

OWN_FILE = """
from molt_gym.trainers.algorithms.registry import EstimatorTraits, LossTraits, register_estimator, register_loss

@register_estimator("best_of_group", EstimatorTraits(needs_group=3, whitens=True))
def best_of_group(rewards, groups, tokens):
    return (rewards == rewards.max()).double()

@register_loss("flat", LossTraits(has_ratio=False, one_update=True))
def flat(logp, old_logp, advantages, rows, options):
    return logp, rows > 0
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """A user's file that can be imported; what it registers is gone after the test."""
    (tmp_path / "my_algorithms.py").write_text(OWN_FILE)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (ESTIMATORS, LOSSES):
        monkeypatch.setattr(registry, "_traits", dict(registry._traits))
        monkeypatch.setattr(registry, "_functions", dict(registry._functions))
    yield tmp_path
    sys.modules.pop("my_algorithms", None)


def test_an_estimator_in_a_file_of_the_users_own_is_found_by_name(own_file):
    batch = TokenBatch(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([0, 1]))
    advantages, _ = estimate_token_advantages("my_algorithms:best_of_group", batch, EstimatorOptions())
    assert advantages.tolist() == pytest.approx([1, -1])
    assert ESTIMATORS.traits("my_algorithms:best_of_group").needs_group == 3


def test_a_loss_in_a_file_of_the_users_own_is_found_by_name_and_by_its_short_name_once_imported(own_file):
    logp = torch.tensor([1.0, 3.0])
    rest = (torch.zeros(2), torch.zeros(2), torch.full((2,), 0.5), torch.zeros(2, dtype=torch.long))
    assert policy_loss("my_algorithms:flat", logp, *rest)[0].item() == 2
    assert policy_loss("flat", logp, *rest)[0].item() == 2


@pytest.mark.parametrize("name", ["kl_in_reward", "discounts", "needs_critic", "needs_teacher"])
def test_what_only_an_estimator_of_tokens_can_use_is_not_declared_of_one_of_rollouts(name):
    assert getattr(EstimatorTraits(per_token=True, **{name: True}), name)
    with pytest.raises(ValueError, match=f"EstimatorTraits.{name}: .* write per_token=True"):
        EstimatorTraits(**{name: True})


@pytest.mark.parametrize(("per_token", "function", "message"), [
    (False, lambda rewards, *_: rewards[:, None] - rewards, r"returned a tensor \[3, 3\]; return a tensor \[3\]"),
    (False, lambda rewards, *_: rewards.tolist(), r"returned list; return a tensor \[3\]"),
    (False, lambda rewards, *_: rewards / 0, "not finite"),
    (True, lambda batch, _: batch.rewards, r"returned a tensor \[3\]; return a tensor \[4\]")])
def test_what_a_users_estimator_returns_is_one_finite_number_each(own_file, per_token, function, message):
    register_estimator("own", EstimatorTraits(per_token=per_token))(function)
    batch = TokenBatch(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1, 2]))
    with pytest.raises(ConfigError, match=f"algorithm.estimator: 'own' .*{message}"):
        estimate_token_advantages("own", batch)


@pytest.mark.parametrize("of", [
    lambda loss: loss, lambda loss: (loss.mean(), loss > 0), lambda loss: (loss[:, None], loss > 0),
    lambda loss: (loss, False), lambda loss: (loss, loss > 0, loss)])
def test_what_a_users_loss_returns_is_a_loss_and_a_mark_for_each_token(own_file, of):
    register_loss("own")(lambda logp, old_logp, advantages, rows, options: of(-advantages * logp))
    one, rows = torch.ones(2), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"algorithm.loss: 'own' must return two tensors \[2\]"):
        policy_loss("own", one, one, one, one, rows)


def test_what_a_users_function_declares_is_validated(own_file):
    found = problems(Settings(estimator="my_algorithms:best_of_group", group_size=2, loss="my_algorithms:flat",
                              updates_per_batch=4, dual_clip=3.0))
    assert len(found) == 3
    assert found[0].startswith("rollout.group_size: 2 with algorithm.estimator = 'my_algorithms:best_of_group'")
    assert "holds for one update a batch" in found[1] and "no ratio to clip" in found[2]


def test_another_process_is_told_where_a_function_is(own_file):
    ESTIMATORS.traits("my_algorithms:best_of_group")
    assert ESTIMATORS.portable("best_of_group") == "my_algorithms:best_of_group"
    assert ESTIMATORS.portable("grpo") == "grpo" and LOSSES.portable("ppo") == "ppo"


SCRIPT = """
from molt_gym.trainers.algorithms.registry import LOSSES, register_loss

@register_loss("mine")
def mine(*_):
    pass

print(LOSSES.portable("mine"), LOSSES.traits("my_script:mine").has_ratio, __name__)
if "both" in __import__("sys").argv:
    import my_script
"""


@pytest.mark.parametrize("command", [["my_script.py"], ["-m", "my_script"]])
def test_what_a_script_registers_is_found_by_its_file_and_the_script_is_not_run_again(own_file, command):
    (own_file / "my_script.py").write_text(SCRIPT)

    def lines(*words):
        result = subprocess.run([sys.executable, *command, *words], cwd=own_file, capture_output=True, text=True,
                                timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    assert lines() == ["my_script:mine True __main__"]
    assert lines("both") == ["my_script:mine True __main__", "my_script:mine True my_script"]


def test_registering_a_name_twice_is_refused_and_reloading_a_file_is_not(own_file):
    LOSSES.traits("my_algorithms:flat")
    with pytest.raises(ValueError, match=r"'flat' is already my_algorithms.flat; register .* under another name"):
        register_loss("flat")(lambda *_: None)
    sys.modules.pop("my_algorithms")
    assert LOSSES.function("my_algorithms:flat") is LOSSES.function("flat")


@pytest.mark.parametrize("register", [register_estimator("grpo"), register_loss("ppo")])
def test_what_is_built_in_is_not_replaced(register):
    with pytest.raises(ValueError, match="is already .*; register .* under another name"):
        register(lambda *_: None)


@pytest.mark.parametrize(("name", "message"), [
    ("grop", "there is no 'grop'; did you mean 'grpo'?"),
    ("my_algorithms:beast_of_group", "there is no 'beast_of_group' in my_algorithms; did you mean 'best_of_group'?"),
    ("my_algorithms:grpo", "there is no 'grpo' in my_algorithms"),
    ("no_such_module:x", "importing 'no_such_module' raised ModuleNotFoundError: .* write the name of a module"),
    ("my_broken:x", "importing 'my_broken' raised ZeroDivisionError"),
])
def test_a_name_that_is_not_there_is_refused_with_the_nearest(own_file, name, message):
    with pytest.raises(ValueError, match="algorithm.estimator: .*" + message):
        ESTIMATORS.traits(name)
    assert len(problems(Settings(estimator=name))) == 1


def test_without_traits_a_function_has_the_default_ones():
    registry = Registry("option", "nowhere", {}, LossTraits())
    registry.register("plain")(len)
    assert registry.traits("plain") == LossTraits() and registry.function("plain") is len
    assert EstimatorTraits() == EstimatorTraits(per_token=False, needs_group=1)


def test_asking_what_is_built_in_loads_no_torch():
    code = ("import sys; from molt_gym.trainers.algorithms.registry import ESTIMATORS, LOSSES; "
            "from molt_gym.trainers.algorithms.validation import Settings, problems; "
            "assert problems(Settings()) == [] and ESTIMATORS.traits('gae').needs_critic; "
            "assert 'torch' not in sys.modules")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_a_built_in_function_is_imported_when_it_is_called_for(tmp_path, monkeypatch):
    (tmp_path / "my_registry.py").write_text(
        "from molt_gym.trainers.algorithms.registry import LossTraits, Registry\n"
        "REGISTRY = Registry('option', 'my_home', {'late': LossTraits(ceiling=True)}, LossTraits())\n")
    (tmp_path / "my_home.py").write_text(
        "from my_registry import REGISTRY\n\n@REGISTRY.register('late')\ndef late():\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = importlib.import_module("my_registry").REGISTRY
    assert registry.traits("late").ceiling and "my_home" not in sys.modules
    assert registry.function("late")() == 3 and registry.traits("late").ceiling


def test_the_example_of_the_documentation_works(own_file):
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    text = page.partition("## One of your own")[2]
    (own_file / "my_algorithms.py").write_text(text.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    batch = TokenBatch(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1, 2]))
    median, _ = estimate_token_advantages("my_algorithms:median_baseline", batch)
    assert median.tolist() == [0, 0, -1, 4]
    last, _ = estimate_token_advantages("my_algorithms:last_tokens", batch)
    assert last.mean().abs() < 1e-12 and last[0] == last[2] < last[1] < last[3]
    logp = torch.zeros(2, requires_grad=True)
    loss, _ = policy_loss("my_algorithms:soft_clip", logp, torch.zeros(2), torch.ones(2), torch.full((2,), 0.5),
                          torch.zeros(2, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0 and logp.grad.tolist() == [-0.5, -0.5]
    assert problems(Settings(estimator="my_algorithms:median_baseline", loss="my_algorithms:soft_clip")) == []
