"""A rank's call of one operation, what of it must be equal on every rank, and the error if not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_shard.core.call_site import CallSite
from lightning_shard.errors import CollectiveMismatchError, ConfigError


@dataclass(slots=True, eq=False)
class Call:
    """One rank's part in one operation.

    Attributes:
        inputs: Tensors that are read, uncopied: the caller writes them after it has waited.
        outputs: Tensors that are written; empty where the inputs are written in place.
        agreed: What every rank of the group must give alike.
        root: Group rank of the source or destination, for send and receive of the peer; else -1.
        tag: Tag of a send or a receive; None makes it a collective.
        posted: CUDA event, recorded on the caller's stream when it called; None on the CPU.
    """

    op: str
    rank: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    agreed: tuple[object, ...]
    site: CallSite
    results: Sequence[Any]
    reduce_op: Any = None
    root: int = -1
    tag: int | None = None
    posted: torch.cuda.Event | None = None

    def __str__(self) -> str:
        details = []
        if self.reduce_op is not None:
            details.append(op_name(self.reduce_op))
        details += [describe_tensor(tensor) for tensor in (self.inputs or self.outputs)[:4]]
        if len(self.inputs or self.outputs) > 4:
            details.append(f"and {len(self.inputs or self.outputs) - 4} more")
        if self.root >= 0:
            details.append(f"{'root' if self.tag is None else 'peer'} {self.root}")
        return f"{self.op}({', '.join(details)})"

    def gives(self, size: int) -> dict[int, Tensor]:
        """Return what it gives to each of so many ranks, if it is an operation that only copies."""
        match self.op:
            case "all_gather":
                return dict.fromkeys(range(size), self.inputs[0])
            case "gather":
                return {self.root: self.inputs[0]}
            case "scatter" | "all_to_all" | "all_to_all_single":
                return dict(enumerate(self.inputs))
        return {}

    def takes(self) -> dict[int, Tensor]:
        """Return by rank where it takes what that one gives, if it only copies."""
        match self.op:
            case "scatter":
                return {self.root: self.outputs[0]}
            case "all_gather" | "gather" | "all_to_all" | "all_to_all_single":
                return dict(enumerate(self.outputs))
        return {}

    def check_own(self, slot: Tensor | None, own: Tensor | None) -> None:
        """Raise unless there is room for what this rank gives to itself, if it does so."""
        if slot is None or own is None or (slot.numel(), slot.dtype) == (own.numel(), own.dtype):
            return
        raise ConfigError(
            f"Rank {self.rank} of the group, {self} at {self.site}: got {describe_tensor(own)}, "
            f"expected {describe_tensor(slot)}, for which there is room here. Make outputs of the "
            f"sizes that the ranks give."
        )


class Disagreement(Exception):  # noqa: N818 - becomes a CollectiveMismatchError
    """Two ranks' calls that cannot be served together."""

    def __init__(self, got: Call, expected: Call, what: str) -> None:
        super().__init__(what)
        self.got, self.expected, self.what = got, expected, what


def op_name(op: Any) -> str:
    """Return the name of a `ReduceOp`, or of one of its values."""
    name: str = getattr(op, "op", op).name
    return name


def tensor_key(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Return the tensors' dtypes and shapes, to compare between ranks."""
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def message_key(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Return dtypes and sizes of a message, to compare; shapes may differ, as for NCCL and Gloo."""
    return tuple((tensor.dtype, tensor.numel()) for tensor in tensors)


def describe_tensor(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape in words, such as "float32 (2, 3)"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One rank's part in a disagreement."""

    rank: int
    operation: str
    site: str


def describe_disagreement(
    group: str, number: int, *, got: Side, expected: Side, what: str = ""
) -> str:
    """Say which two ranks disagree, and on what."""
    return (
        f"Ranks of {group} disagree at its operation number {number}{what and f': {what}'}.\n"
        f"  rank {got.rank}: got {got.operation} at {got.site}\n"
        f"  rank {expected.rank}: expected {expected.operation} at {expected.site}"
    )


def mismatch_error(problem: str, rank: int, operation: str) -> CollectiveMismatchError:
    """Make one rank's error from the `problem`, the same on each rank, and its own operation."""
    return CollectiveMismatchError(
        f"{problem}\nThis is rank {rank}, in {operation}. Every rank of a group must make the "
        "same calls in the same order, with the same shapes, dtypes and options."
    )
