"""Turns torch's errors about the sizes of parameter shards into errors with names and advice.

Where a shard of ZeRO stage 3 meets a tensor of another size element by element, torch's error does
not say why. Nor does it where code was to be compiled as one graph, and the package's own ends it.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.torch_private import GRAPH_ENDS
from lightning_shard.errors import ConfigError, ShardError

_MISFIT = re.compile(
    r"must match|doesn't match|size mismatch|Sizes of tensors|is invalid for input|"
    r"out of range|too many indices|inconsistent tensor size|same shape|same size|at least 2|"
    r"Fan in and fan out|Only tensors with|tensors? with .* dimensions|must be a matrix"
)
_INITIALISES = re.compile(r"Fan in and fan out|Only tensors with")
_SETS_GRADIENT = re.compile(r"assign a gradient of size")
_SIZES = re.compile(r"size of tensor a .* must match the size of tensor b")
_MOST_VALUES = 2000  # of a list that is looked through

Homes = dict[nn.Parameter, tuple[FlatParameters, int]]


@contextmanager
def explaining_shards(homes: Homes) -> Iterator[None]:
    """Say which parameters are shards where user code inside fails on their sizes."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, ShardError) or not _MISFIT.search(str(error)):
            raise
        sizes = {int(number) for number in re.findall(r"\d+", str(error))}
        seen = _shards_in(error.__traceback__, homes)
        fitting = [param for param in seen if param.numel() in sizes] or seen
        if _SIZES.search(str(error)) and not fitting:  # lists that were made for the call
            fitting = _of_sizes(sizes, homes)
        if not fitting:
            raise
        names = " and ".join(_described(*homes[param]) for param in fitting[:2])
        names = names if seen else f"Shards as large as {names}"
        raise ConfigError(
            f"Between the steps of ZeRO stage 3 each rank has shards of the parameters. {names} "
            f"{_advice(error)}"
        ) from error


def _advice(error: Exception) -> str:
    """Say what went wrong with shards, and what to do."""
    if _SETS_GRADIENT.search(str(error)):
        return (
            f"was given a gradient that was set by hand ({error}), expected gradients to come from "
            f"backward, which averages them over the ranks. Call self.manual_backward(loss), or "
            f"use strategy='shard_ddp'."
        )
    if _INITIALISES.search(str(error)):
        return (
            f"was to be initialised ({error}), expected a full parameter. Initialise in __init__, "
            f"setup, configure_model or on_fit_start; later draw new values into a layer of its "
            f"own and load them, the same on every rank: layer.load_state_dict(fresh.state_dict())."
            f" Or use strategy='zero2'."
        )
    return (
        f"met what is not cut alike ({error}), expected tensors of equal shapes in the same order: "
        f"a teacher that is a deep copy of a whole submodule, made in __init__, setup or "
        f"configure_model as a part of the module, or by a callback in on_fit_start or later. Copy "
        f"a submodule as a whole, use Lightning's EMAWeightAveraging, or use strategy='zero2'."
    )


def _of_sizes(sizes: Collection[int], homes: Homes) -> list[nn.Parameter]:
    """Return one parameter for each size that is that of a shard."""
    found: dict[int, nn.Parameter] = {}
    for param in homes:
        if _is_shard(param, homes) and param.numel() in sizes:
            found.setdefault(param.numel(), param)
    return list(found.values())


def _described(flat: FlatParameters, index: int) -> str:
    slot = flat.layout.slots[index]
    return f"{slot.name!r} ({flat.params[index].numel()} elements here of shape {slot.shape})"


def _shards_in(traceback: TracebackType | None, homes: Homes) -> list[nn.Parameter]:
    """Return the parameters that show shards in the innermost frame that has any."""
    found: list[nn.Parameter] = []
    while traceback is not None:
        values = list(_values(list(traceback.tb_frame.f_locals.values())))
        shards = [value for value in values if _is_shard(value, homes)]
        found = shards or found
        traceback = traceback.tb_next
    return list(dict.fromkeys(found))


def _values(values: list[Any]) -> Iterator[Any]:
    for value in values:
        yield value
        if isinstance(value, (list, tuple)):
            yield from value[:_MOST_VALUES]


def _is_shard(value: Any, homes: Homes) -> bool:
    if not isinstance(value, nn.Parameter) or value not in homes:
        return False
    flat, index = homes[value]
    return value.shape != flat.layout.slots[index].shape


@contextmanager
def explaining_gradients(stage: int) -> Iterator[None]:
    """Explain torch's error that a gradient does not fit a shard."""
    try:
        yield
    except RuntimeError as error:
        if stage < 3 or "invalid gradient" not in str(error):
            raise
        raise ConfigError(
            "Under ZeRO stage 3 a block's parameters are full only inside the block's forward, "
            "but training_step has computed with them outside (a penalty over self.parameters(), "
            "say). Use the optimizer's weight_decay, compute inside the block's forward, or use "
            "strategy='zero2'."
        ) from error


@contextmanager
def explaining_graphs() -> Iterator[None]:
    """Name the option where code that is to be one graph runs what ends a graph here."""
    try:
        yield
    except RuntimeError as error:
        if not _ends_graphs(error):
            raise
        raise ConfigError(
            "torch.compile(fullgraph=True) was asked for one graph of code in which ranks gather "
            "parameters or exchange parts of layers or sequences, or a stage of a pipeline begins, "
            "and there a graph ends; expected compiled code that may be cut. Leave fullgraph=True "
            "out. Or compile each block of a list by itself, block.compile(fullgraph=True), which "
            "zero3 and pipelines take; tensor and context parallel cut blocks, too."
        ) from error


def _ends_graphs(error: RuntimeError) -> bool:
    text = str(error)
    if type(error).__module__.startswith("torch._dynamo"):
        return GRAPH_ENDS in text or _PACKAGE in text
    return _AS_WRITTEN in text


_PACKAGE = str(Path(__file__).parent.parent)
_AS_WRITTEN = "Compilation was not attempted"  # torch's words: a pipeline runs it as written
