"""Step time: all contenders live in the same processes and take turns, so noise hits all alike.

    round 0   | A A A | B B B | C C C |
    round 1   | B B B | C C C | A A A |      rotated, and backwards in every other pair of rounds
    round 2   | B B B | A A A | C C C |

Each turn is a few steps between two barriers, so a turn lasts as long as its slowest rank. Step i
of every contender sees the same batch, and every loss is compared with torch DDP's.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
import torch.distributed as dist

from tests.benchmarks.contenders import Contender
from tests.benchmarks.entries import CONTENDERS
from tests.benchmarks.model import build_model, make_batch, step_flops
from tests.benchmarks.ranks import finish, own_device
from tests.benchmarks.roofline import flops_per_second

Turn = Callable[[], AbstractContextManager[object]]

REFERENCE = "ddp"
LOSS_TOLERANCE = 1e-4
NUM_WARMUP_STEPS = 2
UNLIKE = frozenset(name for name, one in CONTENDERS.items() if not one.same_losses)


class LossMismatchError(Exception):
    """A contender trained something else than the reference did: its times mean nothing."""


@dataclass(kw_only=True)
class Record:
    """What one contender did.

    Attributes:
        step_seconds: One per round, the mean over the steps of the turn.
        cpu_seconds: The same of the processor's time, all threads, the mean over the ranks: what
            a step costs when others use the machine, too.
        losses: One per step, the mean over the ranks; the warm-up's come first.
        roofline_seconds: What the matrices of a step would take at the machine's measured rate.
    """

    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    roofline_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Step time over another contender's: median and quartiles of the ratios of each round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, record: Record, other: Record) -> "Ratio":
        """Pair the rounds, so that what slows a whole round cancels."""
        pairs = zip(record.step_seconds, other.step_seconds, strict=True)
        ratios = [mine / theirs for mine, theirs in pairs]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        return cls(median=median(ratios), low=low, high=high)


def turn_order(names: Sequence[str], round_index: int) -> list[str]:
    """Rotate `names` by one each round, reversed in rounds 2, 3, 6, 7 and so on."""
    shift = round_index % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if round_index // 2 % 2 else order


def time_contenders(
    rank: int,
    model_name: str,
    names: Sequence[str],
    num_rounds: int,
    num_steps: int,
    report: Callable[[str], None] = print,
    turn: Turn = nullcontext,
) -> dict[str, Record]:
    """Train every contender in interleaved rounds, each turn inside `turn`; each rank calls."""
    device = own_device()
    models = {name: build_model(model_name).to(device) for name in names}
    seconds = step_flops(models[names[0]], device) / flops_per_second()
    contenders = {name: CONTENDERS[name].make(models.pop(name)) for name in names}
    records = {name: Record(roofline_seconds=seconds) for name in names}
    for name, contender in contenders.items():
        with turn():
            _take_turn(rank, contender, records[name], NUM_WARMUP_STEPS)
        records[name].step_seconds.clear()
        records[name].cpu_seconds.clear()
    check_losses(records)
    for round_index in range(num_rounds):
        begin = time.perf_counter()
        for name in turn_order(names, round_index):
            with turn():
                _take_turn(rank, contenders[name], records[name], num_steps)
        if rank == 0:
            report(f"round {round_index + 1} of {num_rounds}: {time.perf_counter() - begin:.1f} s")
    check_losses(records)
    return records


def _take_turn(rank: int, contender: Contender, record: Record, num_steps: int) -> None:
    first_step, device = len(record.losses), own_device()
    steps = range(first_step, first_step + num_steps)
    batches = [make_batch(step, rank, device) for step in steps]
    sums = torch.empty(num_steps + 1, dtype=torch.float64, device=device)
    finish()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for index, batch in enumerate(batches):
        sums[index] = contender.step(batch)
    finish()
    record.step_seconds.append((time.perf_counter() - begin) / num_steps)
    sums[-1] = (time.process_time() - cpu_begin) / num_steps
    dist.all_reduce(sums)
    *losses, cpu_seconds = (sums / dist.get_world_size()).tolist()
    record.losses.extend(losses)
    record.cpu_seconds.append(cpu_seconds)


def check_losses(records: Mapping[str, Record], reference: str = REFERENCE) -> None:
    """Raise unless every contender that trains the same thing has the reference's losses."""
    if reference not in records:
        return
    expected_losses = records[reference].losses
    for name, record in records.items():
        if name in UNLIKE:
            continue
        for step, (loss, expected) in enumerate(zip(record.losses, expected_losses, strict=True)):
            if not math.isclose(loss, expected, rel_tol=LOSS_TOLERANCE):
                raise LossMismatchError(
                    f"Step {step} of {name!r} has the loss {loss:.7f}, but {reference!r}'s is "
                    f"{expected:.7f}: further than rtol {LOSS_TOLERANCE} away."
                )
