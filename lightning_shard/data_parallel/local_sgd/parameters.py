"""A rank's own parameters by name, in the optimizer's format, under an engine of stage 0."""

from collections.abc import Iterable, Mapping
from operator import is_not

import torch
from torch import Tensor

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.local_sgd.packing import mean_over_ranks


class LocalParameters:
    """This rank's parameters, to be read and overwritten between two steps.

    Args:
        engine: The engine of stage 0 that holds the parameters.
    """

    def __init__(self, engine: DataParallelEngine) -> None:
        self._flats = [gradients.flat for gradients in engine.gradients]
        self._views: dict[str, Tensor] = {}
        self._lists: list[list[Tensor]] = []  # what the views are of
        self._collectives = engine.collectives
        self._marks = {flat: _mark(flat) for flat in self._flats if not _is_trained(flat)}

    @property
    def views(self) -> dict[str, Tensor]:
        """Each parameter that can have a gradient, by name and in its own shape.

        These are views into the engine's memory, which moves when user code has assigned to
        `param.data`.
        """
        lists = [flat.local_views for flat in self._flats]
        if len(lists) != len(self._lists) or any(map(is_not, lists, self._lists)):
            self._lists = lists
            self._views = {
                name: view
                for flat, views in zip(self._flats, lists, strict=True)
                for name, view in zip(_names(flat), views, strict=True)
            }
        return self._views

    def trained(self) -> set[str]:
        """Return the names of trained parameters, and of those that share a buffer with them."""
        return {name for flat in self._flats if _is_trained(flat) for name in _names(flat)}

    def edited(self) -> set[str]:
        """Return the names of frozen parameters (a teacher's) that any rank's user code has edited.

        Each rank must call; the answer is the same on all.
        """
        frozen = [flat for flat in self._flats if not _is_trained(flat)]
        if not frozen:
            return set()
        marks = {flat: _mark(flat) for flat in frozen}
        changed = [self._marks.get(flat) != mark for flat, mark in marks.items()]
        self._marks.update(marks)
        flags = torch.tensor(changed, dtype=torch.uint8, device=frozen[0].full.device)
        self._collectives.all_reduce(flags, "max").wait()
        moved = zip(frozen, flags.tolist(), strict=True)
        return {name for flat, has_moved in moved if has_moved for name in _names(flat)}

    def settle(self) -> None:
        """Take in what user code has changed in the module's parameters, before reading."""
        for flat in self._flats:
            flat.take_in_edits()

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor], *, keep: float = 0.0) -> None:
        """Overwrite parameters, here and in the module.

        Args:
            values: New values by name, in the parameters' shapes.
            keep: Share of the old values that stays, 0 to 1.
        """
        for flat in self._flats:
            flat.see_assigned()  # else it would come back over these values
        for name, value in values.items():
            view = self.views[name]
            view.copy_(value.lerp(view.to(value.dtype), keep) if keep else value)
        for flat in self._flats:
            flat.begin_unshard()  # carries the optimizer's format over; nothing is sent
            if flat in self._marks:
                self._marks[flat] = _mark(flat)

    def copies(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies of the named parameters' values."""
        return {name: self.views[name].clone() for name in names}

    def mean(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Average values over the ranks; each rank must call with the same names."""
        means = mean_over_ranks(list(values.values()), self._collectives)
        return dict(zip(values, means, strict=True))


def _names(flat: FlatParameters) -> list[str]:
    return [slot.name for slot in flat.layout.slots]


def _is_trained(flat: FlatParameters) -> bool:
    return any(param.requires_grad for param in flat.params)


def _mark(flat: FlatParameters) -> int:
    """Return a number that changes when the buffer's values do."""
    flat.take_in_edits()
    return flat.mark()
