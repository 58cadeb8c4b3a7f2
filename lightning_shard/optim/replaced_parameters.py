"""Parameters that user code replaces in the middle of a run, as an optimizer sees them.

    module.p = nn.Parameter(value)      one device: the module's new parameter is in no optimizer
    optimizer given the new one         one device: it is trained, with state of its own

The engine puts its own parameter back, with the new value. An optimizer that was given the new one
goes on with the engine's, and with new state; one that has lost the parameter would train it, which
a single device does not: that is refused before its next step.
"""

from torch import nn
from torch.optim import Optimizer

from lightning_shard.data_parallel.assigned import ReplacedParameter
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import ConfigError


class ReplacedParameters:
    """Follows for one optimizer which parameters of the model are replaced.

    Args:
        optimizer: The user's optimizer.
        engine: The engine that puts parameters back.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer, self._engine = optimizer, engine
        self._lost: dict[nn.Parameter, str] = {}
        engine.adoption.on_replaced.append(self._follow)
        engine.adopt_assigned()  # this optimizer may be given what was replaced just now

    def detach(self) -> None:
        """Follow no longer."""
        if self._follow in self._engine.adoption.on_replaced:
            self._engine.adoption.on_replaced.remove(self._follow)

    def _follow(self, one: ReplacedParameter) -> None:
        groups, state = self._optimizer.param_groups, self._optimizer.state
        listed = {param for group in groups for param in group["params"]}
        if one.newcomer in listed:
            for group in groups:
                others = [param for param in group["params"] if param is not one.param]
                group["params"] = [one.param if p is one.newcomer else p for p in others]
            state.pop(one.param, None)
            if one.newcomer in state:
                state[one.param] = state.pop(one.newcomer)
            self._lost.pop(one.param, None)
        elif one.param in listed and one.newcomer.requires_grad:
            self._lost[one.param] = one.name

    def refuse_lost(self) -> None:
        """Raise ConfigError if a parameter has been replaced that this optimizer still has."""
        if not self._lost:
            return
        listed = {param for group in self._optimizer.param_groups for param in group["params"]}
        names = [name for param, name in self._lost.items() if param in listed]
        if names:
            raise ConfigError(
                f"Rank {self._engine.collectives.rank}: {', '.join(map(repr, names))} was replaced "
                f"by another parameter, which {type(self._optimizer).__name__} was not given and "
                f"would train no longer on one device; expected the parameter that it has. Write "
                f"the value into it, with torch.no_grad(): param.copy_(value), or put the new "
                f"parameter into the optimizer's param_groups in the same hook."
            )
