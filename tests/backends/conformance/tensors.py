"""Small tensors of whole numbers, different on each rank, whose sums are exact in every type."""

import torch

from lightning_shard.backends.collectives import Collectives

# Sums over seven ranks must be exact: these hold whole numbers up to 8 and 16.
TINY_FLOATS = (torch.float8_e5m2, torch.float8_e4m3fn)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    *TINY_FLOATS,
)


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return whole numbers, another set per rank: from -1 to 3, or of 0 and 1."""
    numbers = (torch.arange(numel) * 7 + rank * 3) % 5 - 1
    if dtype in (torch.bool, torch.uint8, *TINY_FLOATS):
        numbers = numbers.clamp(0, 1)
    if dtype.is_complex:
        return torch.complex(numbers.float(), numbers.flip(0).float()).to(dtype)
    return numbers.to(dtype)


def all_values(size: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return every rank's values. Shape (size, numel)."""
    return torch.stack([values(rank, numel, dtype) for rank in range(size)])


def sum_of_values(size: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sum of every rank's values; of bool: whether any is true."""
    everything = all_values(size, numel, dtype)
    if dtype is torch.bool:
        return everything.any(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return everything.to(wide).sum(0).to(dtype)


def own_slice(collectives: Collectives, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a flat tensor, as a view."""
    return full.view(collectives.size, -1)[collectives.rank]


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert the same shape, type and bits."""
    assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device)
    if got.dtype in TINY_FLOATS:  # torch cannot compare them
        got, expected = got.float(), expected.float()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
