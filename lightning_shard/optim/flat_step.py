"""An optimizer's step on a few long pieces of shards, in place of every parameter's own shard.

    a buffer's shard     [ w1 | b1 | w2 | b2 | w3 ]    parameters of one param group lie together
    group["params"]      [          piece         ]    while the optimizer steps

So a step costs the host nothing for each parameter: neither in the optimizer, nor in what shows
parameters as shards. The updates are those of the parameters by themselves, since the optimizer is
one of torch's element-wise ones, exactly. Each parameter by itself is updated

- under offload or compression, and where the model is split over ranks in other ways, too, or an
  optimizer needs some parameters full;
- where some parameters of a buffer have a gradient, and others none;
- where their entries in the optimizer's state differ in kind, or in the number of steps;
- where groups alternate in a buffer, so that pieces would be many and short;
- where hooks look at parameters within the step, or one of the options does (`_needs_each`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.flat_gradients import FlatGradients
from lightning_shard.optim.piece import Piece

_KINDS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SGD", "ASGD", "RMSprop", "Rprop")
# What they cost the host: of 805 parameters in two groups that alternate 205 pieces took 15 ms, the
# parameters by themselves 12, and 5 pieces, in one group, 7.
_PARAMS_A_PIECE, _FEW_PIECES = 8, 16
_ELEMENTWISE = {getattr(torch.optim, name) for name in (*_KINDS, "Adagrad", "Adadelta")}


class FlatStep:
    """Lets an optimizer step on pieces, from `take` to `put_back`.

    Args:
        optimizer: The user's optimizer.
        engine: The engine that holds its parameters.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer = optimizer
        self._buffers = [one for one in engine.gradients if one.flat.has_local_form]
        self._suits = type(optimizer) in _ELEMENTWISE and _has_shards_only(engine)
        self._known_lists: list[list[nn.Parameter]] = []  # by group, of which the pieces are
        self._pieces: list[Piece] = []
        self._stepping: list[Piece] = []
        self._own_lists: list[list[nn.Parameter]] = []  # by group, while these have pieces
        # a step may be interrupted, and what there is may be saved then
        self._handle = optimizer.register_state_dict_pre_hook(lambda _: self.put_back())

    def detach(self) -> None:
        """Give the optimizer its parameters back."""
        self._handle.remove()
        self.put_back()

    @torch.no_grad()
    def prepare(self) -> bool:
        """Prepare a step on pieces, once gradients are averaged; return whether it can be made."""
        if not self._suits or not self._are_few():
            return False
        if any(_needs_each(one, self._buffers) for one in self._optimizer.param_groups):
            return False
        if not all(_is_ready(one) or one.buffer.is_unused for one in self._buffers):
            return False
        self._stepping = [piece for piece in self._pieces if _is_ready(piece.gradients)]
        can_step = all(piece.join(self._optimizer.state) for piece in self._stepping)
        if not can_step:
            self._rest()
        return can_step

    def _are_few(self) -> bool:
        """Whether pieces cost less than their parameters do."""
        self._cut_anew()
        num_params = sum(len(piece.params) for piece in self._pieces)
        return len(self._pieces) <= max(_FEW_PIECES, num_params // _PARAMS_A_PIECE)

    def _cut_anew(self) -> None:
        """Make the pieces anew where the groups have other parameters than they are of."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        if len(lists) == len(self._known_lists) and all(map(_are_same, lists, self._known_lists)):
            return
        self._known_lists = [[*params] for params in lists]
        group_of = {param: number for number, own in enumerate(lists) for param in own}
        self._pieces = [piece for one in self._buffers for piece in _cut(one, group_of)]

    def take(self) -> None:
        """Give the groups pieces in place of their parameters, once `prepare` has said so."""
        for number, group in enumerate(self._optimizer.param_groups):
            self._own_lists.append(group["params"])
            group["params"] = [
                piece.lend(self._optimizer.state)
                for piece in self._stepping
                if piece.group == number
            ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the groups their parameters back, which have what the optimizer has made."""
        if not self._own_lists:
            return
        groups = self._optimizer.param_groups
        for group, params in zip(groups, self._own_lists, strict=False):  # all, unless interrupted
            group["params"] = params
        for piece in self._stepping:
            piece.take_back(self._optimizer.state)
        increment_version([*chain.from_iterable(piece.params for piece in self._stepping)])
        self._rest()

    def _rest(self) -> None:
        for piece in self._stepping:
            piece.rest()
        self._own_lists, self._stepping = [], []


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


def _needs_each(group: Mapping[str, Any], buffers: Sequence[FlatGradients]) -> bool:
    """Whether padding would not stay zero, 0 / (0 + eps), or steps are recorded in a graph."""
    formats = {one.flat.master_dtype for one in buffers}
    vanishes = any(not torch.tensor(group.get("eps", 1.0)).to(kind) for kind in formats)
    return vanishes or bool(group.get("differentiable"))


def _are_same(ones: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    return len(ones) == len(others) and all(map(is_, ones, others))


def _cut(gradients: FlatGradients, group_of: Mapping[nn.Parameter, int]) -> Iterator[Piece]:
    """Yield a piece for each run of shards whose parameters are in one group."""
    flat = gradients.flat
    slices = enumerate(flat.layout.shard_slices(flat.shard_index))
    here = [(index, part) for index, part in slices if part.numel]
    for number, run in groupby(here, lambda one: group_of.get(flat.params[one[0]])):
        if number is not None:
            yield Piece(gradients, number, dict(run))
