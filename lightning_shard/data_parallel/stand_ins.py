"""The tensors that stand in `.grad` of one flat buffer's parameters for averages in shards.

A parameter has one for each shape and format in which it shows itself, and for each device: under
offload its shard is the host's. They share a note. User code may keep them: one that nobody has
kept stands for the next gradient, too.
"""

from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.averaged_gradient import AveragedGradient, GradientNote
from lightning_shard.data_parallel.sharded_parameter import as_they_are
from lightning_shard.data_parallel.tensor_properties import OWN_GRAD, SET_OWN_GRAD

_Form = tuple[torch.Size, torch.dtype, torch.device]
_OWN_REFERENCES = 2  # to a stand-in that nobody else holds: that of the dict, and getrefcount's own


class StandIns:
    """The stand-ins of one buffer.

    Args:
        params: The buffer's parameters.
        names: Their names in the model.

    Attributes:
        notes: A note for each parameter, which the stand-ins of its gradient share.
    """

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._params = params
        self.notes = [GradientNote(name) for name in names]
        self._made: list[dict[_Form, AveragedGradient]]
        self._made = [{} for _ in names]

    def note(self, index: int) -> GradientNote:
        """Return the note that the stand-ins of a parameter's gradient share."""
        return self.notes[index]

    @as_they_are
    def put(self, indices: Iterable[int]) -> None:
        """Let stand-ins be the `.grad` of parameters whose gradients have been reduced."""
        for index in indices:
            param, made = self._params[index], self._made[index]
            form = param.shape, param.dtype, param.device
            stand_in = made.get(form)
            if stand_in is None:
                stand_in = made[form] = AveragedGradient(param, self.notes[index])
            SET_OWN_GRAD(param, stand_in)

    def adopt(self, index: int, shown: AveragedGradient) -> None:
        """Let what user code has put into `.grad` be a stand-in."""
        with torch._C.DisableTorchFunctionSubclass():
            self._made[index][shown.shape, shown.dtype, shown.device] = shown

    @as_they_are
    def lift(self, indices: Sequence[int]) -> list[int]:
        """Take stand-ins out of `.grad` while their parameters come to show other shapes.

        Returns:
            The indices of the parameters that had one, for `put`.
        """
        grads = [*map(OWN_GRAD, map(self._params.__getitem__, indices))]
        if AveragedGradient not in map(type, grads):
            return []
        lifted = []
        for index, grad in zip(indices, grads, strict=True):
            if isinstance(grad, AveragedGradient):
                note = self.notes[index]
                if grad.note is not note or grad.own is not None:
                    grad.settle(note)
                SET_OWN_GRAD(self._params[index], None)
                lifted.append(index)
        return lifted

    def leave(self, indices: Iterable[int], elements: Callable[[int], Tensor | None]) -> None:
        """Note that parameters' gradients are gone, also for code that has kept a `.grad`.

        Args:
            indices: Places of the parameters in the buffer.
            elements: Returns a copy of what this rank has of a gradient; None for nothing.
        """
        for index in indices:
            made = self._made[index]
            for form in list(made):
                if getrefcount(made[form]) > _OWN_REFERENCES:
                    made.pop(form).lose(elements(index))
            self.notes[index].zeroed = False  # of a gradient that is gone
