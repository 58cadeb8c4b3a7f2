"""What stands in for the results of skipped blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.core.placeholders import Placeholder, is_placeholder
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.skipped_blocks import BlockCall, SkippedBlock


class Counted(nn.Module):
    """Counts its runs, and returns the length beside the values."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, *, with_length: bool = False, keep: bool = False) -> Any:
        self.runs += 1
        if keep:
            self.kept.append(2 * x)
        return (x + 1, len(x)) if with_length else x + 1


def stand_in(length: int) -> Placeholder:
    return Placeholder.of(torch.empty(0), (length, 3), "embed.weight")


def test_a_result_that_looks_like_the_argument_is_known_for_all_shapes() -> None:
    block = Counted()
    skipped = SkippedBlock(block)
    shapes = [skipped(BlockCall(block, (stand_in(length),), {})).shape for length in (4, 2, 5)]
    assert shapes == [(4, 3), (2, 3), (5, 3)]
    assert block.runs == 1


def test_numbers_in_a_result_are_those_of_its_shapes() -> None:
    """Numbers in a result were those of the first shapes."""
    block = Counted()
    skipped = SkippedBlock(block)
    results = [skipped(BlockCall(block, (stand_in(n),), {"with_length": True})) for n in (4, 2, 4)]
    assert [length for _, length in results] == [4, 2, 4]
    assert block.runs == 2


def test_a_result_is_that_of_its_settings() -> None:
    """A result was that of other settings."""
    block = Counted()
    skipped = SkippedBlock(block)
    assert is_placeholder(skipped(BlockCall(block, (stand_in(4),), {"with_length": False})))
    assert len(skipped(BlockCall(block, (stand_in(4),), {"with_length": True}))) == 2


def test_a_block_that_keeps_values_runs_every_time() -> None:
    block = Counted()
    skipped = SkippedBlock(block)
    for _ in range(3):
        skipped(BlockCall(block, (stand_in(4),), {"keep": True}))
    assert block.runs == 3
    assert all(map(is_placeholder, block.kept))


def test_hooks_of_skipped_blocks_are_called() -> None:
    """Hooks of skipped blocks were not called."""
    block, seen = Counted(), []
    block.register_forward_hook(lambda module, args, output: seen.append(output))
    skipped = SkippedBlock(block)
    for _ in range(2):
        skipped(BlockCall(block, (stand_in(4),), {}))
    assert len(seen) == 2
    assert all(map(is_placeholder, seen))


@pytest.mark.parametrize("place", ["", "inner"])
def test_a_hook_that_asks_for_elements_is_refused(place: str) -> None:
    """What it kept was missing on the ranks that skip the block."""
    block = Counted()
    block.add_module("inner", nn.Identity())
    block.forward = lambda x: block.inner(x)  # type: ignore[method-assign]
    block.get_submodule(place).register_forward_hook(lambda *given: given[-1].sum().item() and None)
    with pytest.raises(
        ConfigError, match=r"A hook on the forward of 'blocks.1', a block of another"
    ):
        SkippedBlock(block, "blocks.1")(BlockCall(block, (stand_in(4),), {}))
