"""`state_dict` and `load_state_dict` of what Fabric has set up: full tensors, in and out.

    model.state_dict()             each rank gets every parameter full, in the optimizer's format
    model.load_state_dict(full)    each rank keeps its shard, with all of the format's digits
    optimizer.load_state_dict      as a single device's, by number, or as a folder has it, by name

Each rank must call. What runs inside this package asks with `keep_vars`, and gets parameters.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_shard.checkpoint.optimizer_misfits import optimizer_misfits
from lightning_shard.checkpoint.optimizer_state import full_state_dict, local_state_dict
from lightning_shard.checkpoint.resuming import agree_on_misfit, error_of
from lightning_shard.checkpoint.sharded.named_optimizers import name_misfits, numbered_state
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.scripted import hookable


class FullModuleState:
    """Lets the `state_dict` of a module, and of its parts, be full; `load_state_dict` as well.

    Args:
        module: The module, before an engine has it: the engine's hooks come after these.

    Attributes:
        engine: The engine that has the module; None before there is one.
    """

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
            for param, full in engine.full_parameters(everywhere=True, without=others):
                value = full if _is_own(full, param) else full.clone()
                state.update(dict.fromkeys(names.get(param, ()), value))

    def _hooks_of_loading(self, part: nn.Module) -> Sequence[RemovableHandle]:
        def before(module: nn.Module, *_: Any) -> None:
            if self._loaded is None and id(module) in self._parts and self.engine is not None:
                self._loaded = module
                self._begin_loading(self.engine)

        def after(module: nn.Module, incompatible: Any) -> None:
            if self._loaded is module:
                lacking = set(incompatible.missing_keys)
                loaded = {p for name, p in module.named_parameters() if name not in lacking}
                self._end_loading(loaded)

        return (
            part.register_load_state_dict_pre_hook(before),  # type: ignore[no-untyped-call]
            part.register_load_state_dict_post_hook(after),  # type: ignore[no-untyped-call]
        )

    def _begin_loading(self, engine: DataParallelEngine) -> None:
        """Let parameters be full, and each rank's shards take what is loaded; collective."""
        self._missing = []
        self._loading.enter_context(engine.user_code.running(False))
        self._loading.enter_context(engine.optimizer_view())
        self._loading.enter_context(engine.loading(self._missing))

    def _end_loading(self, loaded: Collection[nn.Parameter]) -> None:
        self._loaded = None
        if self.engine is not None:
            named = self.engine.model.named_parameters()
            self._missing += [name for name, param in named if param not in loaded]
        self._loading.close()

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Let the module load as torch does inside."""
        engine, self.engine = self.engine, None
        try:
            yield
        finally:
            self.engine = engine

    def remove(self) -> None:
        """Let the module's states be torch's own again."""
        while self._handles:
            self._handles.pop().remove()


def _is_own(full: torch.Tensor, param: nn.Parameter) -> bool:
    """Whether the full tensor is what the parameter shows, as a state dict usually has it."""
    return full.data_ptr() == param.data_ptr()


class FullOptimizerStates:
    """Gives an optimizer's full state, and lets it load one.

    Args:
        optimizer: An optimizer with shards.
        engine: The engine that has its parameters.
        names: Name of each parameter of the module.

    Attributes:
        optimizer: The optimizer whose state it is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: DataParallelEngine,
        names: Mapping[nn.Parameter, str],
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
        """Return a full state by number; each rank must call.

        Args:
            state: The state, by number or by the module's names.
            without_elements: Returns states to be checked in place of those that are not read.

        Raises:
            CheckpointError: The state does not fit on some rank.
        """
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
        self._is_open = True
        try:
            with self._engine.optimizer_view():
                self.optimizer.load_state_dict(dict(local))
        finally:
            self._is_open = False

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
