"""Gradients that user code has made or edited itself are averages when an optimizer uses them.

    .grad is                          stage 0                        stages 1 to 3
    what a reduction has left         used as it is                  used as it is
    a tensor of the user's            copied into the buffer         reduced as a backward's
    the buffer, edited in place       averaged where ranks differ    (see `averaged_gradient`)

A sum of an average and a rank's own gradient becomes the average of the sums. Ranks compare the
content of their buffers, and only where it differs do values travel. They compare at every update
of a module that may edit (manual optimization, or hooks that meet gradients), since one of them may
have had nothing to edit; otherwise where they notice an edit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.content import content, contents
from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.data_parallel.views.tensor_properties import unrecorded
from lightning_shard.errors import ConfigError


class HandEdits:
    """Averages the gradients that user code has put into `.grad`."""

    def __init__(
        self,
        gradients: Sequence[FlatGradients],
        device: torch.device,
        collectives: Collectives,
        *,
        are_expected: bool,
    ) -> None:
        self._collectives = collectives
        self._gradients = gradients
        self._device = device
        self.are_expected = are_expected

    @as_they_are
    @unrecorded
    def average(self) -> None:
        """Average all gradients that the optimizer is about to see; each rank must call."""
        if not (self.are_expected or any(one.own.are_edited for one in self._gradients)):
            return
        of_ranks: dict[Collectives, list[FlatGradients]] = {}
        for gradients in self._gradients:
            of_ranks.setdefault(self._ranks_of(gradients), []).append(gradients)
        for ranks, some in of_ranks.items():
            if ranks.size > 1:
                self._average(some, ranks)
            else:
                self._take_in(some)

    def _take_in(self, some: Sequence[FlatGradients]) -> None:
        """Take what user code has put into `.grad` of the one rank that has these samples."""
        for gradients in some:
            if gradients.flat.stage == 0:
                gradients.own.take_in()
            elif gradients.own.are_there:
                self._reduce(gradients, gradients.own.kinds())

    def _average(self, some: Sequence[FlatGradients], ranks: Collectives) -> None:
        """Average gradients that the same ranks have."""
        for gradients in some:
            if gradients.flat.stage == 0:
                gradients.own.take_in()
        if not self._any_differ(some, ranks):
            return
        own, others = self._differences(some, ranks)
        for gradients, kinds in zip(some, own, strict=True):
            if gradients.flat.stage > 0 and any(mine for mine, _ in kinds):
                self._reduce(gradients, kinds)
        for gradients, kinds, differs in zip(some, own, others, strict=True):
            if gradients.flat.stage == 0 and differs:
                gradients.own.average_again([any(kind) for kind in kinds])

    def _ranks_of(self, gradients: FlatGradients) -> Collectives:
        averaging = gradients.own.ranks
        return self._collectives if averaging.size == self._collectives.size else averaging

    def _any_differ(self, some: Sequence[FlatGradients], ranks: Collectives) -> bool:
        """Ask all ranks, in a few bytes, whether gradients of any rank have to be averaged."""
        own = any(one.own.are_there for one in some)
        there = [grad for one in some for grad in one.own.which_are_there]
        flags = torch.tensor(there, dtype=torch.int64, device=self._device)
        hashes = torch.stack([flags.new_zeros(()), *map(self._content, some)])
        number = contents([flags, hashes], self._device)
        digest = number.view(1).view(torch.uint8)
        most = torch.cat([digest, 255 - digest, digest.new_tensor([own])])
        ranks.all_reduce(most, "max").wait()
        *both, own = most.tolist()
        greatest, complement = both[:8], both[8:]
        return bool(own) or greatest != [255 - byte for byte in complement]

    def _differences(
        self, some: Sequence[FlatGradients], ranks: Collectives
    ) -> tuple[list[list[tuple[bool, bool]]], list[bool]]:
        """Ask all ranks which tensors stand in `.grad`."""
        kinds = [kind for one in some for kind in one.own.kinds()]
        there = torch.tensor(kinds, dtype=torch.int64, device=self._device).view(-1)
        hashes = torch.stack([self._content(one) for one in some])
        least = torch.cat([~there, ~hashes])
        most = torch.cat([there, hashes, least])
        ranks.all_reduce(most, "max").wait()
        greatest, least = most.chunk(2)
        anywhere = greatest[: len(there)].bool().view(-1, 2).tolist()
        unequal = (greatest != ~least).tolist()
        own, others, start = [], [], 0
        for number, gradients in enumerate(some):
            stop = start + len(gradients.states)
            own.append([(bool(mine), bool(ours)) for mine, ours in anywhere[start:stop]])
            others.append(any(unequal[2 * start : 2 * stop]) or unequal[len(there) + number])
            start = stop
        return own, others

    def _content(self, gradients: FlatGradients) -> Tensor:
        held = gradients.own.held_everywhere
        if held is None:
            return torch.zeros((), dtype=torch.int64, device=self._device)
        return content(held).to(self._device)

    def _reduce(self, gradients: FlatGradients, kinds: Sequence[tuple[bool, bool]]) -> None:
        for index, (is_mine, is_ours) in enumerate(kinds):
            if is_mine and is_ours:
                raise ConfigError(
                    f"Rank {self._collectives.rank}: .grad of {gradients.own.name(index)!r} was "
                    f"set by hand on some ranks and comes from backward on others, expected the "
                    f"same on all: the one is a rank's own and the other an average. Set it on "
                    f"every rank, or call self.manual_backward(loss)."
                )
        gradients.reduce_given([is_mine for is_mine, _ in kinds])
