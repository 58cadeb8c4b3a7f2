"""From the loss of a rank to the next boundary: new groups, the engine anew, the state put back.

    drop the generation ─> ask for the next one ─> its groups ─> the newest boundary of which
      somebody has every shard ─> the engine anew ─> shards moved into it ─> loops, callbacks and
      schedulers as they were there ─> data assigned to the ranks there are

Where nobody has some shard, ranks go back to the newest checkpoint. Else the snapshots that are
left become the state of a new number of ranks, one tensor entry at a time in one exchange, so that
no rank holds more than its share and that entry:

    rank 0   holds [0 .. 6)   new shard [0 .. 4)      copies 0..4, sends 4..6 to rank 1
    rank 1   holds nothing    new shard [4 .. 8)      gets 4..6 from rank 0, 6..8 from rank 2
    rank 2   holds [6 .. 12)  new shard [8 .. 12)     copies 8..12, sends 6..8 to rank 1

Every new rank gets each element of its range once: from its own memory where it holds the shard,
else from a holder that has little to send so far.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.backends.liveness.thread import TERMINATED_STATUS
from lightning_shard.backends.pending import is_about_a_peer
from lightning_shard.backends.rendezvous import unless_a_rank_fails
from lightning_shard.checkpoint.rank_snapshot import (
    PARAMETERS,
    Snapshot,
    SnapshotMetadata,
    TensorKey,
    check_fits,
    forget_state,
    rebuild_optimizers,
)
from lightning_shard.data_parallel.agreement import strangers
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.elastic import _lightning
from lightning_shard.elastic.membership.generation import Generation
from lightning_shard.elastic.progress import Progress, WhatTrains, flags_of
from lightning_shard.elastic.reconfigurable import ElasticFit
from lightning_shard.elastic.snapshot_memory import SnapshotMemory
from lightning_shard.environments.launchers._lightning import mark_terminated
from lightning_shard.environments.launchers.failures import all_raise
from lightning_shard.errors import (
    CheckpointError,
    ConfigError,
    EvictedError,
    LayoutError,
    RankFailedError,
)

_SIGNALS_SECONDS = 1.0  # between the first and the last SIGTERM to the ranks of a job
_POLL_SECONDS = 0.01


class EarlyEnd:
    """Ends a fit on this rank: it leaves, all leave, or too few ranks are left.

        this rank is asked to leave    peers that stay take over its snapshot; it leaves the job
        all ranks are asked to leave   they save a checkpoint together, and end
        too few ranks for too long     those that are left save a checkpoint, and raise

    Who asks: SIGTERM, or in process a `Fault` of kind "leave".
    """

    def __init__(self, fit: ElasticFit, memory: SnapshotMemory) -> None:
        self.is_certain = self.is_common = False
        self._fit = fit
        self._memory = memory

    def by(self, error: BaseException, *, is_common: bool = False) -> BaseException:
        """Note that an error ends the fit, of all ranks alike if it `is_common`; return it."""
        self.is_certain, self.is_common = True, is_common
        return error

    def let_go(self) -> None:
        """Let those ranks go that were asked to; each rank must call."""
        leaving = self._who_leaves()
        if not all(leaving):
            self._memory.hand_over(leaving)
        if not leaving[self._fit.strategy.collectives.rank]:
            return
        ends = self.by(SIGTERMException(TERMINATED_STATUS), is_common=all(leaving))
        mark_terminated(self._fit.trainer)
        if self.is_common:  # the scheduler ends the job
            self._save()
        else:
            self._memory.close()
            self._fit.strategy.drop_generation()
            self._fit.ranks.membership.leave()
        raise ends

    def save_and_end(self, generation: Generation) -> None:
        """Save what there is, and end, in the last generation; each rank must call."""
        self.is_certain = True
        path, step = self._save(), self._fit.trainer.global_step
        raise RankFailedError(
            f"Rank {generation.rank}: {generation.reason or 'too few ranks are left'}, and nobody "
            f"has come for a while. The state after step {step} is saved in {path}. Start "
            f"again with ckpt_path={str(path)!r} when there are more ranks."
        )

    def _who_leaves(self) -> list[bool]:
        """By rank; who ends a whole job sends its signals one after the other."""
        collectives, membership = self._fit.strategy.collectives, self._fit.ranks.membership
        leaving: list[bool] = collectives.all_gather_object(membership.is_leaving)
        if all(leaving):
            return leaving
        deadline = time.monotonic() + _SIGNALS_SECONDS
        while current_world() is None and not membership.is_leaving:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        leaving = collectives.all_gather_object(membership.is_leaving)
        return leaving

    def _save(self) -> str:
        path = _lightning.emergency_place(self._fit.trainer)
        self._fit.trainer.save_checkpoint(path)
        self._fit.strategy.finish_save()
        return path


# A range that several ranks could send is divided into parts of at least so many elements.
_MIN_PART_NUMEL = 1 << 14


class Move(NamedTuple):
    """A range of the full buffer's elements on its way; `shard` is the source's old one."""

    source: int
    target: int
    shard: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def plan_moves(
    holders: Mapping[int, Sequence[int]],
    old_bounds: Mapping[int, tuple[int, int]],
    new_bounds: Sequence[tuple[int, int]],
    *,
    min_part_numel: int = _MIN_PART_NUMEL,
) -> list[Move]:
    """Plan which ranges travel from which rank to which.

    Args:
        holders: By old shard, the ranks that have it.
        old_bounds: By old shard, its first and one-past-last element; disjoint.
        new_bounds: By rank, the bounds of its new range; ranges may overlap or be the same.
        min_part_numel: A range is divided between holders down to this many elements.
    """
    moves: list[Move] = []
    load = dict.fromkeys((rank for ranks in holders.values() for rank in ranks), 0)
    for target, (first, last) in enumerate(new_bounds):
        for shard, (begin, end) in sorted(old_bounds.items(), key=lambda item: item[1]):
            start, stop = max(first, begin), min(last, end)
            if start >= stop:
                continue
            having = holders.get(shard, ())
            if not having:
                raise LayoutError(
                    f"Rank {target} of {len(new_bounds)} needs the elements {start} to {stop} of "
                    f"shard {shard}, which no rank holds, expected one at least. Take an older "
                    f"snapshot, or a checkpoint."
                )
            if target in having:
                moves.append(Move(target, target, shard, start, stop))
                continue
            for part_start, part_stop in _parts(start, stop, len(having), min_part_numel):
                source = min(having, key=lambda rank: (load[rank], rank))
                load[source] += part_stop - part_start
                moves.append(Move(source, target, shard, part_start, part_stop))
    return moves


def _parts(start: int, stop: int, most: int, min_numel: int) -> list[tuple[int, int]]:
    """Divide a range evenly, into at most so many parts."""
    number = max(1, min(most, (stop - start) // min_numel))
    cuts = [start + (stop - start) * index // number for index in range(number + 1)]
    return list(pairwise(cuts))


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """The snapshot that all ranks go back to."""

    generation: int
    step: int
    holders: tuple[tuple[int, ...], ...]

    def has(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is a part of this one."""
        metadata = snapshot.metadata
        mine = metadata.generation, metadata.step, metadata.num_shards
        return mine == (self.generation, self.step, len(self.holders))


def agree(collectives: Collectives, held: Sequence[Snapshot]) -> RecoveryPlan | None:
    """Find the newest snapshot whose shards are all there among the ranks; each must call.

    A later generation counts more than a greater step: its steps may have been taken back.
    """
    mine = [(c.generation, c.step, c.num_shards, c.shard) for c in (one.metadata for one in held)]
    holders: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    for rank, theirs in enumerate(collectives.all_gather_object(mine)):
        for generation, step, num_shards, shard in set(theirs):
            shards = holders.setdefault((generation, step, num_shards), {})
            shards.setdefault(shard, []).append(rank)
    full = [moment for moment, shards in holders.items() if len(shards) == moment[2]]
    if not full:
        return None
    newest = max(full)
    by_shard = tuple(tuple(holders[newest][shard]) for shard in range(newest[2]))
    return RecoveryPlan(generation=newest[0], step=newest[1], holders=by_shard)


def restore(
    collectives: Collectives,
    plan: RecoveryPlan,
    held: Sequence[Snapshot],
    engine: DataParallelEngine,
    optimizers: Sequence[Optimizer],
    *,
    me: str = "",
) -> tuple[bytes, bytes | None]:
    """Bring engine and optimizers to the state of a snapshot; each rank must call.

    Returns what rank 0 had put beside the state, and what this rank had.
    """
    mine = {one.metadata.shard: one for one in held if plan.has(one)}
    own = [one for one in held if plan.has(one) and me and one.metadata.owner == me]
    all_metadata, shard_indices = _share(collectives, plan, mine, engine)
    check_fits(all_metadata[0], engine, optimizers)
    forget_state(optimizers)
    shards: dict[TensorKey, list[Tensor]] = {}
    keys = {key for metadata in all_metadata for key in metadata.tensor_entries}
    for key in sorted(keys, key=lambda key: key.order):
        flat = engine.flats[key.flat]
        target = flat.shard
        if key.optimizer != PARAMETERS:
            target, shards[key] = key.zeros(flat)
        moves = _plan_entry(plan, all_metadata, key, flat, shard_indices)
        move_entry(collectives, key, mine, moves, target, flat)
    rebuild_optimizers(optimizers, all_metadata, engine, shards)
    engine.publish_shards()
    return all_metadata[0].extra, own[0].metadata.extra if own else None


def _share(
    collectives: Collectives,
    plan: RecoveryPlan,
    mine: Mapping[int, Snapshot],
    engine: DataParallelEngine,
) -> tuple[list[SnapshotMetadata], list[int]]:
    """Let every rank know each shard's metadata, and which new shard each rank has."""
    rank = collectives.rank
    given = {
        shard: replace(
            mine[shard].metadata, extra=mine[shard].metadata.extra if shard == 0 else b""
        )
        for shard, holders in enumerate(plan.holders)
        if holders[0] == rank
    }
    of_all_ranks = collectives.all_gather_object((engine.flats[0].shard_index, given))
    known = {shard: metadata for _, given in of_all_ranks for shard, metadata in given.items()}
    all_metadata = [known[shard] for shard in range(len(plan.holders))]
    return all_metadata, [index for index, _ in of_all_ranks]


def _plan_entry(
    plan: RecoveryPlan,
    all_metadata: Sequence[SnapshotMetadata],
    key: TensorKey,
    flat: FlatParameters,
    shard_indices: Sequence[int],
) -> list[Move]:
    """Return who sends what of one tensor entry; the same on every rank."""
    end = -(-flat.layout.slots[-1].stop // key.elements)
    old = {
        shard: (shard * tensor_entry.numel, min((shard + 1) * tensor_entry.numel, end))
        for shard, metadata in enumerate(all_metadata)
        if (tensor_entry := metadata.tensor_entries.get(key))
        is not None  # else no parameter there has it
    }
    bounds = map(flat.layout.shard_bounds, shard_indices)
    new = [(start // key.elements, stop // key.elements) for start, stop in bounds]
    return plan_moves(dict(enumerate(plan.holders)), old, new)


@torch.no_grad()
def move_entry(
    collectives: Collectives,
    key: TensorKey,
    held: Mapping[int, Snapshot],
    moves: Sequence[Move],
    target: Tensor,
    flat: FlatParameters,
) -> None:
    """Fill this rank's new shard, shape (S,), of one tensor entry by moves that all ranks know."""
    rank = collectives.rank
    first = flat.layout.shard_bounds(flat.shard_index)[0] // key.elements
    width = key.dtype.itemsize
    places = target.view(torch.uint8)

    def place(move: Move) -> Tensor:
        return places[(move.start - first) * width : (move.stop - first) * width]

    for move in moves:
        if move.source == move.target == rank:
            place(move).copy_(_content(key, held, move))
    travelling = [move for move in moves if move.source != move.target]
    if not travelling:  # all ranks know
        return
    outgoing: list[list[Tensor]] = [[] for _ in range(collectives.size)]
    incoming: list[list[Tensor]] = [[] for _ in range(collectives.size)]
    for move in travelling:
        if move.source == rank:
            outgoing[move.target].append(_content(key, held, move))
        if move.target == rank:
            incoming[move.source].append(place(move))
    _exchange(collectives, outgoing, incoming, target.device)


def _content(key: TensorKey, held: Mapping[int, Snapshot], move: Move) -> Tensor:
    snapshot = held[move.shard]
    first = move.shard * snapshot.metadata.tensor_entries[key].numel
    return snapshot.elements(key, move.start - first, move.stop - first)


def _exchange(
    collectives: Collectives,
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> None:
    """Send each rank its parts in one message, and write what came to where it belongs."""
    sent = [part for parts in outgoing for part in parts]
    places = [part for parts in incoming for part in parts]
    source = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8)
    source = source.to(device)
    output = source.new_empty(sum(part.numel() for part in places))
    collectives.all_to_all(
        output,
        source,
        output_split_sizes=[sum(part.numel() for part in parts) for parts in incoming],
        input_split_sizes=[sum(part.numel() for part in parts) for parts in outgoing],
    ).wait()
    came = torch.split(output, [part.numel() for part in places])
    for part, content in zip(places, came, strict=True):
        part.copy_(content)


class NextGeneration:
    """Brings this rank from one generation into the next, as often as there is one."""

    def __init__(self, fit: ElasticFit, memory: SnapshotMemory, early_end: EarlyEnd) -> None:
        self._fit = fit
        self._memory = memory
        self._early_end = early_end
        self._fit_began = time.time()  # by the clock of files
        self._num_in_vain = 0
        self._last_loss: tuple[tuple[str, ...], int] = ((), -1)

    def enter(self, error: BaseException | None) -> bool:
        """Go on in the next generation, from the newest boundary that is complete."""
        is_own = error is not None and not (
            isinstance(error, RankFailedError) or is_about_a_peer(error)
        )
        if error is not None and is_own and self._fit.ranks.generation.number and all_raise(error):
            raise self._early_end.by(error, is_common=True)  # no accident: it would come again
        self._memory.close()
        self._fit.strategy.drop_generation()
        generation = self._following(error, is_own=is_own)
        was_first = self._fit.ranks.global_rank == 0
        self._check_gain(generation, error)
        self._fit.strategy.join_generation(generation)
        self._fit.hook_values.keeps_flags = is_own
        behind_step = self._take_up(generation)
        _lightning.share_places(self._fit.trainer, self._fit.strategy.broadcast)
        if self._fit.ranks.global_rank == 0 and not was_first:
            _lightning.continue_logs(self._fit.trainer)
        if generation.is_last:
            self._early_end.save_and_end(generation)
        return behind_step

    def _following(self, error: BaseException | None, *, is_own: bool) -> Generation:
        """Wait for the next generation; whatever is raised meanwhile ends the fit."""
        try:
            return self._fit.ranks.membership.following(error if is_own else None)
        except EvictedError as verdict:
            assert error is not None
            error.add_note(str(verdict))
            raise self._early_end.by(error) from None
        except BaseException as raised:
            self._early_end.by(raised)
            raise

    def _check_gain(self, generation: Generation, error: BaseException | None) -> None:
        """Raise the error where the same ranks reconfigure again and again at the same step."""
        here = generation.members, self._fit.trainer.global_step
        in_vain = error is not None and here == self._last_loss
        self._num_in_vain = self._num_in_vain + 1 if in_vain else 0
        self._last_loss = here
        if self._num_in_vain > self._fit.max_failures:
            assert error is not None
            error.add_note(
                f"The same {generation.size} ranks have reconfigured {self._num_in_vain} times at "
                f"step {self._fit.trainer.global_step}, though none of them was lost."
            )
            raise self._early_end.by(error)

    def _take_up(self, generation: Generation) -> bool:
        """Bring this generation to a boundary; each rank must call."""
        plan = agree(self._fit.strategy.collectives, self._memory.held)
        if plan is None:
            self._go_back_to_a_checkpoint(generation)
            behind_step = False
        else:
            behind_step = self._go_on_from_snapshots(plan, generation)
        self._memory.remember(behind_step=behind_step)
        return behind_step

    def _go_on_from_snapshots(self, plan: RecoveryPlan, generation: Generation) -> bool:
        strategy, trainer = self._fit.strategy, self._fit.trainer
        first = [one for one in self._memory.held if plan.has(one) and one.metadata.shard == 0]
        told = Progress.unpack(first[0].metadata.extra).what_trains if first else None
        self._rebuild_engine(generation, told, src=plan.holders[0][0])
        extra, own_extra = restore(
            strategy.collectives,
            plan,
            self._memory.held,
            strategy.engine,
            strategy.optimizers,
            me=generation.me,
        )
        own = None if own_extra is None else Progress.unpack(own_extra)
        progress = Progress.unpack(extra)
        progress.load_module(trainer.lightning_module)
        progress.load_trainer(trainer)
        own_values = None if own is None else own.hook_values
        self._fit.hook_values.load(progress.hook_values, own_values, strategy.collectives)
        self._fit.data_assignment.take_over(progress.batch_assignment, generation.size)
        self._ask_for_data()
        self._fit.hook_values.load_data_again()
        self._fit.data_assignment.recount(progress.accumulation)
        progress.load_own(trainer, own, generation.rank)
        return progress.behind_step

    def _go_back_to_a_checkpoint(self, generation: Generation) -> None:
        """Go back to the newest checkpoint, where too many ranks were lost at once."""
        trainer, path = self._fit.trainer, None
        if generation.rank == 0:
            path = _lightning.newest_checkpoint(trainer, self._fit_began)
        path = self._fit.strategy.broadcast(path)
        if path is None:
            error = CheckpointError(
                f"Rank {generation.rank}: {generation.reason}, and with them all copies of a "
                f"part of the state; expected a checkpoint to go back to, but this fit has saved "
                f"none. Add a ModelCheckpoint with every_n_train_steps."
            )
            raise self._early_end.by(error)
        module, optimizers = trainer.lightning_module, self._fit.strategy.optimizers
        self._rebuild_engine(generation, WhatTrains.of(module, optimizers, flags_of(module)))
        _lightning.load_checkpoint(trainer, path)
        self._ask_for_data()
        self._fit.data_assignment.recount_loaded()

    def _rebuild_engine(
        self, generation: Generation, told: WhatTrains | None, src: int = 0
    ) -> None:
        """Make the engine of what trains by the word of rank `src`; each rank must call."""
        what_trains = self._fit.strategy.broadcast(told, src)
        assert what_trains is not None  # rank `src` knows it
        module = self._fit.trainer.lightning_module
        what_trains.go_back(module, self._fit.strategy.optimizers)
        self._fit.strategy.rebuild_engine()
        unless_a_rank_fails(
            partial(self._memory.enter, generation), "making the group of the snapshots"
        )

    def _ask_for_data(self) -> None:
        """Have the loaders asked for anew, from the position on; each rank must call."""
        mid_epoch = self._fit.data_assignment.batch_assignment.position.steps > 0
        _lightning.begin_anew(self._fit.trainer, mid_epoch=mid_epoch)
        self._fit.data_assignment.check_alike(self._fit.strategy.collectives)


def refuse_strangers(
    model: nn.Module, collectives: Collectives, settings: Mapping[str, Any]
) -> None:
    """Go on without newcomers that have another model or other settings; each rank must call."""
    others = strangers(model, collectives, settings)
    if others and collectives.rank not in others:
        raise RankFailedError(
            f"Rank {collectives.rank}: the ranks {others} have another model than rank 0, or other "
            f"settings, and so take no part. Start them with the same arguments everywhere."
        )
    if others:
        raise ConfigError(
            f"Rank {collectives.rank}: the model that this process has built is another than that "
            f"which is trained, or its Trainer, strategy or versions are, expected the same. Start "
            f"it with the same arguments."
        )
