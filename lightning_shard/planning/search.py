"""`lightning_shard.plan`: the candidates, their figures, and the one to train with.

fits in memory  ──>  fastest  ──>  of those within 2 %, the one with the fewest dimensions
                        └ its dry run, rank by rank, in place of the estimate

Advice tells what low precision would bring where a plan does not fit, or waits for links: it
changes the results of a step, and so is no candidate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from torch.optim import LBFGS

from lightning_shard.core._lightning import asked_layer_sync, runners_of
from lightning_shard.core.mesh import Axis
from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.pipeline_parallel.microbatches import batch_size_of
from lightning_shard.pipeline_parallel.skipped_blocks import uncompiled
from lightning_shard.planning.anatomy import Anatomy
from lightning_shard.planning.candidates import (
    Checkpointing,
    PlanCandidate,
    SearchSpace,
    strategy_class,
)
from lightning_shard.planning.dry_run import attached, trace_of
from lightning_shard.planning.estimate import Estimate, Estimator
from lightning_shard.planning.machine import MachineProfile, machine_profile
from lightning_shard.planning.plan import Plan
from lightning_shard.planning.report import DryRun, RankFigures, cell
from lightning_shard.planning.simulated_model import NoElements
from lightning_shard.precision.policy import TRUE_DTYPES
from lightning_shard.tensor_parallel.trial import explained

_STATE_BYTES = 2 + 2 / 64  # of an element under AdamW in 8 bits: two codes, and scales for blocks
_BASE_BYTES = 1 / 2 + 1 / 64  # of an element in 4 bits, doubly quantised
_MUCH = 0.1  # of a step, for which a rank waits


def low_precision_advice(
    anatomy: Anatomy,
    machine: MachineProfile,
    ranks_per_node: int,
    limit: int,
    found: Sequence[Estimate],
    chosen: Estimate | None,
) -> list[str]:
    """Return what to write for low precision, and what it would bring; a line for each."""
    on_device = [one for one in found if not one.candidate.uses_host]
    if on_device and (chosen is None or chosen.candidate.uses_host):
        return _for_memory(anatomy, on_device, limit)
    return [] if chosen is None else _for_links(machine, ranks_per_node, chosen)


def _for_memory(anatomy: Anatomy, found: Sequence[Estimate], limit: int) -> list[str]:
    """Return what holds less on a device than the least that there is."""

    def line(text: str, saved: Callable[[Estimate], float]) -> str:
        sizes = [int(one.peak_bytes - saved(one)) for one in found]
        least = min(sizes)
        made = found[sizes.index(least)].candidate
        fits = "fits" if least <= limit else "is too large, too"
        return f"{text}: {cell(least)} a device with {made.strategy}, which {fits}."

    lines = []
    dtype = TRUE_DTYPES.get(anatomy.precision, torch.float32)
    state_share = _STATE_BYTES / dtype.itemsize / anatomy.state_values
    if state_share < 1:
        lines.append(
            line(
                "optimizer: {class_path: bitsandbytes.optim.AdamW8bit}",
                lambda one: (1 - state_share) * one.memory.optimizer_state,
            )
        )
    frozen, base_share = anatomy.frozen_share, _BASE_BYTES / dtype.itemsize
    if frozen:
        lines.append(
            line(
                "the frozen base with quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
                lambda one: (
                    (1 - base_share) * frozen * (one.memory.parameters + one.memory.gathered)
                ),
            )
        )
    return lines


def _for_links(machine: MachineProfile, ranks_per_node: int, one: Estimate) -> list[str]:
    """Return what sends fewer bytes between nodes, where ranks wait for them."""
    made = one.candidate
    speed = machine.bytes_per_second(inside_node=made.dp * made.tp <= ranks_per_node)
    waits = (1 - one.hidden_share) * one.sent["dp"] / speed
    options = made.low_precision
    if made.dp * made.tp <= ranks_per_node or waits < _MUCH * one.seconds or not options:
        return []
    told = yaml.safe_dump(options, default_flow_style=True, sort_keys=False).strip()
    return [
        f"init_args: {told}, since {waits / one.seconds:.0%} of a step is waiting for links "
        f"between nodes: parameters then travel in 1.03 bytes each, gradients in 0.53."
    ]


_ALIKE = 1.02  # times of estimates that say nothing about which is faster
_TP_SIZES = (1, 2, 4, 8)
_MOST_DEVICES = 1_000_000


class LeftOut:
    """Says why candidates are not compared: what a strategy refuses of them, or an error."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, None]] = {}
        self._reasons: dict[tuple[Any, ...], str] = {}

    def add(self, name: str, reason: str) -> None:
        """Note why what has this name is left out."""
        self._names.setdefault(reason, {})[name] = None

    @contextmanager
    def trying(self, name: str, *alike: object) -> Iterator[bool]:
        """Leave out what an error is raised of inside; yield false if it was for its like.

        `alike` is what candidates have in common with others, of which the same error would be
        raised.
        """
        if alike in self._reasons:
            self.add(name, self._reasons[alike])
            yield False
            return
        try:
            with explained(_has_raised):
                yield True
        except ShardError as error:
            self._reasons[alike] = str(error)
            self.add(name, str(error))

    def lines(self) -> list[str]:
        """Return each reason, after the names of what is left out for it."""
        return [f"{', '.join(names)}: {reason}" for reason, names in self._names.items()]


def plan(
    module: "pl.LightningModule",
    batch: Any,
    *,
    devices: int,
    nodes: int | None = None,
    device_memory: int | None = None,
    global_batch: int | None = None,
    batch_size: int | None = None,
    machine: str | MachineProfile = "h100",
    precision: str = "bf16-mixed",
    tensor_plan: dict[str, Any] | None = None,
    checkpointing: Sequence[Checkpointing] = (None, "full"),
) -> Plan:
    """Search for the strategy and options with which a module trains fastest in its memory.

    The search looks at a few of the model's blocks; the recommended step is simulated in full.

    Args:
        module: As for `trainer.fit`; its parameters may be on meta.
        batch: A batch of any number of samples, of which only shapes count.
        devices: Number of all devices.
        nodes: Number of nodes; by default as many as the profile's nodes fill.
        device_memory: Bytes of one device; by default the profile's.
        global_batch: Samples of a step of all ranks; by default the batch's on each device.
        batch_size: Samples of a batch of each data-parallel rank's loader; None leaves it open.
        machine: Name of a published profile, path of a measured one, or a profile.
        precision: As for the Trainer.
        tensor_plan: Layers that tensor parallel splits; None finds them, from values.
        checkpointing: What of "full", "selective" and None to search through.

    Raises:
        ConfigError: Sizes that do not go together, or a `training_step` that asks for elements.
    """
    profile = machine if isinstance(machine, MachineProfile) else machine_profile(machine)
    per_node = _ranks_per_node(devices, nodes, profile)
    with explained(partial(_uncounted, module)):
        anatomy = Anatomy(module, batch, precision, tensor_plan)
    failed = LeftOut()
    tp_sizes = _tp_sizes(anatomy, min(per_node, devices), failed)
    if tensor_plan is not None and failed.lines() and tp_sizes == (1,):
        raise ConfigError(f"The given tensor_plan splits nothing here. {failed.lines()[0]}")
    space = SearchSpace(
        num_ranks=devices,
        ranks_per_node=per_node,
        num_blocks=anatomy.num_blocks,
        global_batch=batch_size_of(batch) * devices if global_batch is None else global_batch,
        tp_sizes=tp_sizes,
        checkpointing=tuple(checkpointing) if anatomy.num_blocks else (None,),
        batch_size=batch_size,
        min_microbatch=anatomy.sizes[0],
    )
    limit = profile.device_memory if device_memory is None else device_memory
    return _searched(anatomy, space, profile, limit, failed)


def _searched(
    anatomy: Anatomy, space: SearchSpace, profile: MachineProfile, limit: int, failed: LeftOut
) -> Plan:
    """Return the plan of all candidates, and the fastest that fits into the limit."""
    found = _estimated(Estimator(anatomy, profile, space.ranks_per_node), space, failed)
    chosen = _confirmed(anatomy, limit, found, failed, space.ranks_per_node)
    if not found:
        raise ConfigError(
            f"No candidate for {space.global_batch} samples a step of {space.num_ranks} devices; "
            f"expected a global batch that a number of data-parallel ranks divides, and a module "
            f"that a strategy takes. {'; '.join(failed.lines())}"
        )
    return Plan(
        machine=profile,
        num_devices=space.num_ranks,
        ranks_per_node=space.ranks_per_node,
        device_memory=limit,
        global_batch=space.global_batch,
        precision=anatomy.precision,
        num_parameters=sum(param.numel() for param in anatomy.module.parameters()),
        tensor_plan=anatomy.plan,
        estimates=tuple(found),
        recommendation=chosen,
        left_out=tuple(failed.lines()),
        low_precision=tuple(
            low_precision_advice(anatomy, profile, space.ranks_per_node, limit, found, chosen)
        ),
    )


def _uncounted(module: "pl.LightningModule", error: str) -> str:
    return (
        f"A plan counts a step of {type(module).__name__} on a few samples of zeros, which failed "
        f"({error}); expected a training_step that takes any number of samples."
    )


def _estimated(estimator: Estimator, space: SearchSpace, failed: LeftOut) -> list[Estimate]:
    """Return the figures of every candidate that would train."""
    anatomy, found = estimator.anatomy, list[Estimate]()
    if anatomy.refusal:
        failed.add("1 sample a forward", anatomy.refusal)
    with _asking(anatomy) as why_not:
        for one in space.candidates():
            name, choice = _named(one), one.checkpointing
            reason = why_not(one)
            if reason:
                failed.add(name, reason)
                continue
            parts = one.pp > 1, one.tp, choice, anatomy.keeps_as(choice, one.zero_stage)
            with failed.trying(name, *parts) as is_new:
                found += [estimator.estimate(one)] if is_new else []
    return found


@contextmanager
def _asking(anatomy: Anatomy) -> Iterator[Callable[[PlanCandidate], str]]:
    """Yield what says why a candidate would not train: what its strategy checks for a fit."""
    module = NoElements().module(anatomy.module, left_out=runners_of(anatomy.module)).train()
    trainers = runners_of(anatomy.module)
    known: dict[Any, str] = {}

    def why_not(made: PlanCandidate) -> str:
        if made.accumulated > 1 and not module.automatic_optimization:
            return "a module that steps by hand accumulates no batches by a Trainer's option"
        if not optimizers and (made.zero_stage or made.pp * made.tp > 1):
            why = f": {refusal}" if refusal else ""
            return f"configure_optimizers makes none for parameters without values{why}"
        if made.accumulated > 1 and any(isinstance(one, LBFGS) for one in optimizers):
            return (
                "LBFGS asks for the loss several times a step, each time that of the last batch "
                "alone, whose gradients would add up"
            )
        key = _named(made), made.dp > 1, made.tp > 1, made.num_microbatches > 1
        if key not in known:
            known[key] = ""
            ranks = made.pp * made.dp * made.tp
            try:
                with explained(_has_raised):
                    strategy_of(anatomy, made).run.setup.check_fit(
                        module, optimizers, world_size=ranks, layer_sync=layer_sync
                    )
            except ShardError as error:
                known[key] = str(error)
        return known[key]

    with attached(module) as strategy, uncompiled():
        trainer: Any = module.trainer
        trainer.callbacks = [one for each in trainers for one in each.callbacks]
        optimizers, refusal = trainer.optimizers, strategy.refusal
        layer_sync = next(map(asked_layer_sync, trainers), None)
        yield why_not


def _has_raised(error: str) -> str:
    return f"looking at it has raised {error}"


def _named(made: PlanCandidate) -> str:
    stage = f" of ZeRO stage {made.zero_stage}" if made.pp * made.tp > 1 else ""
    return made.strategy + stage + (f" with offload={made.offload!r}" if made.offload else "")


def recommended(found: Sequence[Estimate], limit: int) -> Estimate | None:
    """Return the estimate to train with; None where nothing fits.

    Offload is taken only where nothing else fits: what the host's processor needs for the update,
    and what its memory holds, is in no profile.
    """
    fitting = [one for one in found if one.peak_bytes <= limit]
    fitting = [one for one in fitting if not one.candidate.uses_host] or fitting
    if not fitting:
        return None
    fastest = min(one.seconds for one in fitting)
    near = [one for one in fitting if one.seconds <= _ALIKE * fastest]
    return min(near, key=_plainness)


def _plainness(one: Estimate) -> tuple[Any, ...]:
    """Order of what is as fast: fewest dimensions, no recomputation, lowest stage, least memory."""
    made = one.candidate
    dimensions = sum(size > 1 for size in (made.pp, made.tp))
    return dimensions, made.checkpointing is not None, made.zero_stage, one.peak_bytes


def _confirmed(
    anatomy: Anatomy, limit: int, found: list[Estimate], failed: LeftOut, per_node: int
) -> Estimate | None:
    """Simulate the recommended candidate; the next one where it does not fit or cannot be."""
    untried = list(found)
    while (best := recommended(untried, limit)) is not None:
        untried.remove(best)
        made = best.candidate
        alike = _named(made), made.tp, made.schedule, made.microbatch, made.checkpointing
        exact = None
        with failed.trying(_named(made), *alike) as is_new:
            exact = simulated(anatomy, best, per_node) if is_new else None
        if exact is None:
            found.remove(best)
            continue
        found[found.index(best)] = exact
        if exact.peak_bytes <= limit:
            return exact
    return None


def simulated(anatomy: Anatomy, one: Estimate, ranks_per_node: int = 8) -> Estimate:
    """Return an estimate with the figures of a dry run of the same options."""
    made = one.candidate
    run = dry_run_of_candidate(anatomy, made, ranks_per_node)
    fullest = max(run.ranks, key=lambda rank: rank.memory.total)
    return replace(
        one,
        rank=run.ranks.index(fullest),
        memory=fullest.memory,
        passing=_passing(anatomy, one, fullest),
        sent=_most([rank.sent for rank in run.ranks], made),
        sent_elements=_most([rank.sent_elements for rank in run.ranks], made),
        is_simulated=True,
    )


def _most(of_ranks: Sequence[Mapping[Axis, int]], made: PlanCandidate) -> dict[Axis, int]:
    """Return the most that a rank sends in a step of several accumulated batches."""
    at_end = ("dp",) if made.zero_stage < 2 else ()
    return {
        axis: max(sent[axis] for sent in of_ranks) * (1 if axis in at_end else made.accumulated)
        for axis in of_ranks[0]
    }


def _passing(anatomy: Anatomy, one: Estimate, fullest: RankFigures) -> int:
    """Return the passing bytes at the candidate's own number of samples."""
    made = one.candidate
    if made.pp > 1:
        return one.passing
    trace = trace_of(
        anatomy.split(made.tp, 2, made.checkpointing),
        anatomy.short(2),
        anatomy.batch(made.microbatch),
        world_size=made.tp,
        precision=anatomy.precision,
    )
    return trace.most - trace.saved


def dry_run_of_candidate(anatomy: Anatomy, made: PlanCandidate, ranks_per_node: int = 8) -> DryRun:
    """Return the dry run of a candidate's strategy."""
    run: DryRun = strategy_of(anatomy, made).dry_run(
        anatomy.module,
        anatomy.batch(made.batch_size),
        world_size=made.pp * made.dp * made.tp,
        precision=anatomy.precision,
        ranks_per_node=ranks_per_node,
        state_values=anatomy.state_values,
    )
    return run


def strategy_of(anatomy: Anatomy, made: PlanCandidate) -> Any:
    """Return a candidate's strategy."""
    return strategy_class(made.class_name)(**made.options(anatomy.plan_of(made.tp)))


def _ranks_per_node(devices: int, nodes: int | None, profile: MachineProfile) -> int:
    if not 1 <= devices <= _MOST_DEVICES or (nodes is not None and (nodes < 1 or devices % nodes)):
        raise ConfigError(
            f"got {devices} devices on {nodes} nodes, expected 1 to {_MOST_DEVICES:,} devices, and "
            f"as many on each node."
        )
    return devices // nodes if nodes is not None else min(devices, profile.devices_per_node)


def _tp_sizes(anatomy: Anatomy, most: int, failed: LeftOut) -> tuple[int, ...]:
    sizes = [1]
    for tp in _TP_SIZES[1:]:
        if tp > most:
            break
        with failed.trying(f"tensor parallel over {tp} ranks", tp):
            anatomy.unpipelined(tp, None)
            sizes.append(tp)
        if tp not in sizes:
            break
    return tuple(sizes)
