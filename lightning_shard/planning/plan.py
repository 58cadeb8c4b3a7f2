"""The result of a search: a table, JSON, the YAML to train with, and a picture."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_shard.core.reporting.output import new_figure, plain_text
from lightning_shard.planning.estimate import Estimate
from lightning_shard.planning.machine import MachineProfile
from lightning_shard.planning.report import cell

_KINDS = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients", "gradients_in_flight"),
    "optimizer state": ("optimizer_state",),
    "activations": ("activations",),
}


def _kind(one: Estimate) -> tuple[str, str | None, bool]:
    made = one.candidate
    return made.strategy, made.offload, made.activation_offload


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a search has found; `print` gives a table.

    Attributes:
        machine: Profile of the nodes.
        num_devices: Number of all devices.
        ranks_per_node: Devices of a node.
        device_memory: Bytes of a device.
        global_batch: Samples of a step of all ranks.
        precision: Precision string, as for the Trainer.
        num_parameters: Number of the module's parameters.
        tensor_plan: Layers that tensor parallel splits, where they were given.
        estimates: Every candidate's figures.
        recommendation: The one to train with, simulated; None where nothing fits.
        left_out: What was not searched, and why.
    """

    machine: MachineProfile
    num_devices: int
    ranks_per_node: int
    device_memory: int
    global_batch: int
    precision: str
    num_parameters: int
    tensor_plan: Mapping[str, Any] | None
    estimates: tuple[Estimate, ...]
    recommendation: Estimate | None
    left_out: tuple[str, ...] = ()

    def fits(self, one: Estimate) -> bool:
        """Whether a candidate's fullest rank fits a device."""
        return one.peak_bytes <= self.device_memory

    @property
    def best(self) -> tuple[Estimate, ...]:
        """Of each strategy the fastest candidate that fits, or the smallest if none does."""
        found: dict[tuple[str, str | None, bool], Estimate] = {}
        for one in self.estimates:
            key = _kind(one)
            if key not in found or self._rank(one) < self._rank(found[key]):
                found[key] = one
        if self.recommendation is not None:
            found[_kind(self.recommendation)] = self.recommendation
        return tuple(sorted(found.values(), key=self._rank))

    def _rank(self, one: Estimate) -> tuple[float, ...]:
        is_too_large = not self.fits(one)
        return float(is_too_large), one.peak_bytes if is_too_large else one.seconds

    @property
    def reason(self) -> str:
        """Why the recommended candidate is that."""
        limit, chosen = cell(self.device_memory), self.recommendation
        if chosen is None:
            least = min(self.estimates, key=lambda one: one.peak_bytes)
            return (
                f"Nothing fits {limit} a device. The least is {cell(least.peak_bytes)} with "
                f"{least.candidate.strategy} ({least.candidate}): take more devices, a smaller "
                f"batch, or shorter samples."
            )
        fitting = sum(map(self.fits, self.estimates))
        made = chosen.candidate
        lines = [
            f"{made.strategy} ({made}): the fastest of {fitting} candidates of "
            f"{len(self.estimates)} that fit {limit}, at {cell(chosen.peak_bytes)}."
        ]
        plain = [one for one in self.best if one.candidate.strategy != made.strategy]
        others = [one for one in plain if self.fits(one) and not one.candidate.uses_host]
        for one in others[:1]:
            lines.append(
                f"{one.candidate.strategy} takes {one.seconds / chosen.seconds:.2f} times."
            )
        too_large = [one for one in plain if not self.fits(one) and not one.candidate.uses_host]
        if too_large:
            names = ", ".join(
                f"{one.candidate.strategy} ({cell(one.peak_bytes)})" for one in too_large
            )
            lines.append(f"What does not fit: {names}.")
        return " ".join(lines)

    def to_dict(self, *, every: bool = False) -> dict[str, Any]:
        """Return the plan as JSON has it; with `every` all candidates, else the best of each."""
        chosen = self.recommendation
        return {
            "machine": self.machine.name,
            "devices": self.num_devices,
            "ranks_per_node": self.ranks_per_node,
            "device_memory": self.device_memory,
            "global_batch": self.global_batch,
            "precision": self.precision,
            "num_parameters": self.num_parameters,
            "reason": self.reason,
            "left_out": list(self.left_out),
            "recommendation": None if chosen is None else self._row(chosen),
            "candidates": [self._row(one) for one in (self.estimates if every else self.best)],
        }

    def _row(self, one: Estimate) -> dict[str, Any]:
        made = one.candidate
        return {
            "strategy": made.strategy,
            **vars(made),
            "options": made.options(dict(self.tensor_plan) if self.tensor_plan else None),
            "memory": {**vars(one.memory), "passing": one.passing, "peak": one.peak_bytes},
            "fits": self.fits(one),
            "sent_bytes": dict(one.sent),
            "sent_elements": None if one.sent_elements is None else dict(one.sent_elements),
            "idle_share": one.idle_share,
            "seconds": one.seconds,
            "samples_per_second": self.global_batch / one.seconds,
            "is_simulated": one.is_simulated,
        }

    def to_json(self) -> str:
        """Return `to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_yaml(self, **options: Any) -> str:
        """Return the part of a config that trains with the recommendation; empty without one.

        Args:
            options: Further arguments of the strategy.
        """
        if self.recommendation is None:
            return ""
        made = self.recommendation.candidate
        plan = dict(self.tensor_plan) if self.tensor_plan else None
        strategy = {
            "class_path": f"lightning_shard.{made.class_name}",
            "init_args": made.options(plan) | options,
        }
        trainer: dict[str, Any] = {
            "strategy": strategy,
            "num_nodes": self.num_devices // self.ranks_per_node,
            "devices": self.ranks_per_node,
            "precision": self.precision,
        }
        if made.pp == 1 or made.accumulated > 1:
            trainer["accumulate_grad_batches"] = made.accumulated
        head = f"# batch_size of each data-parallel rank's loader: {made.batch_size}\n"
        return head + yaml.safe_dump({"trainer": trainer}, sort_keys=False)

    def __rich__(self) -> RenderableType:
        table = Table(title=self._title, box=box.SIMPLE_HEAD)
        for name in ("", "strategy", "sizes and options"):
            table.add_column(name)
        for name in (*_KINDS, "passing", "peak", "pp", "dp", "tp", "idle", "step"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in self.best:
            table.add_row(*self._cells(one))
        notes = [
            self.reason,
            "pp, dp and tp: bytes that a rank sends in a step. Marks: > recommended and simulated, "
            "x too large. Times are those at the profile's peaks.",
            *(f"Not searched: {reason}" for reason in self.left_out),
        ]
        return Group(table, Text("\n".join(notes)))

    @property
    def _title(self) -> str:
        return (
            f"{self.num_parameters:,} parameters on {self.num_devices} devices "
            f"({self.machine.name}, {self.ranks_per_node} a node, {cell(self.device_memory)}), "
            f"{self.global_batch:,} samples a step"
        )

    def _cells(self, one: Estimate) -> list[str]:
        memory = vars(one.memory)
        mark = ">" if one is self.recommendation else "" if self.fits(one) else "x"
        kinds = [cell(sum(memory[kind] for kind in kinds)) for kinds in _KINDS.values()]
        sent = [cell(one.sent[axis]) for axis in ("pp", "dp", "tp")]
        idle, step = f"{one.idle_share:.1%}", f"{one.seconds:.3g} s"
        made = one.candidate
        sizes = [cell(one.passing), cell(one.peak_bytes)]
        return [mark, made.strategy, str(made), *kinds, *sizes, *sent, idle, step]

    def __str__(self) -> str:
        return plain_text(self, width=200)

    def save_picture(self, path: str | Path) -> None:
        """Draw the best candidates' memory by kind against the memory of a device.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        rows = self.best
        figure = new_figure(path, size=(9, 1.5 + 0.5 * len(rows)), otherwise="print(plan) tells.")
        axes = figure.add_subplot()
        names = [f"{one.candidate.strategy}\n{one.candidate}" for one in rows]
        left = [0.0] * len(rows)
        bars = {
            name: [sum(vars(one.memory)[kind] for kind in kinds) for one in rows]
            for name, kinds in _KINDS.items()
        }
        for name, sizes in {**bars, "passing": [one.passing for one in rows]}.items():
            widths = [size / 2**30 for size in sizes]
            axes.barh(range(len(rows)), widths, left=left, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.axvline(self.device_memory / 2**30, color="black", linestyle="--", label="a device")
        axes.set_yticks(range(len(rows)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("GiB on the fullest rank")
        axes.set_title(self._title, fontsize=9)
        axes.legend(fontsize=7)
        figure.savefig(path)
