"""Runs that the caller's own code need not notice, but for what they take: a dozen in a proof."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_shard.checkpoint.random_state import load_random_state, random_state

_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning")

QUIET_OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Of the Trainer of such a run."""


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be logged but errors, nobody be warned, and the caller's random streams stay."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [one.level for one in loggers]
    streams = random_state(torch.device("cpu"))
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        load_random_state(streams, torch.device("cpu"))
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
