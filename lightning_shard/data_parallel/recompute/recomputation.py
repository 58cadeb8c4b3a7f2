"""Calls of blocks whose activations are dropped in forward, and computed again in backward.

    forward     input ──> block ──> output          kept: the input, and under "selective" what
                                                    matrix products and attention have made
    backward    input ──> block again ──> gradients

The checkpoint is around `forward`, so hooks of the block are outside of it and run once: stage 3
unshards a block for its backward, and what is computed again finds its parameters there.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_shard.core.states import having
from lightning_shard.data_parallel.offload.activations import Here, Saved, kept_by
from lightning_shard.data_parallel.recompute.recomputed_state import (
    Drawn,
    attributes_kept,
    buffers_watched,
    explained,
    has_statistics,
    statistics_kept,
)
from lightning_shard.data_parallel.torch_private import (
    TorchDispatchMode,
    in_backward,
    is_checkpointing,
    saving_hook,
    untraced,
    versions_shared,
)

TakenApart = tuple[Tensor, Callable[[Tensor], Tensor]]
"""A tensor of plain memory, and the function that makes of one like it what it was taken from."""

_classes: dict[type[Tensor], Callable[[Any], TakenApart]] = {}


def take_apart_by(cls: type[Tensor], take: Callable[[Any], TakenApart]) -> None:
    """Let arguments of a class be taken apart, and their memory kept."""
    _classes[cls] = take


def by_position(
    own: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keep: Callable[[Tensor], Saved] | None,
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of positional arguments alone, and those of a first call.

        block(x, mask=m)   ──>   called(x, m)                  torch keeps tensors by position alone
        block(part of x)   ──>   called(holder of the part)    the block is given the part again

    A checkpoint saves its positional tensors, so that hooks of saved tensors see them; all else it
    holds. A tensor of which each rank has a part autograd would gather where it has hooks, so its
    part is kept by itself.
    """
    values, num_args, names = [*args, *kwargs.values()], len(args), list(kwargs)
    if keep is not None:
        values = [_held(value, keep) for value in values]
    devices = {one.device: None for one in values if isinstance(one, _Held)}

    def called(*given: Any) -> Any:
        found = [one.value() if isinstance(one, _Held) else one for one in given]
        return own(*found[:num_args], **dict(zip(names, found[num_args:], strict=False)))

    # of which torch saves the states of random numbers
    return called, [*values, *(torch.empty(0, device=device) for device in devices)]


def _held(value: Any, keep: Callable[[Tensor], Saved]) -> Any:
    take = _classes.get(type(value))
    return value if take is None else _Held(value, take, keep)


class _Held:
    """An argument that is given as it is once, and from then on put together again."""

    def __init__(
        self, tensor: Tensor, take: Callable[[Any], TakenApart], keep: Callable[[Tensor], Saved]
    ) -> None:
        self.device = tensor.device
        self._first: Tensor | None = tensor
        part, self._rebuild = take(tensor)
        self._requires_grad = part.requires_grad
        self._inner = _held(part, keep)
        self._saved = None if isinstance(self._inner, _Held) else keep(part)
        if self._saved is not None:
            self._inner = None

    def value(self) -> Tensor:
        """Return the argument."""
        if (first := self._first) is not None:
            self._first = None
            return first
        part: Any = self._inner.value() if self._saved is None else self._saved.tensor().detach()
        if self._requires_grad and not part.requires_grad:
            part = computed(part.requires_grad_())
        return self._rebuild(part)


def computed(leaf: Tensor) -> Tensor:
    """Return a tensor in the memory of a leaf that requires a gradient, which may be written to."""
    result: Tensor = _Computed.apply(leaf)  # type: ignore[no-untyped-call]
    return result


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data  # in the same memory, but no view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


CACHES = "transformers.cache_utils"  # what they keep of a block is for that block alone
RECOMPUTED = "_lightning_shard_recomputed"  # set on blocks


_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm.default,
}
_KEPT_WITHOUT_DROPOUT = {  # position of the probability: a skipped draw would shift later ones
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}


def policy(
    context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Say whether the result of an operation is kept, as torch asks for in compiled code.

        forward          mm ──> kept    add    gelu    mm ──> kept
        recomputation    found          add    gelu    found             as often as a backward asks

    torch's own modes keep results on the device, and for one backward: these keep them wherever
    they are put, and for any number.
    """
    is_kept = _is_kept(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    place = _KEPT_WITHOUT_DROPOUT.get(operation)
    if place is None:
        return operation in _KEPT
    given = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
    return not given


class KeptResults:
    """The results that one call of a block keeps."""

    def __init__(self, keep: Callable[[Tensor], Saved]) -> None:
        self._keep = keep
        self._kept: dict[Any, list[Any]] = defaultdict(list)

    def keeping(self) -> TorchDispatchMode:
        """Make the mode of a forward, whose results are kept."""
        return _Mode(self._note)

    def finding(self) -> TorchDispatchMode:
        """Make the mode of a recomputation, which finds results, or tells that one was changed."""
        return _Mode(_Finder(self._kept).find)

    def _note(self, operation: Any, compute: Callable[[], Any]) -> Any:
        result = compute()
        # what is kept must not become part of the graph, and sees changes of the result
        with versions_shared():
            kept = tree_map_only(Tensor, lambda one: _Kept(self._keep(one.detach())), result)
        self._kept[operation].append(kept)
        return result


class _Kept:
    """Holds what is kept of a tensor, as a leaf of a result's structure."""

    def __init__(self, saved: Saved) -> None:
        self.saved = saved


class _Finder:
    """Finds results in the order in which they were kept."""

    def __init__(self, kept: Mapping[Any, list[Any]]) -> None:
        self._kept = kept
        self._num_found: Counter[Any] = Counter()

    def find(self, operation: Any, compute: Callable[[], Any]) -> Any:
        """Return the next result of an operation; one that forward did not have is computed."""
        number = self._num_found[operation]
        self._num_found[operation] += 1
        results = self._kept.get(operation, [])
        if number >= len(results):
            return compute()
        return tree_map_only(_Kept, lambda one: one.saved.tensor(), results[number])


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands operations whose results are kept to a function."""

    def __init__(self, handle: Callable[[Any, Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = handle

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not _is_kept(func, args, named):
            return func(*args, **named)
        return self._handle(func, lambda: func(*args, **named))


class Recomputed:
    """What is remembered of a block whose calls are checkpointed."""

    def __init__(self, name: str, forward: Callable[..., Any] | None, *, is_checked: bool) -> None:
        self.name, self.forward, self.is_checked = name, forward, is_checked


class Observer(Protocol):
    """Hears of tensors that checkpoints hold outside of autograd."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Hear of tensors that are kept from forward to backward."""

    def recomputing(
        self, tensors: Iterable[Tensor]
    ) -> AbstractContextManager[Callable[[Tensor], None]]:
        """Make the context of a recomputation from `tensors`, which hears of what that saves."""


_observer: ContextVar[Observer | None] = ContextVar("_observer", default=None)


def observed_by(observer: Observer) -> AbstractContextManager[object]:
    """Let an observer hear of the checkpoints inside."""
    return having(_observer, observer)


def recomputes(block: nn.Module, kind: str) -> Callable[..., Any]:
    """Return the forward of a block that is computed again in backward."""
    function: Any = _fully if kind == "full" else _selectively
    if any(map(has_statistics, block.modules())):
        function = untraced(function)  # compiled code would update them twice
    # the name under which a pickled block finds its class's own forward
    function.__name__ = "forward"
    return MethodType(function, block)


def _fully(self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return checkpoint(own_forward(self), *args, use_reentrant=False, **kwargs)
    return _eagerly(self, _full_contexts, args, kwargs)


def _selectively(self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        contexts = partial(create_selective_checkpoint_contexts, policy)
        own = own_forward(self)
        return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    return _eagerly(self, _selective_contexts, args, kwargs)


def own_forward(block: nn.Module) -> Callable[..., Any]:
    """Return a block's forward that is not computed again in backward."""
    recomputed = block.__dict__.get(RECOMPUTED)
    own = block.__dict__.get("forward") if recomputed is None else recomputed.forward
    forward: Callable[..., Any] = type(block).forward.__get__(block) if own is None else own
    return forward


class _Call(NamedTuple):
    """One call of a block."""

    block: nn.Module
    name: str
    inputs: Sequence[Tensor]
    keep: Callable[[Tensor], Saved]


def _eagerly(
    block: nn.Module,
    contexts: Callable[[_Call], tuple[Any, Any]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a block in a checkpoint, unless there is none to make or it is in one already."""
    own = own_forward(block)
    checkpoints_itself = getattr(block, "gradient_checkpointing", False) and block.training
    hook = saving_hook()
    is_inside = in_backward() or is_checkpointing(hook)
    if not torch.is_grad_enabled() or is_inside or checkpoints_itself:
        return own(*args, **kwargs)
    args, kwargs = _without_caches(args), _without_caches(kwargs)
    observer, keep = _observer.get(), kept_by(hook) or Here
    inputs: list[Tensor] = []
    if observer is not None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        observer.keep(inputs)
        keep = _Observed(keep, observer)
    call = _Call(block, vars(block)[RECOMPUTED].name, inputs, keep)
    called, values = by_position(own, args, kwargs, None if hook is None else keep)
    return checkpoint(called, *values, use_reentrant=False, context_fn=partial(contexts, call))


class _Observed:
    """Keeps tensors, of which an observer hears."""

    def __init__(self, keep: Callable[[Tensor], Saved], observer: Observer) -> None:
        self._keep, self._observer = keep, observer

    def __call__(self, tensor: Tensor) -> Saved:
        """Keep a tensor."""
        self._observer.keep([tensor])
        return self._keep(tensor)


def _without_caches(arguments: Any) -> Any:
    """Leave out Hugging Face's caches of keys and values, which would be filled twice."""

    def present(value: Any) -> Any:
        is_cache = any(cls.__module__ == CACHES for cls in type(value).__mro__)
        return None if is_cache else value

    if isinstance(arguments, Mapping):
        return {name: present(value) for name, value in arguments.items()}
    return tuple(map(present, arguments))


def _full_contexts(call: _Call) -> tuple[Any, Any]:
    drawn = Drawn()
    return drawn.noting(), _Anew(partial(_recomputing, call, drawn))


def _selective_contexts(call: _Call) -> tuple[Any, Any]:
    drawn, results = Drawn(), KeptResults(call.keep)
    return (
        _Anew(partial(_keeping, drawn, results)),
        _Anew(partial(_recomputing_rest, call, drawn, results)),
    )


@contextmanager
def _keeping(drawn: Drawn, results: KeptResults) -> Iterator[None]:
    """Run a forward inside that keeps some results."""
    with drawn.noting(), results.keeping():
        yield


@contextmanager
def _recomputing_rest(call: _Call, drawn: Drawn, results: KeptResults) -> Iterator[None]:
    """Run a recomputation inside that finds what was kept."""
    with explained(call.block, call.name), _recomputing(call, drawn), results.finding():
        yield


@contextmanager
def _recomputing(call: _Call, drawn: Drawn) -> Iterator[None]:
    """Run a recomputation inside; what forward does beside its tensors is not done twice."""
    recomputed: Recomputed = vars(call.block)[RECOMPUTED]
    watched = nullcontext() if recomputed.is_checked else buffers_watched(call.block, call.name)
    recomputed.is_checked = True
    block = call.block
    with watched, drawn.again(), attributes_kept(block), statistics_kept(block):
        observer, save = _observer.get(), saving_hook()
        if observer is None or save is None:
            yield
            return
        with observer.recomputing(call.inputs) as note, _noting(save, note):
            yield


@contextmanager
def _noting(save: Callable[[Tensor], object], note: Callable[[Tensor], None]) -> Iterator[None]:
    def noted(tensor: Tensor) -> object:
        note(tensor)
        return save(tensor)

    with saved_tensors_hooks(noted, _as_is):
        yield


def _as_is(saved: Any) -> Any:
    return saved


class _Anew:
    """A context that can be entered again: a graph that is kept is computed again each time."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        made = self._make()
        made.__enter__()
        self._entered.append(made)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
