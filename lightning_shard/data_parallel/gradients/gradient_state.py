"""The states of the gradients of one buffer: where each lies, and which ranks used its parameter.

    NONE ──arrive──> LOCAL ──leave──> NONE ──come──> REDUCED ──arrive──> BOTH ──leave──> REDUCED
                       any state ──forget──> NONE

    LOCAL      in the full buffer: this rank's own, not yet reduced
    REDUCED    in the shard: an average since the last zero_grad
    BOTH       an average in the shard, and in the full buffer what is to be added to it

A gradient leaves the full buffer when its reduction begins, and comes to lie in the shard of
gradients when the reduction has ended; what backward makes meanwhile arrives for the next one.

A buffer may have thousands of gradients, and most events are of all of them: so a state is one byte
in each of a few arrays, and an event of all, or a question about any, is one operation.
"""

from collections.abc import Iterable, Sequence
from operator import or_

_YES = 1


class GradientStates:
    """The states of a buffer's gradients: 1 for each that something holds for, in buffer order.

    Args:
        num_params: Number of parameters of the buffer.

    Attributes:
        is_local: Whether some of the gradient is still to be reduced: LOCAL or BOTH.
        is_reduced: Whether some of the gradient has been reduced: REDUCED or BOTH.
        is_used: Whether this rank has used the parameter since the last zero_grad.
        is_valid: Whether any rank has used it, so that the optimizer sees a gradient.
    """

    def __init__(self, num_params: int) -> None:
        self.is_local = bytearray(num_params)
        self.is_reduced = bytearray(num_params)
        self.is_used = bytearray(num_params)
        self.is_valid = bytearray(num_params)
        self._all = bytes([_YES]) * num_params

    def __len__(self) -> int:
        """Return the number of gradients."""
        return len(self._all)

    @property
    def any_local(self) -> bool:
        """Whether some of any gradient is still to be reduced."""
        return _YES in self.is_local

    @property
    def any_reduced(self) -> bool:
        """Whether an average of any gradient lies in the shard."""
        return _YES in self.is_reduced

    @property
    def any_known(self) -> bool:
        """Whether any parameter has been used by some rank, as far as is known here."""
        return _YES in self.is_used or _YES in self.is_valid

    def is_none(self, index: int) -> bool:
        """Whether there is no gradient, and has been none since `forget`."""
        somewhere = self.is_local[index] or self.is_reduced[index]
        return not (somewhere or self.is_used[index] or self.is_valid[index])

    def are_none(self, indices: Sequence[int]) -> bool:
        """Whether there is none of some gradients, and has been none since `forget`."""
        known = (self.is_local, self.is_reduced, self.is_used, self.is_valid)
        return not any(_YES in map(one.__getitem__, indices) for one in known)

    @property
    def all_reduced(self) -> bool:
        """Whether an average of every gradient lies in the shard."""
        return self.is_reduced == self._all

    @property
    def all_averaged(self) -> bool:
        """Whether the optimizer sees an average of every gradient."""
        return self.is_reduced == self._all and self.is_valid == self._all

    @property
    def all_used(self) -> bool:
        """Whether this rank has used every parameter."""
        return self.is_used == self._all

    @property
    def all_shown(self) -> bool:
        """Whether some rank has used every parameter, and this rank shows a gradient of each."""
        return self.is_valid == self._all and self._all in (self.is_used, self.is_reduced)

    def arrive(self, index: int) -> None:
        """Note that this rank has a new gradient."""
        self.is_local[index] = self.is_used[index] = _YES

    def all_arrive(self, indices: Iterable[int]) -> None:
        """Note that this rank has new gradients."""
        for index in indices:
            self.is_local[index] = self.is_used[index] = _YES

    def leave(self, index: int) -> None:
        """Note that nothing lies in the full buffer any more: the gradient was zeroed."""
        self.is_local[index] = 0

    def all_leave(self) -> None:
        """Note that the full buffer was sent."""
        self.is_local[:] = bytes(len(self))

    def all_come(self) -> None:
        """Note that averages lie in the shard."""
        self.is_reduced[:] = self._all

    def show(self, index: int) -> None:
        """Note that an average lies in the shard, for every rank's optimizer to see."""
        self.is_reduced[index] = self.is_valid[index] = _YES

    def validate(self, flags: Sequence[int]) -> None:
        """Note which parameters some rank has used, beside those that are known to be."""
        self.is_valid[:] = bytes(map(or_, self.is_valid, flags))

    def forget(self, indices: Iterable[int]) -> None:
        """Note that gradients are gone."""
        for index in indices:
            self.is_local[index] = self.is_reduced[index] = 0
            self.is_used[index] = self.is_valid[index] = 0
