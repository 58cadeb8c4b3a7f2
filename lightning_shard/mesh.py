"""Ranks as points of a grid: pipeline, data and tensor parallel, one axis each.

    ParallelMesh(pp=2, dp=2, tp=2)       tp is the fastest axis: neighbours in rank, usually on
                                         one host, exchange the most; pp is the slowest, and
                  tp 0    tp 1           exchanges the least
    pp 0  dp 0      0       1
          dp 1      2       3
    pp 1  dp 0      4       5
          dp 1      6       7

Pure arithmetic; `device_mesh` alone needs process groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, get_args

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_shard.errors import ConfigError

Axis = Literal["pp", "dp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """The grid of a run's ranks.

    Attributes:
        pp: Stages that the model is cut into.
        dp: Groups that train on different batches.
        tp: Ranks that share every wide layer.
        axis_order: The axes from the slowest to the fastest.

    Raises:
        ConfigError: A size below 1, or an order that is not one of the three axes.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    axis_order: tuple[Axis, ...] = AXES

    def __post_init__(self) -> None:
        """Refuse what is no grid."""
        object.__setattr__(self, "axis_order", tuple(self.axis_order))
        if sorted(self.axis_order) != sorted(AXES):
            raise ConfigError(
                f"axis_order must name each of {', '.join(AXES)} once, got {self.axis_order}."
            )
        for axis in AXES:
            if self.size(axis) < 1:
                raise ConfigError(f"The {axis} axis must have at least 1 rank, got {self}.")

    @classmethod
    def of_world(
        cls,
        world_size: int,
        *,
        pp: int = 1,
        tp: int = 1,
        axis_order: Sequence[Axis] = AXES,
    ) -> "ParallelMesh":
        """Give the dp axis whatever the others leave of `world_size` ranks.

        Raises:
            ConfigError: They do not divide it.
        """
        inner = pp * tp
        if inner < 1 or world_size % inner:
            sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise ConfigError(
                f"{world_size} ranks cannot be split into groups of pp={pp} times tp={tp}; "
                f"expected a product of {', '.join(map(str, sizes))}."
            )
        return cls(
            pp=pp,
            dp=world_size // inner,
            tp=tp,
            axis_order=tuple(axis_order),
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.size(axis) for axis in AXES)

    def size(self, axis: Axis) -> int:
        """Number of ranks along an axis."""
        size: int = getattr(self, axis)
        return size

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return a rank's index on each axis.

        Raises:
            ConfigError: No such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"got rank {rank}, expected 0 to {self.world_size - 1} of {self}.")
        found: dict[Axis, int] = {}
        for axis in reversed(self.axis_order):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def rank_at(self, coordinates: dict[Axis, int]) -> int:
        """Return the rank at an index on each axis; a missing axis counts as 0."""
        rank = 0
        for axis in self.axis_order:
            rank = rank * self.size(axis) + coordinates.get(axis, 0)
        return rank

    def peers(self, axis: Axis | Sequence[Axis], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on these axes only, in order, itself too."""
        axes = [axis] if isinstance(axis, str) else list(axis)
        here = self.coordinates(rank)
        places = product(*(range(self.size(one)) for one in axes))
        found = (self.rank_at(here | dict(zip(axes, at, strict=True))) for at in places)
        return tuple(sorted(found))

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return every group of peers along an axis, in the order of their first ranks."""
        others = [other for other in AXES if other != axis]
        starts = product(*(range(self.size(other)) for other in others))
        firsts = sorted(self.rank_at(dict(zip(others, start, strict=True))) for start in starts)
        return [self.peers(axis, first) for first in firsts]

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Make torch's mesh of the same shape and names; each rank must call."""
        shape = tuple(self.size(axis) for axis in self.axis_order)
        return init_device_mesh(device_type, shape, mesh_dim_names=self.axis_order)

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis}={self.size(axis)}" for axis in self.axis_order)
        return f"ParallelMesh({sizes})"
