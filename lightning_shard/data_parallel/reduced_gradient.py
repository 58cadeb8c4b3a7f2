"""What stands in `.grad` once a gradient has been averaged and cut into pieces.

The pieces lie elsewhere, but `.grad` must go on telling the truth: None means that there is no
gradient (user code zeroes it so), anything else that there is one, and autograd adds to it. So a
tensor without memory stands there. It notes what autograd adds and whether it was zeroed; any
other use would compute with a gradient that is not there, and is an error with advice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_shard.errors import ConfigError

_ADD = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)
_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass
class GradientNote:
    """What has happened to the stand-ins of one parameter.

    Attributes:
        param_name: For messages.
        arrival: What autograd has added since the last `take_arrival`.
        zeroed: Whether `zero_` was called.
    """

    param_name: str
    arrival: Tensor | None = None
    zeroed: bool = False

    def take_arrival(self) -> Tensor:
        """The gradient that autograd has just added."""
        arrival, self.arrival = self.arrival, None
        assert arrival is not None
        return arrival


class ReducedGradient(Tensor):
    """Stands for the averaged gradient of one parameter; holds no memory.

    Attributes:
        note: Shared by the stand-ins for the parameter's full shape and for its piece.
    """

    note: GradientNote

    @staticmethod
    def __new__(cls, like: Tensor, note: GradientNote) -> "ReducedGradient":
        """Make one of the shape, format and device of `like`."""
        stand_in: ReducedGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        stand_in.note = note
        return stand_in

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReducedGradient(of={self.note.param_name!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take additions and zeroing; refuse arithmetic."""
        if func in _ZERO:
            return _zero(args[0])
        if func in _HARMLESS:
            return args[0]
        stand_in, *_ = [arg for arg in _flat(args) if isinstance(arg, cls)]
        if func in _ADD:
            stand_in.note.arrival = args[1] if args[0] is stand_in else args[0]
            return stand_in
        raise ConfigError(
            f"The gradient of {stand_in.note.param_name!r} is averaged and lies in pieces on the "
            f"ranks, so {func} cannot be computed from .grad here. Clip with Trainer("
            f"gradient_clip_val=...) or self.clip_gradients(...), take the norm from "
            f"trainer.strategy.gradient_norm(), read pieces in on_before_optimizer_step, or use "
            f"strategy='shard_ddp', which keeps whole gradients."
        )


def _zero(target: Tensor | Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
    for tensor in [target] if isinstance(target, Tensor) else target:
        if isinstance(tensor, ReducedGradient):
            tensor.note.zeroed = True
        else:
            tensor.zero_()
    return target


def _flat(args: Sequence[Any]) -> list[Any]:
    return [
        item for arg in args for item in (_flat(arg) if isinstance(arg, (list, tuple)) else [arg])
    ]
