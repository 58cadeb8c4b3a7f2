"""Tensors as one shard of memory, without copies where they lie one after the other."""

import torch
from torch import Tensor

from lightning_shard.backends.packing import pack, room_for, unaliased, unpack, write


def neighbours() -> list[Tensor]:
    return list(torch.arange(10.0).split([3, 0, 5, 2]))


def test_neighbours_are_packed_without_a_copy() -> None:
    parts = neighbours()
    assert pack(parts).data_ptr() == parts[0].data_ptr()
    assert pack(parts).tolist() == list(range(10))
    assert room_for(parts).data_ptr() == parts[0].data_ptr()


def test_others_are_copied_in_order() -> None:
    first, _, third, _ = neighbours()
    packed = pack([third, first])
    assert packed.tolist() == [3, 4, 5, 6, 7, 0, 1, 2]
    assert packed.data_ptr() != third.data_ptr()


def test_tensors_that_only_happen_to_be_neighbours_in_size_are_copied() -> None:
    """Two storages may lie side by side; one view cannot span them."""
    memory = torch.zeros(8)
    views = [torch.frombuffer(memory.numpy()[i : i + 4], dtype=torch.float32) for i in (0, 4)]
    assert views[0].data_ptr() + 16 == views[1].data_ptr()
    assert pack(views).data_ptr() != views[0].data_ptr()


def test_columns_are_copied_and_written_back() -> None:
    matrix = torch.zeros(3, 2)
    columns = list(matrix.unbind(1))
    flat = room_for(columns)
    flat.copy_(torch.arange(6.0))
    unpack(flat, columns)
    assert matrix.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_lies_in_place_is_not_written_again() -> None:
    parts = neighbours()
    version = parts[0]._version
    unpack(pack(parts), parts)
    assert parts[0]._version == version
    assert torch.cat(parts).tolist() == list(range(10))


def test_nothing_is_packed_to_nothing() -> None:
    empty = [torch.zeros(0), torch.zeros(2, 0)]
    assert pack(empty).shape == (0,)
    unpack(room_for(empty), empty)


def test_sources_in_the_targets_storage_are_copied() -> None:
    memory = torch.arange(4.0)
    apart = torch.ones(2)
    copied, kept = unaliased([memory[:2], apart], [memory])
    assert copied.data_ptr() != memory.data_ptr()
    assert kept.data_ptr() == apart.data_ptr()


def test_writing_is_unknown_to_autograd() -> None:
    weight = torch.zeros(2, 2, requires_grad=True)
    write(weight, torch.arange(4.0))
    assert weight._version == 0
    assert weight.tolist() == [[0, 1], [2, 3]]
