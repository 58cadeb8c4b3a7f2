"""Checks before training: there is something to train, and all ranks hold the same of it."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer, SparseAdam

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.shared_memory import refuse_shared_memory
from lightning_shard.errors import ConfigError


def check_same_model(
    model: nn.Module,
    collectives: Collectives,
    full_shapes: Mapping[nn.Parameter, torch.Size] | None = None,
) -> None:
    """Compare parameters and buffers over the ranks by name, shape and format; each must call.

    Args:
        model: Module whose parameters and buffers are compared.
        collectives: Group of the ranks.
        full_shapes: Full shapes of parameters of which this rank has a part, or nothing.

    Raises:
        ConfigError: The ranks' models differ; raised on every rank, with the first difference. Or
            parameters share memory without being one.
    """
    refuse_shared_memory(model, collectives.rank)
    advice = "Build the model from the same arguments on every rank."
    _compare(_signatures(model, full_shapes or {}), collectives, "models", advice)


def strangers(model: nn.Module, collectives: Collectives) -> list[int]:
    """Return the ranks whose model differs from rank 0's; each rank must call."""
    of_all_ranks = collectives.all_gather_object(_signatures(model, {}))
    return [rank for rank, theirs in enumerate(of_all_ranks) if theirs != of_all_ranks[0]]


def check_same_optimizers(
    optimizers: Sequence[Optimizer], model: nn.Module, collectives: Collectives
) -> None:
    """Compare the optimizers' classes and the parameters of their groups; each rank must call.

    Raises:
        ConfigError: The ranks' optimizers differ; raised on every rank, with the first param
            group that differs. Or one takes sparse gradients only.
    """
    if any(isinstance(optimizer, SparseAdam) for optimizer in optimizers):
        raise ConfigError(
            f"Rank {collectives.rank}: SparseAdam takes sparse gradients only, but ranks exchange "
            f"dense ones, of embeddings with sparse=True too; expected an optimizer of dense "
            f"gradients. Use torch.optim.Adam, or SGD or Adagrad, whose update of rows without a "
            f"gradient is nothing."
        )
    names = {param: name for name, param in model.named_parameters()}
    mine = [
        f"group {number} of {type(optimizer).__name__}: "
        + ", ".join(names.get(param, "a stranger") for param in group["params"])
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
    ]
    _compare(
        mine, collectives, "optimizers", "Make configure_optimizers return the same on every rank."
    )


def _signatures(model: nn.Module, full_shapes: Mapping[nn.Parameter, torch.Size]) -> list[str]:
    mine = [
        _signature(name, param, full_shapes.get(param)) for name, param in model.named_parameters()
    ]
    return mine + [_signature(name, buffer) for name, buffer in model.named_buffers()]


def _signature(name: str, tensor: Tensor, full_shape: torch.Size | None = None) -> str:
    if isinstance(tensor, UninitializedParameter):
        raise ConfigError(
            f"The parameter {name!r} is lazy and has no shape yet, expected a materialised one. "
            f"Run one batch through the model before training."
        )
    shape = tuple(full_shape or tensor.shape)
    return f"{name} {shape} {tensor.dtype} requires_grad={tensor.requires_grad}"


def _compare(mine: list[str], collectives: Collectives, what: str, advice: str) -> None:
    of_all_ranks = collectives.all_gather_object(mine)
    for rank, theirs in enumerate(of_all_ranks):
        if theirs != of_all_ranks[0]:
            expected, got = next(
                (a, b) for a, b in zip_longest(of_all_ranks[0], theirs, fillvalue="none") if a != b
            )
            raise ConfigError(
                f"Rank {collectives.rank}: the ranks have different {what}. Rank {rank} has "
                f"[{got}] where rank 0 has [{expected}]. {advice}"
            )


def check_trainable(module: nn.Module, num_parts: int = 1) -> None:
    """Raise ConfigError if a module that is to be trained has nothing to train, or wrongly so.

    Args:
        module: The module, before a fit.
        num_parts: Into how many parts the ranks divide each batch.
    """
    if not any(param.requires_grad for param in module.parameters()):
        raise ConfigError(
            f"{type(module).__name__} has no parameter that requires a gradient, expected at least "
            f"one to train. Unfreeze some, or call trainer.validate, test or predict instead of "
            f"fit."
        )
    if num_parts > 1:
        refuse_embeddings_of_batches(module, f"{num_parts} ranks have parts of it")


def refuse_embeddings_of_batches(module: nn.Module, why: str) -> None:
    """Raise ConfigError if what an embedding does to a row depends on the whole batch.

    Args:
        module: The module, before a fit.
        why: Says who does not have the whole batch.
    """
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
