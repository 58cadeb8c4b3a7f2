"""What a tape notes: tensors by how they lie, tensors with elements, and operations on both.

Ref         a tensor without elements: storage 3, shape (4, 4), strides (4, 1)
Constant    a tensor with elements, as it was
Node        func(Ref, Constant, 0.5), and the generator's state before it
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_shard.errors import ConfigError

_SMALL_BYTES = 1 << 20  # copied at once, where a larger tensor is kept as it is


@dataclass(frozen=True)
class Ref:
    """A tensor of a tape: how it lies in which storage.

    Attributes:
        storage: Number of the storage on its tape.
        dtype: Format of the elements.
        size: Shape of the tensor.
        stride: Elements from one index of a dimension to the next.
        offset: Elements of the storage before the first.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def inside(self, memory: Tensor) -> Tensor:
        """Return the tensor in memory, which is the storage's bytes; shape (bytes,), uint8."""
        first = memory.storage_offset() // self.dtype.itemsize + self.offset
        storage = memory.untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, first, self.size, self.stride)

    def scratch(self) -> Tensor:
        """Return a tensor of the same form, of zeros."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        return made.zero_()


@dataclass(frozen=True)
class Constant:
    """A tensor with elements that an operation reads."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Constant":
        """Take a tensor as it is now."""
        is_small = tensor.numel() * tensor.element_size() <= _SMALL_BYTES
        value = tensor.clone() if is_small else tensor
        return cls(value, value._version)

    def read(self) -> Tensor:
        """Return it.

        Raises:
            ConfigError: It was changed since.
        """
        if self.tensor._version != self.version:
            raise ConfigError(
                f"A tensor of shape {tuple(self.tensor.shape)} was copied into a module on meta "
                f"and changed since; expected it as it was, for it is read when the ranks make "
                f"their shards. Copy in a clone of it."
            )
        return self.tensor


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        func: What is called; None for memory that nobody has written.
        args: Its arguments, with notes in the place of tensors.
        kwargs: Its keyword arguments, likewise.
        reads: Storages of the arguments.
        outs: The tensors that it returns in new storages, by their place in the flat result.
        writes: The tensors that it writes to.
        fills: The storage whose every element it writes without reading it; None where there is
            none.
        state: The generator's state before it; None if nothing is drawn.
        default_dtype: Format of new tensors then, where nothing else says it.
    """

    func: Callable[..., Any] | None
    args: Any
    kwargs: Mapping[str, Any]
    reads: frozenset[int]
    outs: tuple[tuple[int, Ref], ...] = ()
    writes: tuple[Ref, ...] = ()
    fills: int | None = None
    state: Tensor | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @property
    def needs(self) -> frozenset[int]:
        """Storages whose content it needs."""
        return self.reads - {self.fills}

    def call(self, memory: Mapping[int, Tensor]) -> Any:
        """Do it on tensors with elements."""

        def real(note: Any) -> Any:
            return note.inside(memory[note.storage]) if isinstance(note, Ref) else note.read()

        args, kwargs = tree_map_only((Ref, Constant), real, (self.args, dict(self.kwargs)))
        if self.state is not None:
            _set_state(kwargs, self.state)
        assert self.func is not None
        with _default_dtype(self.default_dtype):
            return self.func(*args, **kwargs)


def ref_of(tensor: Tensor, number: int) -> Ref:
    """Return the note of a tensor on meta whose storage has a number.

    Raises:
        ConfigError: It is conjugated or negated lazily.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(
            "A lazily conjugated or negated tensor on meta cannot be made later; expected a plain "
            "one. Call resolve_conj() or resolve_neg() where the module is built."
        )
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    return Ref(number, tensor.dtype, size, stride, int(tensor.storage_offset()))


def bytes_of(ref: Ref) -> int:
    """Return the bytes of a tensor's elements."""
    return prod(ref.size) * ref.dtype.itemsize


def covers(ref: Ref, nbytes: int) -> bool:
    """Whether a tensor is all of its storage, each element once."""
    return ref.offset == 0 and bytes_of(ref) == nbytes and 0 not in ref.stride


def draw(node: Node, memory: Mapping[int, Tensor] | None = None) -> None:
    """Let the generator go on as if the operation were done.

    Args:
        node: The operation.
        memory: Memory of the tensors whose values it reads, which it may change; None where it
            draws as often whatever they are.
    """

    def scratch(note: Any) -> Tensor:
        if isinstance(note, Constant):
            return note.read()
        known = None if memory is None else memory.get(note.storage)
        found: Tensor = note.scratch() if known is None else note.inside(known)
        return found

    args, kwargs = tree_map_only((Ref, Constant), scratch, (node.args, dict(node.kwargs)))
    assert node.func is not None
    node.func(*args, **kwargs)


def _set_state(kwargs: dict[str, Any], state: Tensor) -> None:
    if kwargs.get("generator") is None:
        torch.set_rng_state(state)
    else:
        kwargs["generator"] = torch.Generator()
        kwargs["generator"].set_state(state)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
