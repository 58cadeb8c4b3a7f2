"""Ranks that gather different units are told so, before an update with mixed-up weights."""

import pytest
import torch
from torch import nn

from lightning_shard.data_parallel.gradients.usage import UnshardRecord
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks
from tests.groups import engine_of


def digest_of(*indices: int) -> bytes:
    record = UnshardRecord()
    for index in indices:
        record.note(index, f"unit {index}")
    return record.digest()


def test_digests_tell_order_and_number_apart() -> None:
    assert digest_of(0, 1) == digest_of(0, 1)
    assert len({digest_of(*order) for order in [(0, 1), (1, 0), (0,), (0, 1, 1), ()]}) == 5


def test_the_maximum_equals_a_digest_only_where_all_are_the_same() -> None:
    pairs = zip(digest_of(0, 1), digest_of(1, 0), strict=True)
    maximum = bytes(max(pair) for pair in pairs)
    assert maximum not in (digest_of(0, 1), digest_of(1, 0))


def test_taking_begins_anew() -> None:
    record = UnshardRecord()
    record.note(3, "a")
    record.note(3, "a")
    assert record.take() == ["a"]
    assert record.digest() == UnshardRecord().digest()


def test_different_blocks_of_one_size_train_as_on_one_device() -> None:
    """Different blocks of one size trained silently wrong."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
            return self.blocks[chosen](x).square().mean()  # type: ignore[no-any-return]

    def fn(rank: int) -> None:
        torch.manual_seed(0)
        model = Experts()
        engine = engine_of(model, stage=3, bucket_mb=1e-6)
        with engine.step():
            loss = model(torch.ones(2, 8, requires_grad=True) * 1, chosen=rank)
        with engine.backward():
            loss.backward()

    with pytest.raises(ConfigError, match="the ranks used different blocks in this step"):
        run_ranks(fn, 2)
