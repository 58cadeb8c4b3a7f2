"""Whether a module loads its parameters as torch does, so that they may be read into shards.

A module that renames, converts or computes what it loads is given full tensors instead. These are
private names of torch's, and a test of this file fails when they change.
"""

from torch import nn
from torch.nn.parameter import is_lazy

_LEAVE_PARAMETERS_ALONE = ("torch.nn.modules.", "torchmetrics.", "lightning.")
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks")


def loads_plainly(module: nn.Module) -> bool:
    """Whether nothing but torch's own code takes the parameters out of a `state_dict`."""
    return all(_is_plain(part) for part in module.modules())


def _is_plain(part: nn.Module) -> bool:
    kind = type(part)
    methods = (kind._load_from_state_dict, kind._save_to_state_dict)
    known = all(method.__module__.startswith(_LEAVE_PARAMETERS_ALONE) for method in methods)
    return (
        known
        and kind.load_state_dict is nn.Module.load_state_dict
        and kind.state_dict is nn.Module.state_dict
        and kind.set_extra_state is nn.Module.set_extra_state
        and not any(getattr(part, name) for name in _HOOKS)
        and not any(is_lazy(param) for param in part.parameters(recurse=False))
    )
