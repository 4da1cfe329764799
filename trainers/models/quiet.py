"""Keeps other libraries' progress bars and irrelevant warnings off a user's screen."""

__all__ = ["quiet_libraries"]


def quiet_libraries() -> None:
    """Call it before transformers loads its models; in each process, for the settings are not inherited."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
