"""What a run leaves behind: values, each with its place in the run, in the order of events.

step 0   forward   block 0, block 1 ...        outputs, in the order of the calls
         loss
         micro-batch                          gradients of each, in a proof to the bit
         backward  head.weight, ...            gradients, those nearest to the loss first
         clipping  the same, as the optimizer gets them
         update    weights, buffers, optimizer state, options of the optimizer
         hooks     weights and buffers once more, when the next step begins
the end  log       what was logged
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

Phase = Literal[
    "data",
    "forward",
    "loss",
    "micro-batch",
    "backward",
    "clipping",
    "update",
    "hooks after the update",
    "log",
    "accumulation",
]
Kind = Literal[
    "output", "loss", "gradient", "weight", "buffer", "optimizer state", "metric", "batch"
]


class Place(NamedTuple):
    """Where in a run a value stands.

    Attributes:
        step: Number of the optimizer step, from 0.
        micro: Number of the batch within the step, from 0; 0 for what the step has once.
        phase: Part of the step.
        kind: What the value is.
        name: Name of the parameter, buffer, module or metric.
    """

    step: int
    micro: int
    phase: Phase
    kind: Kind
    name: str


@dataclass(kw_only=True)
class Record:
    """What one rank has recorded.

    Attributes:
        data_rank: Rank among those of different samples.
        values: By place the values, several where a module is called several times.
        unsynced: Names of all metrics that were logged without `sync_dist`.
        step_values: What a step has last logged without `sync_dist`, by the metric's name.
    """

    rank: int = 0
    data_rank: int = 0
    num_data_ranks: int = 1
    values: dict[Place, list[Tensor]] = field(default_factory=dict)
    batches: list[Any] = field(default_factory=list)
    epoch_metrics: set[str] = field(default_factory=set)
    unsynced: set[str] = field(default_factory=set)
    step_values: dict[str, float] = field(default_factory=dict)
    num_gathers: int = 0

    def add(self, place: Place, value: Tensor) -> None:
        """Note a value; it is copied."""
        self.values.setdefault(place, []).append(value.detach().to("cpu", copy=True))


class Sink:
    """Collects the records of all ranks of this process; a copy of it is itself."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "Sink":
        return self


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of a run, one for each rank, in their order."""

    records: list[Record]

    @property
    def by_data_rank(self) -> list[list[Record]]:
        """The records of the ranks of one model, for each rank of different samples."""
        number = self.records[0].num_data_ranks
        return [[one for one in self.records if one.data_rank == rank] for rank in range(number)]

    @property
    def batches(self) -> list[list[Any]]:
        """By rank of different samples its batches, of which all have as many."""
        loaded = [records[0].batches for records in self.by_data_rank]
        return [one[: min(map(len, loaded))] for one in loaded]


RATE = "learning rate"
"""What the option `lr` of an optimizer's group is called."""
_GROUP_OPTION = re.compile(r"the (.+) of group \d+ of optimizer \d+")


def group_option_name(option: str, group: int, optimizer: int) -> str:
    """Return the name of the place of an option of a group of an optimizer."""
    return f"the {RATE if option == 'lr' else option} of group {group} of optimizer {optimizer}"


def option_of(place: Place) -> str | None:
    """Return which option of an optimizer's group stands in a place; None for anything else."""
    found = _GROUP_OPTION.fullmatch(place.name)
    return found[1] if found and place.kind == "optimizer state" else None


def is_number(value: Any) -> bool:
    """Whether a value is a number, a tensor of one, or a tuple of numbers."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, int | float)


def bare_name(metric: str) -> str:
    """Return the name under which a metric was logged, without what Lightning adds to it."""
    name, _, added = metric.rpartition("_")
    return name if added in ("epoch", "step") else metric
