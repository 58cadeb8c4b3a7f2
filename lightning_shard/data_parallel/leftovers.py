"""Parameters that a failed or abandoned run leaves cut: no other engine takes them as they are."""

from torch import nn

from lightning_shard.errors import ConfigError

_LEFTOVER = "_lightning_shard_shard"  # set on such parameters


def mark_leftover(param: nn.Parameter) -> None:
    """Note that a parameter is left without its full value."""
    setattr(param, _LEFTOVER, True)


def take_leftovers(model: nn.Module) -> None:
    """Let a new engine take a model that another has abandoned; its values must come after that."""
    for param in model.parameters():
        vars(param).pop(_LEFTOVER, None)


def refuse_leftover_shards(model: nn.Module) -> None:
    """Raise ConfigError for a model that a failed run has left in shards."""
    for name, param in model.named_parameters():
        if hasattr(param, _LEFTOVER):
            raise ConfigError(
                f"The parameter {name!r} of {type(model).__name__} is only one rank's shard, left "
                f"by a run of ZeRO stage 3, tensor or pipeline parallel that failed; expected a "
                f"full model. Build a new one, or load a checkpoint into a new one."
            )
