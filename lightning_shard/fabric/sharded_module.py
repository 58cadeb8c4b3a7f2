"""A module that Fabric has set up, the engine that holds it, and the optimizers on its shards.

    fabric.setup(module, optimizer)
      ├─ ShardedModule    Fabric calls it as the module; a forward is a step of the engine
      └─ HeldModule       module, engine and optimizers, from set-up to the end of a launch

Optimizers that need full matrices say so before the engine is made. Where the module was set up
before such an optimizer was, the engine is made anew.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.optimizer_state import full_state_dict
from lightning_shard.checkpoint.sharded.load_hooks import loads_plainly
from lightning_shard.data_parallel.differentiation import Gradients, Run
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.kept_activations import KeptActivations
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.data_parallel.torch_private import Untraced, untraced_alone
from lightning_shard.errors import ConfigError
from lightning_shard.fabric.full_state import FullModuleState, FullOptimizerStates
from lightning_shard.optim.host_step import refuse_offload
from lightning_shard.optim.owned_parameters import parameters_to_own
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer

EngineMaker = Callable[[nn.Module, Collection[nn.Parameter]], DataParallelEngine]
_HELD = "_lightning_shard_held"  # set on parameters that an engine has under Fabric


class HeldModule:
    """One module of the user's, in shards until `release`.

    Args:
        module: The module, full, on this rank's device.
        optimizers: Optimizers that are known before the engine is made.
        make_engine: Makes an engine of a module, with the parameters that one rank each has full.
        options: Options of the engine, of which blocks are computed again in backward and what lies
            in host memory.
        rank: This rank, for error messages.

    Attributes:
        module: The user's module.
        wrapper: Returns what Fabric calls in its place; None once nobody refers to that.
        activations: What is kept of forwards for their backwards.
        sharded: The optimizers that are attached.
        loads_plainly: Whether only torch's own code takes parameters out of a `state_dict`.
    """

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
        self._names = {param: name for name, param in module.named_parameters()}
        _hold(module, rank)  # before ranks meet: another thread may be given the same module
        self.sharded: list[ShardedOptimizer] = []
        self.loads_plainly = loads_plainly(module)
        self._make_engine, self._offload = make_engine, options.offload
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
        self._state = FullModuleState(self.module)  # its hooks run before the engine's
        self._engine = engine = self._make_engine(self.module, owned if stage_cuts else ())
        self._state.engine = engine
        self.activations.attach(engine)
        engine.edits.are_expected = True
        engine.user_code.runs = engine.user_code.is_a_loop = True
        self._owned = frozenset(owned)

    def _to_own(self, optimizers: Sequence[Optimizer]) -> frozenset[nn.Parameter]:
        """Return the parameters that optimizers of full matrices need on one rank each."""
        owned = parameters_to_own(optimizers, self.module)
        if owned and self._offload is not None:
            raise refuse_offload(self._offload, optimizers)
        return owned

    def holds(self, param: nn.Parameter) -> bool:
        """Whether the engine has this parameter."""
        return self._engine is not None and param in self._names

    def attach(self, optimizer: Optimizer) -> None:
        """Let an optimizer update shards; each rank must call.

        Raises:
            ConfigError: It cannot.
        """
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

    def release(self, *, restore: bool) -> None:
        """Take the engine off; with `restore` module and optimizers' states are full, collective.

        Args:
            restore: Whether all ranks call. Without it shards are left, and refused afterwards.
        """
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
            one.optimizer.state.clear()
            if state:
                one.optimizer.load_state_dict(state)
        self._let_go()
        self.sharded, self._states = [], []

    def _let_go(self) -> None:
        for param in self._names:
            vars(param).pop(_HELD, None)
        self.activations.end()


class ShardedModule(nn.Module):
    """What Fabric calls in the place of the user's module: each forward is a step of the engine.

    Args:
        held: The module with its engine.
        differentiation: Knows who differentiates through the module.
    """

    def __init__(self, held: HeldModule, differentiation: "Differentiation") -> None:
        super().__init__()
        self.module = held.module
        self.held = held
        self._differentiation = differentiation
        self._is_inside = False

    @untraced_alone
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, which may be compiled; a call inside another one is part of it."""
        engine = self.held.engine
        if engine is None or self._is_inside:
            return self.module(*args, **kwargs)
        self._is_inside = True
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
    """Knows whether Fabric differentiates, or the user by inputs: what a plain backward does not.

    A plain backward is refused, as Lightning refuses it, but for gradients by inputs, too.
    """

    def __init__(self) -> None:
        self._num_running = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, let gradients pass through modules."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return the gradients of some inputs, as this rank has them."""
        with self.running():
            return run(inputs)

    def check(self, _: Tensor) -> None:
        """Raise RuntimeError for a gradient of a plain backward."""
        if not self._num_running:
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
    """Tells which engines a backward has come to on any rank, once it is over.

    Of a GAN's two modules a loss may reach one. The other's gradients are not sent then, and what
    it has unsharded for a backward of its own stays.

    Args:
        engines: All engines of a Fabric.
        collectives: Group of all ranks, each of which must ask; None where there is no engine.
    """

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
            arrived = [int(engine.reducer.has_arrived) for engine in self._engines]
            flags = torch.tensor(arrived, dtype=torch.uint8, device=self._engines[0].device)
            self._collectives.all_reduce(flags, "max").wait()
            self._flags = flags.tolist()
        return bool(self._flags[number])
