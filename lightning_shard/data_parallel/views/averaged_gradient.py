"""The tensor that stands in `.grad` once a gradient has been averaged and cut into shards.

    autograd ──add──> AveragedGradient <── user code: norm(), mul_(), clamp ...
                            │                     computed as with a `ShardedTensor`
                            └── note ── source ── this rank's elements, in memory of the engine's

The shards lie elsewhere, but `.grad` must go on telling the truth: None means that there is no
gradient (user code zeroes it so), anything else that there is one, and autograd adds to it. So a
tensor without memory stands there, of the shape that the parameter shows at the moment, as torch
demands. What user code computes from it element by element has elements of its own, and can be put
into `.grad` in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.core.tensor_calls import (
    BY_PYTHON,
    MADE_OF_ALL,
    MOVES_MEMORY,
    OF_MEMORY,
    PICKLES,
    SET_DATA,
    Args,
    Exchanged,
    Function,
    Kwargs,
    SeesCalls,
    SeesOperations,
    changed_by,
    found_in,
    functions,
    map_only,
    name_of,
)
from lightning_shard.data_parallel.torch_private import is_traced
from lightning_shard.data_parallel.views.sharded_tensor import ShardedTensor, refusal
from lightning_shard.errors import ConfigError

_ADD = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)
_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class GradientSource(Protocol):
    """Gives access to the elements of one parameter's averaged gradient."""

    def sharded(self) -> ShardedTensor:
        """Return the gradient; writing to it writes to what the optimizer will see."""

    def look(self, shown: "AveragedGradient") -> None:
        """Learn from `.grad` whether user code has zeroed the gradient, which `shown` stood for."""

    def apart(self, local: Tensor) -> ShardedTensor:
        """Return a tensor of other elements that is spread as the gradient is."""

    def take(self, shown: "AveragedGradient", local: Tensor) -> None:
        """Let the gradient have other elements, also where it was None; `shown` stands for it."""

    def changed(self) -> None:
        """Take note that the gradient's elements have changed."""

    def operand(self, tensor: Tensor, operation: str) -> Tensor:
        """Return the operand that all ranks compute with in place of this rank's `tensor`."""


@dataclass
class GradientNote:
    """Records the events of the stand-ins of one parameter's gradient.

    Attributes:
        arrival: Gradient that autograd has added since the last `take_arrival`.
        zeroed: Whether user code has called `zero_`.
        source: Access to the gradient's elements; None before an engine has them.
        is_gone: Whether the parameter has another gradient by now, or none.
    """

    param_name: str
    arrival: Tensor | None = None
    zeroed: bool = False
    source: GradientSource | None = None
    is_gone: bool = False

    def take_arrival(self) -> Tensor:
        """Return the gradient that autograd has just added, and forget it here."""
        arrival, self.arrival = self.arrival, None
        assert arrival is not None
        return arrival

    def zero(self) -> None:
        """Remember that user code has zeroed the gradient."""
        self.zeroed = True
        if self.source is not None:
            self.source.changed()


class AveragedGradient(SeesCalls, SeesOperations):
    """Stands for the averaged gradient of one parameter; holds no memory.

    Attributes:
        own: Elements that user code has computed; None in a stand-in of the engine.
    """

    note: GradientNote
    own: ShardedTensor | None

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        note: GradientNote,
        own: ShardedTensor | None = None,
        shape: torch.Size | None = None,
    ) -> "AveragedGradient":
        """Make one of the format, device and, unless there is another, the shape of `like`."""
        with torch._C.DisableTorchFunctionSubclass():
            stand_in: AveragedGradient = Tensor._make_wrapper_subclass(
                cls, like.shape if shape is None else shape, dtype=like.dtype, device=like.device
            )
        stand_in.note, stand_in.own = note, own
        return stand_in

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AveragedGradient(of={self.note.param_name!r})"

    def sharded(self) -> ShardedTensor:
        """Return the gradient as a sharded tensor, of which this rank has some elements."""
        if self.note.arrival is not None:
            raise ConfigError(
                f".grad of {self.note.param_name!r} is used in the middle of a backward, where a "
                f"new gradient has been added to it that is not averaged over the ranks, by a hook "
                f"of register_post_accumulate_grad_hook; expected it to be used once the backward "
                f"has ended. Use it in on_after_backward, or change the gradient in a hook of "
                f"param.register_hook, which is called with this rank's own."
            )
        if self.own is None and self.note.source is not None:
            self.note.source.look(self)  # whether it is still there
        if self.own is not None:
            return self.own
        if self.note.is_gone:
            raise gone(self.note.param_name)
        if self.note.source is None:
            raise ConfigError(
                f"The gradient of {self.note.param_name!r} is gone: its run has ended. Compute "
                f"with it in the hooks of training."
            )
        return self.note.source.sharded()

    def lose(self, elements: Tensor | None) -> None:
        """Stand for a gradient that is in no `.grad` any more, for user code that has kept this.

        Without this rank's elements, which nobody else writes to, user code gets an error.
        """
        if self.own is not None:
            return
        if elements is None or self.note.source is None:
            self.note = GradientNote(self.note.param_name, is_gone=True)
        else:
            self.own = self.note.source.apart(elements)

    def leave_graph(self) -> None:
        """Forget the graph of what autograd has added, where backward creates one."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.grad_fn is not None:
                self.detach_()

    def shaped_as(self, param: Tensor) -> "AveragedGradient":
        """Return this for a parameter that torch may have in full by now, or cut since then."""
        with torch._C.DisableTorchFunctionSubclass():  # torch compares shapes as `.grad` is set
            return self if self.shape == param.shape else type(self)(param, self.note, self.own)

    def full_tensor(self) -> Tensor:
        """Bring the full gradient together; each rank must call."""
        return self.sharded().full_tensor()

    def settle(self, note: GradientNote) -> None:
        """Write the result that user code has put into `.grad` into the gradient's elements.

        Raises:
            ConfigError: This is the gradient of another parameter, or one that is gone.
        """
        if self.note.is_gone:
            raise gone(self.note.param_name)
        is_of_other = self.own is not None or self.note.param_name != note.param_name
        if self.note is not note and is_of_other:  # else an engine before this one has left it
            raise ConfigError(
                f".grad of {note.param_name!r} was set to what is computed of the gradient of "
                f"{self.note.param_name!r}, whose elements lie on other ranks; expected its own. "
                f"Change it in place, or use strategy='shard_ddp'."
            )
        if self.own is not None and note.source is not None:
            own, self.own = self.own, None
            note.source.take(self, own.local)

    @classmethod
    @override
    def called(cls, func: Function, types: Sequence[type], args: Args, kwargs: Kwargs) -> Any:
        """Compute what user code asks of the full gradient, on each rank with its own elements."""
        if not all(issubclass(one, AveragedGradient) for one in types):
            return NotImplemented  # together with a sharded parameter, which knows what to do
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_STAND_IN or is_traced():
                return func(*args, **kwargs)
            if func in _ITSELF:
                return args[0]
            return _computed(func, args, kwargs)

    @classmethod
    @override
    def dispatched(cls, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Take note of the gradient that autograd adds, and of zeroing."""
        if func in _ZERO:
            return _zero(args[0])
        if func in _HARMLESS:
            return args[0]
        stand_in = found_in(cls, args)[0]
        if func in _ADD:
            new, before = args[1] if args[0] is stand_in else args[0], stand_in.note.arrival
            stand_in.note.arrival = new if before is None else before + new  # of reentrant blocks
            return stand_in
        raise refusal(func, stand_in.sharded())


_OF_STAND_IN = functions("zero_ requires_grad_ requires_grad= __hash__") | {torch._foreach_zero_}
_ITSELF = functions("detach detach_ data")
_ELEMENTS = OF_MEMORY | MOVES_MEMORY | BY_PYTHON | PICKLES | MADE_OF_ALL


_Found = list[tuple[AveragedGradient, ShardedTensor]]


def _computed(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `func` with the sharded tensors of the gradients among the arguments."""
    name = getattr(func, "__name__", "")
    targets = _plain_targets(func, args, kwargs)
    if targets:  # as in an update by hand
        args, kwargs = _full_for(targets, args, kwargs)
        return func(*args, **kwargs)
    shards = Exchanged(AveragedGradient, AveragedGradient.sharded)
    args, kwargs = shards.given((args, kwargs))
    found = [*shards.pairs.values()]
    like, first = found[0]
    args, kwargs = _with_operands((args, kwargs), name, found, like)
    if func == SET_DATA:
        args[0].copy_(args[1])
        return None
    if name == "__deepcopy__":
        return _shown(first.beside(first.local.clone()), found)
    if name_of(func) in _ELEMENTS:
        raise refusal(name, first)
    try:
        result = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        raise refusal(f"{name or func}", first, str(error)) from error
    return map_only(ShardedTensor, lambda one: _shown(one, found), result)


def _plain_targets(func: Any, args: Sequence[Any], kwargs: Kwargs) -> list[Tensor]:
    """Return what an operation changes where that is no gradient."""
    targets = [args[0]] if func == SET_DATA else changed_by(func, args, kwargs)
    return [] if any(isinstance(one, AveragedGradient) for one in targets) else targets


def _full_for(targets: list[Tensor], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Replace gradients by what has the shape of the target: all of it, or this rank's part."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    beside = {id(one): target for each in lists for one, target in zip(each, targets, strict=False)}

    def full(gradient: AveragedGradient) -> Tensor:
        sharded, target = gradient.sharded(), beside.get(id(gradient), targets[0])
        tensor = sharded.full_tensor()
        own = sharded.spread.own(tensor)
        return own if own.shape == target.shape != tensor.shape else tensor

    given: tuple[Args, Kwargs] = map_only(AveragedGradient, full, (args, kwargs))
    return given


def _with_operands(given: Any, name: str, found: _Found, like: AveragedGradient) -> tuple[Any, Any]:
    """Replace the tensors among the arguments by operands that are the same on all ranks."""
    known = {id(sharded): gradient for gradient, sharded in found}
    lists = [arg for arg in given[0] if isinstance(arg, (list, tuple))]
    gradients: dict[int, AveragedGradient] = {}
    for row in zip(*lists, strict=False) if lists else ():  # of `_foreach_add_` and its like
        of_row = next((known[id(one)] for one in row if id(one) in known), like)
        gradients |= {id(one): of_row for one in row}

    def exchanged(tensor: Tensor) -> Tensor:
        source = gradients.get(id(tensor), like).note.source
        if isinstance(tensor, ShardedTensor) or source is None:
            return tensor
        return source.operand(tensor, name)

    args, kwargs = map_only(Tensor, exchanged, given)
    return args, kwargs


def _shown(result: ShardedTensor, found: _Found) -> Tensor:
    """Return the gradient that user code has changed in place, or a new one with the result.

    A new one has the shape of the full parameter, which may be here by the time that it is put into
    `.grad`; a parameter in shards takes either shape.
    """
    for gradient, sharded in found:
        if result is sharded:
            return gradient
        if result.spread is sharded.spread and result.shape == sharded.spread.shape:
            return AveragedGradient(gradient, gradient.note, result, sharded.spread.own_shape)
    return result


def gone(param_name: str) -> ConfigError:
    """Return the error for the use of a gradient after another has come to its place."""
    return ConfigError(
        f"What stood in .grad of {param_name!r} before it was set to None is used, but its "
        f"elements are gone; expected a copy. Keep p.grad.clone()."
    )


def _zero(target: Tensor | Sequence[Tensor]) -> Tensor | None:
    """Zero what stands in `.grad`; an operation on a list returns nothing."""
    for tensor in [target] if isinstance(target, Tensor) else target:
        if not isinstance(tensor, AveragedGradient):
            tensor.zero_()
        elif tensor.own is not None:
            tensor.own.zero_()
        else:
            tensor.note.zero()
    return target if isinstance(target, Tensor) else None
