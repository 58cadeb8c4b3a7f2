"""A check whether ranks hold the same values, by sums over the bits instead of the values.

    value   [x0 x1 x2 | x3 x4 x5 | ...]     bits as whole numbers
    rows     -> sums,  columns -> sums      each times an odd number of its own, added up mod 2^64

The two marginal sums tell equal values in other positions apart; one sum alone would not.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError

# none of 64 bits: signs of such would be the highest bit, of which a sum keeps a parity only
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_COLUMNS = 1024
_WIDE = 8  # bytes that are added up as one number
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, as a signed number


@torch.no_grad()
def content(tensor: Tensor) -> Tensor:
    """Return an int64 of shape () that nearly always differs where values or their places do."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.detach().reshape(-1)
    bits = flat.view(_WHOLE_NUMBERS[flat.element_size()])
    end = bits.numel() - bits.numel() % _COLUMNS
    body, rest = bits[:end].view(-1, _COLUMNS), bits[end:]
    sums = [body.sum(0, dtype=torch.int64), body.sum(1, dtype=torch.int64), rest.to(torch.int64)]
    return _weighted(torch.cat(sums))


def contents(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a number as `content` does, of several tensors in order: shape (), int64."""
    numbers = [content(tensor).to(device) for tensor in tensors]
    return _weighted(torch.stack([torch.zeros((), dtype=torch.int64, device=device), *numbers]))


def differ(numbers: Tensor, ranks: Collectives) -> Tensor:
    """Return which whole numbers are not the same on all ranks; each rank must call."""
    both = torch.stack([numbers, ~numbers])
    ranks.all_reduce(both, "max").wait()
    return both[0] != ~both[1]


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's memory as whole numbers, modulo 2^64: shape (), int64."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.detach().reshape(-1)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    is_aligned = flat.data_ptr() % _WIDE == 0
    end = flat.numel() - flat.numel() % (_WIDE // flat.element_size()) if is_aligned else 0
    total = flat[:end].view(torch.int64).sum()
    rest = flat[end:].view(torch.uint8)
    weights = torch.arange(1, rest.numel() + 1, device=rest.device)
    return total + (rest * weights).sum()


def _weighted(numbers: Tensor) -> Tensor:
    places = torch.arange(1, len(numbers) + 1, device=numbers.device)
    return ((numbers + places) * (places * _ODD | 1)).sum()


_LINEAR = {"add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "copy", "set"}


@torch.no_grad()
def agreed(
    tensor: Tensor,
    ranks: Collectives,
    *,
    device: torch.device,
    is_full: bool,
    operation: str,
    name: str,
) -> Tensor:
    """Return the operand for all ranks: their tensor where it is the same, or the average.

    It has the shape of the gradient (`is_full`) or of this rank's shard. Where it is not full on
    some rank, each rank keeps its own. The average of operands gives the average of results only
    in a linear operation. Each rank must call.
    """
    number = content(tensor).to(device)
    states = torch.stack([number, ~number, number.new_tensor(not is_full)])
    ranks.all_reduce(states, "max").wait()
    greatest, least, some_have_shards = states.tolist()
    if some_have_shards or greatest == ~least:
        return tensor
    kind = operation.strip("_").removeprefix("foreach_")
    if kind not in _LINEAR or not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"Rank {ranks.rank}: {operation} of the gradient of {name!r} and a tensor that "
            f"differs between the ranks, expected the same on all: each has a part of the "
            f"gradient. Average the tensor first, self.all_gather(tensor).mean(0), or draw it from "
            f"a generator that is seeded alike on all ranks."
        )
    average = tensor.detach().clone(memory_format=torch.contiguous_format).to(device)
    ranks.all_reduce(average, "avg").wait()
    return average.to(tensor.device)
