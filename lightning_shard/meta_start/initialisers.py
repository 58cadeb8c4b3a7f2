"""Modules on meta that nobody saw being built: what their own initialisers do is noted instead.

    children, in the order of registration        as a constructor makes them
    the module's own: reset_parameters,           of a Hugging Face model initialize_weights,
    _reset_parameters                             which calls _init_weights

That is what the constructors of torch's layers and of Hugging Face's models do, in their order. A
weight that two modules share has the values of the first, as if it had been tied afterwards.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.torch_private import INITIALISERS
from lightning_shard.meta_start.recipes import note_recipe
from lightning_shard.meta_start.recorder import noting
from lightning_shard.meta_start.tape import Tape

_HUGGING_FACE = ("transformers.modeling_utils", "PreTrainedModel")


def note_initialisers(model: nn.Module, tensors: Collection[Tensor], state: Tensor | None) -> None:
    """Leave notes at tensors on meta of what the initialisers of their modules do to them.

    The generator is left as it is.

    Args:
        model: The module that has them.
        tensors: Its parameters and buffers that are to get values; all others stay as they are.
        state: State of the CPU's generator in which the first value is drawn; None for the present.
    """
    tape, wanted = Tape(), {id(one) for one in tensors}
    before = torch.get_rng_state()
    try:
        if state is not None:
            torch.set_rng_state(state)
        holders = {
            part
            for part in model.modules()
            if any(id(one) in wanted for one in (*part.parameters(), *part.buffers()))
        }
        with _others_replaced(model, wanted), noting(tape), torch.no_grad():
            _initialise(model, holders)
    finally:
        torch.set_rng_state(before)
    for tensor in tensors:
        note_recipe(tensor, tape)


def _initialise(module: nn.Module, holders: set[nn.Module]) -> None:
    """Do what constructors do after one another, in those modules that are left."""
    holders.discard(module)
    for child in module.children():
        if child in holders:
            _initialise(child, holders)
    initialiser = _initialiser(module)
    if initialiser is not None:
        initialiser()


def _initialiser(module: nn.Module) -> Callable[[], Any] | None:
    if any((kind.__module__, kind.__name__) == _HUGGING_FACE for kind in type(module).__mro__):
        return cast("Callable[[], Any]", module.initialize_weights)
    for name in INITIALISERS:
        method = getattr(module, name, None)
        if callable(method) and not _needs_arguments(method):
            return cast("Callable[[], Any]", method)
    return None


def _needs_arguments(method: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(
        one.default is inspect.Parameter.empty and one.kind not in kinds
        for one in inspect.signature(method).parameters.values()
    )


@contextmanager
def _others_replaced(model: nn.Module, wanted: Collection[int]) -> Iterator[None]:
    """Let initialisers write to stand-ins where a tensor has values, or its first module's."""
    put_back: list[tuple[dict[str, Any], str, Tensor]] = []
    seen: set[int] = set()
    tables: list[dict[str, Any]] = [
        table for one in model.modules() for table in (one._parameters, one._buffers)
    ]
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None and (id(tensor) not in wanted or id(tensor) in seen):
                put_back.append((table, name, tensor))
            seen.add(id(tensor))
    for table, name, tensor in put_back:
        stand_in = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_param = isinstance(tensor, nn.Parameter)
        table[name] = nn.Parameter(stand_in, tensor.requires_grad) if is_param else stand_in
    try:
        yield
    finally:
        for table, name, tensor in put_back:
            table[name] = tensor
