"""Gradients of one buffer that user code has put into `.grad` itself, or changed there.

They are a rank's own until they are averaged: `HandEdits` asks every buffer, compares ranks and has
gradients averaged again. Under stage 0 that is done in place; from stage 1 on such gradients are
reduced as those of a backward are, see `FlatGradients.reduce_given`.
"""

from collections.abc import Sequence
from operator import is_

from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.gradient_buffer import GradientBuffer
from lightning_shard.data_parallel.sharded_parameter import as_they_are
from lightning_shard.data_parallel.tensor_properties import OWN_GRAD
from lightning_shard.data_parallel.unrecorded import unrecorded
from lightning_shard.errors import ConfigError


class OwnGradients:
    """The gradients of one buffer that user code has made or edited.

    Args:
        buffer: The memory in which the gradients lie.
        ranks: Group over which gradients are averaged.
    """

    def __init__(self, buffer: GradientBuffer, ranks: Collectives) -> None:
        self.ranks = ranks
        self._buffer = buffer
        self._flat = buffer.flat
        self._version = 0  # of the full buffer, once it was reduced

    @property
    def num_params(self) -> int:
        """Number of parameters of the buffer."""
        return len(self._flat.params)

    def name(self, index: int) -> str:
        """Return the name of a parameter in the model."""
        return self._flat.layout.slots[index].name

    def know_content(self) -> None:
        """Note that the gradients that lie in the buffer now are the same on all ranks."""
        if self._flat.stage == 0 and self._buffer.full is not None:
            self._version = self._buffer.full._version

    @property
    def are_edited(self) -> bool:
        """Whether user code has changed gradients since `know_content`, by a quick check here."""
        if self.are_there:
            return True
        full = self._buffer.full
        return self._flat.stage == 0 and full is not None and full._version != self._version

    @property
    def are_there(self) -> bool:
        """Whether a tensor of the user's stands in some `.grad`."""
        return any(self._which_are_own())

    @property
    def which_are_there(self) -> list[bool]:
        """Whether each parameter has a gradient here, under stage 0; later stages have agreed."""
        if self._flat.stage > 0:
            return []
        return [param.grad is not None for param in self._flat.params]

    @as_they_are
    def _which_are_own(self) -> list[bool]:
        """Return of each parameter whether a tensor of the user's stands in `.grad`."""
        self._buffer.see_assigned()
        views = self._buffer.views_or_none
        grads = [*map(OWN_GRAD, self._flat.params)]
        if all(map(is_, grads, views)):
            return [False] * len(grads)
        return [
            not (grad is None or grad is view or isinstance(grad, AveragedGradient))
            for grad, view in zip(grads, views, strict=True)
        ]

    def kinds(self) -> list[tuple[bool, bool]]:
        """Whether a tensor of the user's stands in each `.grad`, and whether one of the engine's.

        Raises:
            ConfigError: A tensor of the user's has another shape than the parameter.
        """
        kinds = []
        for index, is_own in enumerate(self._which_are_own()):
            grad = self._flat.params[index].grad
            if is_own and grad is not None and grad.shape != self._flat.layout.slots[index].shape:
                raise self._set_by_hand(index)
            kinds.append((is_own, not is_own and grad is not None))
        return kinds

    @property
    def held_everywhere(self) -> Tensor | None:
        """The memory of all gradients, under stage 0; zero where there is no gradient."""
        if self._flat.stage > 0 or self._buffer.full is None:
            return None
        self._buffer.observe_all()
        for index, param in enumerate(self._flat.params):
            if param.grad is None:
                self._buffer.views[index].zero_()
        return self._buffer.full

    @unrecorded
    def take_in(self) -> None:
        """Under stage 0, copy the tensors that user code has put into `.grad` to the buffer."""
        which = self._which_are_own()
        for index in (index for index, is_own in enumerate(which) if is_own):
            param = self._flat.params[index]
            grad, param.grad = param.grad, None
            assert grad is not None
            self._buffer.allocate()
            self._buffer.views[index].copy_(grad.to_dense() if grad.is_sparse else grad)
            self._buffer.states.arrive(index)
            self._show(index)

    @unrecorded
    def send_along(self, indices: Sequence[int]) -> None:
        """Let a reduction take tensors of the user's, which backward has added nothing to.

        Args:
            indices: Those of the parameters in whose `.grad` they stand, under stages that let
                stand-ins stand there.

        Raises:
            ConfigError: A tensor has another shape than the parameter.
        """
        for index in indices:
            param = self._flat.params[index]
            grad, shape = param.grad, self._flat.layout.slots[index].shape
            if grad is None or grad.shape != shape:
                raise self._set_by_hand(index)
            param.grad = None
            self._buffer.forget([index])
            self._buffer.store(index, grad.to_dense() if grad.is_sparse else grad)

    def _show(self, index: int) -> None:
        buffer = self._buffer
        buffer.states.show(index)
        if buffer.is_plain:
            self._flat.params[index].grad = buffer.views[index]
        else:
            self._flat.stand_ins.put([index])

    @unrecorded
    def average_again(self, there: Sequence[bool]) -> None:
        """Under stage 0, average the gradients in the buffer once more; each rank must call.

        Args:
            there: Whether each parameter has a gradient on any rank.
        """
        if self._buffer.full is None:
            self._buffer.allocate().zero_()
        full = self._buffer.allocate()
        self.ranks.all_reduce(full, "avg").wait()
        for index, is_there in enumerate(there):
            if is_there:
                self._show(index)
        self._buffer.states.all_leave()
        self.know_content()

    @as_they_are
    def check(self) -> None:
        """Raise if a tensor of the user's stands in some `.grad` before the optimizer's view.

        Raises:
            ConfigError: User code has put a gradient of its own there.
        """
        for index in self._buffer.observe_all():
            raise self._set_by_hand(index)

    def _set_by_hand(self, index: int) -> ConfigError:
        return ConfigError(
            f"Rank {self.ranks.rank}: .grad of {self.name(index)!r} was set by hand to what has "
            f"not the parameter's own shape, expected gradients to come from backward, which "
            f"averages them over the ranks. Call self.manual_backward(loss), or use "
            f"strategy='shard_ddp'."
        )
