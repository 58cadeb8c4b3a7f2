"""Checks before training: there is something to train, and all ranks hold the same of it."""

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.shared_memory import refuse_shared_memory
from lightning_shard.errors import ConfigError


def check_same_model(model: nn.Module, collectives: Collectives) -> None:
    """Compare parameters and buffers over the ranks by name, shape and format; each must call.

    Raises:
        ConfigError: The ranks' models differ; raised on every rank, with the first difference. Or
            parameters share memory without being one.
    """
    refuse_shared_memory(model, collectives.rank)
    advice = "Build the model from the same arguments on every rank."
    _compare(_signatures(model), collectives, "models", advice)


def strangers(model: nn.Module, collectives: Collectives) -> list[int]:
    """Return the ranks whose model differs from rank 0's; each rank must call."""
    of_all_ranks = collectives.all_gather_object(_signatures(model))
    return [rank for rank, theirs in enumerate(of_all_ranks) if theirs != of_all_ranks[0]]


def check_same_optimizers(
    optimizers: Sequence[Optimizer], model: nn.Module, collectives: Collectives
) -> None:
    """Compare the optimizers' classes and the parameters of their groups; each rank must call.

    Raises:
        ConfigError: The ranks' optimizers differ; raised on every rank, with the first param
            group that differs.
    """
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


def _signatures(model: nn.Module) -> list[str]:
    mine = [_signature(name, param) for name, param in model.named_parameters()]
    return mine + [_signature(name, buffer) for name, buffer in model.named_buffers()]


def _signature(name: str, tensor: Tensor) -> str:
    if isinstance(tensor, UninitializedParameter):
        raise ConfigError(
            f"The parameter {name!r} is lazy and has no shape yet, expected a materialised one. "
            f"Run one batch through the model before training."
        )
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} requires_grad={tensor.requires_grad}"


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


def check_trainable(module: nn.Module) -> None:
    """Raise ConfigError if a module that is to be trained has nothing to train."""
    if not any(param.requires_grad for param in module.parameters()):
        raise ConfigError(
            f"{type(module).__name__} has no parameter that requires a gradient, expected at least "
            f"one to train. Unfreeze some, or call trainer.validate, test or predict instead of "
            f"fit."
        )
