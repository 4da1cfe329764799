"""What of an env's info is kept."""

import numpy as np
import pytest
import torch

from molt_gym.trainers.rollout.env_calls import plain


@pytest.mark.parametrize("one", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0),
                                 torch.tensor(1.0)])
def test_a_number_is_kept_whatever_library_it_is_of(one: object) -> None:
    kept = plain({"score": one, "text": "x", "list": [1], "array": np.ones(2), "nan": np.array(np.nan)})
    assert kept == {"score": 1, "text": "x"} and type(kept["score"]) in (int, float, bool)
