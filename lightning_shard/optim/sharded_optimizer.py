"""The user's own optimizer object, updating this rank's shard of every parameter.

    optimizer.step(closure)
      ├─ the user's hooks before it    full parameters and gradients, as in any hook
      ├─ closure()                     forward, backward, clipping: full parameters; the loss
      │                                that the optimizer gets is the mean over the ranks
      ├─ enter the optimizer view      param.data, param.grad -> local shards; full matrices
      │                                on their owners, where the optimizer needs them; or
      │                                groups -> a few long pieces of the rank's shards
      ├─ the optimizer's own update    its options and state are untouched
      ├─ leave the view, publish       shards -> everybody's full parameters; also where the
      │                                update raises
      └─ the user's hooks after it     as those before it

Schedulers, callbacks and the user keep the object that they hold; between steps its groups list the
module's own parameters. State that the optimizer creates is in shards because it sees shards; what
user code puts in by hand is cut as the rest of the state is.

An optimizer that looks at the loss (a line search) has to see the mean over the ranks, or ranks
decide differently and their weights part ways; for torch's own but LBFGS nothing is sent.

A step that raises ends as any other does, so that who catches the error can go on. An interrupt may
find other ranks anywhere, and the failure of a rank leaves nobody to exchange with: after those
nothing is sent until the model is used again.

Where user code replaces a parameter in the middle of a run, the engine puts its own back, with the
new value. An optimizer that was given the new one goes on with the engine's, and with new state.
One that was not would train it, which one device does not: the parameter is frozen, and a step that
would move it all the same is refused.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import wraps
from itertools import chain
from types import MethodType
from typing import Any, TypeGuard

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.optimizer_state import (
    full_state_dict,
    is_kept,
    is_stepped,
    own_state,
    params_of,
    shard_state,
)
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.assigned import ReplacedParameter
from lightning_shard.data_parallel.model_split import has_parts
from lightning_shard.data_parallel.optimizer_entries import of_parameters
from lightning_shard.data_parallel.torch_private import put_next_to_step
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.data_parallel.views.sharded_tensor import ShardedTensor
from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.optim.blockwise import BegunStates
from lightning_shard.optim.elementwise import (
    RAISED,
    LaterSteps,
    OwnMethods,
    is_of_torch,
    why_not_separate,
)
from lightning_shard.optim.flat_step import FlatStep, FrozenAdam
from lightning_shard.optim.host_step import StepOnHost
from lightning_shard.optim.owned_parameters import OwnedParameters, why_not_as_they_lie
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, parameter_behind

_ADVICE = (
    "To train it, write the value into the parameter that was there, with torch.no_grad(): "
    "param.copy_(value), or put the new one into the optimizer's param_groups in the same hook."
)
_WORKS_WITH_OWNERS = (
    " zero1, zero2, zero3, tensor, pipeline and hybrid parallel take it without gradient "
    "compression, from the beginning of a fit; elastic does with scheme='shard_ddp'."
)


_Around = Callable[[], AbstractContextManager[object]]


class EditedState:
    """Cuts the state that user code has put into an optimizer."""

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
            params = params_of(self._optimizer)
            self._waiting = [param for param in params if not is_stepped(param, self._engine)]
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

    @as_they_are
    @torch.no_grad()
    def take_in(self) -> None:
        """Cut what user code has put in since the last step; each rank must call."""
        if not self._is_cut or self._entries() == self._seen:
            return
        for param in filter(self._engine.knows, params_of(self._optimizer)):
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
    """State of a parameter whose elements lie on other ranks: each entry is without elements."""

    # A count, such as the number of steps, is the one that the rank's other parameters have.

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


class ReplacedParameters:
    """Follows for one optimizer which parameters of the model are replaced."""

    def __init__(
        self,
        optimizer: Optimizer,
        engine: DataParallelEngine,
        before: "ReplacedParameters | None" = None,
    ) -> None:
        self._optimizer, self._engine = optimizer, engine
        self._lost: dict[nn.Parameter, str] = {} if before is None else before._lost
        self._frozen: dict[nn.Parameter, str] = {} if before is None else before._frozen
        self._has_told: bool = before is not None and before._has_told
        self._checked: list[int] = []
        self._has_strangers = False
        self._left_out: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        self.attach()
        engine.adopt_assigned()  # this optimizer may be given what was replaced just now

    def attach(self) -> None:
        """Follow; what this optimizer has lost is frozen."""
        hearers = self._engine.adoption.on_replaced
        if self._follow not in hearers:
            hearers.append(self._follow)
            for param in self._frozen:
                param.requires_grad = False

    def detach(self) -> None:
        """Follow no longer; what was frozen here is as user code left it."""
        for param in self._frozen:
            param.requires_grad = True
        if self._follow in self._engine.adoption.on_replaced:
            self._engine.adoption.on_replaced.remove(self._follow)

    def _follow(self, one: ReplacedParameter) -> None:
        listed = set(params_of(self._optimizer))
        groups, state = self._optimizer.param_groups, self._optimizer.state
        if one.newcomer in listed:
            for group in groups:
                others = [param for param in group["params"] if param is not one.param]
                group["params"] = [one.param if p is one.newcomer else p for p in others]
            state.pop(one.param, None)
            if one.newcomer in state:
                state[one.param] = state.pop(one.newcomer)
            self._lost.pop(one.param, None)
            self._frozen.pop(one.param, None)
            one.param.grad = one.newcomer.grad
        elif one.param in listed and one.newcomer.requires_grad:
            self._lose(one)

    def _lose(self, one: ReplacedParameter) -> None:
        self._lost[one.param] = one.name
        if len(self._engine.adoption.on_replaced) > 1:  # another optimizer may have been given it
            return
        one.param.requires_grad = False
        if self._engine.adoption.places.takes_newcomers:
            one.param.grad = None  # the newcomer's, which has none
        self._frozen[one.param] = one.name

    def _tell(self) -> None:
        """Warn of what has been frozen, before the first step that leaves it out."""
        for name in self._frozen.values() if not self._has_told else ():
            rank_zero_warn(
                f"{name!r} was replaced by another parameter, which "
                f"{type(self._optimizer).__name__} was not given. It is frozen, since one device "
                f"would train it no longer. {_ADVICE}"
            )
        self._has_told = bool(self._frozen)

    def check(self, *, of_update: bool = True) -> None:
        """Check the param groups before a step, and strangers' gradients before its update."""
        listed = params_of(self._optimizer)
        if [*map(id, listed)] != self._checked:
            self._engine.adopt_assigned()  # what was replaced is in its place again
            listed = params_of(self._optimizer)
            self._has_strangers = not all(map(self._engine.knows, listed))
            self._checked = [*map(id, listed)]
        if self._has_strangers:
            self._refuse_strangers(listed, of_update=of_update)
        if self._lost:
            self._refuse_lost(set(listed))
            self._tell()

    def leave_out(self) -> None:
        """Take out, for an update, what the model has lost, or got without a gradient."""
        for group in self._optimizer.param_groups if self._has_strangers else ():
            self._left_out.append((group, group["params"]))
            group["params"] = [one for one in group["params"] if self._engine.knows(one)]

    def put_back(self) -> None:
        """End `leave_out`."""
        while self._left_out:
            group, params = self._left_out.pop()
            group["params"] = params

    def _refuse_strangers(self, listed: Collection[nn.Parameter], *, of_update: bool) -> None:
        waits, rank = self._engine.adoption.places.takes_newcomers, self._engine.collectives.rank
        for param in listed:
            if self._engine.knows(param) or (waits and not (of_update and param.grad is not None)):
                continue
            raise ConfigError(
                f"Rank {rank}: {type(self._optimizer).__name__} was given a parameter of shape "
                f"{tuple(param.shape)} in the middle of the fit that the ranks do not share, "
                f"expected one that the model has had from the beginning, or, under shard_ddp, "
                f"zero1, zero2 and zero3 without compression, one without a gradient before the "
                f"next batch. Register it in __init__ or configure_model, and freeze it there "
                f"until it is to be trained; exchange parameters between an update and a batch."
            )

    def _refuse_lost(self, listed: Collection[nn.Parameter]) -> None:
        names = [
            name
            for param, name in self._lost.items()
            if param in listed and (param.requires_grad or param.grad is not None)
        ]
        if names:
            raise ConfigError(
                f"Rank {self._engine.collectives.rank}: {', '.join(map(repr, names))} was replaced "
                f"by another parameter, which {type(self._optimizer).__name__} was not given and "
                f"would train no longer on one device, but has a gradient for; expected the "
                f"parameter that it has. {_ADVICE}"
            )


class ShardedOptimizer:
    """Attaches an optimizer, made on the module's parameters, to an engine until `detach`.

    Raises:
        ConfigError: The optimizer needs full parameters and the stage cuts them, or it holds
            parameters that are not the model's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: DataParallelEngine,
        before: "ShardedOptimizer | None" = None,
        around_hooks: _Around = nullcontext,
    ) -> None:
        replaced = None if before is None else before._replaced
        self._around_hooks: _Around = around_hooks if before is None else before._around_hooks
        self._in_hooks, self._has_hooks = ExitStack(), False  # of the user's, around its steps
        self._replaced: ReplacedParameters = ReplacedParameters(optimizer, engine, replaced)
        if before is not None:
            self._replaced.check(of_update=False)
        self._replaced.leave_out()
        check_optimizer(optimizer, engine)
        self._later = LaterSteps(optimizer, engine)
        self.optimizer = optimizer
        self.engine = engine
        engine.note_update(ends=False)
        self._in_view = False
        self._is_flat = False  # the step that runs is made on few pieces
        self._num_steps = 0  # torch hooks a base class's step, too, where that class is in use
        self._frozen_adam = FrozenAdam(optimizer, engine)
        self._owned = OwnedParameters(optimizer, engine)
        self._begun = BegunStates(optimizer, engine)
        self._on_host = StepOnHost(optimizer, engine)
        shard_state(optimizer, engine)
        self._edited_state = EditedState(optimizer, engine)
        self._flat = FlatStep(optimizer, engine)
        self._replaced.put_back()
        self._own_methods = OwnMethods(optimizer, self._in_view_of_state)
        ends = self._end_failed, self._end_later
        self._watched = WatchedSteps(optimizer, *ends, run=self._with_hooks)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        with suppress(AttributeError):  # a wrapper of another package calls no constructor of torch
            self._handles.append(optimizer.register_state_dict_pre_hook(self._before_saving))

    @property
    def is_stepping(self) -> bool:
        """Whether the optimizer's `step` runs now."""
        return self._num_steps > 0

    def set_aside(self) -> None:
        """Decide no longer what is trained: other optimizers have this one's place."""
        self._replaced.detach()

    def take_up(self) -> None:
        """Be one of the run's optimizers again after `set_aside`."""
        self._replaced.attach()

    @property
    def gathered_bytes(self) -> int:
        """Bytes that this rank gathers for an update, of the running one or the last."""
        return self._owned.gathered.num_bytes

    def detach(self) -> None:
        """Give the optimizer back as it was, state in shards."""
        for handle in self._handles:
            handle.remove()
        self._watched.detach()
        self._own_methods.detach()
        self._flat.put_back()
        self._edited_state.detach()
        self._replaced.detach()
        self._owned.put_back()

    def _before_saving(self, _: Optimizer) -> None:
        """Take in what was put in after the last step, which may have been interrupted."""
        self._owned.put_back()
        self._edited_state.take_in()
        self._flat.put_back()

    def _with_hooks(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, outside of whose view the user's hooks before and after it run."""
        self.engine.view.end_interrupted()
        with self._in_hooks:
            self._has_hooks = put_next_to_step(self.optimizer, *self._handles[:2])
            if self._has_hooks:
                self.engine.average_gradients()  # also those of batches that are accumulated
                self._in_hooks.enter_context(self._around_hooks())
            return step(*args, **kwargs)

    def _before_step(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # torch hands over the optimizer itself as args[0]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._in_hooks.close()
        is_whole = not self.engine.view.differs and not self.engine.split.groups
        if self._has_hooks and self._num_steps and not is_whole:
            raise _hooks_inside(self.engine, self.optimizer)
        self._replaced.check(of_update=closure is None)
        if not self._num_steps:
            self._later.try_next(with_closure=closure is not None)
        self._num_steps += 1
        if closure is None or self._own_methods.begins_early:
            self._enter()
        if closure is None:
            return args, kwargs
        wrapped = self._wrap(closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            if self._in_view:  # LBFGS and its like evaluate several times
                self._leave()
            result = self._common(closure())
            self._enter()
            return result

        return run

    def _common(self, loss: Any) -> Any:
        ranks = self.engine.ranks_of_loss
        if ranks is None or not looks_at_loss(self.optimizer):
            return loss
        return mean_loss(loss, self.optimizer, ranks, self.engine.device)

    def _after_step(self, *_: Any) -> None:
        self._num_steps -= 1
        if self._in_view and not self._num_steps:
            self._leave()
            self.engine.note_update(ends=True)
        if self._has_hooks and not self._num_steps:
            self._in_hooks.enter_context(self._around_hooks())

    def _end_failed(self) -> None:
        """Leave the view that an update has left by raising; each rank must call."""
        self._num_steps = 0
        if self._in_view:
            self.engine.reducer.usage.note_failed_update()
            self._leave()

    def _end_later(self) -> None:
        """Leave that view when the model is used again; no communication."""
        self._num_steps = 0
        self._flat.put_back()
        if self._in_view:
            self.engine.view.on_interrupted = self._end_failed

    def _in_view_of_state(self, method: Callable[[], Any], obstacle: str) -> Any:
        """Call a method of the optimizer that goes by its state; each rank must call."""
        if self._in_view or self._num_steps:
            return method()
        is_whole = not self.engine.view.differs and not self.engine.split.groups
        if obstacle:
            if not is_whole:
                rank_zero_warn(
                    f"A method of {type(self.optimizer).__name__} is called with full weights and "
                    f"with a rank's part of the optimizer's state: {obstacle}. If it uses both, "
                    f"it is wrong here: compare with strategy='shard_ddp'."
                )
            return method()
        if is_whole:
            with self.engine.around_methods(self.optimizer):
                return method()
        with self.engine.options.seeing_shards():
            self._edited_state.take_in()
            self.engine.view.enter()
            self._in_view = True
            self.engine.begin_update(params_of(self.optimizer))
            self._on_host.take()
            self._owned.take()
            try:
                return method()
            finally:
                self._leave()

    def _enter(self) -> None:
        if self._in_view:
            return
        self._replaced.check()  # what a closure's hooks have done
        self._replaced.leave_out()
        self._edited_state.take_in()
        self._is_flat = False
        self.engine.view.enter(self._shows_shards)
        self._in_view = True
        self.engine.begin_update(params_of(self.optimizer), in_place=not self._is_flat)
        if self._is_flat:
            self._flat.take()
            return
        self._on_host.take()
        self._frozen_adam.take()
        self._owned.take()
        self._begun.take()

    def _shows_shards(self) -> bool:
        """Decide how the step is made; return whether each parameter is to show its shard."""
        self._is_flat = self._flat.prepare()
        return not self._is_flat

    def _leave(self) -> None:
        self._in_view = False
        self._flat.put_back()
        self._owned.send_out()
        self._owned.put_back()
        self._frozen_adam.put_back()
        self._on_host.put_back()
        self.engine.send_up(params_of(self.optimizer))
        self.engine.view.leave()
        self._edited_state.look()
        self.engine.publish(params_of(self.optimizer))
        self._replaced.put_back()


def _hooks_inside(engine: DataParallelEngine, optimizer: Optimizer) -> ConfigError:
    return ConfigError(
        f"Rank {engine.collectives.rank}: step() of {type(optimizer).__name__} calls that of its "
        f"base class, around which torch calls hooks of register_step_pre_hook and its like once "
        f"more, where ranks have parts of the weights; expected hooks around the whole step. "
        f"Use on_before_optimizer_step and on_train_batch_end, or strategy='shard_ddp'."
    )


_IN_SHARDS = (AveragedGradient, ShardedTensor)


class LaidOutAnew:
    """Moves a fit's optimizers and gradients to another engine of its model; each must make one."""

    def __init__(self, engine: DataParallelEngine, sharded: Sequence[ShardedOptimizer]) -> None:
        self._sharded, ranks = sharded, engine.collectives
        self._states: list[Any] = [
            ranks.broadcast_object(full_state_dict(one.optimizer, engine), src=0)
            for one in (sharded if engine.options.stage else ())
        ]
        with engine.user_code.running():
            self._grads = {
                param: grad.full_tensor() if isinstance(grad, _IN_SHARDS) else grad.clone()
                for flat in engine.flats
                for param in flat.params
                if (grad := param.grad) is not None
            }

    def detach_optimizers(self) -> None:
        """Let optimizers update full parameters, once the engine is off the model."""
        for one in self._sharded:
            one.detach()
        for one, state in zip(self._sharded, self._states, strict=False):
            groups = one.optimizer.param_groups  # user code may hold them
            one.optimizer.load_state_dict(state)
            one.optimizer.param_groups = groups

    def attach_optimizers(self, engine: DataParallelEngine) -> list[ShardedOptimizer]:
        """Let optimizers update the shards of another engine; gradients are what they were."""
        renewed = [ShardedOptimizer(one.optimizer, engine, one) for one in self._sharded]
        with engine.user_code.running():
            for param, grad in self._grads.items():
                is_wider = grad.dtype != param.dtype  # of a parameter that shows a narrow copy
                param.grad = engine.shards.averaged_gradient_for(param, grad) if is_wider else grad
        return renewed


def check_optimizer(optimizer: Optimizer, engine: Any) -> None:
    """Raise ConfigError if an optimizer would not update right what an engine, or its like, has."""
    _check_parts(optimizer, engine)
    _check_form(optimizer, engine)
    _check_same_parameters(optimizer, engine)


def _check_parts(optimizer: Optimizer, engine: DataParallelEngine) -> None:
    """Raise if an optimizer needs more than this rank has."""
    unit, reason = "element", None
    if engine.options.stage > 0:
        cut = f"ZeRO stage {engine.options.stage} gives each rank 1-D shards of the parameters"
        reason = why_not_as_they_lie(optimizer, engine)
    elif has_parts(engine.split):
        shares = bool(engine.split.fewer_ranks)
        cut = "expert parallel gives each rank some of the experts in a tensor" if shares else ""
        cut = cut or "tensor parallel gives each rank its part of every layer"
        reason = why_not_as_they_lie(optimizer, engine)
    elif engine.split.groups_of_layers:
        unit, cut = "parameter", "pipeline parallel gives each rank the parameters of its stages"
        reason = why_not_separate(optimizer)
    if reason is not None and reason.startswith(RAISED):
        raise ConfigError(
            f"{type(optimizer).__name__} could not be tried on a small matrix ({reason}), and "
            f"{cut}, so that nobody knows whether its updates would be right; expected an "
            f"optimizer whose copy, made with its defaults, takes steps. Use "
            f"strategy='shard_ddp', or let its constructor take what its defaults say."
        )
    if reason is not None:
        works = "" if why_not_separate(optimizer) is not None else _WORKS_WITH_OWNERS
        raise ConfigError(
            f"{type(optimizer).__name__} does not update each {unit} by itself, but {cut}, "
            f"which would make its updates wrong ({reason}). Use strategy='shard_ddp', or an "
            f"element-wise optimizer such as AdamW.{works}"
        )


def _check_form(optimizer: Optimizer, engine: DataParallelEngine) -> None:
    """Raise if an optimizer saves its state in a form of its own, and ranks have parts of it."""
    if type(optimizer).state_dict is Optimizer.state_dict or not optimizer.param_groups:
        return  # Lightning's stand-in for no optimizer has no groups
    if (engine.options.stage > 0 or engine.split.groups) and "state" not in optimizer.state_dict():
        raise ConfigError(
            f"{type(optimizer).__name__}.state_dict() has a form of its own, and ranks have parts "
            f"of the state, which nobody could join; expected the entries 'state' and "
            f"'param_groups', as torch's optimizers give them. Use strategy='shard_ddp'."
        )


def _check_same_parameters(optimizer: Optimizer, engine: DataParallelEngine) -> None:
    known = set(engine.model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        strangers = sum(param not in known for param in group["params"])
        if strangers:
            raise ConfigError(
                f"Rank {engine.collectives.rank}: {strangers} parameters in group {number} of "
                f"{type(optimizer).__name__} are not parameters of the model that is trained. Make "
                f"the optimizer from self.parameters() inside configure_optimizers, not from "
                f"another module or a copy."
            )


def looks_at_loss(optimizer: Optimizer) -> bool:
    """Whether an optimizer may use what its closure returns; only torch's own are known not to."""
    return type(optimizer) is torch.optim.LBFGS or not is_of_torch(optimizer)


def mean_loss(loss: Any, optimizer: Optimizer, ranks: Collectives, device: torch.device) -> Any:
    """Return the mean of what the ranks' closures have returned; each rank must call."""
    counts = isinstance(loss, (int, float)) or (isinstance(loss, Tensor) and loss.numel() == 1)
    known = counts or loss is None
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    own = [float(loss) if counts else 0.0, float(counts), float(not known)]
    sums = torch.tensor(own, dtype=torch.float64, device=device)
    ranks.all_reduce(sums, "sum").wait()
    total, count, unknown = sums.tolist()
    if unknown:
        got = type(loss).__name__ if not known else "another type on another rank"
        raise ConfigError(
            f"Rank {ranks.rank}: the closure of {type(optimizer).__name__} returned {got}, "
            f"expected a loss of one element, whose mean over the ranks the optimizer is given. "
            f"Return the loss alone, or call optimizer.step() without a closure."
        )
    if not count:
        return None
    mean = total / count
    return loss.new_tensor(mean).reshape(loss.shape) if isinstance(loss, Tensor) else mean


def _called(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return step(*args, **kwargs)


def _nothing() -> None:
    pass


class WatchedSteps:
    """Runs an optimizer's steps by `run`, and calls back where one raises, until `detach`."""

    def __init__(
        self,
        optimizer: Optimizer,
        end: Callable[[], None],
        end_later: Callable[[], None],
        run: Callable[..., Any] = _called,
    ) -> None:
        self._optimizer, self._run = optimizer, run
        self._end, self._end_later = end, end_later
        self._before = vars(optimizer).get("step")
        step = optimizer.step

        @wraps(step)
        def watched(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return self._run(step, *args, **kwargs)
            except BaseException as error:
                (self._end if _all_are_there(error) else self._end_later)()
                raise

        self._ours = MethodType(watched, optimizer)
        optimizer.step = self._ours  # type: ignore[method-assign]

    def detach(self) -> None:
        """Give the optimizer its own step back, unless somebody has wrapped ours since."""
        self._run, self._end, self._end_later = _called, _nothing, _nothing
        if vars(self._optimizer).get("step") is not self._ours:
            return
        if self._before is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._before  # type: ignore[method-assign]


def _all_are_there(error: BaseException) -> bool:
    """Whether the other ranks are where they would be without the error."""
    is_of_group = isinstance(error, ShardError) and not isinstance(error, ConfigError)
    return isinstance(error, Exception) and not is_of_group
