"""`python -m tests.benchmarks.host_overhead`: the host's work per parameter, unit and step.

    cost of a step  -  cost without communication  =  a * parameters  +  b * units  +  c

The model's compute is nothing: a block adds up its tiny parameters in one operation. What is left
is Python and dispatch, the work that leaves a fast device idle. Steps of models of several sizes
are counted and timed, and a plane is laid through the figures; `misfit` says how far the worst
point is from it, as a share of the largest cost: a cost that grows faster than the model shows.

    calls          calls of Python functions, by `sys.setprofile`: the same in every run
    builtins       calls from Python of what is written in C, tensor operations included
    microseconds   processor time of the main thread, so that waiting for peers does not count

Two Gloo processes of one thread; rank 0's figures. With `--device cuda` one rank on each GPU: the
microseconds are those until the host has asked for all of a step, which the GPU, with next to
nothing to compute, does not delay; calls are those of forward and the update, as autograd calls
hooks on a thread of its own.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import FrameType

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_shard.data_parallel.options import EngineOptions
from tests.benchmarks.contenders import Contender, Local, Sharded, TorchDDP, TorchFSDP2
from tests.benchmarks.model import Batch
from tests.benchmarks.ranks import DEVICES, NUM_RANKS, finish, own_device, ranks_on
from tests.benchmarks.report import make_console

PARAM_NUMEL = 8
UNIT_BY_UNIT = 1e-9  # MB up to which blocks are joined: none are
NUM_WARMUP_STEPS = 3  # the order of units is learnt in the first
REFERENCE = "local"


@dataclass(frozen=True)
class Size:
    """A model's number of units, and of parameters in each."""

    units: int
    params_per_unit: int

    @property
    def params(self) -> int:
        """Number of parameters in all units."""
        return self.units * self.params_per_unit


SIZES = (Size(4, 4), Size(4, 64), Size(8, 8), Size(16, 4), Size(16, 16))


class Idle(nn.Module):
    """A block of many parameters which does next to nothing with them."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(PARAM_NUMEL) for _ in range(num_params))

    def forward(self, x: Tensor) -> Tensor:  # (PARAM_NUMEL,) -> (PARAM_NUMEL,)
        return x + torch.stack(tuple(self.weights.parameters())).sum(0)


class IdleModel(nn.Module):
    """A chain of `Idle` blocks behind one parameter, which has the place of an embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(PARAM_NUMEL))
        self.blocks = nn.ModuleList(Idle(size.params_per_unit) for _ in range(size.units))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = x * self.first
        for block in self.blocks:
            x = block(x)
        return (x * scale).sum()


def idle_batch(device: torch.device | None = None) -> Batch:
    """Make the inputs of `IdleModel`, on the CPU by default."""
    return torch.ones(PARAM_NUMEL, device=device), torch.ones((), device=device)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one step costs the host.

    Attributes:
        builtins: Calls from Python of functions written in C.
        microseconds: Processor time of the main thread.
    """

    calls: float
    builtins: float
    microseconds: float = 0.0

    def over(self, other: "Cost") -> "Cost":
        """Return what this one costs more than another."""
        return Cost(
            calls=self.calls - other.calls,
            builtins=self.builtins - other.builtins,
            microseconds=self.microseconds - other.microseconds,
        )


KINDS = ("calls", "builtins", "microseconds")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One kind of cost per parameter, unit and step.

    Attributes:
        misfit: Distance of the worst point from the plane, over the largest cost.
    """

    per_param: float
    per_unit: float
    per_step: float
    misfit: float

    @classmethod
    def of(cls, costs: Mapping[Size, float]) -> "Fit":
        """Lay a plane of least squares through the costs of models of several sizes."""
        rows = torch.tensor([[size.params, size.units, 1] for size in costs], dtype=torch.float64)
        values = torch.tensor(list(costs.values()), dtype=torch.float64)
        plane = torch.linalg.lstsq(rows, values[:, None]).solution[:, 0]
        misfit = (rows @ plane - values).abs().max() / values.abs().max().clamp(min=1)
        param, unit, step = plane.tolist()
        return cls(per_param=param, per_unit=unit, per_step=step, misfit=float(misfit))


def count_calls(function: Callable[[], object]) -> Cost:
    """Count the calls that a function makes on this thread, backward's included on a CPU."""
    counts = {"call": 0, "c_call": 0}

    def note(_: FrameType, event: str, __: object) -> None:
        if event in counts:
            counts[event] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return Cost(calls=counts["call"], builtins=counts["c_call"])


def _sharded(stage: int) -> Callable[[nn.Module], Contender]:
    options = EngineOptions(stage=stage, bucket_mb=UNIT_BY_UNIT)
    return lambda model: Sharded(model, options=options)


MAKERS: dict[str, Callable[[nn.Module], Contender]] = {
    REFERENCE: Local,
    "ddp": TorchDDP,
    "fsdp2_reshard": lambda model: TorchFSDP2(model, reshard=True),
    "shard_ddp": _sharded(0),
    "zero1": _sharded(1),
    "zero2": _sharded(2),
    "zero3": _sharded(3),
}


def measure(rank: int, names: Sequence[str], num_steps: int) -> dict[str, dict[Size, Cost]]:
    """Count and time the steps of each contender at each size; each rank calls."""
    return {name: {size: _cost(name, size, num_steps) for size in SIZES} for name in names}


def _cost(name: str, size: Size, num_steps: int) -> Cost:
    device = own_device()
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    contender = MAKERS[name](IdleModel(size).to(device))
    batch = idle_batch(device)
    for _ in range(NUM_WARMUP_STEPS):
        contender.step(batch)
    counted = count_calls(lambda: contender.step(batch))
    seconds = []
    for _ in range(num_steps):
        finish()
        begin = clock()
        contender.step(batch)
        seconds.append(clock() - begin)
    return Cost(calls=counted.calls, builtins=counted.builtins, microseconds=1e6 * median(seconds))


def fits(costs: Mapping[str, Mapping[Size, Cost]]) -> dict[str, dict[str, Fit]]:
    """Return by contender and kind of cost what it adds to training without communication."""
    return {
        name: {kind: Fit.of(_over_reference(by_size, costs[REFERENCE], kind)) for kind in KINDS}
        for name, by_size in costs.items()
        if name != REFERENCE
    }


def _over_reference(
    costs: Mapping[Size, Cost], reference: Mapping[Size, Cost], kind: str
) -> dict[Size, float]:
    return {size: getattr(cost.over(reference[size]), kind) for size, cost in costs.items()}


def print_fits(console: Console, found: Mapping[str, Mapping[str, Fit]]) -> None:
    """Print a row per contender, and for each kind of cost the parameter's, unit's and step's."""
    table = Table("contender", *(f"{kind}: parameter, unit, step (misfit)" for kind in KINDS))
    for name, by_kind in found.items():
        table.add_row(name, *(_cell(by_kind[kind]) for kind in KINDS))
    console.print(table)


def _cell(fit: Fit) -> str:
    figures = ", ".join(f"{value:.1f}" for value in (fit.per_param, fit.per_unit, fit.per_step))
    return f"{figures} ({fit.misfit:.1%})"


def write_json(path: Path, costs: Mapping[str, Mapping[Size, Cost]]) -> None:
    """Write the fits, and the costs that they are of."""
    found = {
        "fits": {
            name: {kind: asdict(fit) for kind, fit in by_kind.items()}
            for name, by_kind in fits(costs).items()
        },
        "costs": {
            name: [asdict(size) | asdict(cost) for size, cost in by_size.items()]
            for name, by_size in costs.items()
        },
    }
    path.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.host_overhead",
        description="Calls and microseconds of the host per parameter, unit and step.",
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=MAKERS, default=list(MAKERS), metavar="NAME")
    add("--device", choices=DEVICES, default="cpu", help="two CPU ranks, or a rank on each GPU")
    add("--steps", type=int, default=40, help="timed steps of each size")
    add("--json", type=Path, metavar="PATH", help="also write every figure here")
    arguments = parser.parse_args()
    names = [name for name in MAKERS if name in {REFERENCE, *arguments.only}]
    costs = ranks_on(arguments.device, NUM_RANKS).run(measure, names, arguments.steps)
    print_fits(make_console(), fits(costs))
    if arguments.json is not None:
        write_json(arguments.json, costs)


if __name__ == "__main__":
    main()
