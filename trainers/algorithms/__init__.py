"""Pure functions from rewards and log-probabilities to a loss: formulas, shapes and sources in their docstrings."""
