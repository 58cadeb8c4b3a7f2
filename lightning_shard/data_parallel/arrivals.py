"""Gradients that have come to a buffer in a backward, and wait to be taken many at a time.

    first backward     every gradient is taken as it comes, and the order is learnt
    later ones         a: begins | b c d wait | e: b to e are taken | f g wait | h: the last

To take one gradient costs the host a dozen calls, most of which can be made for many at once. Those
at which others are taken come a few kilobytes after one another, so that no more is held twice. If
gradients come in another order, they are taken at another time, at the latest when the buffer is
reduced. Nobody waits where user code is called with a gradient that has been added up.
"""

from collections.abc import Sequence

from torch import nn

from lightning_shard.data_parallel.torch_private import after_gradient

_HELD_BYTES = 1 << 20  # of gradients that wait, beside those of one parameter


class Arrivals:
    """The gradients of one buffer that wait.

    Args:
        params: The buffer's parameters.

    Attributes:
        waiting: Indices of the parameters whose gradients wait, in the order in which they came.
        gathers: Whether gradients wait now.
        ends: Indices of the parameters at which those that wait are taken.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self.waiting: list[int] = []
        self.gathers = False
        self.ends: frozenset[int] = frozenset()
        self._num_known = 0
        self._hooks: list[dict[int, object]] = []  # of each parameter that has come

    def begin(self) -> None:
        """Note that a backward has brought the first gradient, which has been taken."""
        self.gathers = bool(self.ends) and sum(map(len, self._hooks)) == len(self._hooks)

    def take(self) -> list[int]:
        """Return the indices of all that wait, which are taken now."""
        waiting = self.waiting[:]
        self.waiting.clear()
        return waiting

    def end(self, order: Sequence[int]) -> None:
        """Note that a backward has ended.

        Args:
            order: Indices of the parameters whose gradients it has brought, in their order.
        """
        self.gathers = False
        self.waiting.clear()
        if order and (len(order) != self._num_known or order[-1] not in self.ends):
            self._learn(order)

    def _learn(self, order: Sequence[int]) -> None:
        ends, held = [], 0
        for index in order:
            held += self._params[index].nbytes
            if held >= _HELD_BYTES or index == order[-1]:
                ends.append(index)
                held = 0
        self.ends, self._num_known = frozenset(ends), len(order)
        self._hooks = [hooks for p in self._params if (hooks := after_gradient(p)) is not None]
