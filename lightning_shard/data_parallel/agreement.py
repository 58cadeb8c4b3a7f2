"""Checks before training: there is something to train, and all ranks hold the same of it."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer, SparseAdam
from torch.utils._pytree import tree_map_only

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.memory.shared_memory import refuse_shared_memory
from lightning_shard.errors import CollectiveMismatchError, ConfigError

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in what Python writes of an object, each rank's own
_LONGEST = 300  # characters that are told of a value
_MOST = 5  # values that are told


def check_same_model(
    model: nn.Module,
    collectives: Collectives,
    full_shapes: Mapping[nn.Parameter, torch.Size] | None = None,
) -> None:
    """Compare parameters and buffers over the ranks by name, shape and format; each must call.

    `full_shapes` has those of parameters of which this rank has a part, or nothing.

    Raises:
        ConfigError: The ranks' models differ (raised on every rank), or parameters share memory.
    """
    refuse_shared_memory(model, collectives.rank)
    advice = "Build the model from the same arguments on every rank."
    check_alike(_signatures(model, full_shapes or {}), collectives, "models", advice)


def strangers(
    model: nn.Module, collectives: Collectives, others: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the ranks whose model, or other values, are not rank 0's; each rank must call."""
    mine = _signatures(model, {}) | _written(others or {})
    of_all_ranks = collectives.all_gather_object(mine)
    return [rank for rank, theirs in enumerate(of_all_ranks) if theirs != of_all_ranks[0]]


def check_same_optimizers(
    optimizers: Sequence[Optimizer],
    model: nn.Module,
    collectives: Collectives,
    besides: Mapping[str, Any] | None = None,
) -> None:
    """Compare optimizers' classes, and their groups' parameters and numbers; each rank must call.

    What must be the same `besides` is given by name.

    Raises:
        ConfigError: They differ (raised on every rank), or one takes sparse gradients only.
    """
    if any(isinstance(optimizer, SparseAdam) for optimizer in optimizers):
        raise ConfigError(
            f"Rank {collectives.rank}: SparseAdam takes sparse gradients only, but ranks exchange "
            f"dense ones, of embeddings with sparse=True too; expected an optimizer of dense "
            f"gradients. Use torch.optim.Adam, or SGD or Adagrad, whose update of rows without a "
            f"gradient is nothing."
        )
    names = {param: name for name, param in model.named_parameters()}
    mine = dict(besides or {}) | {"the optimizers": [type(one).__name__ for one in optimizers]}
    for place, group in _groups(optimizers):
        own = [names.get(param, "a stranger") for param in group["params"]]
        mine |= {f"the number of parameters of {place}": len(own), place: ", ".join(own)}
    advice = "Make configure_optimizers, and what hooks set before it, the same on every rank."
    mine |= group_numbers(optimizers)
    check_alike(mine, collectives, "optimizers or options", advice)


def group_numbers(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return all that optimizers' groups hold beside parameters, by name and place."""
    return {
        f"{name} of {place}": value
        for place, group in _groups(optimizers)
        for name, value in group.items()
        if name != "params"
    }


def met(mine: Any, collectives: Collectives, place: str) -> list[Any]:
    """Return an object of every rank; each must call, at the same place of a run."""
    places, of_all = zip(*collectives.all_gather_object((place, mine)), strict=True)
    if other := next((rank for rank, one in enumerate(places) if one != places[0]), 0):
        raise CollectiveMismatchError(
            f"Rank {collectives.rank}: the ranks are at different places of the run, expected the "
            f"same: rank 0 tells of {places[0]}, rank {other} of {places[other]}. One has more "
            f"batches, or stops (trainer.should_stop) or raises by itself: decide on all ranks "
            f"alike."
        )
    return list(of_all)


def _groups(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, optimizer in enumerate(optimizers):
        which = f" (optimizer {number})" if len(optimizers) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            yield f"group {index} of {type(optimizer).__name__}{which}", group


def check_alike(mine: Mapping[str, Any], collectives: Collectives, what: str, advice: str) -> None:
    """Compare values over the ranks by name, as they are written; each rank must call.

    Where they differ, the error on every rank says `what` they are, and the `advice`.
    """
    told = _written(mine)
    digest = hashlib.sha256(repr(told).encode()).hexdigest()
    if len(set(met(digest, collectives, what))) == 1:
        return
    of_all = collectives.all_gather_object(told)
    found: list[str] = []
    for name in dict.fromkeys(name for one in of_all for name in one):
        first, *others = [one.get(name, "nothing") for one in of_all]
        if other := next((at for at, value in enumerate(others, 1) if value != first), 0):
            pair = _shortened(first, others[other - 1])
            found.append(f"{name} is {pair[0]} on rank 0 and {pair[1]} on rank {other}")
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    raise ConfigError(
        f"Rank {collectives.rank}: the ranks have different {what}, expected the same on all: "
        f"{'; '.join(found[:_MOST]) or 'they come in another order'}{more}. {advice}"
    )


def _shortened(first: str, other: str) -> list[str]:
    """Return of long texts what begins shortly before they differ."""
    pairs = enumerate(zip(first, other, strict=False))
    same = next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(first), len(other)))
    begin = max(0, same - _LONGEST // 2)
    return ["..." * bool(begin) + text[begin : begin + _LONGEST] for text in (first, other)]


def _written(values: Mapping[str, Any]) -> dict[str, str]:
    exact = tree_map_only(Tensor, Tensor.tolist, dict(values))  # a rate in four digits tells little
    texts = {name: one if isinstance(one, str) else repr(one) for name, one in exact.items()}
    return {name: _ADDRESS.sub("", text) for name, text in texts.items()}


def _signatures(model: nn.Module, full_shapes: Mapping[nn.Parameter, torch.Size]) -> dict[str, str]:
    mine = {
        name: _signature(name, param, full_shapes.get(param))
        for name, param in model.named_parameters()
    }
    return mine | {name: _signature(name, buffer) for name, buffer in model.named_buffers()}


def _signature(name: str, tensor: Tensor, full_shape: torch.Size | None = None) -> str:
    if isinstance(tensor, UninitializedParameter):
        raise ConfigError(
            f"The parameter {name!r} is lazy and has no shape yet, expected a materialised one. "
            f"Run one batch through the model before training."
        )
    shape = tuple(full_shape or tensor.shape)
    return f"{shape} {tensor.dtype} requires_grad={tensor.requires_grad}"


def check_trainable(module: nn.Module) -> None:
    """Raise ConfigError if a module has nothing to train once its first training step begins."""
    if not any(param.requires_grad for param in module.parameters()):
        raise ConfigError(
            f"{type(module).__name__} has no parameter that requires a gradient, expected at least "
            f"one to train. Unfreeze some, or call trainer.validate, test or predict instead of "
            f"fit."
        )


def refuse_embeddings_of_batches(module: nn.Module, why: str) -> None:
    """Raise ConfigError if what an embedding does to a row depends on the whole batch."""
    for name, one in module.named_modules():
        if not isinstance(one, (nn.Embedding, nn.EmbeddingBag)):
            continue
        option = "max_norm" if one.max_norm is not None else "scale_grad_by_freq"
        if getattr(one, option) and (option == "max_norm" or one.weight.requires_grad):
            raise ConfigError(
                f"{name!r} has {option}={getattr(one, option)}, which counts or changes the rows "
                f"that a batch has, but {why}; expected an embedding that treats each row alike. "
                f"{_INSTEAD[option]}"
            )


_INSTEAD = {
    "max_norm": (
        "Leave max_norm out and limit all rows in on_train_batch_start, with torch.no_grad(): "
        "weight.copy_(weight.renorm(2, 0, max_norm))."
    ),
    "scale_grad_by_freq": (
        "Leave it out, and count rows in on_after_backward, where gradients are the whole batch's."
    ),
}
