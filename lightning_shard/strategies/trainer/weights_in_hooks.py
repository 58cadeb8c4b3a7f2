"""Lets weights that the ranks of one model share look full to the user's hooks.

    hook ──> weight.norm(), nn.init.eye_(weight), weight[0].zero_(), load_state_dict(full) ...
                │ the full tensor, gathered for this one operation
                └──> what was written is cut, and each rank keeps its shard

The full tensor stays as long as the hook keeps a view of it, at most until the hook ends.
Questions about shapes need no gathering. Gathering is collective: each rank must ask.

The layers' own forwards see the shards, as does code of the engine `as_they_are`: so parameters
cannot show themselves full by their class, as under ZeRO stage 3.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_shard.core.call_site import reading
from lightning_shard.core.states import Asker, asker, having, user_asks
from lightning_shard.core.tensor_calls import (
    OF_FORMAT,
    OF_MEMORY,
    OF_OBJECT,
    OF_SHAPE,
    SET_DATA,
    SET_GRAD,
    Exchanged,
    changed_by,
    found_in,
    map_only,
    name_of,
)
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.torch_private import (
    outside_transforms,
    sees_subclasses,
    wraps_tensors,
)
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.sharded_parameter import (
    differentiation_refused,
    is_recorded,
    stand_for,
)
from lightning_shard.data_parallel.views.sharded_tensor import ShardedTensor
from lightning_shard.data_parallel.views.unseen_calls import ModeInHooks, makers_seen
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor


@dataclass(eq=False)
class _Full:
    """A parameter as a hook sees it: its full tensor, without a graph."""

    param: nn.Parameter
    tensor: Tensor
    is_assigned: bool = False


class WeightsInHooks(ModeInHooks):
    """Gives hooks full tensors in place of the parameters of a split model.

    After each hook it calls `finish_copies`, as a hook may have copied modules with full weights.
    `follow` returns by tensor beside the parameters, such as buffers of other stages, what brings
    it up to date and returns what stands for it; each rank must call.
    """

    def __init__(
        self,
        engine: DataParallelEngine,
        rank: int,
        finish_copies: Callable[[], None] = lambda: None,
        follow: Callable[[], dict[Tensor, Callable[[], Tensor]]] = dict,
    ) -> None:
        super().__init__()
        self._follow = follow
        self._behind: dict[Tensor, Callable[[], Tensor]] | None = None  # not yet asked for
        self._engine, self._rank, self._finish_copies = engine, rank, finish_copies
        self._of_model = set(engine.model.parameters())
        self._names: Mapping[nn.Parameter, str] = {}
        self.is_on = False
        self._kept: dict[nn.Parameter, _Full] = {}
        self._written: dict[nn.Parameter, Tensor] = {}  # what this has assigned, alive

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Run a hook of the user's inside; each rank must enter."""
        if self.is_on:
            yield
            return
        with self._turned(on=True), makers_seen(), having(asker, value=Asker.USER):
            yield
        with having(asker, Asker.ENGINE):
            self._take_in()
            self._written.clear()
            self._engine.adopt_assigned()
            self._finish_copies()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Run code inside that a hook has called and that works with the shards."""
        with having(asker, Asker.ENGINE), ExitStack() as inside:
            if self.is_on:
                inside.enter_context(self._turned(on=False))
                self._take_in()
            yield

    @contextmanager
    def _turned(self, *, on: bool) -> Iterator[None]:
        """The mode stays on the stack, and does nothing, below one that the hook has entered."""
        before, self.is_on, self._behind = self.is_on, on, None
        turned = self.turn(on=on)
        try:
            yield
        except BaseException:
            self._kept.clear()  # the other ranks may be elsewhere
            raise
        finally:
            if turned:
                self.turn(on=not on)
            self.is_on, self._behind = before, None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not self.is_on:
            return func(*args, **(kwargs or {}))
        return self.call(func, args, dict(kwargs or {}))

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Do one operation of a hook, with full tensors in place of shards."""
        if func == SET_DATA:  # of which torch asks no class
            value = args[1].full_tensor() if isinstance(args[1], _SHARDED) else args[1]
            args = (args[0], full_tensor(value))
        if func not in _OF_THE_OBJECT and func not in OF_SHAPE:
            args, kwargs = self._up_to_date(args, kwargs)
        params = [one for one in found_in(nn.Parameter, (args, kwargs)) if self._is_spread(one)]
        if not params:
            args, kwargs = _with_full_gradients(func, args, kwargs)
            return func(*args, **kwargs)
        if func in _OF_THE_OBJECT:
            return func(*args, **kwargs)
        if _own_code_runs():
            self._bring_back(params)
            is_cut = asker.get() is Asker.LAYER and self._engine.split.groups_of_layers
            return self._on_shards(func, args, kwargs) if is_cut else func(*args, **kwargs)
        if func in _ASKS_BY_INPUTS or name_of(func) == "swap_tensors":
            raise self._refused(func, params[0])
        if func == SET_GRAD and self._is_spread(args[0]):
            return func(args[0], self._local(args[0], args[1]))
        if func in OF_SHAPE:
            return func(_shaped(args[0], self._shape(args[0])), *args[1:], **kwargs)
        args, kwargs = _with_full_gradients(func, args, kwargs)
        if found_in(_SHARDED, (args, kwargs)):
            self._settle_all()  # goes element by element, where the elements are
            return func(*args, **kwargs)
        return self._on_full(func, args, kwargs, params)

    def _up_to_date(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Bring what other ranks' steps have changed, once for a hook, and what stands for it."""
        if self._behind is None:
            self._behind = self._follow()
        tensors = found_in(Tensor, (args, kwargs)) if self._behind else []
        late = [one for one in tensors if one in self._behind]
        if not late or _own_code_runs():
            return args, kwargs
        instead = {one: self._behind.pop(one)() for one in dict.fromkeys(late)}
        given = tuple(args), kwargs
        args, kwargs = map_only(Tensor, lambda one: instead.get(one, one), given)
        return args, kwargs

    def _is_spread(self, value: Any) -> bool:
        """Whether a value is a parameter whose elements are on several ranks, or on another one."""
        return isinstance(value, nn.Parameter) and self._engine.split.is_spread(value)

    def _on_full(
        self, func: Callable[..., Any], args: Any, kwargs: Any, params: Sequence[nn.Parameter]
    ) -> Any:
        fulls = {param: self._full(param) for param in params}
        is_written = func == SET_DATA or bool(changed_by(func, args, kwargs))
        is_recorded_now = is_recorded(func) and not is_written

        def full(value: nn.Parameter) -> Tensor:
            if value not in fulls:
                return value
            return self._leaf(fulls[value]) if is_recorded_now else fulls[value].tensor

        tensors = Exchanged(nn.Parameter, full)
        full_args, full_kwargs = tensors.given((tuple(args), kwargs))
        result = func(*full_args, **full_kwargs)
        if func == SET_DATA and args[0] in fulls:
            fulls[args[0]].is_assigned = True
        for param, one in fulls.items():
            if param not in self._kept and is_written:
                self._settle(one)
            if _shows(result, one.tensor) or func == SET_DATA or name_of(func) in OF_MEMORY:
                self._kept[param] = one
        return tensors.returned(result)

    def _leaf(self, full: _Full) -> Tensor:
        """Return a full tensor for a graph, of which the parameter gets the gradient."""
        param, leaf = full.param, full.tensor.detach()
        if param.requires_grad and param in self._of_model:
            stand_for(leaf, param, lambda grad: SET_GRAD(param, self._local(param, grad)))
        return leaf

    def _full(self, param: nn.Parameter) -> _Full:
        self._take_what_was_set([param])
        if param in self._kept:
            return self._kept[param]
        with outside_transforms(), torch.inference_mode(False), torch.no_grad():
            shard = param.data
            with reading(self._name(param)):
                tensor = self._engine.split.full(param, shard)
            if tensor.data_ptr() == shard.data_ptr():
                tensor = tensor.clone()
        return _Full(param, tensor)

    def _shard(self, param: nn.Parameter) -> Tensor:
        """Return the shard of a layer's parameter, also where another stage has it."""
        if not self._is_spread(param):
            return param
        full = self._full(param).tensor  # which other stages need of this one
        is_here = self._engine.split.is_here(param)
        return param if is_here else self._engine.split.local(param, full)

    @torch.no_grad()
    def _take_what_was_set(self, spread: Iterable[nn.Parameter]) -> None:
        """Take over the full tensors of `param.set_(value)`, which torch shows to no mode."""
        found = [(one, self._set_to(one)) for one in spread]
        values = {param: value for param, value in found if value is not None}
        for param, value in values.items():
            self._kept.pop(param, None)
            self._write(param, value, to_new_memory=True)

    def _set_to(self, param: nn.Parameter) -> Tensor | None:
        """Return what a parameter has been set to, and let it show this rank's part again."""
        written = self._written.get(param)
        if written is not None and written.data_ptr() == param.data_ptr():
            return None
        if param not in self._of_model:
            return self._set_to_copy(param)
        if self._engine.split.is_here(param):
            flat, index = self._engine.owner(param)
            return flat.take_away(index)
        if param.numel() == 0:
            return None
        value, param.data = param.data, param.data.new_empty(0)
        return value

    def _set_to_copy(self, param: nn.Parameter) -> Tensor | None:
        """Return the full tensor that a parameter of a copied module has been set to."""
        shape = self._shape(param)
        local = self._engine.split.local(param, torch.empty(shape, device="meta")).shape
        return param.data if param.shape == shape != local else None

    def _take_in(self) -> None:
        """Take over what user code has set, and what it has written."""
        split = self._engine.split
        self._take_what_was_set(dict.fromkeys((*split.full_shapes, *split.copies, *self._kept)))
        self._settle_all()

    def _settle_all(self) -> None:
        kept, self._kept = self._kept, {}
        shown = [*self._shown_beside(kept)]
        for full in kept.values():
            self._settle(full)
        ties = self._engine.adoption.ties
        ties.note_shown(shown)
        ties.renew({param for param, full in kept.items() if full.is_assigned})

    def _shown_beside(
        self, kept: Mapping[nn.Parameter, _Full]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the full tensors that hooks have kept, and what parameters show that lie in one."""
        yield from ((param, full.tensor) for param, full in kept.items())
        for param in self._engine.model.parameters() if kept else ():
            if not self._is_spread(param):
                yield param, param.data

    def _on_shards(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = map_only(nn.Parameter, self._shard, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @torch.no_grad()
    def _bring_back(self, params: Sequence[nn.Parameter]) -> None:
        """Write to this rank's shards what a hook has written to the full tensors that it keeps."""
        for full in [self._kept[one] for one in dict.fromkeys(params) if one in self._kept]:
            self._write(full.param, full.tensor, to_new_memory=full.is_assigned)

    @torch.no_grad()
    def _settle(self, full: _Full) -> None:
        """Let each rank keep its shard of the values that a hook has written."""
        split, expected = self._engine.split, self._shape(full.param)
        if full.tensor.shape != expected:
            raise ConfigError(
                f"Rank {self._rank}: a tensor of shape {tuple(full.tensor.shape)} was assigned to "
                f"the parameter {self._name(full.param)!r}, expected {tuple(expected)}. Assign "
                f"tensors of the parameter's shape, or change the model in configure_model, "
                f"before the fit."
            )
        self._write(full.param, full.tensor, to_new_memory=full.is_assigned)
        if split.is_shared(full.param):  # the ranks that have it may have drawn other values
            agreed = split.full(full.param, full.param.data)
            self._write(full.param, agreed, to_new_memory=False)

    def _write(self, param: nn.Parameter, full: Tensor, *, to_new_memory: bool) -> None:
        """Write this rank's shard of a value; a graph may need what lies in the old memory."""
        if not self._engine.split.is_here(param):
            return
        own = self._engine.split.local(param, full.detach())
        if to_new_memory:
            param.data = own.clone()
            self._written[param] = param.data
        else:
            param.data.copy_(own)

    def _local(self, param: nn.Parameter, grad: Any) -> Any:
        """Return what stands for this rank's shard of a full gradient that a hook sets."""
        if isinstance(grad, AveragedGradient):
            return grad.shaped_as(param)
        if not isinstance(grad, Tensor) or grad.shape != self._shape(param):
            return grad
        if param in self._of_model:
            return self._engine.shards.averaged_gradient_for(param, grad)
        return self._engine.split.local(param, grad)

    def _shape(self, param: nn.Parameter) -> torch.Size:
        return torch.Size(self._engine.split.full_shape(param))

    def _refused(self, func: Callable[..., Any], param: nn.Parameter) -> ConfigError:
        name = self._name(param)
        if func in _ASKS_BY_INPUTS:
            return differentiation_refused(name)
        return ConfigError(
            f"Rank {self._rank}: swap_tensors() was called of the parameter {name!r}, "
            f"of which this rank does not have all elements, expected values that are assigned. "
            f"Use param.data = value."
        )

    def _name(self, param: nn.Parameter) -> str:
        if param not in self._names:
            self._names = {one: name for name, one in self._engine.model.named_parameters()}
        return self._names.get(param, "of a copy")


def _with_full_gradients(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Take the full gradients where something else is changed by sharded ones."""
    targets = changed_by(func, args, kwargs)
    if len(targets) != 1 or isinstance(targets[0], _SHARDED):
        return args, kwargs
    args, kwargs = map_only(_SHARDED, lambda one: one.full_tensor(), (args, kwargs))
    return args, kwargs


def _shows(result: Any, tensor: Tensor) -> bool:
    """Whether a result may show a tensor's memory."""
    for one in tree_leaves(result):
        if isinstance(one, Tensor):
            if one is not tensor and _share_memory(one, tensor):
                return True
        elif not isinstance(one, (type(None), bool, int, float, complex, str)):
            return True
    return False


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    if tensor.device != other.device:
        return False
    if wraps_tensors():  # whose tensors do not tell
        return True
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _shaped(param: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of a shape, without memory."""
    return torch.empty(shape, dtype=param.dtype, device="meta")


def _own_code_runs() -> bool:
    """Whether a split layer's own forward calls, or code that sees parameters `as_they_are`."""
    return not (user_asks() and sees_subclasses())


_ASKS_BY_INPUTS = (torch.autograd.grad, torch.autograd.backward)
_SHARDED = (AveragedGradient, ShardedTensor)
_OF_THE_OBJECT = OF_OBJECT | OF_FORMAT
