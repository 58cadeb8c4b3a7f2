"""Optimizer state that user code has put in by hand is cut as the rest of the state is.

    on_train_batch_end    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)    looks full
    the next step         the rank's shard of it, as what the optimizer makes itself

Under tensor parallel a step sees tensors that show parameters, by which it finds their state. A
rank that has no element of a parameter takes no step for it and makes no state. There a hook that
reads an entry, to change it, finds one without elements; counts are those of the parameters here.
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.optimizer_state import (
    is_kept,
    is_on_other_ranks,
    own_state,
    params_of,
)
from lightning_shard.data_parallel.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import has_parts
from lightning_shard.data_parallel.optimizer_entries import of_parameters
from lightning_shard.data_parallel.sharded_parameter import as_they_are
from lightning_shard.data_parallel.sharded_tensor import ShardedTensor
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, parameter_behind


class EditedState:
    """Cuts the state that user code has put into an optimizer.

    Args:
        optimizer: The user's optimizer, whose own state is cut already.
        engine: The engine that holds its parameters.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer, self._engine = optimizer, engine
        self._is_cut = engine.options.stage > 0 or bool(engine.split.groups)
        self._seen: list[int] = []
        self._num_params, self._waiting = -1, list[nn.Parameter]()  # those that lie elsewhere
        self._let_find()

    def detach(self) -> None:
        """Watch the optimizer's state no longer."""
        self.take_in()
        if isinstance(self._optimizer.state, _FoundState):
            self._optimizer.state = defaultdict(dict, self._optimizer.state)

    def _let_find(self) -> None:
        if has_parts(self._engine.split) and type(self._optimizer.state) is defaultdict:
            self._optimizer.state = _FoundState(dict, self._optimizer.state)

    @as_they_are
    def look(self) -> None:
        """Note the state that the optimizer leaves, after a step and outside of its view."""
        if self._is_cut:
            self._let_find()  # loading a state makes a new one
            self._let_read()
            self._seen = self._entries()

    def _entries(self) -> list[int]:
        """Return what tells whether entries have been exchanged, by few calls of Python's."""
        entries = self._optimizer.state.values()
        try:
            return [*map(id, chain.from_iterable(map(dict.values, entries)))]
        except TypeError:  # an optimizer that keeps something of itself there
            known = [entries for _, entries in of_parameters(self._optimizer)]
            return [id(one) for entries in known for one in entries.values()]

    def _let_read(self) -> None:
        """Let hooks read state of every parameter that has been updated on any rank."""
        groups = self._optimizer.param_groups
        if self._num_params != (number := sum(len(group["params"]) for group in groups)):
            self._num_params = number
            self._waiting = [*filter(self._is_elsewhere, params_of(self._optimizer))]
        ready = [param for param in self._waiting if param.grad is not None]
        if ready:
            known = set(ready)
            self._waiting = [param for param in self._waiting if param not in known]
        for param in ready:
            if param not in self._optimizer.state:
                self._let_read_nothing(param)

    def _let_read_nothing(self, param: nn.Parameter) -> None:
        """Let hooks read state without elements, which lies where the rank's other state does."""
        device = param.device if self._engine.copier is None else torch.device("cpu")
        dtype = param.dtype
        if self._engine.split.is_here(param):  # then it has the format of the forward
            dtype = self._engine.owner(param)[0].master_dtype
        nothing = torch.empty(0, dtype=dtype, device=device)
        self._optimizer.state[param] = _ElsewhereState(nothing, self._optimizer.state)

    def _is_elsewhere(self, param: nn.Parameter) -> bool:
        engine = self._engine
        if not engine.split.is_here(param) or engine.owners.gathered_elsewhere(param):
            return True
        return is_on_other_ranks(*engine.owner(param))

    @as_they_are
    @torch.no_grad()
    def take_in(self) -> None:
        """Cut what user code has put in since the last step; each rank must call."""
        if not self._is_cut or self._entries() == self._seen:
            return
        for param in params_of(self._optimizer):
            entries = self._optimizer.state.get(param)
            if isinstance(entries, dict):
                for key, value in entries.items():
                    entries[key] = self._own(key, value, param)
                if not is_kept(param, self._engine):
                    self._let_read_nothing(param)
        self._seen = self._entries()

    def _own(self, key: str, value: Any, param: nn.Parameter) -> Any:
        engine, keeps = self._engine, is_kept(param, self._engine)
        if isinstance(value, (AveragedGradient, ShardedTensor)):
            if keeps and self._lies_alike(value, param):
                return value.local.clone()
            value = value.full_tensor()
        if isinstance(value, DimShardedTensor):
            value = value.part.gather_detached()
        if not isinstance(value, Tensor) or not keeps or value.ndim == 0:
            return value
        if tuple(value.shape) != tuple(engine.full_shape(param)):
            return value
        own: Tensor = own_state(key, value, param, engine)
        return own.to(engine.owner(param)[0].master.device)

    def _lies_alike(self, value: Tensor, param: nn.Parameter) -> TypeGuard[ShardedTensor]:
        """Whether this rank has of a value what its optimizer has of the parameter."""
        flat, index = self._engine.owner(param)
        return (
            isinstance(value, ShardedTensor)
            and value.spread is self._engine.shards.spread_of(param)
            and not (flat.is_owned or self._engine.owners.gathers(param))
            and value.local.shape == flat.master_views[index].shape
            and value.local.device == flat.master.device
        )


class _FoundState(defaultdict[Any, Any]):
    """State of an optimizer, found by what shows a parameter to user code as well."""

    def __missing__(self, key: Any) -> Any:
        param = parameter_behind(key)
        return super().__missing__(key) if param is None else self[param]

    def __contains__(self, key: object) -> bool:
        param = parameter_behind(key)
        return super().__contains__(key if param is None else param)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter, or a default."""
        param = parameter_behind(key)
        return super().get(key if param is None else param, default)


class _ElsewhereState(dict[str, Any]):
    """State of a parameter whose elements lie on other ranks: each entry is without elements.

    A count, such as the number of steps, is the one that the rank's other parameters have.
    """

    def __init__(self, nothing: Tensor, states: Mapping[Any, Any]) -> None:
        super().__init__()
        self._nothing, self._states = nothing, states

    def __missing__(self, key: str) -> Any:
        here = (one for one in self._states.values() if isinstance(one, dict))
        value = next((one[key] for one in here if key in one), None)
        if isinstance(value, Tensor) and value.ndim == 0:
            return value.clone()
        if value is not None and not isinstance(value, Tensor):
            return value
        return self._nothing.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
