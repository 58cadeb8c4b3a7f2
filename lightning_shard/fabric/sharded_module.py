"""A module that Fabric has set up, the engine that holds it, and the optimizers on its shards.

    fabric.setup(module, optimizer)
      ├─ ShardedModule    Fabric calls it as the module; a forward is a step of the engine
      └─ HeldModule       module, engine and optimizers, from set-up to the end of a launch

Where an optimizer needs full matrices and the module was set up before it, the engine is made
anew. `state_dict` and `load_state_dict` of both give and take full tensors, and each rank must
call; what runs inside this package asks with `keep_vars`, and gets parameters.

The option `same_bits` in a loop of the user's: what it has of micro-batches.

for batch in loader:              a micro-batch begins, and its random numbers
loss = model(batch)           the first begins with rank 0's buffers, each with the step's
fabric.backward(loss / L)     ends it; the last of L sends what all have added up
optimizer.step()              ends the step, after L backwards on each rank
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler, IterableDataset
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.misfits import optimizer_misfits
from lightning_shard.checkpoint.optimizer_state import (
    full_state_dict,
    local_state_dict,
    put_full_state,
)
from lightning_shard.checkpoint.resuming import agree_on_misfit, error_of
from lightning_shard.checkpoint.sharded.entries import name_misfits, numbered_state
from lightning_shard.checkpoint.sharded.run_state import loads_plainly
from lightning_shard.core.modules import hookable
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.differentiation import Gradients, Run
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.gradients.reducer import HAS_ARRIVED
from lightning_shard.data_parallel.kept_activations import KeptActivations
from lightning_shard.data_parallel.memory.inner_tensors import join_entries, take_entries_apart
from lightning_shard.data_parallel.memory.quantised import (
    give_back,
    pop_scales,
    set_scales,
    take_over,
)
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.data_parallel.torch_private import Untraced, untraced_alone
from lightning_shard.errors import ConfigError
from lightning_shard.optim.host_step import refuse_offload
from lightning_shard.optim.owned_parameters import parameters_to_own
from lightning_shard.optim.sharded_optimizer import LaidOutAnew, ShardedOptimizer
from lightning_shard.strategies.micro_batches import TRAINING, UPDATE, Dealing, begin_random_numbers


class StepsInOrder:
    """Counts the micro-batches of steps, and lets random numbers and buffers follow them.

    Attributes:
        num_steps: Steps that are done; a loop that goes on from a checkpoint sets it.
    """

    def __init__(
        self, ranks: Collectives, device: torch.device, *, stage: int, num_own: int
    ) -> None:
        self.num_steps = 0
        self._index, self._num_own, self._device = 0, num_own, device
        self._rank, self._notes_buffers = ranks.rank, True
        self._dealing = Dealing(
            rank=ranks.rank, num_ranks=ranks.size, num_own=num_own, stage=stage, error=self.error
        )
        neighbours = num_own if stage < 2 and ranks.size > 1 else 1
        if ranks.size & (ranks.size - 1) or neighbours & (neighbours - 1):
            raise self.error(
                f"{ranks.size} ranks have {num_own} micro-batches of a step each, expected 1, 2, "
                f"4, 8 ... ranks, and as many micro-batches under stages 0 and 1. Use another "
                f"number."
            )
        self.begin_micro_batch()

    def error(self, why: str) -> ConfigError:
        """Return the error that says why bits would depend on the ranks, and what to do."""
        return ConfigError(f"Rank {self._rank}: same_bits=True, but {why}")

    def check(self, module: nn.Module, precision: str, *, is_first: bool) -> None:
        """Refuse a module whose bits would depend on the ranks."""
        if not is_first:
            raise self.error(
                "a second module is set up, expected one, whose backwards count the micro-batches "
                "of a step. Set up one module that holds both."
            )
        if precision.startswith("16"):
            raise self.error(
                f"precision={precision!r} leaves out steps by what the ranks' own gradients are, "
                f"expected a format with fp32's range. Use 'bf16-mixed'."
            )
        if any(isinstance(one, nn.SyncBatchNorm) for one in module.modules()):
            raise self.error(
                "batch norms are synchronised over the ranks, expected each micro-batch's own "
                "statistics. Leave SyncBatchNorm out."
            )

    def begin_micro_batch(self) -> None:
        """Begin random numbers anew with what comes next: a micro-batch, or the step's update."""
        of = [UPDATE, self.num_steps]
        if self._index < self._num_own:
            of = [TRAINING, self.num_steps, self._dealing.place(self._index)]
        begin_random_numbers(*of, device=self._device)

    def before_forward(self, engine: DataParallelEngine) -> None:
        """Note with what buffers a step begins."""
        if self._notes_buffers and self._num_own > 1:
            engine.buffers.begin_micro_batch(is_first=True)
        self._notes_buffers = False

    @contextmanager
    def backward(self, engine: DataParallelEngine) -> Iterator[None]:
        """Run the backward of a micro-batch inside, which sends only with the last of a step."""
        index, is_last = self._index, self._index == self._num_own - 1
        if index == self._num_own or (is_last and not engine.reducer.synchronises):
            raise self.error(
                f"backward {index + 1} of a step begins, expected {self._num_own} before "
                f"optimizer.step(), the last of them outside of no_backward_sync. Pass "
                f"num_micro_batches to the strategy."
            )
        with nullcontext() if is_last else engine.no_sync():
            yield
        if self._num_own > 1:
            engine.buffers.end_micro_batch(is_first=index == 0, is_last=is_last)
        self._index += 1
        self.begin_micro_batch()

    def end_step(self) -> None:
        """Note that an optimizer has stepped, the first of the model's or another."""
        if self._index not in (0, self._num_own):
            raise self.error(
                f"an optimizer steps after {self._index} backwards, expected {self._num_own}. Pass "
                f"num_micro_batches={self._index} to the strategy, or make as many."
            )
        if self._index:
            self._index, self._notes_buffers = 0, True
            self.num_steps += 1
            self.begin_micro_batch()

    def dealt(self, loader: Any) -> Any:
        """Return a loader of this rank's micro-batches, unless each rank has all samples."""
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        if not is_stream and not isinstance(getattr(loader, "sampler", None), DistributedSampler):
            return loader
        return DealtLoader(self._dealing.dealt(loader, is_training=True), self)


class DealtLoader:
    """A loader at whose batches micro-batches begin."""

    def __init__(self, loader: Any, steps: StepsInOrder) -> None:
        self.__dict__.update(vars(loader))
        self._loader, self._steps = loader, steps

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._steps.begin_micro_batch()
            yield batch


EngineMaker = Callable[[nn.Module, Collection[nn.Parameter]], DataParallelEngine]
_HELD = "_lightning_shard_held"  # set on parameters that an engine has under Fabric


class FullModuleState:
    """Lets the `state_dict` of a module, and of its parts, be full; `load_state_dict` as well."""

    engine: DataParallelEngine | None = None

    def __init__(self, module: nn.Module) -> None:
        self._parts = {id(part) for part in module.modules()}  # and not copies of them
        self._asked: list[nn.Module] = []  # by the user; of their parts torch asks
        self._loaded: nn.Module | None = None
        self._loading = ExitStack()
        self._missing: list[str] = []
        self._handles = [
            handle
            for part in hookable(module)
            for handle in (*self._hooks_of_saving(part), *self._hooks_of_loading(part))
        ]

    def _hooks_of_saving(self, part: nn.Module) -> Sequence[RemovableHandle]:
        def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if not keep_vars and id(module) in self._parts and not (self._asked and prefix):
                self._asked.append(module)
                if self.engine is not None:
                    self.engine.adoption.part_from_shards()

        def after(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            if self._asked and self._asked[-1] is module:
                self._asked.pop()
                self._fill(module, state, prefix)

        return (
            part.register_state_dict_pre_hook(before),  # type: ignore[no-untyped-call]
            part.register_state_dict_post_hook(after),  # type: ignore[no-untyped-call]
        )

    @torch.no_grad()
    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Exchange a state's entries for full tensors; each rank must call."""
        engine = self.engine
        if engine is None:
            return
        with engine.user_code.running(False):
            names: dict[nn.Parameter, list[str]] = {}
            for name, param in module.named_parameters(remove_duplicate=False):
                if prefix + name in state:
                    names.setdefault(param, []).append(prefix + name)
            others = {param for param in engine.model.parameters() if param not in names}
            for param, full in engine.full_values.each(everywhere=True, without=others):
                value = full if _is_own(full, param) else full.clone()
                state.update(dict.fromkeys(names.get(param, ()), value))
        if not prefix:
            join_entries(module, state)

    def _hooks_of_loading(self, part: nn.Module) -> Sequence[RemovableHandle]:
        def before(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
            if self._loaded is None and id(module) in self._parts and self.engine is not None:
                self._loaded = module
                take_entries_apart(module, state)
                set_scales(pop_scales(module, state))
                self._begin_loading(self.engine)

        def after(module: nn.Module, incompatible: Any) -> None:
            if self._loaded is module:
                lacking, named = set(incompatible.missing_keys), dict(module.named_parameters())
                # torch takes names of inner tensors, which have a dot, for those of modules
                unexpected = incompatible.unexpected_keys
                unexpected[:] = [name for name in unexpected if name not in named]
                self._end_loading({p for name, p in named.items() if name not in lacking})

        return (
            part.register_load_state_dict_pre_hook(before),  # type: ignore[no-untyped-call]
            part.register_load_state_dict_post_hook(after),  # type: ignore[no-untyped-call]
        )

    def _begin_loading(self, engine: DataParallelEngine) -> None:
        """Let parameters be full, and each rank's shards take what is loaded; collective."""
        self._missing = []
        self._loading.enter_context(engine.user_code.running(False))
        self._loading.enter_context(engine.optimizer_view())
        self._loading.enter_context(engine.full_values.loading(self._missing))

    def _end_loading(self, loaded: Collection[nn.Parameter]) -> None:
        self._loaded = None
        if self.engine is not None:
            named = self.engine.model.named_parameters()
            self._missing += [name for name, param in named if param not in loaded]
        self._loading.close()

    def plain(self) -> AbstractContextManager[None]:
        """Let the module load as torch does inside."""
        return setting(self, engine=None)

    def remove(self) -> None:
        """Let the module's states be torch's own again."""
        while self._handles:
            self._handles.pop().remove()


def _is_own(full: torch.Tensor, param: nn.Parameter) -> bool:
    """Whether the full tensor is what the parameter shows, as a state dict usually has it."""
    return full.data_ptr() == param.data_ptr()


class FullOptimizerStates:
    """Gives an optimizer's full state, and lets it load one."""

    def __init__(
        self, optimizer: Optimizer, engine: DataParallelEngine, names: Mapping[nn.Parameter, str]
    ) -> None:
        self.optimizer = optimizer
        self._engine, self._names = engine, names
        self._is_open = False
        self._handles = [
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def full(self) -> dict[str, Any]:
        """Return the full state on every rank, on the host; each rank must call."""
        with self._engine.user_code.running(False):
            state = full_state_dict(self.optimizer, self._engine)
        told: dict[str, Any] = self._engine.collectives.broadcast_object(state, src=0)
        return told

    def checked(
        self,
        state: Mapping[str, Any],
        without_elements: Callable[[list[Any]], list[Any]] = lambda states: states,
    ) -> dict[str, Any]:
        """Return a full state by number, checked without what is not read; each must call."""
        optimizer, names = self.optimizer, self._names
        misfits = name_misfits(state, optimizer, names)
        numbered = dict(state) if misfits else numbered_state(state, optimizer, names)
        shapes = {
            param: (name, self._engine.full_shape(param)) for param, name in self._names.items()
        }
        if not misfits:
            (known,) = without_elements([numbered])
            misfits = list(optimizer_misfits(known, optimizer, shapes))
        agree_on_misfit(self._engine.collectives, error_of(misfits))
        return numbered

    def load(self, local: Mapping[str, Any]) -> None:
        """Load the state of this rank's shards."""
        with setting(self, _is_open=True), self._engine.optimizer_view():
            self.optimizer.load_state_dict(dict(local))

    def _before_load(self, _: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Cut a full state that user code loads, and let the optimizer see its shards meanwhile."""
        if self._is_open:
            return None
        numbered = self.checked(state)
        local = local_state_dict(numbered, self.optimizer, self._engine)
        self._engine.view.enter()
        return local

    def _after_load(self, _: Optimizer) -> None:
        if not self._is_open:
            self._engine.view.leave()

    def remove(self) -> None:
        """Let the optimizer load as torch does."""
        for handle in self._handles:
            handle.remove()


class HeldModule:
    """One module of the user's, in shards until `release`."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Collection[Optimizer],
        make_engine: EngineMaker,
        *,
        options: EngineOptions,
        rank: int,
    ) -> None:
        self.module = module
        self.wrapper: Callable[[], ShardedModule | None] = lambda: None
        self._known = set[nn.Parameter]()  # also what the module has lost since
        self._rank, self._options = rank, options
        self._hold()  # before ranks meet: another thread may be given the same module
        self.sharded: list[ShardedOptimizer] = []
        self.loads_plainly = loads_plainly(module)
        self._make_engine = make_engine
        self.activations = KeptActivations()
        self.activations.begin(module, options)
        self._engine: DataParallelEngine | None = None
        self._states: list[FullOptimizerStates] = []
        try:
            self._start(self._to_own(list(optimizers)))
        except BaseException:
            self._let_go()
            raise

    @property
    def engine(self) -> DataParallelEngine | None:
        """The engine; None once the module is full again."""
        return self._engine

    @property
    def present_engine(self) -> DataParallelEngine:
        """The engine, from set-up to `release`."""
        assert self._engine is not None
        return self._engine

    def _start(self, owned: Collection[nn.Parameter]) -> None:
        stage_cuts = self._engine is None or self._engine.options.stage > 0
        take_over(self.module)
        self._state = FullModuleState(self.module)  # its hooks run before the engine's
        self._engine = engine = self._make_engine(self.module, owned if stage_cuts else ())
        self._state.engine = engine
        self.activations.attach(engine)
        engine.user_code.runs = engine.user_code.is_a_loop = True
        self._owned = frozenset(owned)

    def _hold(self) -> None:
        _hold(self.module, self._rank)
        self._names = {param: name for name, param in self.module.named_parameters()}
        self._known.update(self._names)

    def follow_model(self) -> None:
        """Lay the module out anew where it has other parameters; each rank must call."""
        engine = self._engine
        if engine is None or not engine.has_other_parameters():
            return
        laid_out = LaidOutAnew(engine, self.sharded)
        for states in self._states:
            states.remove()
        self._give_back(engine, restore=True)
        laid_out.detach_optimizers()
        self._let_go()
        self._hold()
        self.activations.begin(self.module, self._options)
        optimizers = [one.optimizer for one in self.sharded]
        self._start(self._to_own(optimizers))
        engine = self.present_engine
        self.sharded = laid_out.attach_optimizers(engine)
        self._states = [FullOptimizerStates(one, engine, self._names) for one in optimizers]

    def _to_own(self, optimizers: Sequence[Optimizer]) -> frozenset[nn.Parameter]:
        """Return the parameters that optimizers of full matrices need on one rank each."""
        owned = parameters_to_own(optimizers, self.module)
        if owned and self._options.offload is not None:
            raise refuse_offload(self._options.offload, optimizers)
        return owned

    def holds(self, param: nn.Parameter) -> bool:
        """Whether the engine has this parameter."""
        return self._engine is not None and param in self._known

    def attach(self, optimizer: Optimizer) -> None:
        """Let an optimizer update shards; each rank must call."""
        if any(one.optimizer is optimizer for one in self.sharded):
            return
        engine = self.present_engine
        owned = self._to_own([optimizer]) if engine.options.stage > 0 else frozenset()
        if owned - self._owned and not self.sharded and engine.options.compression is None:
            self._give_back(engine, restore=True)
            self._start(owned)
        self.sharded.append(ShardedOptimizer(optimizer, self.present_engine))
        self._states.append(FullOptimizerStates(optimizer, self.present_engine, self._names))

    def state_of(self, optimizer: Optimizer) -> FullOptimizerStates | None:
        """Return what gives the full state of an optimizer; None where it is not attached."""
        return next((one for one in self._states if one.optimizer is optimizer), None)

    def loading_plainly(self) -> AbstractContextManager[None]:
        """Let `load_state_dict` of the module be torch's own inside."""
        return self._state.plain()

    def _give_back(self, engine: DataParallelEngine, *, restore: bool) -> None:
        self._state.remove()
        engine.user_code.runs = engine.user_code.is_a_loop = False
        engine.detach(restore=restore)
        if restore:
            give_back(self.module)

    def release(self, *, restore: bool) -> None:
        """Detach the engine; with `restore` module and optimizers' states are full, collective."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        full = [full_state_dict(one.optimizer, engine) for one in self.sharded if restore]
        for states in self._states:
            states.remove()
        self._give_back(engine, restore=restore)
        for one in self.sharded:
            one.detach()
        for one, state in zip(self.sharded, full, strict=False):
            put_full_state(one.optimizer, state)
        self._let_go()
        self.sharded, self._states = [], []

    def _let_go(self) -> None:
        for param in self._known:
            vars(param).pop(_HELD, None)
        self.activations.end()


class ShardedModule(nn.Module):
    """What Fabric calls in the place of the user's module: each forward is a step of the engine."""

    def __init__(
        self,
        held: HeldModule,
        differentiation: "Differentiation",
        in_order: StepsInOrder | None = None,
    ) -> None:
        super().__init__()
        self._in_order = in_order
        self.module = held.module
        self.held = held
        self._differentiation = differentiation
        self._is_inside = False

    @untraced_alone
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, which may be compiled; a call inside another one is part of it."""
        if self.held.engine is None or self._is_inside:
            return self.module(*args, **kwargs)
        self.held.follow_model()
        engine = self.held.present_engine
        self._is_inside = True
        if self._in_order is not None:
            self._in_order.before_forward(engine)
        try:
            with Untraced(engine.step()), Untraced(self.held.activations.forward(args, kwargs)):
                outputs = self.module(*args, **kwargs)
        finally:
            self._is_inside = False
        apply_to_collection(outputs, Tensor, self._watch)
        return outputs

    def _watch(self, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(self._differentiation.check)  # type: ignore[no-untyped-call]
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ConfigError(
            f"A {type(self.module).__name__} that Fabric has set up is copied, but its engine and "
            f"its ranks' groups cannot be; expected the module itself. Copy model.module."
        )


class Differentiation:
    """Knows whether Fabric differentiates, or the user by inputs, as a plain backward does not."""

    def __init__(self) -> None:
        self._is_running = False

    def running(self) -> AbstractContextManager[None]:
        """Inside, let gradients pass through modules."""
        return setting(self, _is_running=True)

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return the gradients of some inputs, as this rank has them."""
        with self.running():
            return run(inputs)

    def check(self, _: Tensor) -> None:
        """Raise RuntimeError for a gradient of a plain backward."""
        if not self._is_running:
            raise RuntimeError(
                "The strategy averages gradients and requires you to call `fabric.backward(loss)` "
                "instead of `loss.backward()`."
            )


def _hold(module: nn.Module, rank: int) -> None:
    """Mark a module's parameters, or raise ConfigError if one of them is marked."""
    for name, param in module.named_parameters():
        holder = vars(param).get(_HELD)
        if holder is None:
            continue
        if holder != rank:
            raise ConfigError(
                f"Rank {rank}: {name!r} of {type(module).__name__} was set up by rank {holder}, "
                f"which is a thread of this process, expected a module of this rank's own. Make "
                f"it inside the launched function, or pass it: fabric.launch(train, model)."
            )
        raise ConfigError(
            f"Rank {rank}: {name!r} of {type(module).__name__} is in shards already, of a module "
            f"that was set up before; expected parameters of one module alone. Set up one module "
            f"that holds all that share parameters."
        )
    for param in module.parameters():
        vars(param)[_HELD] = rank


def engines_of(held: Collection[HeldModule]) -> Iterator[DataParallelEngine]:
    """Yield the engines of modules that are in shards."""
    for one in held:
        if one.engine is not None:
            yield one.engine


class UsedEngines:
    """Tells which engines, of a GAN's two, a backward has come to on any rank; each must ask."""

    def __init__(
        self, engines: Sequence[DataParallelEngine], collectives: Collectives | None
    ) -> None:
        self._engines, self._collectives = engines, collectives
        self._flags: list[int] | None = None

    def has(self, number: int) -> bool:
        """Whether some rank has a gradient of the engine of this number."""
        if len(self._engines) < 2 or self._collectives is None:
            return True
        if self._flags is None:
            arrived = [int(engine.reducer.owed in HAS_ARRIVED) for engine in self._engines]
            flags = torch.tensor(arrived, dtype=torch.uint8, device=self._engines[0].device)
            self._collectives.all_reduce(flags, "max").wait()
            self._flags = flags.tolist()
        return bool(self._flags[number])
