"""The stance of torch.compile during a step: a stage's own blocks and what follows run compiled.

    step ──> before ──> skipped blocks ──> own blocks ──> end, or what follows the last block
             └──────as it is written─────┘ └─compiled────────────────────────────────────────┘

Before its blocks a stage computes with stand-ins, which compiled code cannot take. So the stance of
torch.compile changes during a step, and with it that of compiled code around the whole network.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stance:
    """The stance of torch.compile during one step."""

    def __init__(self) -> None:
        self._eager: Any = None  # what has set the stance

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Run a step inside, whose compiled code runs uncompiled except in the stage's blocks."""
        eager = self._eager = torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            self._eager = None
            eager.__exit__(None, None, None)

    @contextmanager
    def compiled(self, *, is_last: bool) -> Iterator[None]:
        """Run one of the stage's blocks inside, compiled where the user has compiled it.

        Args:
            is_last: Whether no tensor is a stand-in after this block.
        """
        eager = self._eager
        if eager is None:  # in backward
            yield
            return
        eager.__exit__(None, None, None)
        try:
            yield
        finally:
            if not is_last:
                eager.__enter__()
