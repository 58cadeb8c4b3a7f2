"""Templates of skipped blocks' results, shared by all ranks: one block of each class is run.

A real rank runs the Python code of each block of other stages in its first batch. That is little
for one rank; a simulation has all ranks of a pipeline.
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

    Other effects of a skipped block, such as an auxiliary loss, happen only once.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Template] = {}

    def watch(self, run: StepRun, blocks: Sequence[nn.Module]) -> StepRun:
        """Return a run that runs skipped blocks only where their results are not known."""
        return _Watched(run, blocks, self)

    def result(
        self,
        kind: type[nn.Module],
        skipped: SkippedBlock,
        call: _Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return placeholders in the structure of a skipped block's result."""
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
    """A run of a stage, or a probe, that remembers the results of skipped blocks."""

    def __init__(self, run: StepRun, blocks: Sequence[nn.Module], skips: Skips) -> None:
        self._run, self._blocks, self._skips = run, blocks, skips

    def known(self) -> AbstractContextManager[None]:
        """Return the context of the wrapped run."""
        return self._run.known()

    def call(
        self,
        index: int,
        skipped: SkippedBlock,
        call: _Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Answer as the wrapped run does, with the known result where it skips the block."""

        def skip(call: _Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return self._skips.result(type(self._blocks[index]), skipped, call, args, kwargs)

        return self._run.call(index, cast("SkippedBlock", skip), call, args, kwargs)
