"""Runs that the caller's own code need not notice, but for what they take: a dozen in a proof."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_shard.checkpoint.random_state import load_random_state, random_state

_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning")


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
