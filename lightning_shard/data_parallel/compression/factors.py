"""A matrix as the product of two thin ones, P Q', and which matrices gain by it.

    M (m, n)  ≈  P (m, rank), orthonormal columns  ·  Q' (rank, n)

Source: PowerSGD, arXiv:1905.13727.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_shard.data_parallel.compression.compressor import if_sound
from lightning_shard.layout.flat import Slot


@dataclass(eq=False)
class Factors:
    """One matrix's place, and its factors.

    Attributes:
        slot: Its place in the buffer.
        rows: Its first dimension; the others make up the columns.
        q: Shape (columns, rank): the next power iteration starts from it; no value is over 1.
        p: Shape (rows, rank): orthonormal columns; a view of what is averaged before.
        next_q: Shape (columns, rank): a view of what is averaged.
    """

    slot: Slot
    q: Tensor
    p: Tensor
    next_q: Tensor

    def matrix(self, full: Tensor) -> Tensor:
        """The matrix, a view of a flat tensor."""
        return full[self.slot.offset : self.slot.stop].view(self.slot.shape[0], -1)

    def orthonormalise(self, sound: Tensor) -> None:
        """Make the columns of P of length 1 and at right angles; any such ones unless `sound`."""
        p = if_sound(sound, self.p)
        self.p.copy_(torch.linalg.qr(scaled(p, otherwise=p)).Q)

    def start_from(self, q: Tensor) -> None:
        """Begin the next iteration with `q`, shape (columns, rank).

        Only the directions of its columns matter, since P is made orthonormal. Their lengths must
        not stay: they would grow with each gradient, and one that is large enough would make all
        later P overflow.
        """
        self.q.copy_(scaled(q, otherwise=self.q))


def scaled(columns: Tensor, otherwise: Tensor) -> Tensor:
    """Each column divided by its greatest value; of `otherwise` where that is 0 or not finite."""
    greatest = columns.abs().amax(0)
    return torch.where((greatest > 0) & (greatest < torch.inf), columns / greatest, otherwise)


def num_columns(slot: Slot) -> int:
    """All dimensions but the first, as one."""
    return prod(slot.shape[1:])


def rank_of(slot: Slot, rank: int) -> int:
    """The rank that its factors have at most."""
    return min(rank, slot.shape[0], num_columns(slot))


def pays(slot: Slot, rank: int) -> bool:
    """Whether the factors of a matrix are smaller than it."""
    if len(slot.shape) < 2 or not slot.numel:
        return False
    return rank_of(slot, rank) * (slot.shape[0] + num_columns(slot)) < slot.numel
