"""Which blocks stand for all of their list."""

import pytest
from torch import nn

from lightning_shard.planning.anatomy import repeated_blocks
from tests.strategies.models import ExampleGPT, llama


class Block(nn.Module):
    """A layer that is told its number, and what it looks at."""

    def __init__(self, number: int, window: int | None = None) -> None:
        super().__init__()
        self.layer_index, self.window = number, window
        self.layer = nn.Linear(4, 4)


class Network(nn.Module):
    def __init__(self, windows: list[int | None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*pair) for pair in enumerate(windows))


def test_blocks_that_know_their_number_are_alike() -> None:
    assert repeated_blocks(Network([None] * 4)) is not None


@pytest.mark.parametrize("windows", [[None, 8, None, 8], [8, 8, 16, 16], [1, True, 1, True]])
def test_blocks_that_are_told_different_windows_are_not_taken_for_alike(windows: list) -> None:
    assert repeated_blocks(Network(windows)) is None


def test_blocks_of_common_models_are_alike() -> None:
    assert repeated_blocks(ExampleGPT()) is not None
    assert repeated_blocks(llama()) is not None
