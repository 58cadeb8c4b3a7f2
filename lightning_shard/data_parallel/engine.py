"""The data-parallel engine: one mechanism, four stages.

    stage   parameters   gradients   optimizer state   backward                step
    0       full         full        full              all-reduce
    1       full         full        1/N               reduce-scatter (*)      all-gather
    2       full         1/N         1/N               reduce-scatter          all-gather
    3       1/N          1/N         1/N               all-gather,
                                                       reduce-scatter          (*) at the boundary
                                                                                   of accumulation
The module keeps its own parameters, the optimizer keeps its own object; the engine moves what
`param.data` and `param.grad` point at. Source: ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives, begin_update
from lightning_shard.backends.free_memory import keep_freed_memory
from lightning_shard.core.states import Asker, asker, having, setting
from lightning_shard.data_parallel.agreement import check_same_model
from lightning_shard.data_parallel.buffers import BufferSync
from lightning_shard.data_parallel.compression.compressor import Exchange
from lightning_shard.data_parallel.compression.float8_gather import Float8Scales
from lightning_shard.data_parallel.data_groups import DataGroups, Sole
from lightning_shard.data_parallel.gradients.early_clipping import EarlyClipping
from lightning_shard.data_parallel.gradients.flat_gradients import (
    FlatGradients,
    build_gradients,
    reducing_of,
)
from lightning_shard.data_parallel.gradients.gradient_shards import AbsentGradients, GradientShards
from lightning_shard.data_parallel.gradients.hand_edits import HandEdits
from lightning_shard.data_parallel.gradients.reducer import (
    HAS_ARRIVED,
    ArrivalHooks,
    Reducer,
    always,
)
from lightning_shard.data_parallel.gradients.tree_sum import TreeExchange
from lightning_shard.data_parallel.gradients.usage import agreement
from lightning_shard.data_parallel.memory.adoption import Adoption
from lightning_shard.data_parallel.memory.equal_weights import EqualWeights
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.memory.leftovers import (
    give_back,
    mark_leftover,
    refuse_leftover_shards,
)
from lightning_shard.data_parallel.memory.quantised import refuse_quantised
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit, has_parts, share_out
from lightning_shard.data_parallel.offload.copier import HostCopier
from lightning_shard.data_parallel.optimizer_view import OptimizerView
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.data_parallel.phases import Phase, Phases
from lightning_shard.data_parallel.recompute.checkpointed_blocks import noting_reentrance
from lightning_shard.data_parallel.torch_private import BatchNorm, gradient_hooks
from lightning_shard.data_parallel.units.full_values import (
    FullValues,
    bring_together,
    gathering_near,
)
from lightning_shard.data_parallel.units.presenting import (
    cut_loaded,
    explaining_gradients,
    explaining_graphs,
    explaining_shards,
    look_full,
)
from lightning_shard.data_parallel.units.unit import HERE, Unit, build_units, exist_once
from lightning_shard.data_parallel.units.unsharding import Since, Unsharder
from lightning_shard.data_parallel.views.sharded_parameter import move_out, shards_as_they_are
from lightning_shard.data_parallel.views.sharded_tensor import LentMemory
from lightning_shard.data_parallel.views.unseen_calls import SeesUnseenCalls, makers_seen

T = TypeVar("T")
_InsideOf = Callable[[Optimizer], AbstractContextManager[object]]


class DataParallelEngine:
    """Keeps one model in step over the data-parallel ranks.

    Args:
        model: Any module, on its device, the same on all ranks. Its parameters become views into
            flat buffers; rank 0's values win.
        groups: The data-parallel ranks, one group or several; each rank must construct this.
        reducing: Second groups of the same ranks, for gradients: ranks that use different parts of
            the model may start reductions at other moments than unshards. Made here when left out.
        split: How the model is split over other ranks; left out when it is not.

    Attributes:
        collectives: Group of all data-parallel ranks.
        shards: The gradients as user code sees them.
        absent: The gradients of parameters that only other ranks have.
        adoption: Takes over what user code assigns.
        edits: Averages the gradients that user code has made or edited.
        full_values: Brings parameters together, and takes full ones in.
        owners: Who updates the parameters that an optimizer needs full.
        is_alone: Whether ranks train by themselves now.
        buffers_moved: Whether a training step alone may have changed buffers; code that makes them
            equal on all ranks sets it back to False.
        around_methods: Makes what a method of an optimizer runs in that goes by its state.
        clipping: Clips gradients before they are sent, where a compressor keeps some of them.
        copier: Copies to and from host memory, and counts them; None without offload.

    Raises:
        ConfigError: The ranks' models differ.
    """

    is_alone = buffers_moved = False

    def __init__(
        self,
        model: nn.Module,
        groups: Collectives | DataGroups,
        options: EngineOptions,
        reducing: Collectives | DataGroups | None = None,
        split: ModelSplit | None = None,
    ) -> None:
        refuse_leftover_shards(model)
        self.groups = DataGroups.of(groups)
        self.collectives = self.groups.dp
        refuse_quantised(model, self.collectives.rank)
        self.split: ModelSplit = Unsplit() if split is None else split
        check_same_model(model, self.collectives, self.split.full_shapes)
        self.model = model
        self.options = options
        reducing = self.groups.duplicate() if reducing is None else DataGroups.of(reducing)
        first = next((param.device for param in model.parameters()), torch.device("cpu"))
        self.device = first if options.start is None else options.start.device
        self.copier = None if options.offload is None else HostCopier(self.device)
        self.owners = share_out(
            model, self.groups, self.split, stage=options.stage, owned=options.owned
        )
        self._scales = Float8Scales.of(model, options.gather_dtype)
        args = self.groups, options, self.split, self.owners.of_shards, self._scales, self.copier
        self.units = build_units(model, *args)
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self._unshards = options.stage == 3 and not exist_once(self.units)
        self.gradients = self._made_gradients(reducing)
        self._positions = _placed(
            (one, gradients.flat) for one, gradients in enumerate(self.gradients)
        )
        self._homes = _placed((flat, flat) for flat in self.flats)
        self._buffer_numbers = {id(param): one for param, (one, _) in self._positions.items()}
        self.phases = Phases()
        self.user_code = self.phases.user_code
        self._lent = LentMemory()
        self._unsharder = self._made_unsharder()
        self._weights = self._made_weights(reducing)
        self.edits = HandEdits(
            self.gradients, self.device, self.collectives, are_expected=options.expects_edits
        )
        self.clipping = EarlyClipping(self.gradients, reducing.dp)
        self.reducer = self._made_reducer(reducing)
        self._arrivals = ArrivalHooks(self._positions, self._arrival)
        self.buffers = BufferSync(model, self.collectives)
        self.buffers.broadcast_all()
        self.shards = self._gradient_shards()
        self.absent = AbsentGradients(self.shards, [*model.parameters()], self.split, self.device)
        self.view = self._made_view()
        self._loading = cut_loaded(model, self._homes, self.split) if options.stage == 3 else []
        self.adoption = self._made_adoption()
        self.full_values = FullValues(
            model, self._homes, self.units, self.groups, self.split, self.adopt_assigned
        )
        self._look_full()
        self._unseen_calls = SeesUnseenCalls(self.phases)
        self.around_methods: _InsideOf = nullcontext
        self.hook_trainable()
        keep_freed_memory(self.device)

    def _made_gradients(self, reducing: DataGroups) -> list[FlatGradients]:
        roots = [unit for unit in self.units if unit.is_root and self._unshards]
        in_root = [flat for unit in roots for flat in unit.flats]
        return build_gradients(self.flats, in_root, reducing, self.options, self.split)

    def _made_weights(self, reducing: DataGroups) -> EqualWeights:
        having = [(flat, reducing_of(flat, reducing, self.split).dp) for flat in self.flats]
        return EqualWeights(having, reducing.dp, self.device)

    def _made_unsharder(self) -> Unsharder | None:
        if self.options.stage != 3:
            return None
        ahead = 1 if self.options.prefetch is None else self.options.prefetch
        args = self.model, self.units, self._close, ahead, self.phases, self._lent.take_all_back
        return Unsharder(*args, self._scales, of_parts=has_parts(self.split))

    def _made_adoption(self) -> Adoption:
        weights, rank, phases = self._weights, self.collectives.rank, self.phases
        args = self.model, self.flats, self._homes, self.split, weights, rank, phases
        options = self.options
        takes = options.takes_newcomers and isinstance(self.split, Unsplit)
        return Adoption(*args, may_reformat=options.may_reformat, takes_newcomers=takes)

    def _made_view(self) -> OptimizerView:
        users = self.absent, self.edits, self._weights
        return OptimizerView(self.gradients, self.reducer, self._unsharder, self.phases, *users)

    def _made_reducer(self, groups: DataGroups) -> Reducer:
        record = None if self._unsharder is None else self._unsharder.record
        talks = any(isinstance(one, BatchNorm) for one in self.model.modules())  # in backward
        waits = self._unshards or talks or self.options.waits_in_backward
        usage = agreement(
            self.gradients, groups, self.split, self.device, record, self._weights, may_differ=waits
        )
        edits, clipping = self.edits, self.clipping
        return Reducer(self.gradients, groups.dp, usage, self.phases, edits, clipping)

    def _gradient_shards(self) -> GradientShards:
        return GradientShards(
            self.gradients,
            self.model.named_parameters(),
            self.split,
            self.device,
            self.groups_of_gradients,
            self._reduce_asked,
            self.collectives,
            self.phases,
            self._lent,
            reduces_full=self.options.same_bits,
        )

    def _reduce_asked(self) -> None:
        self.reducer.reduce_asked()  # ranks that come to train alone get another one

    def _look_full(self) -> None:
        if self._unsharder is not None:
            look_full(self.units, self.shards, self._unsharder, self.split, self.user_code)

    def asking_nobody(self) -> AbstractContextManager[None]:
        """Inside, this rank hands out the full state that it has, and asks no other."""
        sole: Any = Sole()
        return setting(self, groups=DataGroups.of(sole), collectives=sole)

    @property
    def is_first(self) -> bool:
        """Whether this is the one rank that gets full states to save."""
        return self.collectives.rank == 0 and self.split.is_first

    def groups_of_gradients(self) -> list[Collectives]:
        """Groups over whose ranks the elements of one gradient lie, from backward to the update."""
        return [] if self.options.stage == 0 or self.is_alone else [self.groups.shard]

    def groups_of_forwards(self) -> list[Collectives]:
        """Groups whose ranks unshard together in each forward."""
        if self._unsharder is None or self._unsharder.since is Since.HELD or self.is_alone:
            return []
        return [self.groups.shard]

    @property
    def steps_alone(self) -> bool:
        """Whether a step that begins now concerns no other rank."""
        return self.is_alone

    @property
    def ranks_of_loss(self) -> Collectives | None:
        """Group whose gradients, and so losses, are averaged; None where each rank has its own."""
        return None if self.is_alone else self.collectives

    @property
    def exchanges(self) -> list[Exchange]:
        """Exchanges that average compressed gradients, in the order of the buffers."""
        compresses = self.options.compression is not None
        found = [one.exchange for one in self.gradients if compresses]
        return [one for one in found if one is not None]

    def exchange_of(self, param: nn.Parameter) -> Exchange | None:
        """Return the exchange that averages the gradient of `param`; None without compression."""
        place = self._positions.get(param) if self.options.compression is not None else None
        return None if place is None else self.gradients[place[0]].exchange

    def count_micro_batches(self, number: int | None, divisor: int | None = None) -> None:
        """Where sums have one order, say how many micro-batches of a step count; None: all.

        `divisor` is what their sum is divided by, where that is another number.
        """
        for one in self.gradients:
            if isinstance(one.exchange, TreeExchange):
                one.exchange.num_micro_batches = number
                one.exchange.divisor = divisor

    def slot_of(self, param: nn.Parameter) -> int:
        """Return the index of `param` in its buffer of gradients."""
        return self._positions[param][1]

    def _close(self, unit: Unit) -> None:
        self.reducer.close(g for g in self.gradients if g.flat in unit.flats)

    def hook_trainable(self) -> None:
        """Watch parameters that have come to require gradients (unfrozen ones, too)."""
        self._arrivals.watch()

    def _arrival(self, position: int, index: int) -> Callable[[Tensor], None]:
        arrivals = self.gradients[position].arrivals
        waits = arrivals.waiting.append

        def arrived(_: Tensor) -> None:
            if arrivals.gathers and index not in arrivals.ends:
                waits(index)
            else:
                self.shards.changed()
                with shards_as_they_are():
                    self.reducer.arrive(position, index)

        return arrived

    def adopt_assigned(self) -> None:
        """Take over values assigned to `param.data`, or parameters that user code replaced."""
        self.view.end_interrupted()
        self.shards.lent.end()
        with self.options.seeing_shards():
            self.adoption.adopt()
        if self._unsharder is not None:
            self._unsharder.copies.take_set()

    @having(asker, value=Asker.ENGINE)
    def has_other_parameters(self) -> bool:
        """Whether the model has parameters that are to be laid out anew; each rank must call."""
        places = self.adoption.places
        if places.takes_newcomers and not places.are_as_known:
            self.adopt_assigned()
        return places.are_others

    @having(asker, value=Asker.ENGINE)
    def in_other_formats(self) -> dict[nn.Parameter, Tensor]:
        """Return by parameter what user code has given it in another format; each rank must call.

        It is the value before it was rounded to the buffer's format: full, or a split layer's part.
        """
        self.adopt_assigned()
        named = dict(self.model.named_parameters())
        given = self.adoption.other_formats
        values = {
            name: self._joined(one, given[one]) for name, one in named.items() if one in given
        }
        for group in self.split.groups_of_layers:
            for others in group.all_gather_object(values):
                values = {**others, **values}
        return {named[name]: values[name] for name in sorted(values)}

    def _joined(self, param: nn.Parameter, value: Tensor) -> Tensor:
        """Return the full value of which this rank has a shard; each rank must call."""
        flat, index = self._homes[param]
        is_shard = flat.reshards and value.shape != flat.layout.slots[index].shape
        return (flat.joined(index, value) if is_shard else value).cpu()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one training, validation, test or predict step inside; each rank must enter."""
        step = self._step_alone() if self.steps_alone else self._step_together()
        # What comes before the user's code is this package's own; the step itself turns it.
        with noting_reentrance(self.reducer.kinds.note), having(asker, Asker.ENGINE), step:
            yield

    @contextmanager
    def _step_together(self) -> Iterator[None]:
        self.adopt_assigned()
        self.adoption.check_ties(self.full_values.each)
        self.hook_trainable()
        self.buffers.follow(exchanged=self.reducer.take_exchanged())
        if self.model.training and torch.is_grad_enabled():
            self.buffers.note_training(exchanges=self.reducer.synchronises)
        full = self._unsharder.step() if self._unsharder else self.phases.within(Phase.STEP)
        with self.options.seeing_shards(), full, explaining_graphs(), self.running_user_code():
            yield

    @contextmanager
    def _step_alone(self) -> Iterator[None]:
        self.adopt_assigned()
        self.hook_trainable()
        self.buffers_moved |= self.model.training and torch.is_grad_enabled()
        with self.phases.within(Phase.STEP), having(asker, value=Asker.USER):
            yield

    @contextmanager
    def running_user_code(self) -> Iterator[None]:
        """Run user code inside: sharded parameters look full, errors about sizes are explained."""
        if self._unsharder is None:
            with having(asker, value=Asker.USER):
                yield
            return
        with explaining_shards(self._homes), makers_seen(), self.user_code.running():
            try:
                yield
            finally:  # what is raised here may be caught by a hook, which trains on
                self.shards.lent.end()
                self._unsharder.note_user_code()

    @contextmanager
    def hook(self) -> Iterator[None]:
        """Run a hook of the user's inside, under stage 3; see `running_user_code`."""
        unsharder = self._unsharder if self.split.groups else None
        shards = nullcontext() if unsharder is None else unsharder.in_shards()
        with shards, self.running_user_code(), self._unseen_calls.watching():
            yield

    @contextmanager
    def backward(self, is_used: Callable[[], bool] = always) -> Iterator[None]:
        """Run one backward inside; on leaving it the gradients are averaged (unless `no_sync`).

        `is_used` is as for `Reducer.backward`, and asked twice.
        """
        self.hook_trainable()  # what the step itself has unfrozen
        if self._unsharder is not None:
            self._unsharder.unshard_staying()
        # User code runs in hooks, and in blocks that are computed again.
        again, mark = self.user_code.running(), setting(self.user_code, is_in_backward=True)
        with self.options.seeing_shards(), again, mark, ExitStack() as inside:
            if self._unsharder is not None:
                inside.enter_context(gathering_near(self.flats, self._lent.take_all_back))
            for make in self.options.around_backward:
                inside.enter_context(make())
            inside.enter_context(self.reducer.backward(is_used))
            inside.enter_context(explaining_gradients(self.options.stage))
            yield
            if self._unsharder is not None and self.reducer.owed in HAS_ARRIVED:
                self._unsharder.catch_up()
        if self._unsharder is not None:
            self._unsharder.end_backward(is_used=is_used(), held_up=self.reducer.was_held_up)
        self.shards.changed()
        self.absent.agree()

    def at_hand(
        self, params: Sequence[nn.Parameter], *, unrounded: bool = False
    ) -> AbstractContextManager[None]:
        """Keep parameters unsharded inside, for a part of a backward that their blocks' hooks miss.

        Under stage 3 each rank must enter. With `unrounded` they have their own format from now on.
        """
        if self._unsharder is None:
            return nullcontext()
        return self._unsharder.at_hand(params, unrounded=unrounded)

    def hide_rounded(self) -> None:
        """Let the code of a step that comes next see no rounded parameters before its blocks."""
        if self._unsharder is not None:
            self._unsharder.hide_rounded()

    @property
    def reformats(self) -> bool:
        """Whether parameters have another format while they are full than between the steps."""
        return any(flat.reshards and flat.has_master for flat in self.flats)

    def take_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """Inside `backward`, take a gradient that was computed outside autograd's own pass.

        The parameter may show its shard now; its hooks are called here.

        Raises:
            ConfigError: User code wants to be called once the gradient has been added up.
        """
        self._arrivals.refuse_others(param, self.collectives.rank)
        for hook in gradient_hooks(param).values():
            changed = hook(grad)
            grad = grad if changed is None else changed
        with shards_as_they_are():
            self.reducer.take(*self._positions[param], grad)

    def hold_parameters(self) -> None:
        """Keep full parameters from now on for prediction, in which ranks may take other steps.

        Under stage 3 each rank must call, and needs the memory.
        """
        if self._unsharder is not None:
            self._unsharder.hold()

    def note_update(self, *, ends: bool) -> None:
        """Note that an optimizer will step on this model, or (`ends`) that it has."""
        self.buffers.note_update(ends=ends)
        if ends:
            self.clipping.end_step()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards inside only accumulate; stages 2 and 3 reduce all the same."""
        return self.reducer.no_sync()

    @contextmanager
    def optimizer_view(self) -> Iterator[None]:
        """Let every parameter and its `.grad` show the shard that this rank updates."""
        self.view.enter()
        try:
            yield
        finally:
            self.view.leave()

    def average_gradients(self) -> None:
        """Average the gradients that hooks before a step see; each rank must call."""
        self.view.average()

    def send_up(self, params: Iterable[nn.Parameter]) -> None:
        """After an update of `params` in host memory, bring this rank's device up to date."""
        for flat in self._touched(params) if self.copier is not None else ():
            flat.send_up()

    def _touched(self, params: Iterable[nn.Parameter]) -> list[FlatParameters]:
        touched = set(map(self._buffer_numbers.get, map(id, params)))
        return [one.flat for number, one in enumerate(self.gradients) if number in touched]

    def begin_update(self, params: Iterable[nn.Parameter], *, in_place: bool = True) -> None:
        """Before `params` are updated, let this rank write its part of what ranks have in common.

        Each rank must call; `in_place` is as for `common_buffer.begin_update`.
        """
        if self.is_alone:
            return
        if self._unsharder is not None:
            self._unsharder.note_updated(params)
        has_common = any(flat.common is not None for flat in self.flats)
        touched = self._touched(params) if has_common else ()
        buffers = [flat.common for flat in touched if flat.common is not None]
        begin_update(buffers, in_place=in_place)

    def publish(self, params: Iterable[nn.Parameter]) -> None:
        """After an update of `params`, bring all ranks' full parameters up to date."""
        self.shards.lent.changed()
        if self._unsharder is not None or not self.view.differs:
            return
        bring_together(self._touched(params))

    def publish_shards(self) -> None:
        """After shards were overwritten, bring full parameters up to date; each rank must call."""
        for flat in self.flats:
            flat.send_up()
        bring_together(flat for unit in self.units if unit.state in HERE for flat in unit.flats)

    def knows(self, param: nn.Parameter) -> bool:
        """Whether `param` lies in a buffer of this rank's, or on other stages."""
        with suppress(KeyError):  # a stage's split knows no stranger
            return param in self._homes or not self.split.is_here(param)
        return False

    def owner(self, param: nn.Parameter) -> tuple[FlatParameters, int]:
        """Return the buffer that holds `param`, and its index there."""
        return self._homes[param]

    def full_shape(self, param: nn.Parameter) -> Sequence[int]:
        """Return the full shape of `param`, however it shows itself now."""
        return self.full_values.shape(param)

    def numbered_shards(self) -> dict[tuple[int, int], int]:
        """Return by address and size a number for each shard on this rank, also of copies."""
        return {} if self._unsharder is None else self._unsharder.copies.numbered_shards()

    def full_shard(self, number: int) -> Tensor:
        """Bring a shard together that has this number on some rank; each rank must call."""
        assert self._unsharder is not None
        return self._unsharder.copies.full(number)

    def rest(self) -> None:
        """After the last step, keep no more than parameters until `detach`; each rank must call."""
        self.adopt_assigned()
        self.adoption.check_ties(self.full_values.each)
        if self._unsharder is not None:
            self._unsharder.reshard_all()
        for gradients in self.gradients:
            gradients.buffer.drop()
        self._arrivals.remove()  # autograd would keep the engine for good

    def detach(self, *, restore: bool, keep: bool = True) -> None:
        """Take the engine off the model; with `restore`, each parameter is full again.

        Args:
            restore: Collective: each rank must call. Without it (after a failure, when peers may
                be gone) stage 3 leaves this rank's shards.
            keep: Whether this rank keeps what is restored; else it has NaNs without memory.
        """
        self._remove_hooks()
        if restore:
            self.adopt_assigned()
            if self.adoption.places.takes_newcomers:
                self.adoption.part_from_shards()
            self.buffers.end()
        if self._unsharder is not None:
            if restore:
                self._unsharder.reshard_all()
            self._unsharder.copies.restore(self.collectives if restore else None)
        for flat in self.flats if restore else ():
            give_back(flat, keep=keep)
        for unit in self.units if not restore else ():
            unit.leave_as_is()
        for param in {*self._homes, *self.model.parameters()}:  # the model may have lost some
            param.grad = None
            if not restore and param in self.split.full_shapes:
                mark_leftover(param)
        self._end()

    def _end(self) -> None:
        self.shards.forget()
        self.phases.begin(Phase.OVER)

    def _remove_hooks(self) -> None:
        for flat in self.flats:
            flat.move_out()
        for param in self.model.parameters():
            move_out(param)  # of which nothing is here
        self._arrivals.remove()
        for handle in (*self._loading, *self.adoption.handles):
            handle.remove()
        if self._unsharder is not None:
            self._unsharder.remove()

    def learnt_orders(self) -> tuple[list[int], list[int], tuple[Any, ...]]:
        """Return the orders of reductions and unshards, and which buffers follow, as values."""
        visited = [] if self._unsharder is None else self._unsharder.visited
        due, *others = self.buffers.learnt()
        return self.reducer.learnt_order, visited, (due or self.reducer.has_exchanged, *others)

    def follow_orders(
        self, reduced: Sequence[int], visited: Sequence[int], buffers: tuple[Any, ...]
    ) -> None:
        """Go on, on each rank, by the orders that another engine of the same model has learnt."""
        self.reducer.follow(reduced)
        if self._unsharder is not None:
            self._unsharder.follow(visited)
        if buffers:
            self.buffers.go_on(*buffers)

    @torch.no_grad()
    def abandon(self) -> None:
        """Take the engine off a model whose values will come from elsewhere; no communication.

        Each parameter gets memory of its own shape in the optimizer's format, without values, and
        no other engine takes it until `take_leftovers`.
        """
        self._remove_hooks()
        self._end()
        if self._unsharder is not None:
            self._unsharder.copies.restore(None)
        for flat in self.flats:
            for param, slot in zip(flat.params, flat.layout.slots, strict=True):
                param.grad = None
                param.data = flat.full.new_empty(slot.shape, dtype=flat.master_dtype)
                mark_leftover(param)


def _placed(flats: Iterable[tuple[T, FlatParameters]]) -> dict[nn.Parameter, tuple[T, int]]:
    """Return by parameter the object paired with its buffer, and its index in that buffer."""
    return {param: (of, index) for of, flat in flats for index, param in enumerate(flat.params)}
