"""Keeps Lightning's own lines out of a proof: a dozen runs would each print theirs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning")


@contextmanager
def quiet() -> Iterator[None]:
    """Let only errors be logged inside."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
