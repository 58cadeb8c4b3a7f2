"""An optimizer's step on a few long pieces of shards, in place of every parameter's own shard.

    a buffer's shard     [ w1 | b1 | w2 | b2 | w3 ]    parameters of one param group lie together
    group["params"]      [          piece         ]    while the optimizer steps

So a step costs the host nothing for each parameter: neither in the optimizer, nor in what shows
parameters as shards. The updates are those of the parameters by themselves, since a trial before
the fit has found the optimizer element-wise. It has to be one of torch's own.

Made for each parameter by itself are steps for which not all of a buffer's parameters have
gradients, and those under offload, compression, or a model that is split over ranks in other ways,
too.
"""

from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.flat_gradients import FlatGradients
from lightning_shard.optim.edited_state import EditedState
from lightning_shard.optim.piece import Piece

_KINDS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SGD", "ASGD", "RMSprop", "Rprop")
_ELEMENTWISE = {getattr(torch.optim, name) for name in (*_KINDS, "Adagrad", "Adadelta")}


class FlatStep:
    """Lets an optimizer step on pieces, from `take` to `put_back`.

    Args:
        optimizer: The user's optimizer.
        engine: The engine that holds its parameters.
        edited_state: Knows how often entries of its state have been exchanged.
    """

    def __init__(
        self, optimizer: Optimizer, engine: DataParallelEngine, edited_state: EditedState
    ) -> None:
        self._optimizer, self._engine, self._edited_state = optimizer, engine, edited_state
        self._buffers = [one for one in engine.gradients if one.flat.has_local_form]
        self._could = type(optimizer) in _ELEMENTWISE and _has_shards_only(engine)
        self._listed: list[list[nn.Parameter]] = []  # by group, when the pieces were made
        self._masters: list[Tensor] = []  # by buffer, likewise
        self._pieces: list[Piece] = []
        self._lent: list[Piece] = []
        self._lists: list[list[nn.Parameter]] = []  # the groups' own, while these have pieces
        self._num_exchanges = -1  # of entries when the state was adopted; -1: it is not
        # a step may be interrupted, and what there is may be saved then
        self._handle = optimizer.register_state_dict_pre_hook(lambda _: self.put_back())

    def detach(self) -> None:
        """Give the optimizer its parameters back."""
        self._handle.remove()
        self.put_back()
        self._masters, self._listed, self._pieces = [], [], []

    @torch.no_grad()
    def is_possible(self) -> bool:
        """Whether the step that begins can be made on pieces, once gradients are averaged."""
        possible = self._could and self._may_now() and self._know_state()
        if not possible:
            self._num_exchanges = -1  # the optimizer is about to make entries by itself
        return possible

    def _may_now(self) -> bool:
        if any(map(_needs_each, self._optimizer.param_groups)):
            return False
        return all(_is_ready(one) or one.buffer.is_unused for one in self._buffers)

    def _know_state(self) -> bool:
        self._know_pieces()
        if self._num_exchanges != self._edited_state.num_exchanges:
            if not all(piece.adopt(self._optimizer.state) for piece in self._pieces):
                return False
            self._num_exchanges = self._edited_state.num_exchanges
        return all(piece.agrees() for piece in self._pieces)

    def _know_pieces(self) -> None:
        """Make the pieces anew where groups or buffers are not those that they are of."""
        masters = [one.flat.master for one in self._buffers]
        listed = [group["params"] for group in self._optimizer.param_groups]
        is_known = len(listed) == len(self._listed) and all(map(_are_same, listed, self._listed))
        if is_known and _are_same(masters, self._masters):
            return
        self._masters, self._listed = masters, [[*params] for params in listed]
        group_of = {param: number for number, own in enumerate(self._listed) for param in own}
        self._pieces = [piece for one in self._buffers for piece in _cut(one, group_of)]
        self._num_exchanges = -1

    def take(self) -> None:
        """Give the groups pieces in place of their parameters; it must be possible."""
        self._lent = [piece for piece in self._pieces if _is_ready(piece.gradients)]
        for number, group in enumerate(self._optimizer.param_groups):
            self._lists.append(group["params"])
            group["params"] = [piece.param for piece in self._lent if piece.group == number]
        for piece in self._lent:
            piece.lend(self._optimizer.state)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the groups their parameters back, which have what the optimizer has made."""
        for group, params in zip(self._optimizer.param_groups, self._lists, strict=False):
            group["params"] = params
        for piece in self._lent:
            piece.take_back(self._optimizer.state)
        increment_version([*chain.from_iterable(piece.params for piece in self._lent)])
        self._lists, self._lent = [], []


def _has_shards_only(engine: DataParallelEngine) -> bool:
    """Whether the optimizer's parameters are shards on the device, cut evenly, and nothing else."""
    is_plain = engine.copier is None and not engine.exchanges and not engine.split.groups
    is_cut = all(one.flat.stage > 0 and not one.flat.is_owned for one in engine.gradients)
    return is_plain and is_cut and not engine.owners.of_parts


def _is_ready(gradients: FlatGradients) -> bool:
    """Whether every parameter of a buffer has an average for the optimizer."""
    local, master = gradients.buffer.local, gradients.flat.master
    if local is None or not gradients.states.all_averaged:
        return False
    return local.dtype == master.dtype and local.shape == master.shape


def _needs_each(group: Mapping[str, Any]) -> bool:
    """Whether padding would not stay zero, or a step is recorded for each parameter."""
    return group.get("eps") == 0.0 or bool(group.get("differentiable"))


def _are_same(ones: Any, others: Any) -> bool:
    return len(ones) == len(others) and all(map(is_, ones, others))


def _cut(gradients: FlatGradients, group_of: Mapping[nn.Parameter, int]) -> Iterator[Piece]:
    """Yield a piece for each run of shards whose parameters are in one group."""
    flat = gradients.flat
    slices = enumerate(flat.layout.shard_slices(flat.shard_index))
    here = [(index, part) for index, part in slices if part.numel]
    for number, run in groupby(here, lambda one: group_of.get(flat.params[one[0]])):
        if number is not None:
            yield Piece(gradients, number, dict(run))
