"""What a proof tells: equal, or the first thing that differs and why."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_shard.core.reporting.records import finite
from lightning_shard.tools.proving.comparison import Difference
from lightning_shard.tools.proving.records import Kind, Place

Outcome = Literal["equal", "different", "refused", "failed"]
CauseName = Literal[
    "sum",
    "unequal counts",
    "batch dependent",
    "batch norm",
    "dropout",
    "random numbers",
    "shared attribute",
    "divergence",
    "rank dependent",
    "counted once per rank",
    "number of ranks",
    "gather without gradients",
    "parameter hook",
    "module hook",
    "callback",
    "clipping",
    "buffer of own samples",
    "kept from own samples",
    "half precision",
    "unsynchronised log",
    "averaged log",
    "shared memory",
    "full matrices",
    "learning rate",
    "optimizer option",
    "accumulation scale",
    "repeated samples",
    "same samples",
    "unknown",
]
_STATUS = {"equal": 0, "different": 1, "refused": 2, "failed": 2}


@dataclass(frozen=True)
class Cause:
    """Why ranks and one device differ.

    Attributes:
        name: A word for it, for scripts.
        because: A sentence that says what makes the difference.
        evidence: The experiment that has shown it.
        advice: What to do.
    """

    name: CauseName
    because: str
    evidence: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a proof.

    Attributes:
        outcome: "equal", "different", "refused" by the strategy or by the proof, or "failed": the
            module's own code has raised.
        strategy: The strategy's name.
        num_ranks: Ranks that it ran on.
        num_steps: Optimizer steps that were compared.
        precision: Precision of the comparison that decided.
        deviations: By kind the largest relative deviation.
        first: The first difference; None if equal.
        cause: Why; None if equal.
        is_rounding: Whether deviations were seen that float64 has shown to be rounding.
        remarks: What is worth knowing and does not change the outcome.
        error: What was raised, where the outcome is "refused" or "failed".
        seconds: Seconds that the proof has taken.
    """

    outcome: Outcome
    strategy: str
    num_ranks: int
    num_steps: int = 0
    precision: str = "32-true"
    deviations: Mapping[Kind, float] = field(default_factory=dict)
    first: Difference | None = None
    cause: Cause | None = None
    is_rounding: bool = False
    remarks: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0

    @property
    def exit_status(self) -> int:
        """Of a command: 0 if equal, 1 if different, 2 if nothing could be compared."""
        return _STATUS[self.outcome]

    @property
    def is_equal(self) -> bool:
        """Whether the module trains as on one device."""
        return self.outcome == "equal"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers, strings and lists."""
        return {
            "outcome": self.outcome,
            "strategy": self.strategy,
            "ranks": self.num_ranks,
            "steps": self.num_steps,
            "precision": self.precision,
            "rounding": self.is_rounding,
            "deviations": dict(self.deviations),
            "first": None if self.first is None else _told(self.first),
            "cause": None if self.cause is None else vars(self.cause),
            "remarks": list(self.remarks),
            "error": self.error,
            "seconds": round(self.seconds, 2),
        }

    def as_json(self) -> str:
        """Return `as_dict` as JSON, in which what is not finite is null."""
        return json.dumps(finite(self.as_dict()), indent=1, allow_nan=False)

    def __str__(self) -> str:
        head = f"{self.strategy} on {self.num_ranks} ranks: {self.outcome}"
        parts = [head, *(f"  {name}: {text}" for name, text in self.lines())]
        return "\n".join(parts)

    def lines(self) -> list[tuple[str, str]]:
        """Return what is told below the headline, each line with its name."""
        lines = list[tuple[str, str]]()
        if self.first is not None:
            lines += [("first", where(self.first)), *_values(self.first)]
        if self.cause is not None:
            lines += [
                ("because", self.cause.because),
                ("evidence", self.cause.evidence),
                ("what to do", self.cause.advice),
            ]
        if self.error:
            lines.append(("error", self.error))
        if self.deviations:
            told = ", ".join(f"{kind} {value:.1e}" for kind, value in self.deviations.items())
            lines.append(("largest deviations", told))
        lines += [("remark", one) for one in self.remarks]
        return lines


def where(first: Difference) -> str:
    """Return in which step, of what, and on which rank a difference is."""
    rank = "the ranks' mean" if first.rank is None else f"rank {first.rank}"
    micro = f", batch {first.place.micro} of the step" if first.place.micro else ""
    return f"step {first.place.step}{micro}, {phase_of(first.place)}, {rank}"


def phase_of(place: Place) -> str:
    """Return a place's phase and tensor in words."""
    by_kind = {
        "output": f"forward of {place.name!r}",
        "loss": "the loss",
        "gradient": f"backward of {place.name!r}",
        "weight": f"update of {place.name!r}",
        "buffer": f"buffer {place.name!r}",
        "optimizer state": f"update: {place.name}",
        "metric": f"logged {place.name!r}",
        "batch": f"data: {place.name}",
    }
    told = by_kind[place.kind]
    if place.phase == "clipping":
        return f"clipping of the gradient of {place.name!r}"
    if place.phase == "accumulation":
        return f"accumulation of the gradient of {place.name!r}"
    return f"{told} in {place.phase}" if place.phase.startswith("hooks") else told


def _values(first: Difference) -> list[tuple[str, str]]:
    got, expected, index = first.worst
    if math.isnan(got) and math.isnan(expected):
        shapes = f"{tuple(first.got.shape)}, expected {tuple(first.expected.shape)}"
        return [("got", f"shape {shapes}")] if first.got.shape != first.expected.shape else []
    at = f" at {list(index)}" if index else ""
    return [("got", f"{got:.8g}, expected {expected:.8g}{at}")]


def _told(first: Difference) -> dict[str, Any]:
    got, expected, index = first.worst
    return {
        "step": first.place.step,
        "micro": first.place.micro,
        "phase": first.place.phase,
        "kind": first.place.kind,
        "name": first.place.name,
        "rank": first.rank,
        "got": got,
        "expected": expected,
        "index": list(index),
        "deviation": first.deviation,
    }
