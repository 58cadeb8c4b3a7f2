"""Does the section that only this package's strategies read fit the run.

Of each rank's entry everything is looked at that a rank would load, on every rank: one damaged
entry is found before any rank has loaded its own.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from torch import Tensor

from lightning_shard.checkpoint.by_rank import entries_of_ranks, outline
from lightning_shard.checkpoint.misfits import kind_of, shape_misfit
from lightning_shard.checkpoint.random_state import random_misfit

_Shapes = Mapping[str, Any]  # full shapes by parameter name

_OF_LOCAL_SGD = {"own", "common", "arriving", "outer", "compression"}
_OF_ONE_RANK = {"parameters", "buffers", "compression"}  # of local SGD
_OF_GRADIENTS = {"residual", "momentum"}  # of what compression keeps; PowerSGD's q is shaped by it
_OF_ELEMENTS = {
    "momentum_buffer",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
}  # of an optimizer


def kept_misfits(kept: Mapping[str, Any], shapes: _Shapes) -> Iterator[str]:
    """Yield the misfits of the state that only this package's strategies keep.

    Args:
        kept: The checkpoint's section of this package's strategies.
        shapes: Full shapes of the parameters by name; entries for other names are left out.
    """
    yield from _compression_misfits(kept.get("compression") or {}, shapes)
    yield from _local_misfits(kept, shapes)
    for rank, stored in entries_of_ranks(kept):
        whose, entry = f"{rank}'s ", outline(stored)
        if not isinstance(entry, Mapping):
            yield f"{whose}entry is a {type(entry).__name__}, expected a dictionary"
            continue
        yield from _compression_misfits(entry.get("compression") or {}, shapes, whose)
        yield from _own_misfits(entry, shapes, whose)
        yield from _stream_misfits(entry, whose)


def _local_misfits(kept: Mapping[str, Any], shapes: _Shapes) -> Iterator[str]:
    """Yield the misfits of what local SGD keeps for all ranks."""
    local = kept.get("local_sgd")
    if not local:
        return
    lacking = sorted(_OF_LOCAL_SGD - local.keys())
    if lacking:
        yield f"what local SGD keeps has no {lacking}, expected {sorted(_OF_LOCAL_SGD)}"
        return
    yield from _tensor_misfits("the own value", local["own"], shapes)
    yield from _tensor_misfits("the common value", local["common"], shapes)
    yield from _compression_misfits(local["compression"] or {}, shapes)
    for flight in local["arriving"]:
        yield from _tensor_misfits("the mean on its way", flight["mean"], shapes)
    for name, entries in local["outer"].get("state", {}).items():
        for key in _OF_ELEMENTS & entries.keys():
            yield from _tensor_misfits(f"the outer optimizer's {key}", {name: entries[key]}, shapes)


def _own_misfits(entry: Mapping[str, Any], shapes: _Shapes, whose: str) -> Iterator[str]:
    """Yield the misfits of what local SGD keeps for one rank."""
    local = entry.get("local_sgd")
    if not local:
        return
    if lacking := sorted(_OF_ONE_RANK - local.keys()):
        yield f"{whose}local SGD has no {lacking}, expected {sorted(_OF_ONE_RANK)}"
        return
    yield from _tensor_misfits(f"{whose}own value", local["parameters"], shapes)
    yield from _compression_misfits(local["compression"], shapes, whose)
    for state in entry.get("optimizers", ()):
        for name, entries in state.items():
            for key in _OF_ELEMENTS & entries.keys():
                one = {name: entries[key]}
                yield from _tensor_misfits(f"{whose}optimizer's {key}", one, shapes)


def _stream_misfits(entry: Mapping[str, Any], whose: str) -> Iterator[str]:
    """Yield the misfits of one rank's random streams."""
    data = entry.get("data") or {}
    for when in (entry.get("random"), data.get("iterators"), data.get("order")):
        if when and (found := random_misfit(when)) is not None:
            yield f"{whose}random streams: {found}"


def _compression_misfits(
    state: Mapping[str, Any], shapes: _Shapes, whose: str = ""
) -> Iterator[str]:
    for kind in _OF_GRADIENTS & state.keys():
        yield from _tensor_misfits(f"{whose}compression's {kind}", state[kind], shapes)
    for name, value in state.get("owned", {}).items():
        most = prod(shapes.get(name, ()))
        if isinstance(value, Tensor) and name in shapes and value.numel() > most:
            yield (
                f"{whose}compression's owned part of {name!r} has {value.numel()} elements, "
                f"expected at most {most}"
            )


def _tensor_misfits(what: str, tensors: Any, shapes: _Shapes) -> Iterator[str]:
    if not isinstance(tensors, Mapping):
        yield f"{what} is a {type(tensors).__name__}, expected tensors by name"
        return
    for name, value in tensors.items():
        if name not in shapes or value is None:
            continue
        if not isinstance(value, Tensor):
            yield f"{what} of {name!r} is a {type(value).__name__}, expected a tensor"
        elif (found := shape_misfit(f"{what} of {name!r}", value.shape, shapes[name])) is not None:
            yield found
        elif kind_of(value.dtype) == "integer":
            yield f"{what} of {name!r} is of {value.dtype}, expected floating-point numbers"
