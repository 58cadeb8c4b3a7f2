"""Stage 3: parameters are unsharded before a module needs them and resharded when it is done.

    forward    unshard 0 | forward 0, unshard 1 | forward 1, unshard 2 | forward 2 ...
                         |        reshard 0     |        reshard 1     |
    backward   ... backward 2, unshard 1 | backward 1, unshard 0 | backward 0 |
                               reshard 2 |             reshard 1 |  reshard 0

A block's forward is bracketed by module hooks, its backward by hooks on its outputs (gradients
are about to enter) and inputs (they have left). The order of the last step says what to prefetch.
Parameters of the root unit stay from the start of a step to the end of its backward; outside a
step, for as long as any module that holds one is in its forward. Where the parameters exist once
per host, giving them back would free nothing: there all units stay for a step.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.modules import hookable
from lightning_shard.core.states import Asker, State, asker, having, setting
from lightning_shard.data_parallel.compression.float8_gather import Float8Scales
from lightning_shard.data_parallel.gradients.usage import UnshardRecord
from lightning_shard.data_parallel.graph_borders import LeftGraphs, on_entry, outputs_with_gradient
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.phases import Phase, Phases
from lightning_shard.data_parallel.torch_private import (
    GENERATES,
    GENERATES_TOGETHER,
    in_backward,
    keeps_graph,
    outside_transforms,
    queue_after_backward,
    untraced,
    without_function_modes,
)
from lightning_shard.data_parallel.units.unit import HERE, Digits, Passage, Unit
from lightning_shard.data_parallel.views.sharded_parameter import (
    ShardedParameter,
    as_they_are,
    copy_home,
    move_out,
    present,
    take_set,
)
from lightning_shard.data_parallel.views.transforms import OF_SHARDS, refuse_transforms
from lightning_shard.errors import ConfigError

_Home = tuple[FlatParameters, int]


class ShardCopies:
    """The copies of some parameters.

    self.ema = copy.deepcopy(net)     each parameter of the copy is this rank's shard, also before
                                      the first step, when the model itself is still full
    self.ema(x)                       gathered for the call, and in shards again after it
    the end of the run                gathered for good

    The hooks that a copy's modules carry along tell of its calls. Each rank must make, call and
    keep the same copies.
    """

    def __init__(self, flats: Sequence[FlatParameters], shows_full: Callable[[], bool]) -> None:
        self._homes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of copies
        self._made = 0
        self._depth = 0
        self._shards: list[tuple[nn.Parameter, Tensor]] = []  # while their copies are full
        self._looked_full: list[nn.Parameter] = []  # those of them that seemed to be
        self._params = [param for flat in flats for param in flat.params]
        self._originals = [(flat, index) for flat in flats for index in range(len(flat.params))]
        for flat in flats:
            for index, param in enumerate(flat.params):
                vars(param)["__deepcopy__"] = _Copier(self, (flat, index), shows_full)

    @torch.no_grad()
    def copy(self, home: _Home, *, full: bool) -> nn.Parameter:
        """Return a copy of a parameter: this rank's shard, or the full tensor that it shows."""
        flat, index = home
        param = flat.params[index]
        if full:
            return nn.Parameter(param.data.clone(), param.requires_grad)
        return self._copied(home, param, flat.own_value(index))

    def _copied(self, home: _Home, param: nn.Parameter, shard: Tensor) -> nn.Parameter:
        made = nn.Parameter(shard.clone(), param.requires_grad)
        copy_home(param, made, partial(self._copy_again, home))
        self._homes[made] = (home, self._made)
        self._made += 1
        return made

    @as_they_are
    @torch.no_grad()
    def _copy_again(self, home: _Home, copy: nn.Parameter) -> nn.Parameter:
        return self._copied(home, copy, copy.data)

    def _alive(self) -> dict[int, tuple[nn.Parameter, _Home]]:
        """Return by number the copies that user code still has, each with its original's place."""
        copies = self._homes.items()  # type: ignore[no-untyped-call]
        return {number: (copy, home) for copy, (home, number) in copies}

    @as_they_are
    def take_set(self) -> None:
        """Let copies that user code has set to full tensors be this rank's shards again."""
        for copy, (flat, index) in self._alive().values() if not self._depth else ():
            take_set(copy, flat.local_views[index])

    def own(self, module: nn.Module) -> bool:
        """Whether a module holds copies that were made here."""
        return any(param in self._homes for param in module.parameters())

    def check_entered(self, part: nn.Module) -> None:
        """Raise ConfigError unless a part of a copied block is called by its block's forward."""
        if not self._depth:
            raise ConfigError(
                f"A {type(part).__name__} inside a block of a copy that was made during the run "
                f"is called by itself, but under ZeRO stage 3 it is one rank's shards; expected a "
                f"call of the block, for which it is gathered. Call the copied network or block."
            )

    def enter(self, module: nn.Module) -> None:
        """Make a copied module full for a call; each rank must call."""
        self._depth += 1
        if self._depth > 1:
            return
        params = [param for param in module.parameters() if param in self._homes]
        if torch.is_grad_enabled() and any(param.requires_grad for param in params):
            self._depth -= 1
            self._refuse(module)
        self._looked_full = [param for param in params if type(param) is ShardedParameter]
        present(self._looked_full, sharded=False)
        self._shards = [(param, param.data) for param in params]
        self._gather(params)

    def leave(self, _: nn.Module) -> None:
        """End a call of a copied module."""
        self._depth -= 1
        if self._depth == 0:
            for param, shard in self._shards:
                param.data = shard
            present(self._looked_full, sharded=True)
            self._shards, self._looked_full = [], []

    def _refuse(self, module: nn.Module) -> NoReturn:
        raise ConfigError(
            f"A copy of a {type(module).__name__} that was made during the run is called with "
            f"gradients, but under ZeRO stage 3 it is this rank's shards and cannot be trained; "
            f"expected a call without. Call it within torch.no_grad(), freeze it with "
            f"requires_grad_(False), or make the copy in __init__ or configure_model, as a part of "
            f"the module."
        )

    @as_they_are
    @torch.no_grad()
    def _gather(self, params: Iterable[nn.Parameter]) -> None:
        """Make copies full, buffer by buffer."""
        batches: dict[tuple[FlatParameters, int], dict[int, nn.Parameter]] = {}
        for param in params:
            (flat, index), _ = self._homes[param]
            nth = 0
            while index in batches.get((flat, nth), ()):
                nth += 1
            batches.setdefault((flat, nth), {})[index] = param
        for (flat, _), copies in batches.items():
            shard = torch.zeros_like(flat.shard)
            views = flat.shard_views(shard)
            for index, param in copies.items():
                views[index].copy_(param.data)
            full = flat.gather_shards(shard)
            for index, param in copies.items():
                param.data = full[index].to(param.dtype, copy=True)

    @as_they_are
    def numbered_shards(self) -> dict[tuple[int, int], int]:
        """Return a number for each shard here by address and size, the same on every rank."""
        views = [flat.local_views[index] for flat, index in self._originals]
        numbered = dict(enumerate(views))
        for made, (copy, _) in self._alive().items():
            numbered[len(views) + made] = copy.data
        return {(view.data_ptr(), view.numel()): number for number, view in numbered.items()}

    @as_they_are
    def full(self, number: int) -> Tensor:
        """Return the full tensor of the shard with this number; each rank must have it and call."""
        if number < len(self._originals):
            flat, index = self._originals[number]
            return flat.full_values()[index]
        made = number - len(self._originals)
        copy, (flat, index) = self._alive()[made]
        return flat.joined(index, copy.data.to(flat.shard.dtype))

    @torch.no_grad()
    def restore(self, ranks: Collectives | None) -> None:
        """End the run: copy parameters plainly again, and make copies full, which all must call."""
        for param in self._params:
            vars(param).pop("__deepcopy__", None)
        alive = self._alive()
        for copy, _ in alive.values():
            move_out(copy)
        if ranks is None:
            return
        everywhere = set.intersection(*ranks.all_gather_object(set(alive)))
        self._gather([alive[number][0] for number in sorted(everywhere)])
        self._homes = WeakTensorKeyDictionary()


class _Copier:
    """Makes the copy of one parameter for `copy.deepcopy`."""

    def __init__(self, copies: ShardCopies, home: _Home, shows_full: Callable[[], bool]) -> None:
        self._copies, self._home, self._shows_full = copies, home, shows_full

    def __call__(self, memo: dict[int, Any]) -> nn.Parameter:
        flat, index = self._home
        is_full = type(flat.params[index]) is not ShardedParameter and (
            flat.params[index].shape == flat.layout.slots[index].shape
        )
        return self._copies.copy(self._home, full=is_full and self._shows_full())

    def __reduce__(self) -> NoReturn:
        flat, index = self._home
        raise ConfigError(
            f"The parameter {flat.layout.slots[index].name!r} is pickled during a run of ZeRO "
            f"stage 3, in which each rank has a shard of it; expected its values only. Save with "
            f"trainer.save_checkpoint, or after the run."
        )


class Since(State):
    """What has been since a model's parameters were laid out."""

    START = "FIRST_STEP HELD"  # nothing: all are full, as model summaries count them
    FIRST_STEP = "HELD"
    HELD = "HELD"  # prediction has begun, for which all are full for good


class Unsharder:
    """Unshards and reshards the units of a model."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        on_left: Callable[[Unit], None],
        units_ahead: int,
        phases: Phases,
        take_back: Callable[[], None],
        scales: Float8Scales,
        *,
        of_parts: bool = False,
    ) -> None:
        self._units, self._take_back, self._scales = units, take_back, scales
        self._of_parts = of_parts  # full parameters are parts of what user code is to see
        self._hides_parts = False  # in a hook, to which only shards look full
        self._brought_by: list[nn.Module] = []  # called by hooks, the innermost last
        self._units_ahead = units_ahead
        self._on_left = on_left
        self._staying = [unit for unit in units if unit.stays]
        self._next: dict[Unit, Unit] = {}
        self._previous: dict[Unit, Unit] = {}
        self._trace: dict[Unit, None] = {}  # in this step, in order
        self._awaited: dict[Passage, Unit] = {}  # a backward enters the last one first
        self._depth = 0
        self._phases, self._user_code = phases, phases.user_code
        self.since = Since.START
        self._has_ended_in_step = False  # a backward
        self._watches_steps = False
        self._handles: list[RemovableHandle] = []  # none once they are removed
        self._device_type = next((f.full.device.type for one in units for f in one.flats), "cpu")
        self._flats = [flat for unit in units for flat in unit.flats]
        self.copies = ShardCopies(self._flats, self._shows_full)
        self.record = UnshardRecord()
        for index, unit in enumerate(units):
            unit.on_unshard = partial(self._begin_unshard, index, unit.name)
            unit.passages.on_entry = partial(self._before_backward, unit)
            unit.passages.on_exit = partial(self._after_backward, unit)
        self._left_graphs: dict[nn.Module, LeftGraphs] = {}  # by block
        self._generating: list[nn.Module] = []
        self._install(model)
        if not all(unit.stays for unit in units):
            self._generating = [one for one in model.modules() if hasattr(one, GENERATES)]
        for module in self._generating:
            vars(module)[GENERATES_TOGETHER] = True

    def _begin_unshard(self, index: int, name: str) -> None:
        self._take_back()  # before the elements travel
        if Phase.STEP not in self._phases.open and not self._awaits_backward:
            self._scales.forget()  # since hooks may edit weights at any time
        self.record.note(index, name)

    def _shows_full(self) -> bool:
        return Phase.STEP in self._phases.open or self.since is Since.HELD

    def _install(self, model: nn.Module) -> None:
        inside: set[nn.Module] = set()
        for unit in self._units:
            for module in unit.modules:
                inside.update(module.modules())
                self._left_graphs[module] = LeftGraphs(module)
                self._hook_block(unit, module)
                for part in hookable(module):
                    has_own = next(part.parameters(recurse=False), None) is not None
                    if part is not module and has_own:
                        self._hook_part(unit, part)
        in_root = {param for unit in self._units if unit.is_root for param in unit.params}
        for module in hookable(model):
            if module not in inside and not in_root.isdisjoint(module.parameters()):
                self._hook_holder(module)

    def _hook_block(self, unit: Unit, module: nn.Module) -> None:
        before = partial(self._before_forward, unit)

        def before_other(called: nn.Module, args: Any, kwargs: Any) -> None:
            # A copy that has full values, or none, is no block of the model.
            if not self._as_copy(called, self.copies.enter) and called in self._left_graphs:
                self._before_forward(unit, called, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> None:
            # A shallow copy has the block's own hooks and parameters: it runs as the block.
            self._after_forward(unit, module, args, output)

        def after_other(called: nn.Module, args: Any, output: Any) -> None:
            if not self._as_copy(called, self.copies.leave) and called in self._left_graphs:
                self._after_forward(unit, called, args, output)

        make = self._outside_of_steps if unit.stays else _Hook
        first, last = make(before, before_other), make(after, after_other)
        self._handles.append(module.register_forward_pre_hook(first, with_kwargs=True))
        self._handles.append(module.register_forward_hook(last, always_call=self._of_parts))

    def _outside_of_steps(
        self, function: Callable[..., None], of_copy: Callable[..., None]
    ) -> "TracedHook":
        """Return a hook of a unit that stays for a step, in which it has nothing to unshard."""
        hook = _Hook(function)

        def called(*args: Any) -> None:
            if Phase.STEP not in self._phases.open or self._watches_steps:
                hook(*args)

        return TracedHook(called, of_copy)

    def _hook_part(self, unit: Unit, part: nn.Module) -> None:
        """Hook a part of a block, which another method than the block's forward may use."""

        def keep() -> None:
            with outside_transforms():  # of parameters that are given the part instead, say
                self._widen(unit)
                unit.ensure_full()
            if self._hides_parts:
                self._brought_by.append(part)
            else:
                unit.kept = True

        keep_full, widen = _Hook(keep), _Hook(partial(self._widen, unit))

        def before(_: nn.Module, __: Any) -> None:
            if unit.state not in HERE:
                keep_full()
            elif unit.digits is Digits.ROUNDED and not torch.is_autocast_enabled(self._device_type):
                widen()

        hook = TracedHook(before, self._or_as_copy(before, self.copies.check_entered))
        self._handles.append(part.register_forward_pre_hook(hook))
        if self._of_parts:
            self._hook_part_of_split(unit, part)

    def _hook_part_of_split(self, unit: Unit, part: nn.Module) -> None:
        leave = _Hook(partial(self._leave_part, unit))

        def after(called: nn.Module, _: Any, output: Any) -> None:
            if self._hides_parts:
                leave(called, output)

        hook = TracedHook(after, lambda *_: None)
        self._handles.append(part.register_forward_hook(hook, always_call=True))

    def _leave_part(self, unit: Unit, part: nn.Module, output: Any) -> None:
        """Let a hook that has called a part of a block see full parameters again."""
        if self._brought_by[-1:] == [part]:
            self._brought_by.pop()
            self._hide_until_backward([unit], output)

    def _hide_until_backward(self, units: Sequence[Unit], output: Any) -> None:
        """Reshard units that a call in a hook has used, until a backward through it begins."""
        outputs, _ = outputs_with_gradient(output)
        if outputs:
            on_entry(outputs, lambda _: self._bring_for_backward(units))
        with outside_transforms():
            for unit in units:
                unit.reshard(edited=True)  # of which a graph keeps the memory that it needs

    def _bring_for_backward(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.begin_unshard()
        for unit in units:
            unit.ensure_full()
        self._hide_after_backward()

    def _hide_after_backward(self) -> None:
        if self._hides_parts:
            queue_after_backward(self._hide_parts)

    def _hide_parts(self) -> None:
        """Reshard what a backward has left full that a hook has called."""
        for unit in self._units if self._hides_parts else ():
            if not (unit.is_resharded or unit.kept):
                self._on_left(unit)
                unit.reshard(edited=True)

    def _hook_holder(self, module: nn.Module) -> None:
        enter, leave = _Hook(self._enter_holder), _Hook(self._leave_holder)

        def before(_: nn.Module, __: Any) -> None:
            if Phase.STEP not in self._phases.open:  # where all is here
                enter()

        def after(_: nn.Module, __: Any, output: Any) -> None:
            if Phase.STEP not in self._phases.open:
                leave(output)

        first = TracedHook(before, self._or_as_copy(before, self.copies.enter))
        last = TracedHook(after, self._or_as_copy(after, self.copies.leave))
        self._handles.append(module.register_forward_pre_hook(first, prepend=True))
        self._handles.append(module.register_forward_hook(last, always_call=True))

    def _or_as_copy(
        self, function: Callable[..., None], act: Callable[[nn.Module], None]
    ) -> Callable[..., None]:
        """Return a hook that calls `act` with a copy, and `function` as a hook of the model's."""

        def called(module: nn.Module, *args: Any) -> None:
            if not self._as_copy(module, act):
                function(module, *args)

        return called

    def _as_copy(self, called: nn.Module, act: Callable[[nn.Module], None]) -> bool:
        """Call `act` with a module that copies one of the model's, and return whether it does."""
        # Compiled code meets no weights that look full, and would break at a mark.
        traced = torch.compiler.is_compiling()
        with nullcontext() if traced else having(asker, Asker.ENGINE):
            if self._handles and self.copies.own(called):
                act(called)
                return True
        return not self._handles

    def remove(self) -> None:
        """Take the hooks off the model."""
        self._generate_apart()
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep what stays for a step here from now until its backward is over."""
        if self.since is Since.START:
            self.reshard_all()
            self.since = self.since.to(Since.FIRST_STEP)
        self._follow_trace()
        self._scales.forget()
        self._has_ended_in_step = False
        with self._phases.within(Phase.STEP), setting(self, _hides_parts=False):
            self.unshard_staying()
            yield
        awaits = self._user_code.is_a_loop and self._awaits_backward
        if not (torch.is_grad_enabled() or self.since is Since.HELD or awaits):
            self.reshard_all()
        for unit in self._units if self._has_ended_in_step and not self._graphs_last else ():
            if unit.kept:
                unit.forget_calls()
                unit.reshard()

    @property
    def _graphs_last(self) -> bool:
        """Whether others may be there after a backward or an update: where user code calls both."""
        return Phase.STEP in self._phases.open or self._user_code.is_a_loop

    @property
    def _awaits_backward(self) -> bool:
        """Whether a forward's backward, or one of parameters that were brought, may come."""
        return any(unit.passages.open_calls or unit.kept for unit in self._units)

    def hold(self) -> None:
        """Unshard everything: ranks may take different numbers of steps. Each rank must call."""
        self.reshard_all()
        for unit in self._units:
            unit.widen(for_good=False)  # which ranks could not do later
            unit.ensure_full()
        self.since = self.since.to(Since.HELD)
        self._generate_apart()

    def _generate_apart(self) -> None:
        while self._generating:
            vars(self._generating.pop()).pop(GENERATES_TOGETHER, None)

    @contextmanager
    def at_hand(
        self, params: Collection[nn.Parameter], *, unrounded: bool = False
    ) -> Iterator[None]:
        """Keep parameters unsharded inside, for a backward that may miss their blocks' hooks."""
        resharded = [unit for unit in self._units if unit.is_resharded]
        used = [unit for unit in self._units if not unit.params.isdisjoint(params)]
        for unit in used:
            if unrounded:
                unit.widen(for_good=True)
            unit.begin_unshard()
        try:
            with self._phases.within(Phase.APART):
                for unit in used:
                    unit.ensure_full()
                yield
        finally:
            for unit in resharded:
                unit.reshard(ends=())

    def bring(self, unit: Unit) -> bool:
        """Unshard a unit that user code needs for a graph; each rank must call.

        It stays until the step ends, or an optimizer updates it.
        """
        in_update = Phase.UPDATE in self._phases.open
        brings = self._graphs_last and not (in_update or self._hides_parts)
        if brings:
            unit.widen(for_good=True)
            unit.ensure_full()
            unit.kept = unit.was_met = True
        return brings

    def hide_rounded(self) -> None:
        """Let user code that comes before the blocks see no rounded parameters."""
        with without_function_modes():  # which would see calls of this package's
            for unit in self._units:
                if not (unit.kept or unit.stays):
                    unit.hide()

    def note_user_code(self) -> None:
        """Note that a hook or a step of the user's has run, which may have edited full units."""
        for unit in self._units:
            unit.was_met |= unit.state in HERE

    def unshard_staying(self) -> None:
        """Unshard the units that stay for a step, all at once."""
        for unit in self._staying:
            unit.begin_unshard()
        for unit in self._staying:
            unit.ensure_full()

    def end_backward(self, *, is_used: bool = True, held_up: bool = False) -> None:
        """Reshard what backward has finished with; inside a step, what stays for it does not."""
        self._watches_steps |= held_up
        if not is_used and self._awaits_backward:
            return
        self._see_assigned()
        in_step = self._has_ended_in_step = Phase.STEP in self._phases.open
        self._awaited.clear()
        for unit in self._units:
            unit.forget_calls(but_kept=self._graphs_last)
            if not (unit.kept or (unit.stays and in_step)):
                unit.reshard(edited=unit.stays)

    def reshard_all(self) -> None:
        """Reshard every unit, for the optimizer or for code outside a step."""
        self._see_assigned()
        self._awaited.clear()
        for unit in self._units:
            unit.forget_calls()
            unit.reshard(edited=unit.stays or self.since is Since.START)

    @contextmanager
    def in_shards(self) -> Iterator[None]:
        """Run a hook inside, to which shards look full as a part of a split model cannot.

        What is full comes back where a backward or the rest of the step may read it.
        """
        held = self.since is Since.HELD
        full = [unit for unit in self._units if not (unit.is_resharded or held)]
        if full:
            self._see_assigned()
        for unit in full:
            unit.reshard(edited=unit.stays or self.since is Since.START)
        kept = {unit for unit in self._units if unit.kept}
        with setting(self, _hides_parts=self._of_parts and not held, _brought_by=[]):
            yield
        full += [one for one in self._units if one.kept and one not in {*kept, *full}]
        for unit in full:
            in_step = Phase.STEP in self._phases.open
            if unit.kept or unit.passages.are_open or (unit.stays and in_step):
                unit.ensure_full()
                unit.was_met |= unit.kept

    def _see_assigned(self) -> None:
        """Adopt assigned values before any reshard: they may lie in another unit's memory."""
        for unit in self._units:
            for flat in unit.flats:
                flat.see_assigned()

    def begin_update(self) -> None:
        """Reshard every unit for an optimizer; those that graphs may need come back after it."""
        kept = [unit for unit in self._units if unit.kept and self._graphs_last]
        self.reshard_all()
        for unit in kept:
            unit.kept = True

    def note_updated(self, params: Iterable[nn.Parameter]) -> None:
        """Note which parameters an optimizer updates: autograd allows no backward through them."""
        kept = [unit for unit in self._units if unit.kept]
        updated = set(params) if kept else set()
        for unit in kept:
            unit.kept = not unit.params <= updated
            # also of those that this rank has nothing of, which its optimizer leaves alone
            increment_version(unit.params & updated)

    def after_update(self) -> None:
        """Unshard anew what stays: in a step (manual optimization), or for graphs of user code."""
        self._scales.forget()
        if Phase.STEP in self._phases.open:
            self.unshard_staying()
        for unit in (one for one in self._units if one.kept):
            unit.ensure_full()
            unit.was_met = True
        for flat in (one for one in self._flats if one.left is not None):
            flat.warn_of_holders()

    @property
    def visited(self) -> list[int]:
        """Numbers of the units in the order that the next step is expected to visit them in."""
        order = list(self._trace) or [*self._next, *list(self._next.values())[-1:]]
        return [self._units.index(unit) for unit in order]

    def follow(self, visited: Sequence[int]) -> None:
        """Expect an order that another unsharder of the same model has seen, on each rank."""
        self._trace = dict.fromkeys(self._units[number] for number in visited)

    def _follow_trace(self) -> None:
        """Expect the next step to visit the units in the order of the last one."""
        if self._trace:
            self._next = dict(pairwise(self._trace))
            self._previous = {after: before for before, after in self._next.items()}
            self._trace = {}

    def _before_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if unit.state not in HERE:
            refuse_transforms(OF_SHARDS)
        comes = unit.state not in HERE
        self._widen(unit)
        unit.ensure_full()
        if in_backward():  # recomputation of a checkpointed block
            return
        if comes and unit.has_secondary and torch.is_grad_enabled():
            unit.keep_secondary()
        if Phase.STEP in self._phases.open:
            self._trace.setdefault(unit)
        self._prefetch(self._next, unit)
        if not torch.is_grad_enabled():
            return
        unit.passages.begin_call(args, kwargs)

    def _widen(self, unit: Unit) -> None:
        """Before what runs outside autocast, have a unit's parameters unrounded."""
        if not torch.is_autocast_enabled(self._device_type):
            unit.widen(for_good=Phase.STEP in self._phases.open)

    def _after_forward(self, unit: Unit, module: nn.Module, _: Any, output: Any) -> None:
        if in_backward():
            return
        outputs: Sequence[Tensor] | None = () if unit.passages.open_calls else None
        if torch.is_grad_enabled():
            outputs, hides = outputs_with_gradient(output)
            if hides or self._left_graphs[module].are_there():
                unit.kept = True  # we cannot see its backward coming
            passage = unit.passages.end_call(outputs)
            self._awaited.pop(passage, None)
            if outputs or unit.is_trained:
                self._awaited[passage] = unit
            elif unit.has_secondary and unit not in self._awaited.values():
                unit.forget_secondary()
        if self._hides_parts and not self._depth:
            unit.reshard(edited=True)
            return
        in_step = Phase.STEP in self._phases.open
        stays = unit.kept or self.since is Since.HELD or (unit.stays and in_step)
        if unit.note_forward(module) and not stays:
            # a forward may keep its own weights small
            unit.reshard(edited=True, ends=outputs)
        elif in_step and not stays:
            unit.hide()

    def _before_backward(self, unit: Unit, passage: Passage) -> None:
        unit.kept |= torch.is_grad_enabled()  # create_graph: a second backward reads it again
        is_apart = Phase.APART in self._phases.open
        if passage in self._awaited and not is_apart:
            self.catch_up(passage)
        unit.ensure_full()
        self._hide_after_backward()
        if is_apart or passage in unit.passages.open_backwards:
            return
        unit.passages.open_backwards.add(passage)
        self._prefetch(self._previous, unit)

    def catch_up(self, entered: Passage | None = None) -> None:
        """Unshard and leave, as other ranks do, the blocks that backward has passed by here."""
        while self._awaited:
            passage, unit = self._awaited.popitem()
            if passage is entered:
                return
            unit.begin_unshard()
            self._after_backward(unit, passage)

    def _after_backward(self, unit: Unit, passage: Passage) -> None:
        if Phase.APART in self._phases.open:
            return
        passed_by = passage in self._awaited
        if passed_by:  # but for what it has returned as it came, whose gradient enters next
            self.catch_up(passage)
            unit.begin_unshard()
        unit.passages.close(passage)
        if not (unit.passages.are_open or unit.kept):
            self._on_left(unit)
            if not (unit.stays or passed_by):
                unit.reshard(ends=() if keeps_graph() else None)

    def _prefetch(self, order: Mapping[Unit, Unit], running: Unit) -> None:
        """Unshard units ahead, but no teacher's, which may be moved once its student has run."""
        unit: Unit | None = running
        for _ in range(self._units_ahead):
            unit = order.get(unit) if unit is not None else None
            if unit is None or not unit.is_resharded:
                continue
            if unit.is_trained == running.is_trained:
                unit.begin_unshard()

    def _enter_holder(self) -> None:
        self._depth += 1
        if self._depth == 1 and not in_backward():
            self.unshard_staying()

    def _leave_holder(self, output: Any) -> None:
        self._depth -= 1
        if self._hides_parts and self._depth == 0 and not in_backward():
            used = [unit for unit in self._units if not unit.is_resharded]
            self._hide_until_backward(used, output)
            return
        in_use = self._shows_full() or in_backward() or torch.is_grad_enabled()
        if self._depth == 0 and not in_use:
            self.reshard_all()


class TracedHook:
    """A hook of a module, which runs another function in a copy of the module, as EMA makes one.

    Compiled code checks its class: it is compiled once for all blocks that are alike. The function
    for a copy must not copy an unsharder.
    """

    def __init__(
        self, function: Callable[..., Any], of_copy: Callable[..., None] | None = None
    ) -> None:
        self._function, self._of_copy = function, of_copy

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TracedHook":
        return self if self._of_copy is None else _Hook(self._of_copy)


class _Hook(TracedHook):
    """A hook that runs uncompiled, also where the module that calls it is compiled."""

    # Were each hook an untraced function of its own, every block would be compiled for itself.

    @untraced
    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def looks_at_values(hook: Any) -> bool:
    """Whether a hook around a module is neither ours nor the Trainer's profiler's.

    A profiler's takes times, and in process on rank 0 alone.
    """
    owner = getattr(getattr(hook, "func", None), "__self__", None)
    return not isinstance(hook, TracedHook) and type(owner).__name__ != "RegisterRecordFunction"
