"""What exchanges save and others take up: means of what ranks kept, nothing of unknown buffers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lightning_shard.core.layout import build_layout
from lightning_shard.data_parallel.compression import (
    Compressor,
    Exchange,
    FlatBuffer,
    OneBit,
    PowerSGD,
    TopK,
)
from lightning_shard.data_parallel.compression.state import (
    load_state,
    mean_of_ranks,
    own_state,
    shared_by_all,
    with_means,
)
from lightning_shard.testing import run_ranks
from tests.data_parallel.compression.buffers import average, gradient, state_of, world

KINDS: dict[str, Callable[[], Compressor]] = {
    "topk": lambda: TopK(ratio=0.1),
    "onebit": lambda: OneBit(warmup_steps=1),
    "powersgd": lambda: PowerSGD(rank=1),
}


def saved_state(compressor: Compressor, exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Return the shared state with means; each rank must call."""
    kept = world("in_process").all_gather_object(own_state(exchanges))
    return dict(with_means(shared_by_all(compressor, exchanges), kept))


def named(compressor: Compressor, name: str) -> Exchange:
    layout = build_layout([(name, (8, 9))], num_shards=1, align=4)
    return compressor.exchange(FlatBuffer(layout=layout, ranks=world("in_process")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_the_checkpoint_does_not_know_is_loaded_over(kind: str) -> None:
    """A tensor that the checkpoint did not know could not be loaded."""

    def fn(rank: int) -> None:
        compressor = KINDS[kind]()
        saved = named(compressor, "old")
        if not saved.passes(gradient(saved.buffer, rank, 0)):
            average(saved, gradient(saved.buffer, rank, 0))
        full = saved_state(compressor, [saved])
        both = [named(compressor, "old"), named(compressor, "new")]
        load_state(compressor, both, full)
        assert [exchange.step for exchange in both] == [1, 0]
        assert both[0].kept
        assert not both[1].kept

    run_ranks(fn, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_taking_up_a_checkpoint_makes_no_memory_for_frozen_buffers(kind: str) -> None:
    """Taking up a checkpoint made memory for frozen buffers."""

    def fn(rank: int) -> None:
        compressor = KINDS[kind]()
        trained, frozen = named(compressor, "trained"), named(compressor, "frozen")
        if not trained.passes(gradient(trained.buffer, rank, 0)):
            average(trained, gradient(trained.buffer, rank, 0))
        assert not frozen.kept
        full = saved_state(compressor, [trained, frozen])
        again = [named(compressor, "trained"), named(compressor, "frozen")]
        load_state(compressor, again, full)
        assert again[0].kept
        assert not again[1].kept
        for tag, tensors in state_of(again[0]).items():
            torch.testing.assert_close(tensors["trained"], full[tag]["trained"])

    run_ranks(fn, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_same", [True, False])
def test_a_checkpoint_from_before_a_key_was_renamed_loads(kind: str, is_same: bool) -> None:
    """A checkpoint from before a key was renamed could not be loaded."""

    def fn(rank: int) -> None:
        compressor = KINDS[kind]()
        saved = named(compressor, "weight")
        if not saved.passes(gradient(saved.buffer, rank, 0)):
            average(saved, gradient(saved.buffer, rank, 0))
        full = saved_state(compressor, [saved])
        full["sends_momentum"] = full.pop("freezes_variance") == is_same
        again = named(compressor, "weight")
        load_state(compressor, [again], full)
        assert again.step == int(is_same)

    run_ranks(fn, 2)


def test_a_mean_is_over_the_ranks_with_what_owners_have_added() -> None:
    ranks = [{"w": torch.full((2, 2), float(rank))} for rank in range(3)]
    parts = [{"w": torch.tensor([1.0, 2.0])}, {}, {"w": torch.tensor([3.0, 4.0])}]
    means = mean_of_ranks(ranks, parts)
    torch.testing.assert_close(means["w"], torch.tensor([[2.0, 3.0], [4.0, 5.0]]))


def test_the_mean_of_an_empty_parameter_is_taken() -> None:
    """The mean of an empty parameter could not be taken."""
    ranks = [{"empty": torch.empty(0, 4)} for _ in range(2)]
    assert mean_of_ranks(ranks, [{}, {}])["empty"].shape == (0, 4)
