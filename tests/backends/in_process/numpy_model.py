"""What a step of a program does to each rank, in plain numpy: no torch, nothing of the package.

A step's data come from its number and the rank, so that the model and a run start from the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = ("float32", "float64", "float16")
INTS = ("int64", "int32", "int16", "int8", "uint8")
# numpy has not these: their values are small whole numbers, exact in each, kept as float32.
NARROW_FLOATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
OTHERS = ("bool", "complex64", "complex128", "uint16", "uint32", "uint64")
DTYPES = FLOATS + INTS + NARROW_FLOATS + OTHERS

_UFUNCS = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@dataclass(frozen=True)
class Step:
    """One step of a program; which fields count depends on `kind`.

    Args:
        kind: A function's name in this module and in `programs`.
        number: The step's place in the program; also the seed of its data.
        ranks: The members of its group, in the group's order.
        dtype: A torch dtype's name.
        shape: Of a shard of data.
        op: A reduction's name.
        root: A place in `ranks`: root, or sender; the receiver is the next one.
        sizes: W numbers from 0: uneven sizes along the first dimension.
        tag: For a send.
        layout: How the tensors lie in memory.
        wait_after: How many steps later an asynchronous operation is waited for; 0 is at once.
    """

    kind: str
    number: int
    ranks: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    op: str
    root: int
    sizes: tuple[int, ...]
    tag: int
    layout: str
    wait_after: int


def reduce_ops(dtype: str) -> Sequence[str]:
    """Return the reductions that a dtype has."""
    if dtype.startswith("complex"):
        return ("SUM", "AVG")
    if dtype == "bool":
        return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    if dtype in INTS:
        return tuple(_UFUNCS)
    if dtype.startswith("uint"):
        return ("SUM", "MIN", "MAX")
    return ("SUM", "PRODUCT", "MIN", "MAX") + (("AVG",) if dtype in FLOATS[:2] else ())


def data(step: Step, rank: int, shape: Sequence[int], shard: int = 0) -> Array:
    """Return what `rank` brings to a step."""
    random = np.random.RandomState(step.number * 10_000 + rank * 100 + shard)
    if step.dtype in NARROW_FLOATS:
        return random.randint(0, 2, shape).astype(np.float32)
    kind = np.dtype(step.dtype).kind
    if kind in "iu":
        limits = np.iinfo(step.dtype)
        return random.randint(limits.min, limits.max, shape, dtype=step.dtype)
    if kind == "b":
        return random.randint(0, 2, shape).astype(bool)
    numbers = random.randint(-4, 5, shape).astype(step.dtype)
    return numbers + 1j * random.randint(-4, 5, shape) if kind == "c" else numbers


def fold(parts: Sequence[Array], op: str) -> Array:
    """Reduce one array of each rank."""
    with np.errstate(over="ignore"):
        total = reduce(_UFUNCS[op], parts)
    if op != "AVG":
        return total
    if total.dtype.kind in "iu":
        exact = np.abs(total.astype(object)) // len(parts)
        return (exact * np.where(total < 0, -1, 1)).astype(total.dtype)
    return total / len(parts)


def sized(step: Step, place: int) -> tuple[int, ...]:
    """Return the shape of the shard of one place, of uneven size."""
    return (step.sizes[place], *step.shape)


def all_reduce(step: Step) -> list[list[Array]]:
    total = fold([data(step, rank, step.shape) for rank in step.ranks], step.op)
    return [[total]] * len(step.ranks)


def coalesced_all_reduce(step: Step) -> list[list[Array]]:
    totals = [fold([data(step, r, step.shape, k) for r in step.ranks], step.op) for k in range(3)]
    return [totals] * len(step.ranks)


def reduce_to_root(step: Step) -> list[list[Array]]:
    parts = [data(step, rank, step.shape) for rank in step.ranks]
    return [[fold(parts, step.op) if k == step.root else part] for k, part in enumerate(parts)]


def broadcast(step: Step) -> list[list[Array]]:
    return [[data(step, step.ranks[step.root], step.shape)]] * len(step.ranks)


def all_gather(step: Step) -> list[list[Array]]:
    return [[data(step, r, sized(step, k)) for k, r in enumerate(step.ranks)]] * len(step.ranks)


def all_gather_single(step: Step) -> list[list[Array]]:
    shape = (2, *step.shape)
    return [[np.concatenate([data(step, rank, shape) for rank in step.ranks])]] * len(step.ranks)


def reduce_scatter(step: Step) -> list[list[Array]]:
    return [
        [fold([data(step, rank, sized(step, k), k) for rank in step.ranks], step.op)]
        for k in range(len(step.ranks))
    ]


def reduce_scatter_single(step: Step) -> list[list[Array]]:
    size = len(step.ranks)
    total = fold([data(step, rank, (2 * size, *step.shape)) for rank in step.ranks], step.op)
    return [[total[2 * k : 2 * k + 2]] for k in range(size)]


def gather(step: Step) -> list[list[Array]]:
    everything = [data(step, rank, step.shape) for rank in step.ranks]
    return [everything if k == step.root else [] for k in range(len(step.ranks))]


def scatter(step: Step) -> list[list[Array]]:
    root = step.ranks[step.root]
    return [[data(step, root, step.shape, k)] for k in range(len(step.ranks))]


def exchange_size(step: Step, sender: int, receiver: int) -> int:
    """Return how many rows one place sends to another in an all-to-all."""
    return (step.sizes[sender] + step.sizes[receiver] * (sender + 1)) % 4


def all_to_all(step: Step) -> list[list[Array]]:
    return [
        [
            data(step, rank, (exchange_size(step, s, r), *step.shape), r)
            for s, rank in enumerate(step.ranks)
        ]
        for r in range(len(step.ranks))
    ]


def all_to_all_single(step: Step) -> list[list[Array]]:
    return [[np.concatenate(received)] for received in all_to_all(step)]


def even_all_to_all_single(step: Step) -> list[list[Array]]:
    size = len(step.ranks)
    sent = [data(step, rank, (2 * size, *step.shape)) for rank in step.ranks]
    return [[np.concatenate([s[2 * k : 2 * k + 2] for s in sent])] for k in range(size)]


def barrier(step: Step) -> list[list[Array]]:
    return [[]] * len(step.ranks)


monitored_barrier = barrier


def send_recv(step: Step) -> list[list[Array]]:
    receiver = (step.root + 1) % len(step.ranks)
    sent = data(step, step.ranks[step.root], step.shape)
    return [[sent] if k == receiver else [] for k in range(len(step.ranks))]


recv_from_anybody = send_recv


def ring(step: Step) -> list[list[Array]]:
    return [[data(step, step.ranks[k - 1], step.shape)] for k in range(len(step.ranks))]


def thing(step: Step, rank: int) -> dict[str, Any]:
    """Return an object that `rank` brings to a step."""
    return {"rank": rank, "text": "x" * ((step.number * 7 + rank * 13) % 40), "dtype": step.dtype}


def all_gather_object(step: Step) -> list[list[Any]]:
    return [[thing(step, rank) for rank in step.ranks]] * len(step.ranks)


def broadcast_object_list(step: Step) -> list[list[Any]]:
    root = step.ranks[step.root]
    return [[thing(step, root), step.number]] * len(step.ranks)


def gather_object(step: Step) -> list[list[Any]]:
    everything = [thing(step, rank) for rank in step.ranks]
    return [everything if k == step.root else [] for k in range(len(step.ranks))]


def scatter_object_list(step: Step) -> list[list[Any]]:
    return [[thing(step, rank)] for rank in step.ranks]


def send_object_list(step: Step) -> list[list[Any]]:
    receiver = (step.root + 1) % len(step.ranks)
    sent = [thing(step, step.ranks[step.root])]
    return [sent if k == receiver else [] for k in range(len(step.ranks))]


_COUNTS = {
    "ring": 2,
    "all_gather_object": 2,
    "broadcast_object_list": 2,
    "gather_object": 2,
    "scatter_object_list": 3,
    "send_object_list": 2,
}
PEER_KINDS = ("send_recv", "recv_from_anybody", "send_object_list")
KINDS = (
    "all_reduce",
    "coalesced_all_reduce",
    "reduce_to_root",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "even_all_to_all_single",
    "barrier",
    "monitored_barrier",
    "send_recv",
    "recv_from_anybody",
    "ring",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
)


def partners(step: Step) -> tuple[int, ...]:
    """Return the places that take part: all, or sender and receiver."""
    size = len(step.ranks)
    if step.kind in PEER_KINDS:
        return (step.root, (step.root + 1) % size)
    return tuple(range(size))


def num_operations(step: Step, rank: int) -> int:
    """Return how many operations `rank` calls in a step."""
    if rank not in step.ranks or step.ranks.index(rank) not in partners(step):
        return 0
    return _COUNTS.get(step.kind, 1)


def expected(step: Step) -> dict[int, list[Any]]:
    """Return what each member of the group has after a step."""
    return dict(zip(step.ranks, globals()[step.kind](step), strict=True))
