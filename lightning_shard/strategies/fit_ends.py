"""What a fit leaves on its ranks: full parameters, or the shards that they had.

    full     each rank gathers the parameters, rank 0 the optimizers' states (on the host)
    rank 0   of ranks of one process, whose others end with the fit: it gathers, they have NaNs
    shards   nothing is gathered. Engine and groups stay as they are, at rest: `save_checkpoint`
             works as in the fit
    states   up to stage 2, where parameters are full anyway: the optimizers' states stay in shards

What "auto" decides is the same on all ranks. After a failure each rank has what it has. The next
run makes a module that rests in shards full first; any other use raises an error that says so.

Tensors in shards that user code keeps on its objects (the module and its parts, the callbacks, the
data module, in containers and the user's own classes) become full ones once the run is over. What
some ranks have kept alone, and what shows a parameter and is no copy of it, stays in shards: its
use after the run is refused by name.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType, ModuleType
from typing import Any, Literal, NoReturn
from weakref import ref

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.free_memory import free_bytes, free_host_bytes
from lightning_shard.checkpoint.optimizer_state import full_state_dict, put_full_state
from lightning_shard.core.extensions import instead
from lightning_shard.core.layout import FlatLayout
from lightning_shard.core.modules import hookable
from lightning_shard.core.reporting.output import format_bytes
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import replicated
from lightning_shard.data_parallel.memory.quantised import give_back
from lightning_shard.data_parallel.torch_private import storage_key
from lightning_shard.data_parallel.units.presenting import of_all_ranks
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.parameter_shard import ShardView
from lightning_shard.data_parallel.views.sharded_tensor import ShardedTensor
from lightning_shard.environments.launchers.replicas import find_owners
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import with_values
from lightning_shard.strategies.options import AfterFit
from lightning_shard.strategies.parts import RunPart
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor

_Exchange = Callable[[str, Tensor], Tensor]
_OTHERS = (nn.Module, pl.Trainer, pl.Callback, pl.LightningDataModule, Optimizer, Dataset)
_NO_HOLDERS = (*_OTHERS, DataLoader, type, FunctionType, ModuleType)
_PLAIN = {type(None), bool, int, float, str, bytes}
_DEPTH, _MOST = 8, 10_000  # of what holds what, and entries: a data module may hold its samples
_PACKAGES = ("builtins", "torch", "lightning", "pytorch_lightning", "lightning_shard")
_STANDS = "_lightning_shard_at_rest"  # set on such modules
StatesAtRest = Literal["keep", "gather", "drop"]
_USED_AT_MOST = 0.9  # of the memory that is free


@torch.no_grad()
def complete_kept(trainer: "pl.Trainer", collectives: Collectives, live: Collection[int]) -> None:
    """Put full tensors where user code keeps what was read in shards; each rank must call."""
    own: dict[str, Tensor] = {}

    def note(place: str, tensor: Tensor) -> Tensor:
        local = _local(tensor)
        if local is not None and storage_key(local) not in live:
            own[place] = tensor
        return tensor

    _exchange_all(trainer, note)
    common = set.intersection(*map(set, collectives.all_gather_object([*own])))
    full: dict[int, Tensor] = {}  # by what it was: two names of one tensor stay so
    for place in sorted(common):
        joined = _full(own[place])  # also of the same tensor, which another rank may have copied
        full.setdefault(id(own[place]), joined)
    if common:
        _exchange_all(trainer, lambda place, one: full[id(one)] if place in common else one)


def _local(tensor: Tensor) -> Tensor | None:
    """Return this rank's elements of a tensor in shards that can be full; None for any other."""
    if isinstance(tensor, DimShardedTensor):
        return tensor.part.local
    base = _base(tensor)
    return None if base is None or of_all_ranks(base.spread) is None else base.local


def _base(tensor: Tensor) -> ShardedTensor | None:
    """Return the sharded tensor that a tensor is or shows; None for any other."""
    if isinstance(tensor, AveragedGradient):
        return tensor.own  # none in one that stands for the optimizer's
    base = tensor.base if isinstance(tensor, ShardView) else tensor
    return base if isinstance(base, ShardedTensor) else None


def _full(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DimShardedTensor):
        return tensor.part.gather_detached()
    base = _base(tensor)
    assert base is not None
    base.spread = of_all_ranks(base.spread) or base.spread
    return tensor.full_tensor() if isinstance(tensor, ShardView) else base.full_tensor()


def _exchange_all(trainer: "pl.Trainer", exchange: _Exchange) -> None:
    """Exchange the tensors of the user's objects, each with a name of its place."""
    seen = set[int]()
    datamodule = getattr(trainer, "datamodule", None)
    for name, owner in find_owners(trainer, (datamodule,), {}).items():
        is_module = isinstance(owner, nn.Module)
        for path, part in owner.named_modules() if is_module else [("", owner)]:
            seen.add(id(vars(part).get("_parameters")))  # which are shown full by others
            _exchanged(vars(part), f"{name} {path}", exchange, seen)


def _exchanged(value: Any, place: str, exchange: _Exchange, seen: set[int]) -> Any:
    """Return a value with its tensors exchanged, in the same lists, mappings and objects."""
    if isinstance(value, Tensor):
        return exchange(place, value)
    if type(value) in _PLAIN or place.count("/") > _DEPTH:
        return value
    if isinstance(value, tuple):
        held = {
            index: _exchanged(one, f"{place}/{index}", exchange, seen)
            for index, one in enumerate(value)
        }
        is_same = all(one is value[index] for index, one in held.items())
        return value if is_same else with_values(value, held)
    holder = vars(value) if _is_holder(value) else value
    if not isinstance(holder, dict | list | deque) or len(holder) > _MOST or id(holder) in seen:
        return value
    seen.add(id(holder))
    for number, key in enumerate([*holder] if isinstance(holder, dict) else range(len(holder))):
        before = holder[key]
        after = _exchanged(before, f"{place}/{number}", exchange, seen)
        if after is not before:
            holder[key] = after
    return value


def _is_holder(value: Any) -> bool:
    """Whether a value is an object of a class of the user's own that may hold tensors."""
    if not hasattr(value, "__dict__") or isinstance(value, _NO_HOLDERS):
        return False
    return type(value).__module__.partition(".")[0] not in _PACKAGES


class ShardsAtRest:
    """Refuses by name what would take a rank's shards for parameters, which `wake` makes full."""

    def __init__(self, module: nn.Module, rank: int, wake: Callable[[], bool]) -> None:
        self.wake = wake
        self._module, self._rank = module, rank
        self._is_open = False
        self._parts = [
            part for part in hookable(module) if next(part.parameters(), None) is not None
        ]
        self._handles = [handle for part in self._parts for handle in self._hooks(part)]
        for part in self._parts:
            vars(part)[_STANDS] = self

    def _hooks(self, part: nn.Module) -> list[Any]:
        called, saved, loaded = (
            _Refusal(self, what)
            for what in (
                "{} is called",
                "the state_dict of {} is asked for",
                "{} loads a state_dict",
            )
        )
        return [
            part.register_forward_pre_hook(called, prepend=True),
            part.register_state_dict_pre_hook(saved),  # type: ignore[no-untyped-call]
            part.register_load_state_dict_pre_hook(loaded),  # type: ignore[no-untyped-call]
        ]

    def refuse(self, what: str, module: nn.Module) -> None:
        """Raise unless this is `opened`; `what` names the module's class where it has "{}"."""
        if not self._is_open:
            raise self.error(what.format(f"the {type(module).__name__}"))

    def error(self, what: str) -> ConfigError:
        """Return the error for what takes shards for the parameters."""
        return ConfigError(
            f"Rank {self._rank}: {what}, but the fit has left the parameters in shards, expected "
            f"full ones. Save with trainer.save_checkpoint and load the file, go on with "
            f"trainer.fit, validate, test or predict on all ranks, or set "
            f"full_parameters_after_fit=True."
        )

    def opened(self) -> AbstractContextManager[None]:
        """Refuse nothing inside."""
        return setting(self, _is_open=True)

    def end(self) -> None:
        """Stand over the module no more."""
        while self._handles:
            self._handles.pop().remove()
        for part in self._parts:
            vars(part).pop(_STANDS, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self.error(f"the {type(self._module).__name__}, or a part of it, is copied")

    def __reduce__(self) -> NoReturn:
        raise self.error(f"the {type(self._module).__name__}, or a part of it, is pickled")


class _Refusal:
    """A hook that refuses; copied or pickled with its module, it does so, too."""

    def __init__(self, rest: ShardsAtRest, what: str) -> None:
        self._rest, self._what = rest, what

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._rest.refuse(self._what, module)


def wake(module: nn.Module) -> None:
    """Make a module full that another strategy's run has left in shards; each rank must call."""
    stands: ShardsAtRest | None = vars(module).get(_STANDS)
    if stands is not None and not stands.wake():
        raise stands.error(
            f"the {type(module).__name__} is to run, whose strategy, which has its shards, is gone"
        )


class FitEnd(RunPart):
    """Ends a run with full parameters or with shards.

    Attributes:
        at_rest: Stands over the module that is left in shards; None over any other.
    """

    failed = False
    at_rest: ShardsAtRest | None = None
    cut_states: DataParallelEngine | None = None
    _around_rest: ExitStack | None = None
    _states_in_shards: list[FlatLayout] | None = None  # the optimizers', of a fit that is over

    def __init__(self, run: Any, after_fit: AfterFit) -> None:
        super().__init__(run)
        if after_fit is False and self.strategy.is_in_process:
            raise ConfigError(
                "full_parameters_after_fit=False leaves each rank its shards after the fit, but "
                "the ranks of the backend 'in_process' end with it; expected True or 'auto'. "
                "Leave it out, or use ranks that are processes: backend='gloo', devices=2."
            )
        self.after_fit = after_fit if self.strategy.may_leave_shards else True

    def check(self) -> None:
        """Refuse what a fit could not leave in shards, at its beginning."""
        averages = self.run.setup.averages
        if averages and self.after_fit is False and not self.run.has_full_parameters:
            raise ConfigError(
                "full_parameters_after_fit=False leaves the parameters in shards, but a callback "
                "averages weights and has the full average after the fit; expected one of the two. "
                "Leave out full_parameters_after_fit, or the callback."
            )

    # --- the end of a run -------------------------------------------------------------------------

    def end_run(self) -> None:
        """Leave the module as the option says; each rank must call unless the run has failed."""
        engine = self.run.engine
        if self.at_rest is not None:  # no run has begun since
            return
        if engine is not None and self._leaves_shards(engine):
            self._leave_shards(engine)
            return
        if engine is not None and self._leaves_states(engine):
            self._leave_states(engine)
            return
        if engine is not None:
            if self._states_in_shards is not None and not self.failed:
                self._gather_states(engine)
            self.detach(engine, keep=self._keeps_full(engine))
            self.run.checkpoints.left_sharded = self.failed and self.run.holds_shards
        elif self._states_in_shards is not None:  # its set-up has failed
            self.run.checkpoints.left_sharded = True
        self.run.engine, self._states_in_shards = None, None
        self.run.setup.revert_layer_sync()

    def _leaves_shards(self, engine: DataParallelEngine) -> bool:
        """Whether shards stay after this run, the same on all ranks; each rank must call."""
        if self.run.has_full_parameters or self.run.setup.averages:
            return False
        return self._leaves(engine, "the parameters in shards")

    def _leaves_states(self, engine: DataParallelEngine) -> bool:
        """Whether optimizers' states stay in shards after this run, and parameters are full."""
        if not (self.run.has_full_parameters and self.run.holds_shards):
            return False
        return self._leaves(engine, "the optimizers' states in shards")

    def _leaves(self, engine: DataParallelEngine, otherwise: str) -> bool:
        if self.failed or self.strategy.is_in_process:
            return False
        if not self.run.is_fitting():
            return self.has_states
        return not (self._fits(engine, otherwise) if self.after_fit == "auto" else self.after_fit)

    @property
    def has_states(self) -> bool:
        """Whether a fit that is over has left its optimizers' states in shards."""
        return self._states_in_shards is not None

    def _keeps_full(self, engine: DataParallelEngine) -> bool:
        """Whether this rank's module is full after this run; each rank must call."""
        # Ranks of one process other than 0 end with it, on copies that nobody has afterwards.
        run, strategy = self.run, self.strategy
        chooses = self.after_fit == "auto" and strategy.is_in_process and run.is_fitting()
        holds_full = run.has_full_parameters or strategy.dimensions or run.setup.averages
        if self.failed or not chooses or holds_full:
            return True
        return self._fits(engine, "full parameters to rank 0 alone") or strategy.mesh_rank == 0

    def _fits(self, engine: DataParallelEngine, otherwise: str) -> bool:
        """Whether the full state would fit into the memory of every rank; each rank must call."""
        fits, why = True, ""
        for where, needed, free in self._needs(engine):
            if free is not None and needed > _USED_AT_MOST * free:
                fits, why = False, f"{format_bytes(needed)} of the {format_bytes(free)} {where}"
        if self.strategy.reduce_boolean_decision(fits):
            return True
        rank_zero_warn(
            f"The fit leaves {otherwise}: full ones would take "
            f"{why or 'more than there is on another rank'}. trainer.save_checkpoint, fit, "
            f"validate, test and predict go on from there; full_parameters_after_fit="
            f"{'True' if self.strategy.is_in_process else 'True or False'} says so beforehand."
        )
        return False

    def _needs(self, engine: DataParallelEngine) -> Iterator[tuple[str, int, int | None]]:
        """Yield for each memory what the full state takes there of all ranks, and what is free."""
        strategy = self.strategy
        each = sum(
            torch.Size(engine.full_shape(param)).numel() * param.element_size()
            for param in (() if self.run.has_full_parameters else engine.model.parameters())
        )
        state = replicated(engine, strategy.optimizers).optimizer_state
        on_host = strategy.num_processes * each + (state if strategy.node_rank == 0 else 0)
        yield "free on the host", on_host, free_host_bytes()
        if strategy.root_device.type != "cpu":
            devices = len(set(strategy.parallel_devices or [strategy.root_device]))
            sharing = -(-strategy.num_processes // devices)
            yield "free on the device", sharing * each, free_bytes(strategy.root_device)

    def detach(
        self, engine: DataParallelEngine, *, keep: bool = True, states_stay: bool = False
    ) -> None:
        """Make the module full on every rank that keeps it, the optimizers' state on rank 0."""
        states, setup = [], self.run.setup
        if self.run.is_fitting():
            self.run.checkpoints.kept.keep(self.run.checkpointed, failed=self.failed)
        if not self.failed and self.run.holds_shards and not states_stay:
            states = [full_state_dict(sharded.optimizer, engine) for sharded in setup.sharded]
        for average in setup.averages:
            average.restore(full=not self.failed)
        if not self.failed:
            self.complete_kept(engine)
        engine.detach(restore=not self.failed, keep=keep)
        self.restore_dimensions(full=not self.failed)
        if not self.failed:
            give_back(engine.model)
        setup.detach_optimizers()
        for sharded, state in zip(setup.sharded, states, strict=False):
            put_full_state(sharded.optimizer, state)

    def complete_kept(self, engine: DataParallelEngine) -> None:
        """Put full tensors where user code keeps some in shards; each rank must call."""
        if self.run.holds_shards or self.strategy.dimensions:
            of_params = {
                storage_key(one)
                for flat in engine.flats
                for one in (flat.full, flat.shard, flat.master)
            }
            complete_kept(self.run.module.trainer, self.strategy.collectives, of_params)

    def restore_dimensions(self, *, full: bool) -> None:
        """Undo what has split the model; with `full` each rank must call."""
        self.run.setup.in_split_model.close()
        for one in reversed(self.strategy.dimensions):
            one.restore(full=full)

    # --- at rest ----------------------------------------------------------------------------------

    def _leave_states(self, engine: DataParallelEngine) -> None:
        """Leave the module full, and the optimizers' states in shards; each rank must call."""
        self.detach(engine, states_stay=True)
        for gradients in engine.gradients:
            gradients.buffer.drop()
        self._states_in_shards = [flat.layout for flat in engine.flats]
        self.run.engine, self.cut_states = None, engine
        self.run.setup.revert_layer_sync()

    def _leave_shards(self, engine: DataParallelEngine) -> None:
        """Gather nothing, and let engine and groups rest; each rank must call."""
        if self.run.is_fitting():
            self.run.checkpoints.kept.keep(self.run.checkpointed, failed=False)
        engine.rest()
        self.run.setup.detach_optimizers()
        for param in engine.model.parameters():
            param.grad = None
        self._states_in_shards = [flat.layout for flat in engine.flats]
        end = ref(self)  # who gives the strategy up frees what it holds

        def wake_if_alive() -> bool:
            alive = end()
            if alive is not None:
                alive._wake("gather")
            return alive is not None

        self.at_rest = ShardsAtRest(self.run.module, self.strategy.mesh_rank, wake_if_alive)

    @contextmanager
    def around_teardown(self) -> Iterator[None]:
        """Inside, Lightning tears down and moves full parameters, and shards stay put."""
        module = self.strategy.lightning_module
        if module is None or (self.at_rest is None and self.cut_states is None):
            yield
            return
        stays = self.at_rest is not None
        with instead(module, "cpu", lambda _: module) if stays else nullcontext():
            yield
        if self._around_rest is None:
            self._around_rest = ExitStack()
            saving = self.run.checkpoints.saving_in_run(module.trainer, self._opened)
            self._around_rest.enter_context(saving)
            if stays:
                self._around_rest.enter_context(self.strategy.engine.user_code.running())

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Inside, the shards at rest can be saved; each rank must enter."""
        with ExitStack() as opened:
            if self.at_rest is not None:
                opened.enter_context(self.at_rest.opened())
                opened.enter_context(self.strategy.engine.user_code.running(False))
            yield

    def begin_run(self) -> None:
        """Make a module full that a run has left in shards, its own or another strategy's."""
        run, module = self.run, self.strategy.lightning_module
        assert module is not None
        if run.engine is not None and self.at_rest is not None:
            self._wake(self._next_states(run.engine))
        elif self.cut_states is not None:
            self._settle_states(self._next_states(self.cut_states))
        wake(module)  # another strategy's

    def _next_states(self, engine: DataParallelEngine) -> StatesAtRest:
        if self.run.is_in_fit:
            return "drop"  # it has optimizers of its own
        return "keep" if engine.model is self.strategy.model else "gather"

    def _wake(self, states: StatesAtRest) -> None:
        """Make the module that rests full, and the optimizers' states; each rank must call."""
        strategy, engine, rest = self.strategy, self.run.engine, self.at_rest
        assert engine is not None
        assert rest is not None
        assert self._around_rest is not None
        self._around_rest.close()
        rest.end()
        if states == "gather":
            self._gather_states(engine)
        self.complete_kept(engine)
        engine.detach(restore=True)
        self.restore_dimensions(full=True)
        give_back(engine.model)
        self.run.engine = self.at_rest = self._around_rest = None
        if states != "keep":
            self._states_in_shards = None
        coming, strategy.model = strategy.model, engine.model
        self.run.setup.revert_layer_sync()
        strategy.model = strategy.model if coming is engine.model else coming

    def _settle_states(self, states: StatesAtRest) -> None:
        """Do with states in shards, beside full parameters, what a run asks for; each must call."""
        assert self.cut_states is not None
        assert self._around_rest is not None
        self._around_rest.close()
        if states == "gather":
            self._gather_states(self.cut_states)
        self.cut_states = self._around_rest = None
        if states != "keep":
            self._states_in_shards = None

    def _gather_states(self, engine: DataParallelEngine) -> None:
        """Bring the optimizers' states together on rank 0; each rank must call."""
        for optimizer in self.strategy.optimizers:
            put_full_state(optimizer, full_state_dict(optimizer, engine))

    def check_states_in_shards(self) -> None:
        """Raise unless the optimizers' states of a fit are cut as an evaluation's model is."""
        known, found = self._states_in_shards, [flat.layout for flat in self.run.engine.flats]
        if known is not None and known != found:
            raise ConfigError(
                f"Rank {self.strategy.mesh_rank}: the fit has left its optimizers' states in "
                f"shards, but this run cuts the model in another way; expected the same. Save and "
                f"load a checkpoint in between, freeze and unfreeze parameters after this run, or "
                f"set full_parameters_after_fit=True."
            )
