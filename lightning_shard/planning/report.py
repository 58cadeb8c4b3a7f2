"""The result of a dry run: figures of each rank of the pipeline, and a table of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_shard.core.mesh import Axis, NodePlacement, ParallelMesh
from lightning_shard.core.reporting.output import format_bytes, plain_text
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.data_parallel.offload.activations import HostActivations


@dataclass(frozen=True, kw_only=True)
class RankMemory(HeldBytes):
    """The most that one rank holds of each kind, in bytes; buffers and workspace not included.

    What it holds has the state of Adam, or an optimizer with as many values; in host memory are
    activations, too.

    Attributes:
        gathered: Further bytes of unsharded parameters within a step, under ZeRO stage 3.
        gradients_in_flight: Bytes of the gradients of a pipeline's microbatches, until the engine
            takes them over.
        recomputed: Further bytes of the largest block whose activations backward computes again.
    """

    gathered: int
    gradients_in_flight: int
    activations: int
    recomputed: int = 0

    @property
    @override
    def total(self) -> int:
        """Sum of the kinds on the device: the peak in bytes, if all are there at one time."""
        in_step = self.gathered + self.gradients_in_flight + self.activations + self.recomputed
        return super().total + in_step


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """One rank of the pipeline; its tensor-parallel and data-parallel peers have the same.

    Attributes:
        num_parameters: Number of elements of this rank's part of the parameters.
        sent: Bytes that it sends in a step along each axis, as a ring would.
        idle_share: Idle share of a step, 0 to 1, if all stages take equally long.
        sent_elements: Elements that it sends along each axis; formats differ within one.
    """

    stages: tuple[int, ...]
    num_blocks: int
    num_parameters: int
    memory: RankMemory
    sent: Mapping[Axis, int]
    idle_share: float
    sent_elements: Mapping[Axis, int]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """One step of a run that has not begun; `print` or `str` gives it as a table.

    Attributes:
        mesh: The grid of the ranks.
        placement: Which of their groups lie within a node.
        num_parameters: Number of elements of the full model, tied ones counted once.
        zero_stage: ZeRO stage, 0 to 3, of the data-parallel ranks.
        schedule: Name of the pipeline's schedule; empty without a pipeline.
        num_microbatches: Number of microbatches of each batch.
        batch_size: Number of samples in a step of all data-parallel ranks.
        ranks: Figures of each rank of a pipeline, in order.
        not_counted: Names of what ranks hold besides.
    """

    mesh: ParallelMesh
    placement: NodePlacement
    num_parameters: int
    zero_stage: int
    schedule: str
    num_microbatches: int
    batch_size: int
    ranks: tuple[RankFigures, ...]
    not_counted: tuple[str, ...] = ()

    @property
    def idle_share(self) -> float:
        """Mean of the ranks' idle shares, 0 to 1."""
        return sum(one.idle_share for one in self.ranks) / len(self.ranks)

    @property
    def peak_bytes(self) -> int:
        """Bytes that the fullest rank holds."""
        return max(one.memory.total for one in self.ranks)

    def __rich__(self) -> RenderableType:
        table = Table(title=self._title, caption=self._caption, box=box.SIMPLE_HEAD)
        columns = [*_COLUMNS, *map(_sent, self.mesh.axes), ("idle", lambda one: one.idle_share)]
        for heading in ("pipeline rank", *(name for name, _ in columns)):
            table.add_column(heading, justify="right")
        for rank, figures in enumerate(self.ranks):
            table.add_row(str(rank), *(cell(read(figures)) for _, read in columns))
        table.add_section()
        for name, choose in (("least", min), ("most", max)):
            cells = (cell(choose(map(read, self.ranks))) for _, read in columns)
            table.add_row(name, *cells)
        return table

    @property
    def _title(self) -> str:
        sizes = ", ".join(f"{axis} {self.mesh.size(axis)}" for axis in self.mesh.axes)
        return (
            f"{self.num_parameters:,} parameters on {self.mesh.world_size:,} ranks: {sizes}, "
            f"ZeRO stage {self.zero_stage}"
        )

    @property
    def _caption(self) -> Text:
        pipeline = f"{self.schedule}, {self.num_microbatches} microbatches, " * bool(self.schedule)
        lines = [
            f"{pipeline}{self.batch_size:,} samples a step; idle {self.idle_share:.1%}",
            str(self.placement),
            *self.placement.warnings,
            *([f"not counted: {', '.join(self.not_counted)}"] if self.not_counted else []),
        ]
        return Text("\n".join(lines))

    def __str__(self) -> str:
        return plain_text(self, width=125 + 15 * len(self.mesh.axes))


_Column: TypeAlias = tuple[str, Callable[[RankFigures], "int | float"]]
_COLUMNS: tuple[_Column, ...] = (
    ("parameters", lambda one: one.memory.parameters),
    ("gathered", lambda one: one.memory.gathered),
    ("gradients", lambda one: one.memory.gradients),
    ("in flight", lambda one: one.memory.gradients_in_flight),
    ("optimizer", lambda one: one.memory.optimizer_state),
    ("activations", lambda one: one.memory.activations),
    ("recomputed", lambda one: one.memory.recomputed),
    ("total", lambda one: one.memory.total),
    ("on host", lambda one: one.memory.offloaded),
)


def _sent(axis: Axis) -> _Column:
    return f"sent {axis}", lambda one: one.sent[axis]


def cell(value: int | float) -> str:
    """Write a share as a percentage, and a size in its largest binary unit."""
    if isinstance(value, float):
        return f"{value:.1%}"
    return format_bytes(value, ".1f")


# Where the activations of microbatches that are in flight lie: on the device, or on the host.


class Kept(NamedTuple):
    """What one stage keeps of one microbatch.

    `moving` has the bytes of each stretch of memory that goes to the host, in order.
    """

    total: int
    moving: tuple[int, ...] = ()


class ActivationBytes(NamedTuple):
    """The most bytes of activations at one time, on the device and in host memory."""

    on_device: int
    on_host: int = 0


def at_once(in_flight: Iterable[Kept]) -> ActivationBytes:
    """Return where activations lie while those of some microbatches are kept."""
    kept = list(in_flight)
    on_host = sum(sum(one.moving) for one in kept)
    staying = sum(one.total for one in kept) - on_host
    travelling = HostActivations.most_in_flight(chain.from_iterable(one.moving for one in kept))
    return ActivationBytes(staying + travelling, on_host)


def peak(states: Iterable[Iterable[Kept]]) -> ActivationBytes:
    """Return the most of either memory over the states of a step."""
    found: Iterator[ActivationBytes] = map(at_once, states)
    on_device, on_host = 0, 0
    for one in found:
        on_device, on_host = max(on_device, one.on_device), max(on_host, one.on_host)
    return ActivationBytes(on_device, on_host)
