"""How torch asks classes of tensors that compute for themselves: two functions of one signature.

    p.norm()   ──> __torch_function__ ──> called         what code asks, with autograd still to come
    aten.norm  ──> __torch_dispatch__ ──> dispatched     what is left of it below autograd

Every class that stands for elements elsewhere answers one of the two, or both. (A class that is
asked in each step's host work has the first function itself: a call less.)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


class SeesCalls(Tensor):
    """Tensors whose class computes what is called with one of them among the arguments."""

    @classmethod
    def called(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of a call; NotImplemented lets another class among `types` do it."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take a call from torch."""
        return cls.called(func, types, tuple(args), dict(kwargs or {}))


class SeesOperations(Tensor):
    """Tensors whose class computes the operations below autograd on them."""

    @classmethod
    def dispatched(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation of torch's."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take an operation from torch."""
        return cls.dispatched(func, tuple(args), dict(kwargs or {}))
