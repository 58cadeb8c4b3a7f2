"""Runs that the caller's own code need not notice, but for what they take: a dozen in a proof."""

import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning")


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be logged but errors, nobody be warned, and the caller's random streams stay."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [one.level for one in loggers]
    streams = torch.get_rng_state(), random.getstate()
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
