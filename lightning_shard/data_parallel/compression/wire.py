"""Several tensors as one row of bytes, so that one message carries them.

    | sound | field 0 ... | field 1 ... |      each begins at a multiple of 8 bytes

`sound` says whether the values were finite. A codec need not be able to say so.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGN = 8  # of the widest type, so that each field can be seen in its own


class Field(NamedTuple):
    """One tensor in a row of bytes.

    Attributes:
        dtype: Type of the tensor.
        shape: Shape of the tensor.
        start: Index in the row of the tensor's first byte.
        stop: Index in the row one past its last byte.
    """

    dtype: torch.dtype
    shape: torch.Size
    start: int
    stop: int


class Form(NamedTuple):
    """The layout of a row of bytes.

    Attributes:
        fields: The tensors in the row, in order.
        num_bytes: Length of the row.
    """

    fields: tuple[Field, ...]
    num_bytes: int


def form_of(tensors: Sequence[Tensor]) -> Form:
    """Return the form of a row that holds these tensors one behind the other."""
    fields, end = [], _ALIGN
    for tensor in tensors:
        fields.append(Field(tensor.dtype, tensor.shape, end, end + tensor.nbytes))
        end = -(-fields[-1].stop // _ALIGN) * _ALIGN
    return Form(tuple(fields), end)


def write(row: Tensor, form: Form, tensors: Sequence[Tensor], sound: Tensor) -> None:
    """Fill `row`, shape (num_bytes,) of uint8; `sound` is a scalar of bool."""
    row[0].copy_(sound)
    for field, tensor in zip(form.fields, tensors, strict=True):
        row[field.start : field.stop].copy_(tensor.contiguous().view(-1).view(torch.uint8))


def read(row: Tensor, form: Form) -> tuple[Tensor, ...]:
    """Return the tensors that a row holds, as views of it."""
    return tuple(
        row[field.start : field.stop].view(field.dtype).view(field.shape) for field in form.fields
    )


def all_sound(rows: Tensor) -> Tensor:
    """Return whether all rows' values, (R, num_bytes), were finite: a bool scalar."""
    return (rows[:, 0] != 0).all()
