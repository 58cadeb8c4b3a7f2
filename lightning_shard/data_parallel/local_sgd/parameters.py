"""A rank's own parameters by name, in the optimizer's format, under an engine of stage 0."""

from collections.abc import Iterable, Mapping
from operator import is_not

import torch
from torch import Tensor

from lightning_shard.data_parallel.content import content
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.local_sgd.packing import mean_over_ranks
from lightning_shard.errors import ConfigError


class LocalParameters:
    """This rank's parameters, to be read and overwritten between two steps.

    Args:
        engine: The engine of stage 0 that holds the parameters.
        watches: Whether user code may edit trained parameters between two steps.
    """

    def __init__(self, engine: DataParallelEngine, *, watches: bool = False) -> None:
        self._flats = [gradients.flat for gradients in engine.gradients]
        self._views: dict[str, Tensor] = {}
        self._lists: list[list[Tensor]] = []  # what the views are of
        self._collectives = engine.collectives
        self._watches = watches
        self._moved: dict[str, Tensor | bool] = {}  # whether user code has edited it here
        self.know()

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

    def _watched(self) -> list[FlatParameters]:
        return [flat for flat in self._flats if self._watches or not _is_trained(flat)]

    def contents(self, flats: Iterable[FlatParameters] | None = None) -> dict[str, Tensor]:
        """Return by name a number that changes when the module's values do, of given buffers."""
        numbers: dict[str, Tensor] = {}
        for flat in self._flats if flats is None else flats:
            flat.take_in_edits()
            numbers.update(zip(_names(flat), map(content, flat.full_views), strict=True))
        return numbers

    def know(self) -> None:
        """Note that the values are those of a step, or of an exchange, and nobody's edits."""
        self._known = self.contents(self._watched())

    def look(self) -> None:
        """Note what user code has edited on this rank since `know`."""
        before, self._known = self._known, self.contents(self._watched())
        for name, now in self._known.items():
            self._moved[name] = (now != before.get(name)) | self._moved.get(name, False)

    def edited(self) -> set[str]:
        """Return the names of parameters that any rank's user code has edited since it was asked.

        Of frozen ones (a teacher's), and of all if they are watched. Each rank must call; the
        answer is the same on all.
        """
        if not self._watched():
            return set()
        self.look()
        moved, self._moved = self._moved, {}
        none = torch.zeros((), dtype=torch.bool, device=self._flats[0].full.device)
        flags = torch.stack([torch.as_tensor(moved.get(name, none)) for name in self.views]).byte()
        self._collectives.all_reduce(flags, "max").wait()
        found = zip(self.views, flags.tolist(), strict=True)
        return {name for name, has_moved in found if has_moved}

    def set_since(self, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of what user code has set on all ranks alike; each rank must call.

        Args:
            known: The `contents` before.

        Raises:
            ConfigError: It has set other values on some rank; raised on every rank.
        """
        names, numbers = [*known], torch.stack([*self.contents().values()])
        moved = numbers != torch.stack([*known.values()])
        both = torch.stack([one := torch.where(moved, numbers, 0), ~one])
        self._collectives.all_reduce(both, "max").wait()
        apart = (both[0] != ~both[1]).tolist()
        if any(apart):
            raise ConfigError(
                f"Rank {self._collectives.rank}: hooks of a validation have left the ranks with "
                f"different values of {names[apart.index(True)]!r}, expected the same on all, "
                f"which hold what they agree on for as long. Change parameters on every rank "
                f"alike, or after self.trainer.strategy.broadcast(value)."
            )
        return self.copies(
            name for name, is_set in zip(names, moved.tolist(), strict=True) if is_set
        )

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
        self.know()

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
