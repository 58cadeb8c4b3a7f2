"""Which parameters train, and in which groups of the optimizers: what hooks may change in mid-run.

engine built    a and b train       its flat buffers part frozen parameters from others
a hook          b is frozen         the buffers stay as they are
b is lost       as built, rebuild   newcomers and survivors lay out the buffers of before
                frozen again        and then know what trains at the boundary
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer


def flags_of(module: nn.Module) -> dict[str, bool]:
    """Return by name whether each parameter requires a gradient."""
    return {name: param.requires_grad for name, param in module.named_parameters()}


def set_flags(module: nn.Module, flags: dict[str, bool]) -> None:
    """Freeze and thaw parameters, by their names."""
    for name, param in module.named_parameters():
        if flags.get(name, param.requires_grad) != param.requires_grad:
            param.requires_grad_(flags[name])


@dataclass(frozen=True, kw_only=True)
class WhatTrains:
    """What trains at a boundary.

    Attributes:
        as_built: By name whether a parameter required a gradient when the engine was made.
        now: The same at the boundary.
        groups: By optimizer and group the names of the parameters.
    """

    as_built: dict[str, bool]
    now: dict[str, bool]
    groups: list[list[list[str]]]

    @classmethod
    def of(
        cls, module: nn.Module, optimizers: Sequence[Optimizer], as_built: dict[str, bool]
    ) -> "WhatTrains":
        """Take down what trains now."""
        names = {param: name for name, param in module.named_parameters()}
        groups = [
            [[names.get(param, "") for param in group["params"]] for group in one.param_groups]
            for one in optimizers
        ]
        return cls(as_built=as_built, now=flags_of(module), groups=groups)

    def go_back(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Have what the engine was made of, before it is made anew, and the groups of then."""
        set_flags(module, self.as_built)
        params = dict(module.named_parameters())
        for optimizer, groups in zip(optimizers, self.groups, strict=False):
            del optimizer.param_groups[len(groups) :]  # added since
            for names in groups[len(optimizer.param_groups) :]:
                mine = [params[name] for name in names if name in params]
                optimizer.add_param_group({"params": mine})
