"""Modules of TorchScript within a model: they take no hooks, and their code is not Python's.

Data parallel follows them from the module that they lie in. What splits layers or cuts a model into
stages would have to change them.
"""

from torch import nn
from torch.jit import ScriptModule

from lightning_shard.errors import ConfigError


def is_scripted(module: nn.Module) -> bool:
    """Whether a module was scripted or traced."""
    return isinstance(module, ScriptModule)


def hookable(module: nn.Module) -> list[nn.Module]:
    """Return the module and those in it, without those of TorchScript."""
    return [one for one in module.modules() if not is_scripted(one)]


def refuse_scripted_parts(model: nn.Module, what: str) -> None:
    """Raise if a model has a module of TorchScript.

    Args:
        model: Model whose modules are looked at.
        what: Who refuses it, such as "a pipeline".

    Raises:
        ConfigError: Naming the first such module.
    """
    for name, module in model.named_modules():
        if is_scripted(module):
            raise ConfigError(
                f"{name!r} is a module of TorchScript, which {what} cannot change; expected "
                f"modules of Python. Leave torch.jit.script or torch.jit.trace out, or use "
                f"strategy='zero3', which takes it as it is."
            )
