"""The proof: the user's module on one device and on ranks, and what differs first."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.proving import changes
from lightning_shard.proving.batches import Join, join_batches, num_repeats, repeated, samples_of
from lightning_shard.proving.causes import find_cause, log_cause
from lightning_shard.proving.comparison import Comparison, Difference, compare, tolerance_of
from lightning_shard.proving.laboratory import Laboratory
from lightning_shard.proving.records import Place, Record, Run, bare_name
from lightning_shard.proving.runs import EXACT, RunFailedError, Subject, check_options
from lightning_shard.proving.shrinking import shrunk
from lightning_shard.proving.strategies import (
    StrategyLike,
    check_comparable,
    name_of,
    strategy_in_process,
)
from lightning_shard.proving.update_causes import accumulated_multiple
from lightning_shard.proving.verdict import Cause, Verdict, phase_of


def prove(
    module: pl.LightningModule,
    data: Any = None,
    *,
    strategy: StrategyLike = "shard_ddp",
    num_ranks: int = 2,
    num_steps: int = 3,
    precision: str = "32-true",
    seed: int = 0,
    dropout: bool = True,
    join: Join = join_batches,
    shrink: int | None = None,
    trainer_options: Mapping[str, Any] | None = None,
) -> Verdict:
    """Say whether a module trains under a strategy as it does on one device, and if not, why.

    The module runs for a few steps on ranks inside this process, with its own data, and on one
    device, on the same global batches: those of the ranks. Module and data stay as they are.

    Args:
        module: Any LightningModule, on the CPU.
        data: A data module, a loader, batches of a rank, or None for the module's own loader.
        strategy: A name of this package, a strategy, or a function that makes one.
        num_ranks: Ranks inside this process.
        num_steps: Number of optimizer steps to compare.
        precision: Lightning's precision string; differences are decided in "64-true".
        seed: Seed of the random numbers that the runs draw.
        dropout: Whether dropout is left on. With it ranks differ from one device.
        join: Makes one device's batch of the ranks' batches, in their order.
        shrink: Number of blocks to which lists of repeated blocks are shortened; None for all.
        trainer_options: Those options of the Trainer that change what is trained:
            `accumulate_grad_batches`, `gradient_clip_val`, `callbacks` and the like.

    Returns:
        The verdict; errors of the strategy and of the module are in it.

    Raises:
        ConfigError: An argument of `prove` itself cannot be.
    """
    began = time.perf_counter()
    check_options(dict(trainer_options or {}))
    _check_counts(num_ranks=num_ranks, num_steps=num_steps, shrink=shrink)
    module, told = (module, "") if shrink is None else shrunk(module, shrink)
    subject = Subject(
        module=module,
        data=data,
        strategy=strategy,
        num_ranks=num_ranks,
        num_steps=num_steps,
        precision=precision,
        seed=seed,
        join=join,
        options=dict(trainer_options or {}),
    )
    if not dropout:
        subject = replace(subject, module=subject.fresh_module(changes.without_dropout))
    name = name_of(strategy_in_process(strategy, num_ranks))
    found = _judge(subject, Verdict(outcome="equal", strategy=name, num_ranks=num_ranks))
    remarks = (told, *found.remarks) if told else found.remarks
    return replace(found, seconds=time.perf_counter() - began, remarks=remarks)


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"prove got {name}={value}, expected 1 or more.")


def _judge(subject: Subject, verdict: Verdict) -> Verdict:
    try:
        check_comparable(strategy_in_process(subject.strategy, subject.num_ranks))
        return _compared(subject, verdict)
    except ShardError as error:
        return replace(verdict, outcome="refused", error=f"{type(error).__name__}: {error}")
    except RunFailedError as error:
        return replace(verdict, outcome="failed", error=str(error))


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """One comparison in one precision."""

    subject: Subject
    ranks: Run
    alone: Run
    found: Comparison
    tolerance: float


def _compared(subject: Subject, verdict: Verdict) -> Verdict:
    pair = _in_precision(subject)
    steps = 1 + max(place.step for place in pair.alone.records[0].values)
    verdict = replace(verdict, num_steps=steps, precision=subject.precision)
    wrong = _wrong_data(subject, pair.ranks)
    if wrong is not None:
        return replace(verdict, outcome="different", first=wrong[0], cause=wrong[1])
    decided, remarks = pair, list[str]()
    if _is_undecided(pair) and subject.precision != EXACT:
        decided, remarks = _exact(subject, pair)
    first, before = _trained(decided), _trained(pair)
    if first is None and before is not None:
        remarks.append(
            f"{subject.precision} deviates by {before.deviation:.1e} in step {before.place.step}, "
            f"{phase_of(before.place)}, which the same run in {EXACT} shows to be rounding"
        )
    verdict = replace(
        verdict,
        precision=decided.subject.precision,
        deviations=decided.found.deviations,
        is_rounding=first is None and before is not None,
    )
    if first is not None:
        lab = Laboratory(decided.subject, decided.ranks, decided.alone, first, decided.tolerance)
        cause = find_cause(lab)
        return replace(
            verdict, outcome="different", first=first, cause=cause, remarks=tuple(remarks)
        )
    return _logged(_accumulated(verdict, decided, remarks), decided, remarks)


def _is_undecided(pair: _Pair) -> bool:
    """Whether float64 could tell more: values that are each rank's own differ in any precision."""
    unsynced = pair.ranks.records[0].unsynced
    return any(
        one.place.kind != "metric" or bare_name(one.place.name) not in unsynced
        for one in pair.found.counting
    )


def _in_precision(subject: Subject) -> _Pair:
    ranks = subject.on_ranks()
    alone = subject.on_one_device(subject.joined(ranks.batches))
    tolerance = tolerance_of(subject.precision)
    return _Pair(
        subject=subject,
        ranks=ranks,
        alone=alone,
        found=compare(ranks, alone, tolerance),
        tolerance=tolerance,
    )


def _exact(subject: Subject, pair: _Pair) -> tuple[_Pair, list[str]]:
    """Compare once more in float64, in which rounding is next to nothing."""
    try:
        return _in_precision(replace(subject, precision=EXACT)), []
    except (RunFailedError, ShardError) as error:
        return pair, [
            f"float64 could not decide whether this is rounding, because the module does not run "
            f"in it: {error}"
        ]


def _trained(pair: _Pair) -> Difference | None:
    """Return the first difference in what is trained, not in what is only logged."""
    first = pair.found.first
    return None if first is None or _is_logged(pair) else first


def _is_logged(pair: _Pair) -> bool:
    return all(one.place.kind == "metric" for one in pair.found.counting)


def _logged(verdict: Verdict, pair: _Pair, remarks: list[str]) -> Verdict:
    """Look at the metrics, where all that is trained is equal."""
    found = [] if verdict.outcome != "equal" else pair.found.counting
    own = [one for one in found if _is_of_a_step(one.place.name, pair.ranks.records[0])]
    wrong = [one for one in found if one not in own]
    remarks += [
        f"{name!r} is logged at each step without sync_dist=True, so that rank 0 logs the value of "
        f"its own samples"
        for name in dict.fromkeys(one.place.name for one in own)
    ]
    deviations = dict(verdict.deviations)
    if found:  # those that are in the remarks, or the difference itself
        deviations.pop("metric", None)
    verdict = replace(verdict, remarks=tuple(remarks), deviations=deviations)
    if not wrong:
        return verdict
    lab = Laboratory(pair.subject, pair.ranks, pair.alone, wrong[0], pair.tolerance)
    cause = log_cause(lab, wrong[0].place)
    return replace(verdict, outcome="different", first=wrong[0], cause=cause)


def _is_of_a_step(name: str, record: Record) -> bool:
    """Whether a metric is a step's value of each rank's own samples, and not an epoch's."""
    bare = bare_name(name)
    return bare in record.unsynced and (name.endswith("_step") or bare not in record.epoch_metrics)


def _accumulated(verdict: Verdict, pair: _Pair, remarks: list[str]) -> Verdict:
    """Compare accumulated batches with one large batch, on one device."""
    subject, count = pair.subject, pair.subject.accumulate
    if count == 1:
        return verdict
    batches = pair.alone.records[0].batches[:count]
    try:
        whole = subject.without_accumulation().on_one_device([subject.join(batches)])
    except ConfigError:
        remarks.append("a step's batches cannot become one, so accumulation was not compared")
        return verdict
    found = accumulated_multiple(pair.alone, whole, pair.tolerance)
    if found is None:
        return verdict
    place, got, want, ratio = found
    first = Difference(
        place=place._replace(phase="accumulation"),
        rank=None,
        got=got,
        expected=want,
        deviation=abs(ratio - 1.0),
    )
    cause = Cause(
        name="accumulation scale",
        because=f"the gradients that {count} batches accumulate are {ratio:.4g} times those of one "
        "batch of all their samples: the step scales its loss for accumulation, which Lightning "
        "does already, or sums what is to be averaged",
        evidence="one device, once with and once without accumulation; the factor is the same for "
        "every parameter",
        advice="leave accumulate_grad_batches out of the loss, and take a mean over samples",
    )
    return replace(verdict, outcome="different", first=first, cause=cause)


def _wrong_data(subject: Subject, ranks: Run) -> tuple[Difference, Cause] | None:
    """Return samples that come to several ranks, where one device's loader gives them once."""
    batches = ranks.batches
    if len(batches) < 2:
        return None
    found = repeated(batches)
    if found is None:
        return None
    first, other, number = found
    is_padding = number == len(batches[0]) - 1 and number > 0
    alike = samples_of(batches[first][number]) == samples_of(batches[other][number])
    if (is_padding and not alike) or _has_repeats(subject, ranks):
        return None
    ours, theirs = (torch.tensor(float(one)) for one in (first, other))
    records = ranks.by_data_rank[other]
    place = Place(number // subject.accumulate, 0, "data", "batch", "samples")
    difference = Difference(
        place=place, rank=records[0].rank, got=theirs, expected=ours, deviation=float("inf")
    )
    how = "every rank is given the same samples" if alike else "ranks draw samples in orders of "
    because = how if alike else how + "their own, and some come to several ranks"
    return difference, Cause(
        name="same samples" if alike else "repeated samples",
        because=because,
        evidence=f"a sample of rank {first} came to rank {other} in its batch {number}; one "
        "device's loader gives each sample once",
        advice="let the Trainer assign the samples (use_distributed_sampler=True), or give your "
        "own sampler the same seed on all ranks, and num_replicas and rank from "
        "trainer.distributed_sampler_kwargs",
    )


def _has_repeats(subject: Subject, ranks: Run) -> bool:
    """Whether one device's own loader gives a sample twice in as many batches."""
    number = subject.num_steps * len(ranks.batches)
    alone = replace(subject, num_steps=number).on_one_device(None)
    return num_repeats(alone.records[0].batches) > 0
