"""Moves one tensor entry of a snapshot from the ranks that hold it into the new shards.

    rank 0   holds [0 .. 6)   new shard [0 .. 4)      copies 0..4, sends 4..6 to rank 1
    rank 1   holds nothing    new shard [4 .. 8)      gets 4..6 from rank 0, 6..8 from rank 2
    rank 2   holds [6 .. 12)  new shard [8 .. 12)     copies 8..12, sends 6..8 to rank 1

All that the ranks send each other goes in one exchange.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.rank_snapshot import Snapshot, TensorKey
from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.elastic.resharding import Move


@torch.no_grad()
def move_entry(
    collectives: Collectives,
    key: TensorKey,
    held: Mapping[int, Snapshot],
    moves: Sequence[Move],
    target: Tensor,
    flat: FlatParameters,
) -> None:
    """Fill this rank's new shard of one tensor entry; each rank must call.

    Args:
        collectives: Collectives over all ranks, each of which must call.
        key: Names the tensor entry.
        held: By shard, the snapshots that this rank has.
        moves: The moves of all ranks, in the same order on each.
        target: The new shard, of shape (S,).
        flat: Says where in the buffer the new shard lies.
    """
    rank = collectives.rank
    first = flat.layout.shard_bounds(flat.shard_index)[0]
    width = key.dtype.itemsize
    places = target.view(torch.uint8)

    def place(move: Move) -> Tensor:
        return places[(move.start - first) * width : (move.stop - first) * width]

    for move in moves:
        if move.source == move.target == rank:
            place(move).copy_(_content(key, held, move))
    travelling = [move for move in moves if move.source != move.target]
    if not travelling:  # all ranks know
        return
    outgoing: list[list[Tensor]] = [[] for _ in range(collectives.size)]
    incoming: list[list[Tensor]] = [[] for _ in range(collectives.size)]
    for move in travelling:
        if move.source == rank:
            outgoing[move.target].append(_content(key, held, move))
        if move.target == rank:
            incoming[move.source].append(place(move))
    _exchange(collectives, outgoing, incoming, target.device)


def _content(key: TensorKey, held: Mapping[int, Snapshot], move: Move) -> Tensor:
    snapshot = held[move.shard]
    first = move.shard * snapshot.metadata.tensor_entries[key].numel
    return snapshot.elements(key, move.start - first, move.stop - first)


def _exchange(
    collectives: Collectives,
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> None:
    """Send each rank its parts in one message, and write what came to where it belongs."""
    sent = [part for parts in outgoing for part in parts]
    places = [part for parts in incoming for part in parts]
    source = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8)
    source = source.to(device)
    output = source.new_empty(sum(part.numel() for part in places))
    collectives.all_to_all(
        output,
        source,
        output_split_sizes=[sum(part.numel() for part in parts) for parts in incoming],
        input_split_sizes=[sum(part.numel() for part in parts) for parts in outgoing],
    ).wait()
    came = torch.split(output, [part.numel() for part in places])
    for part, content in zip(places, came, strict=True):
        part.copy_(content)
