"""What skipped blocks return, remembered for all ranks: one of each class is asked, once.

A real rank asks each block of other stages in its first batch, which takes their Python code. That
is little for one rank; here are all of a pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import nn

from lightning_shard.pipeline_parallel.leaves import signature, tensors_in
from lightning_shard.pipeline_parallel.skipped_blocks import SkippedBlock, Template
from lightning_shard.pipeline_parallel.staged_model import StepRun

_Call = Callable[..., Any]


class Skips:
    """Remembers the structure of results by class of block and shapes of its arguments.

    What else a skipped block leaves behind, such as an auxiliary loss, is there only once.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Template] = {}

    def watch(self, run: StepRun, blocks: Sequence[nn.Module]) -> StepRun:
        """Return a run whose skipped blocks are asked for what is not known only."""
        return _Watched(run, blocks, self)

    def result(
        self,
        kind: type[nn.Module],
        skipped: SkippedBlock,
        call: _Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return what a skipped block seems to return."""
        leaves = tensors_in((args, kwargs))
        key = kind, signature(leaves)
        if key in self._known:
            return self._known[key].build(leaves)
        result = skipped(call, args, kwargs)
        template = Template.of(result, leaves)
        if template.is_plain:
            self._known[key] = template
        return result


class _Watched:
    """A run of a stage, or a probe, that remembers."""

    def __init__(self, run: StepRun, blocks: Sequence[nn.Module], skips: Skips) -> None:
        self._run, self._blocks, self._skips = run, blocks, skips

    def known(self) -> AbstractContextManager[None]:
        """Do as the run does."""
        return self._run.known()

    def call(
        self,
        index: int,
        skipped: SkippedBlock,
        call: _Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Do as the run does, with what is known of the block where it skips it."""

        def skip(call: _Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return self._skips.result(type(self._blocks[index]), skipped, call, args, kwargs)

        return self._run.call(index, cast("SkippedBlock", skip), call, args, kwargs)
