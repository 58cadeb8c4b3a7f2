"""The result of a search: a table, JSON, the YAML to train with, and a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_shard.core.mesh import Axis
from lightning_shard.core.reporting.drawings import seconds_of
from lightning_shard.core.reporting.output import UNITS, format_bytes, new_figure, plain_text
from lightning_shard.planning.candidates import PlanCandidate
from lightning_shard.planning.estimate import Estimate
from lightning_shard.planning.machine import MachineProfile
from lightning_shard.planning.report import cell

_KINDS = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients", "gradients_in_flight"),
    "optimizer state": ("optimizer_state",),
    "activations": ("activations",),
}


_AXES: tuple[Axis, ...] = ("pp", "dp", "tp")
_MOST_ROWS = 6
_WIDTH = 100
_ALL_WIDTH = 200
_ALIKE_SECONDS = 1.02  # times one another: as the search compares them
_ALIKE_MEMORY = 0.02  # of a device's
_FAR = 20  # times the longest bar, from which on a device's line would leave nothing to see


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
        low_precision: What to write for fewer bits where nothing fits a device, or ranks wait for
            links, and what that brings; it changes results, and is no candidate.
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
    low_precision: tuple[str, ...] = ()

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
    def rows(self) -> list[list[Estimate]]:
        """The few best that differ in what matters here, the recommended first, each with its like.

        Two are alike that take as long, and as much of a device's memory, within 2 %. Host memory
        is for where nothing else fits.
        """
        chosen = self.recommendation
        needs_host = chosen is None or chosen.candidate.uses_host
        listed = [one for one in self.best if needs_host or not one.candidate.uses_host]
        found: list[list[Estimate]] = []
        for one in sorted(listed, key=lambda one: one is not chosen):  # a stable sort
            same = next((row for row in found if self._are_alike(row[0], one)), None)
            found.append([one]) if same is None else same.append(one)
        return found[:_MOST_ROWS]

    def _are_alike(self, one: Estimate, other: Estimate) -> bool:
        fast, slow = sorted((one.seconds, other.seconds))
        apart = abs(one.peak_bytes - other.peak_bytes)
        return (
            self.fits(one) == self.fits(other)
            and slow <= _ALIKE_SECONDS * fast
            and apart <= _ALIKE_MEMORY * self.device_memory
        )

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
            "low_precision": list(self.low_precision),
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
        trainer: dict[str, Any] = {
            "strategy": self._strategy(made, **options),
            "num_nodes": self.num_devices // self.ranks_per_node,
            "devices": self.ranks_per_node,
            "precision": self.precision,
        }
        if made.pp == 1 or made.accumulated > 1:
            trainer["accumulate_grad_batches"] = made.accumulated
        head = f"# batch_size of each data-parallel rank's loader: {made.batch_size}\n"
        return head + yaml.safe_dump({"trainer": trainer}, sort_keys=False)

    def _strategy(self, made: PlanCandidate, **options: Any) -> dict[str, Any]:
        plan = dict(self.tensor_plan) if self.tensor_plan else None
        return {
            "class_path": f"lightning_shard.{made.class_name}",
            "init_args": made.options(plan) | options,
        }

    def __rich__(self) -> RenderableType:
        return self.table()

    def table(self, *, every: bool = False) -> RenderableType:
        """Return the few best, or with `every` the best of each strategy with all figures."""
        table = Table(title=self._title, box=box.SIMPLE_HEAD, pad_edge=False)
        if every:
            self._add_figures(table)
        else:
            self._add_rows(table)
        notes = [
            self.reason,
            f"Step is at the profile's peaks, in {self.precision}. Marks: > recommended and "
            f"simulated, x too large." + ("" if every else " More rows: --all."),
            *(f"In low precision, {line}" for line in self.low_precision),
            *(f"Not searched: {reason}" for reason in self.left_out),
        ]
        return Group(table, Text("\n".join(notes)))

    def _add_rows(self, table: Table) -> None:
        for name in ("", "step", "memory", f"of {cell(self.device_memory)}"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("in YAML, under trainer", overflow="fold")
        for one, *alike in self.rows:
            size = cell(one.peak_bytes)
            share = f"{one.peak_bytes / self.device_memory:.1%}"
            table.add_row(
                self._mark(one), seconds_of(one.seconds), size, share, self._told(one, alike)
            )

    def _told(self, one: Estimate, alike: Sequence[Estimate]) -> str:
        """Say what to write for a row, and what is as good."""
        made = one.candidate
        options = yaml.safe_dump(
            made.options(), default_flow_style=True, sort_keys=False, width=500
        )
        strategy = (
            f"{{class_path: lightning_shard.{made.class_name}, init_args: {options.strip()}}}"
        )
        rounds = f", accumulate_grad_batches: {made.accumulated}" if made.accumulated > 1 else ""
        named = f"strategy: {strategy if made.options() else made.strategy}{rounds}"
        others = "; ".join(dict.fromkeys(_named(other) for other in alike))
        return f"{named}; batches of {made.batch_size}" + (f"\nas good: {others}" if others else "")

    def _add_figures(self, table: Table) -> None:
        for name in ("", "strategy", "sizes and options"):
            table.add_column(name)
        for name in (*_KINDS, "passing", "peak", *_AXES, "idle", "step"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in self.best:
            table.add_row(*self._cells(one))

    @property
    def _title(self) -> str:
        return (
            f"{self.num_parameters:,} parameters on {self.num_devices} devices "
            f"({self.machine.name}, {self.ranks_per_node} a node), {self.global_batch:,} samples a "
            f"step in {self.precision}"
        )

    def _cells(self, one: Estimate) -> list[str]:
        memory = vars(one.memory)
        kinds = [cell(sum(memory[kind] for kind in kinds)) for kinds in _KINDS.values()]
        sent = [cell(one.sent[axis]) for axis in _AXES]
        idle, step = f"{one.idle_share:.1%}", f"{one.seconds:.3g} s"
        made = one.candidate
        sizes = [cell(one.passing), cell(one.peak_bytes)]
        return [self._mark(one), made.strategy, str(made), *kinds, *sizes, *sent, idle, step]

    def _mark(self, one: Estimate) -> str:
        return ">" if one is self.recommendation else "" if self.fits(one) else "x"

    def __str__(self) -> str:
        return plain_text(self, width=_WIDTH)

    def text(self, *, every: bool = False) -> str:
        """Return the table as plain text."""
        return plain_text(self.table(every=every), width=_ALL_WIDTH if every else _WIDTH)

    def save_picture(self, path: str | Path) -> None:
        """Draw the rows' memory by kind against that of a device, and how long a step takes.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        rows = [one for one, *_ in self.rows]
        figure = new_figure(path, size=(11, 2 + 0.6 * len(rows)), otherwise="print(plan) tells.")
        memory, step = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        chosen = [one is self.recommendation for one in rows]
        names = [
            fill(f"{'recommended: ' * is_chosen}{_unbroken(_named(one))}", 40)
            for one, is_chosen in zip(rows, chosen, strict=True)
        ]
        self._draw_memory(memory, rows)
        seconds = [one.seconds for one in rows]
        bars = step.barh(range(len(rows)), seconds, color="tab:gray")
        step.bar_label(bars, labels=list(map(seconds_of, seconds)), padding=3, fontsize=8)
        step.set(xlabel="a step", xticks=[])
        step.margins(x=0.2)
        memory.set_yticks(range(len(rows)), names, fontsize=8)
        for label, is_chosen in zip(memory.get_yticklabels(), chosen, strict=True):
            label.set_fontweight("bold" if is_chosen else "normal")
        memory.invert_yaxis()
        figure.suptitle(self._title, fontsize=10)
        figure.savefig(path)

    def _draw_memory(self, axes: Any, rows: Sequence[Estimate]) -> None:
        largest = max(one.peak_bytes for one in rows)
        is_far = self.device_memory > _FAR * largest
        unit = format_bytes(largest if is_far else self.device_memory).split()[1]
        scale = 1024 ** UNITS.index(unit)
        left = [0.0] * len(rows)
        bars = {
            name: [sum(vars(one.memory)[kind] for kind in kinds) for one in rows]
            for name, kinds in _KINDS.items()
        }
        for name, sizes in {**bars, "passing": [one.passing for one in rows]}.items():
            widths = [size / scale for size in sizes]
            axes.barh(range(len(rows)), widths, left=left, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        device = f"a device has {cell(self.device_memory)}"
        if is_far:
            device += ", far to the right"
        else:
            axes.axvline(
                self.device_memory / scale, color="black", linestyle="--", label="a device"
            )
        axes.set_xlabel(f"{unit} on the fullest rank; {device}")
        axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _unbroken(label: str) -> str:
    """Return a label whose lines end after commas alone, such as `dp 32 tp 2, 4 a forward`."""
    return label.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")


def _named(one: Estimate) -> str:
    return f"{one.candidate.strategy}, {one.candidate}"
