"""Bringing full parameters up to date on all ranks, after shards of them have changed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.flat_parameters import FlatParameters


def bring_together(flats: Iterable[FlatParameters]) -> None:
    """Gather the full parameters of some buffers; each rank must call."""
    for handle in [flat.begin_unshard() for flat in flats]:
        if handle is not None:
            handle.wait()


@contextmanager
def publishing_edits(
    flats: Sequence[FlatParameters], ranks: Collectives, device: torch.device
) -> Iterator[None]:
    """Bring those buffers up to date whose shards user code on any rank changes inside.

    Args:
        flats: Buffers whose full parameters stay between the steps; the same on all ranks.
        ranks: Group of all ranks that hold the model; each must enter and leave.
        device: Where the numbers that ranks exchange lie.
    """
    for flat in flats:
        flat.take_in_edits()
        flat.settle()
    marks = [flat.mark() for flat in flats]
    yield
    changed = [flat.mark() != mark for flat, mark in zip(flats, marks, strict=True)]
    flags = torch.tensor(changed, dtype=torch.uint8, device=device)
    ranks.all_reduce(flags, "max").wait()
    bring_together(flat for flat, moved in zip(flats, flags.tolist(), strict=True) if moved)
