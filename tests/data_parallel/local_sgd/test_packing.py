"""Tensors of many kinds as one buffer."""

import torch

from lightning_shard.data_parallel.local_sgd.rules import pack, unpack


def test_every_kind_comes_back() -> None:
    tensors = [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([1.0 + 2.0j, 3.0j]),
    ]
    buffer = pack(tensors)
    assert buffer.dtype == torch.float32
    assert buffer.shape == (6 + 1 + 0 + 4,)
    for tensor, back in zip(tensors, unpack(buffer, tensors), strict=True):
        assert back.shape == tensor.shape
        assert torch.equal(back.to(tensor.dtype), tensor)


def test_the_widest_format_travels() -> None:
    tensors = [torch.ones(2), torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)]
    assert pack(tensors).dtype == torch.float64
    assert torch.equal(unpack(pack(tensors), tensors)[1], tensors[1])
