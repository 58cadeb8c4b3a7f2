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
    """One matrix of a buffer and its two thin factors.

    Attributes:
        slot: Slot of the matrix in the buffer: its first dimension are the rows, all others
            together the columns.
        q: Shape (columns, rank): the next power iteration starts from it; no value is over 1.
        p: Shape (rows, rank), with orthonormal columns: a view of the vector averaged first.
        next_q: Shape (columns, rank): a view of the vector averaged second.
    """

    slot: Slot
    q: Tensor
    p: Tensor
    next_q: Tensor

    def matrix(self, full: Tensor) -> Tensor:
        """Return the matrix as a view of a flat tensor."""
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
    """Return columns divided by their greatest value; those of `otherwise` where it is bad."""
    greatest = columns.abs().amax(0)
    return torch.where((greatest > 0) & (greatest < torch.inf), columns / greatest, otherwise)


def num_columns(slot: Slot) -> int:
    """Return the number of columns: all dimensions but the first, as one."""
    return prod(slot.shape[1:])


def rank_of(slot: Slot, rank: int) -> int:
    """Return the rank of a matrix's factors, at most `rank`."""
    return min(rank, slot.shape[0], num_columns(slot))


def pays(slot: Slot, rank: int) -> bool:
    """Whether the factors of a matrix have fewer elements than the matrix."""
    if len(slot.shape) < 2 or not slot.numel:
        return False
    return rank_of(slot, rank) * (slot.shape[0] + num_columns(slot)) < slot.numel
