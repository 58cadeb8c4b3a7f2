"""Values of other stages: tensors that know everything about themselves but their elements.

    stage 0    ids ──> embedding ──> dropout ──> block 0 ──> block 1 ──send──┐
    stage 1    ids ──> Elsewhere ──> Elsewhere ──> (skipped) ────────────> block 2 ──> block 3

A stage runs the user's whole step, but has only its own parameters. `Elsewhere` stands in for the
others, and whatever is computed from it is an `Elsewhere` again: it costs no arithmetic and no
memory, and it cannot be mistaken for a value. So the arguments of a stage's first block that are
`Elsewhere` are exactly those that have to be received; all others every stage computes by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_shard.errors import ConfigError

_UPDATES_STATISTICS = ("batch_norm",)  # of another stage: they are its own to keep


class Elsewhere(Tensor):
    """A tensor whose elements are known on another stage only.

    Attributes:
        like: A meta tensor of the same shape and format.
        origin: The parameter that it was computed from, for messages.
    """

    like: Tensor
    origin: str

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, origin: str) -> "Elsewhere":
        """Make one that looks as `like`, a meta tensor, does on `device`."""
        tensor: Elsewhere = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        tensor.like, tensor.origin = like, origin
        return tensor

    @classmethod
    def of(cls, value: Tensor, shape: Sequence[int], origin: str) -> "Elsewhere":
        """Stand in for a parameter of `shape` that is `value` in format and device."""
        return cls(torch.empty(shape, dtype=value.dtype, device="meta"), value.device, origin)

    def again(self) -> "Elsewhere":
        """Return another one that looks the same: a value of its own."""
        return Elsewhere(self.like, self.device, self.origin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Elsewhere(of={self.origin!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute shape and format only.

        Raises:
            ConfigError: The elements themselves are asked for, or would go into another tensor.
        """
        given = (args, dict(kwargs or {}))
        sources: list[Elsewhere] = []
        apply_to_collection(given, cls, sources.append)
        source = sources[0]
        _refuse_writes(func, args, source.origin)
        device = given[1].get("device") or source.device
        if "device" in given[1]:
            given[1]["device"] = torch.device("meta")
        meta_args, meta_kwargs = apply_to_collection(given, Tensor, _as_meta)
        try:
            result = func(*meta_args, **meta_kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"{func} asks for the elements of a value that is computed from {source.origin!r} "
                f"on another stage of the pipeline, expected code before the blocks to need its "
                f"shape only. Compute from the batch instead, or inside a block. ({error})"
            ) from error
        known = {id(one.like): one for one in sources}

        def wrap(tensor: Tensor) -> Tensor:
            same = known.get(id(tensor))
            if same is not None:
                return same
            with torch.inference_mode(mode=False):  # or it could be no view of a stand-in
                return cls(tensor, torch.device(device), source.origin)

        return apply_to_collection(result, Tensor, wrap)


def _as_meta(tensor: Tensor) -> Tensor:
    return tensor.like if isinstance(tensor, Elsewhere) else tensor.to("meta")


@cache
def _written(func: Any) -> tuple[int, ...]:
    """Which positional arguments an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, one in arguments if one.alias_info and one.alias_info.is_write)


def _refuse_writes(func: Any, args: Sequence[Any], origin: str) -> None:
    """Raise where unknown elements would go into a tensor that looks known afterwards."""
    for index in _written(func):
        target = args[index] if index < len(args) else None
        if not isinstance(target, Tensor) or isinstance(target, Elsewhere):
            continue
        if not any(name in str(func) for name in _UPDATES_STATISTICS):
            raise ConfigError(
                f"{func} writes a value that is computed from {origin!r} on another stage of the "
                f"pipeline into a tensor of shape {tuple(target.shape)}, expected it to be an "
                f"argument of the blocks. Make a new tensor of it (torch.cat, torch.where) instead "
                f"of writing into one, or do so inside a block."
            )


def is_elsewhere(value: object) -> bool:
    """Whether a value is one of another stage."""
    return isinstance(value, Elsewhere)
