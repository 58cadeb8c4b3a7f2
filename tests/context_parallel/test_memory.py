"""The memory of a step falls with the ranks: a sequence too long for one trains on eight."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from examples.train_gpt import Block
from lightning_shard.context_parallel import attention
from lightning_shard.context_parallel.cut_blocks import CutBlocks
from lightning_shard.planning.simulated_step import LiveBytes
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

WIDTH, NUM_BLOCKS, NUM_CLASSES = 16, 3, 128


class LanguageModel(nn.Module):
    """Has no tensor of all scores, so that memory grows with the length."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(NUM_CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, heads) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


class LimitError(Exception):
    """A rank has needed more than its limit."""


class Limited(LiveBytes):
    """Raises where more than a number of bytes is alive."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = limit

    def _note(self, tensor: Tensor) -> None:
        super()._note(tensor)
        if self._limit is not None and self.alive > self._limit:
            raise LimitError


def peaks(num_ranks: int, length: int, heads: int, limit: int | None = None) -> list[int]:
    """Return the most bytes that a training step of each rank has had at a time."""
    text = torch.randint(NUM_CLASSES, (1, length + 1), generator=torch.Generator().manual_seed(1))

    def of_rank(rank: int) -> int:
        model = LanguageModel(heads)
        if num_ranks > 1:
            CutBlocks(model, all_ranks())
            model(text[:, : num_ranks + 1])  # each class of blocks is tried, with few positions
        with Limited(limit) as live:
            model(text).backward()
        assert all(param.grad is not None for param in model.parameters())
        return live.most

    return run_ranks(of_rank, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [8, 1], ids=["heads on all ranks", "a ring"])
def test_the_peak_of_a_step_falls_as_the_ranks_rise(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1 / C and less than a fifth more: what comes before the blocks is on each rank."""
    monkeypatch.setattr(attention, "_TILE", 64)
    length = 1024
    alone = max(peaks(1, length, heads))
    for ranks in (2, 4, 8):
        assert alone / ranks < max(peaks(ranks, length, heads)) < 1.2 * alone / ranks


@pytest.mark.slow
def test_a_sequence_that_one_rank_cannot_hold_trains_on_eight() -> None:
    length, limit = 2048, 1_500_000
    with pytest.raises(LimitError):
        peaks(1, length, 8, limit)
    assert max(peaks(8, length, 8, limit)) <= limit
