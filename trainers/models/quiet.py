"""Keeps other libraries' progress bars and irrelevant warnings off a user's screen."""

import logging

__all__ = ["quiet_libraries"]

# torchao, where it is installed, warns at import about its GPU kernels and about torch's deprecations; DTensor, that
# parameters under tensor parallelism are gathered in two steps.
_NOISY = ("torchao", "torch.utils._pytree", "torch.distributed.tensor._redistribute")


def quiet_libraries() -> None:
    """Call it before transformers loads its models; in each process, for the settings are not inherited."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
