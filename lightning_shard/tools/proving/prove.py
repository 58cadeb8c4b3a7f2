"""The proof: the user's module on one device and on ranks, and what differs first.

Ranks that train by themselves are each compared with one device on their own samples, until they
meet.

    rank 0   step step step        one device on rank 0's samples   step step step
    rank 1   step step step        one device on rank 1's samples   step step step

Local SGD averages weights between such stretches, which asks nothing of the module.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_shard.backends.packing import bits_of
from lightning_shard.core.options import check_num_ranks
from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.strategies.micro_batches import number_in_step
from lightning_shard.strategies.names import strategy_name
from lightning_shard.tools.proving import causes, changes
from lightning_shard.tools.proving.changes import narrowed, shrunk
from lightning_shard.tools.proving.comparison import (
    Comparison,
    Difference,
    beyond_rounding,
    compared,
    deviation,
    deviations_in_low_precision,
    in_order,
    in_parts,
    is_low_precision,
)
from lightning_shard.tools.proving.laboratory import Laboratory
from lightning_shard.tools.proving.records import Kind, Place, Record, Records, bare_name
from lightning_shard.tools.proving.runs import (
    EXACT,
    Join,
    Recorder,
    RunFailedError,
    Subject,
    check_options,
    join_batches,
    num_repeats,
    repeated,
    samples_of,
)
from lightning_shard.tools.proving.strategies import StrategyLike, comparable, strategy_in_process
from lightning_shard.tools.proving.verdict import Cause, Verdict, phase_of


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
    narrow: int | None = None,
    trainer_options: Mapping[str, Any] | None = None,
    to_the_bit: bool = False,
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
        narrow: Number by which widths that a configuration says are divided; None for none.
        trainer_options: Those of the Trainer's that change what is trained: `callbacks` and others.
        to_the_bit: Whether to compare with one rank under `same_bits=True`, where every difference
            is a finding, in place of one device, from which ranks deviate by rounding.

    Returns:
        The verdict; errors of the strategy and of the module are in it.

    Raises:
        ConfigError: An argument of `prove` itself cannot be.
    """
    began = time.perf_counter()
    check_options(dict(trainer_options or {}))
    _check_counts(num_ranks=num_ranks, num_steps=num_steps, shrink=shrink, narrow=narrow)
    module, told = _made_small(module, narrow, shrink)
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
    found = _judge(subject, dropout=dropout, to_the_bit=to_the_bit)
    return replace(found, seconds=time.perf_counter() - began, remarks=(*told, *found.remarks))


def _made_small(
    module: pl.LightningModule, narrow: int | None, shrink: int | None
) -> tuple[pl.LightningModule, list[str]]:
    told = list[str]()
    for number, change in ((narrow, narrowed), (shrink, shrunk)):
        if number is not None:
            module, what = change(module, number)
            told.append(what)
    return module, told


def _check_counts(**counts: int | None) -> None:
    if counts["num_ranks"] == 1:
        raise ConfigError(
            "prove got num_ranks=1, expected 2 or more: one rank is one device itself."
        )
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"prove got {name}={value}, expected 1 or more.")
    check_num_ranks(counts["num_ranks"] or 0)


def _judge(subject: Subject, *, dropout: bool, to_the_bit: bool) -> Verdict:
    if not dropout:
        subject = replace(subject, module=subject.fresh_module(changes.without_dropout))
    name = strategy_name(strategy_in_process(subject.strategy, subject.num_ranks))
    verdict = Verdict(outcome="equal", strategy=name, num_ranks=subject.num_ranks)
    try:
        if to_the_bit:
            return proved_to_the_bit(subject, verdict)
        strategy, remark, is_local = comparable(subject.strategy, subject.num_ranks)
        subject = replace(subject, strategy=strategy)
        found = (compared_alone if is_local else _compared)(subject, verdict)
        return replace(found, remarks=(remark, *found.remarks)) if remark else found
    except ShardError as error:
        return replace(verdict, outcome="refused", error=f"{type(error).__name__}: {error}")
    except RunFailedError as error:
        return replace(verdict, outcome="failed", error=str(error))


@dataclass(frozen=True, kw_only=True)
class _ComparedRuns:
    subject: Subject
    ranks: Records
    alone: Records
    found: Comparison
    tolerance: float


def _compared(subject: Subject, verdict: Verdict) -> Verdict:
    pair = _in_precision(subject)
    verdict = _counted(verdict, subject, pair.alone)
    wrong = wrong_data(subject, pair.ranks)
    if wrong is not None:
        return _different(verdict, *wrong)
    decided, remarks = pair, list[str]()
    if _is_undecided(pair) and subject.precision != EXACT:
        decided, remarks = _exact(subject, pair)
    first, before = _trained(decided), _trained(pair)
    if first is None and before is not None:
        remark, kinds = _rounded(pair, before)
        remarks.append(remark)
        if kinds:
            return _only_in_low_precision(verdict, pair, kinds, tuple(remarks))
    verdict = replace(
        verdict,
        precision=decided.subject.precision,
        deviations=decided.found.deviations,
        is_rounding=first is None and before is not None,
    )
    if first is not None:
        lab = Laboratory(decided.subject, decided.ranks, decided.alone, first, decided.tolerance)
        verdict = replace(verdict, remarks=tuple(remarks))
        return _different(verdict, first, causes.find_cause(lab))
    return _logged(_accumulated(verdict, decided, remarks), decided, remarks)


def _counted(verdict: Verdict, subject: Subject, run: Records) -> Verdict:
    steps = 1 + max(place.step for place in run.records[0].values)
    return replace(verdict, num_steps=steps, precision=subject.precision)


def _different(verdict: Verdict, first: Difference, cause: Cause) -> Verdict:
    return replace(verdict, outcome="different", first=first, cause=cause)


def _is_undecided(pair: _ComparedRuns) -> bool:
    """Whether float64 could tell more: values that are each rank's own differ in any precision."""
    unsynced = pair.ranks.records[0].unsynced
    return any(
        one.place.kind != "metric" or bare_name(one.place.name) not in unsynced
        for one in pair.found.counting
    )


def _in_precision(subject: Subject) -> _ComparedRuns:
    ranks = subject.on_ranks()
    alone = subject.on_one_device(subject.joined(ranks.batches))
    found, tolerance = compared(subject, ranks, alone)
    return _ComparedRuns(
        subject=subject, ranks=ranks, alone=alone, found=found, tolerance=tolerance
    )


def _exact(subject: Subject, pair: _ComparedRuns) -> tuple[_ComparedRuns, list[str]]:
    """Compare once more in float64, in which rounding is next to nothing."""
    try:
        return _in_precision(replace(subject, precision=EXACT)), []
    except (RunFailedError, ShardError) as error:
        return pair, [
            f"float64 could not decide whether this is rounding, because the module does not run "
            f"in it: {error}"
        ]


def _rounded(pair: _ComparedRuns, before: Difference) -> tuple[str, list[Kind]]:
    """Return what is told of rounding, and the kinds of values in which there is more."""
    told = (
        f"{pair.subject.precision} deviates by {before.deviation:.1e} in step {before.place.step}, "
        f"{phase_of(before.place)}, which the same run in {EXACT} shows to be rounding"
    )
    if not is_low_precision(pair.subject.precision):
        return told, []
    got = deviations_in_low_precision(pair.ranks, pair.alone)
    parts = in_parts(pair.subject, pair.ranks)
    noise = deviations_in_low_precision(parts, pair.alone)
    told += (
        f"; in {pair.subject.precision} the ranks deviate by, and one device whose gradients "
        "accumulate over the ranks' batches: "
    ) + ", ".join(f"{kind} {value:.1e} and {noise[kind]:.1e}" for kind, value in got.items())
    return told, beyond_rounding(got, noise)


def _only_in_low_precision(
    verdict: Verdict, pair: _ComparedRuns, kinds: Sequence[Kind], remarks: tuple[str, ...]
) -> Verdict:
    precision = pair.subject.precision
    cause = Cause(
        "half precision",
        f"in {EXACT} the ranks are one device, and in {precision} they deviate in "
        f"{', '.join(kinds)} by more than rounding does",
        "one device that accumulates the ranks' batches deviates from itself by less "
        "than an eighth of that",
        "look for what is computed in one format on ranks and in another on one device, "
        "and for sums over samples in half precision: take them in float32",
    )
    first = next(one for one in pair.found.counting if one.place.kind in kinds)
    deviations = pair.found.deviations
    verdict = replace(verdict, deviations=deviations, remarks=remarks)
    return _different(verdict, first, cause)


def _trained(pair: _ComparedRuns) -> Difference | None:
    """Return the first difference in what is trained, not in what is only logged."""
    first = pair.found.first
    is_logged = all(one.place.kind == "metric" for one in pair.found.counting)
    return None if first is None or is_logged else first


def _logged(verdict: Verdict, pair: _ComparedRuns, remarks: list[str]) -> Verdict:
    """Look at the metrics, where all that is trained is equal."""
    found = [] if verdict.outcome != "equal" else pair.found.counting
    wrong = [one for one in found if not _is_of_a_step(one.place.name, pair.ranks.records[0])]
    remarks += [
        f"{name!r} is logged at each step without sync_dist=True, so that rank 0 logs the value of "
        f"its own samples"
        for name in (_own_step_values(pair.ranks) if verdict.outcome == "equal" else ())
    ]
    deviations = dict(verdict.deviations)
    if found:  # those that are in the remarks, or the difference itself
        deviations.pop("metric", None)
    verdict = replace(verdict, remarks=tuple(remarks), deviations=deviations)
    if not wrong:
        return verdict
    lab = Laboratory(pair.subject, pair.ranks, pair.alone, wrong[0], pair.tolerance)
    return _different(verdict, wrong[0], causes.log_cause(lab, wrong[0].place))


def _own_step_values(run: Records) -> list[str]:
    """Return the names of what each rank has logged in a step of its own samples."""
    first, *others = (one.step_values for one in run.records)
    return [
        name
        for name, value in first.items()
        if not all(math.isclose(one.get(name, value), value, rel_tol=1e-5) for one in others)
    ]


def _is_of_a_step(name: str, record: Record) -> bool:
    """Whether a metric is a step's value of each rank's own samples, and not an epoch's."""
    bare = bare_name(name)
    return bare in record.unsynced and (name.endswith("_step") or bare not in record.epoch_metrics)


def _accumulated(verdict: Verdict, pair: _ComparedRuns, remarks: list[str]) -> Verdict:
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
    found = causes.accumulated_multiple(pair.alone, whole, pair.tolerance)
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
        "accumulation scale",
        f"the gradients that {count} batches accumulate are {ratio:.4g} times those of one "
        "batch of all their samples: the step scales its loss for accumulation, which Lightning "
        "does already, or sums what is to be averaged",
        "one device, once with and once without accumulation; the factor is the same for "
        "every parameter",
        "leave accumulate_grad_batches out of the loss, and take a mean over samples",
    )
    return _different(verdict, first, cause)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    batches: Sequence[Any]
    found: Comparison
    tolerance: float


def compared_alone(subject: Subject, verdict: Verdict) -> Verdict:
    """Compare each rank with one device on its own samples."""
    run = subject.on_ranks()
    verdict = _counted(verdict, subject, run)
    wrong = wrong_data(subject, run)
    if wrong is not None:
        return _different(verdict, *wrong)
    decided, ranks = subject, _ranks(subject, run)
    before = _first_of(ranks)
    remarks = tuple[str, ...]()
    if before is not None and subject.precision != EXACT:
        try:
            decided = replace(subject, precision=EXACT)
            ranks = _ranks(decided, decided.on_ranks())
        except (RunFailedError, ShardError) as error:
            decided = subject
            remarks = (f"float64 could not decide whether this is rounding: {error}",)
    first = _first_of(ranks)
    verdict = replace(
        verdict,
        precision=decided.precision,
        deviations=_largest(ranks),
        remarks=remarks,
        is_rounding=first is None and before is not None,
    )
    if first is None:
        return verdict
    rank = next(one for one in ranks if one.found.first is first)
    return _different(verdict, first, _cause(decided, rank))


def _ranks(subject: Subject, run: Records) -> list[_Rank]:
    made = list[_Rank]()
    for record, batches in zip(run.records, run.batches, strict=True):
        own = _before_the_end(replace(record, data_rank=0, num_data_ranks=1))
        alone = _before_the_end(subject.on_one_device(batches).records[0])
        found, tolerance = compared(subject, own, alone)
        made.append(_Rank(batches=batches, found=found, tolerance=tolerance))
    return made


def _before_the_end(record: Record) -> Records:
    """Return a run without what it leaves when it ends: there the ranks meet after all."""
    last = max(place.step for place in record.values)
    values = {
        place: one
        for place, one in record.values.items()
        if place.phase != "log" and (place.step, place.phase) != (last, "hooks after the update")
    }
    return Records(records=[replace(record, values=values)])


def _first_of(ranks: Sequence[_Rank]) -> Difference | None:
    found = [one.found.first for one in ranks if one.found.first is not None]
    return min(found, key=lambda one: one.place.step, default=None)


def _largest(ranks: Sequence[_Rank]) -> dict[Kind, float]:
    largest: dict[Kind, float] = {}
    for one in ranks:
        for kind, value in one.found.deviations.items():
            largest[kind] = max(largest.get(kind, 0.0), value)
    return largest


def _cause(subject: Subject, rank: _Rank) -> Cause:
    moved = causes.first_random(subject, rank.batches, rank.tolerance)
    if moved is not None:
        shared = causes.cause_in_shared_values(subject, rank.batches, rank.tolerance)
        return shared or Cause(
            "random numbers",
            f"{moved} draws random numbers, other ones on each rank",
            "one device differs from itself with another seed",
            "it is no mistake if each sample gets numbers of its own; to compare the rest, "
            "prove with dropout off (dropout=False, --no-dropout)",
        )
    return Cause(
        "rank dependent",
        "the step uses its rank, the number of ranks or what other ranks have, while each "
        "trains by itself",
        "with the same samples and the same weights one device computes something else",
        "leave ranks and collective calls out of the step: between two exchanges nobody "
        "else takes it",
    )


# Whether each sample comes to one rank, as one device's loader gives it once.


def wrong_data(subject: Subject, ranks: Records) -> tuple[Difference, Cause] | None:
    """Return samples that come to several ranks, where one device's loader gives them once."""
    batches = ranks.batches
    if len(batches) < 2:
        return None
    found = repeated(batches)
    if found is None:
        return None
    first, other, number = found
    if _is_a_loaders(subject, ranks):
        return None
    alike = samples_of(batches[first][number]) == samples_of(batches[other][number])
    ours, theirs = (torch.tensor(float(one)) for one in (first, other))
    records = ranks.by_data_rank[other]
    place = Place(number // subject.accumulate, 0, "data", "batch", "samples")
    difference = Difference(
        place=place, rank=records[0].rank, got=theirs, expected=ours, deviation=float("inf")
    )
    how = "every rank is given the same samples" if alike else "ranks draw samples in orders of "
    because = how if alike else how + "their own, and some come to several ranks"
    return difference, Cause(
        "same samples" if alike else "repeated samples",
        because,
        f"a sample of rank {first} came to rank {other} in its batch {number}; one "
        "device's loader gives each sample once",
        "let the Trainer assign the samples (use_distributed_sampler=True), or give your "
        "own sampler the same seed on all ranks, and num_replicas and rank from "
        "trainer.distributed_sampler_kwargs",
    )


def _is_a_loaders(subject: Subject, ranks: Records) -> bool:
    """Whether a loader repeats so: one device's own, or a sampler that gives ranks as many each."""
    number = subject.num_steps * len(ranks.batches)
    alone = replace(subject, num_steps=number).on_one_device(None).records[0].batches
    given = [one for of_rank in ranks.batches for batch in of_rank for one in samples_of(batch)]
    all_samples = {one for batch in alone for one in samples_of(batch)}
    is_padding = len(given) - len(ranks.batches) < len(set(given))
    return num_repeats(alone) > 0 or (is_padding and set(given) == all_samples)


# The proof without tolerance: `same_bits=True` on ranks beside the same on one rank.
#
#     one rank    micro-batches 0 1 2 3    outputs and gradients of each, then the step's
#     two ranks   rank 0: 0 1  rank 1: 2 3    the same, compared with the one rank's by number
#
# Every difference is a finding. What one micro-batch computes names the rank that has computed it;
# what follows from all of them is the same on every rank.

_OF_MICRO_BATCHES = ("forward", "micro-batch")
_SIZES = {"data_parallel_size", "pipeline_parallel_size"}  # of a mesh, in which one rank is 1


class MicroBatchRecorder(Recorder):
    """Records the gradients of each micro-batch, too."""

    _handles: Sequence[RemovableHandle] = ()

    @override
    def on_before_backward(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor
    ) -> None:
        params: Any = pl_module.named_parameters()
        # Here the hooks of the step itself are there already, and are called before these.
        self._handles = [
            param.register_hook(partial(self._add, "micro-batch", "gradient", name))
            for name, param in params
            if param.requires_grad
        ]

    @override
    def on_after_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        for handle in self._handles:
            handle.remove()


def proved_to_the_bit(subject: Subject, verdict: Verdict) -> Verdict:
    """Compare a training on ranks with that on one rank, where both have the same bits."""
    made = strategy_in_process(subject.strategy, subject.num_ranks, same_bits=True)
    subject = replace(subject, strategy=made, recorder=MicroBatchRecorder)
    ranks = subject.on_ranks()
    number = subject.accumulate * ranks.records[0].num_data_ranks
    options = {**subject.options, "accumulate_grad_batches": number}
    given: Any = made
    sizes: dict[str, Any] = dict.fromkeys(_SIZES & given.given_options[1].keys(), 1)
    one_rank = strategy_in_process(made, 1, **sizes)
    alone = replace(subject, strategy=one_rank, num_ranks=1, options=options).on_ranks()
    places = partial(number_in_step, num_own=subject.accumulate, stage=made.run.options.stage)
    found = sorted(_differences(ranks, alone, places), key=lambda one: in_order(one.place))
    verdict = _counted(verdict, subject, alone)
    return _different(verdict, found[0], _cause_of_bits(found[0])) if found else verdict


def _differences(ranks: Records, alone: Records, number: Any) -> Iterator[Difference]:
    """Yield what has other bits; values that one run alone has count, too."""
    expected, num_ranks = dict(alone.records[0].values), ranks.records[0].num_data_ranks
    has_stages = num_ranks < len(ranks.records)
    for record in ranks.records:
        for place, values in record.values.items():
            own = place
            if place.phase == "micro-batch" and has_stages:
                continue  # hooks are given sums over those of a batch, from the first stage on
            if place.phase in _OF_MICRO_BATCHES:
                own = place._replace(micro=number(record.data_rank, num_ranks, place.micro))
            elif record.rank or _is_told_otherwise(place):
                continue
            for got, want in zip(values, expected.get(own, []), strict=False):
                if not has_same_bits(got, want):
                    yield Difference(
                        place=own,
                        rank=record.rank if own.phase in _OF_MICRO_BATCHES else None,
                        got=got,
                        expected=want,
                        deviation=deviation(got, want),
                    )


def _is_told_otherwise(place: Place) -> bool:
    """Whether a value is divided by a rank's number of micro-batches, or of its samples alone."""
    return place.kind == "loss" or (place.kind == "metric" and place.name.endswith("_step"))


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(bits_of(one), bits_of(other))


def _cause_of_bits(first: Difference) -> Cause:
    if first.rank is None:
        return Cause(
            "unknown",
            "each micro-batch has the same outputs and, but for pipelines, the same "
            "gradients, and what the ranks make of all of them is not the same",
            "same_bits=True on one rank has other bits",
            "look for a callback, a hook or an optimizer that adds up over shards or ranks",
        )
    return Cause(
        "rank dependent",
        f"micro-batch {first.place.micro} of the step has other bits on rank {first.rank} "
        f"than on one rank, with the same samples, weights and random numbers",
        "same_bits=True on one rank has other bits",
        "look for what uses the rank or the number of ranks, what was kept from earlier "
        "micro-batches, and random numbers from a generator of one's own",
    )
