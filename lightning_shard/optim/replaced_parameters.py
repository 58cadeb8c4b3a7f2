"""Parameters that user code replaces or adds in the middle of a run, as an optimizer sees them.

    module.p = nn.Parameter(value)      one device: the module's new parameter is in no optimizer
    optimizer given the new one         one device: it is trained, with state of its own

The engine puts its own parameter back, with the new value. An optimizer that was given the new one
goes on with the engine's, and with new state. One that was not would train it, which one device
does not: the parameter is frozen, and a step that would move it all the same is refused.
"""

from collections.abc import Collection
from itertools import chain

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_shard.data_parallel.assigned import ReplacedParameter
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import ConfigError

_ADVICE = (
    "To train it, write the value into the parameter that was there, with torch.no_grad(): "
    "param.copy_(value), or put the new one into the optimizer's param_groups in the same hook."
)


class ReplacedParameters:
    """Follows for one optimizer which parameters of the model are replaced.

    Args:
        optimizer: The user's optimizer.
        engine: The engine that puts parameters back.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer, self._engine = optimizer, engine
        self._lost: dict[nn.Parameter, str] = {}
        self._frozen: dict[nn.Parameter, str] = {}
        self._has_told = False
        self._checked: list[int] = []
        self.attach()
        engine.adopt_assigned()  # this optimizer may be given what was replaced just now

    def attach(self) -> None:
        """Follow; what this optimizer has lost is frozen."""
        hearers = self._engine.adoption.on_replaced
        if self._follow not in hearers:
            hearers.append(self._follow)
            for param in self._frozen:
                param.requires_grad = False

    def detach(self) -> None:
        """Follow no longer; what was frozen here is as user code left it."""
        for param in self._frozen:
            param.requires_grad = True
        if self._follow in self._engine.adoption.on_replaced:
            self._engine.adoption.on_replaced.remove(self._follow)

    def _follow(self, one: ReplacedParameter) -> None:
        listed = set(self._listed())
        groups, state = self._optimizer.param_groups, self._optimizer.state
        if one.newcomer in listed:
            for group in groups:
                others = [param for param in group["params"] if param is not one.param]
                group["params"] = [one.param if p is one.newcomer else p for p in others]
            state.pop(one.param, None)
            if one.newcomer in state:
                state[one.param] = state.pop(one.newcomer)
            self._lost.pop(one.param, None)
            self._frozen.pop(one.param, None)
            one.param.grad = one.newcomer.grad
        elif one.param in listed and one.newcomer.requires_grad:
            self._lose(one)

    def _lose(self, one: ReplacedParameter) -> None:
        self._lost[one.param] = one.name
        if len(self._engine.adoption.on_replaced) > 1:  # another optimizer may have been given it
            return
        one.param.requires_grad = False
        self._frozen[one.param] = one.name

    def _tell(self) -> None:
        """Warn of what has been frozen, before the first step that leaves it out."""
        for name in self._frozen.values() if not self._has_told else ():
            rank_zero_warn(
                f"{name!r} was replaced by another parameter, which "
                f"{type(self._optimizer).__name__} was not given. It is frozen, since one device "
                f"would train it no longer. {_ADVICE}"
            )
        self._has_told = bool(self._frozen)

    def check(self) -> None:
        """Check the param groups before a step.

        Raises:
            ConfigError: A parameter was replaced that this optimizer still has, or it was given
                one that the ranks do not share.
        """
        listed = self._listed()
        if [*map(id, listed)] != self._checked:
            self._engine.adopt_assigned()  # what was replaced is in its place again
            listed = self._listed()
            for param in listed:
                self._refuse_unknown(param)
            self._checked = [*map(id, listed)]
        if self._lost:
            self._refuse_lost(set(listed))
            self._tell()

    def _listed(self) -> list[nn.Parameter]:
        groups = self._optimizer.param_groups
        return [*chain.from_iterable([group["params"] for group in groups])]

    def _refuse_unknown(self, param: nn.Parameter) -> None:
        try:
            known = not self._engine.split.is_here(param) or bool(self._engine.owner(param))
        except KeyError:
            known = False
        if not known:
            raise ConfigError(
                f"Rank {self._engine.collectives.rank}: {type(self._optimizer).__name__} was given "
                f"a parameter of shape {tuple(param.shape)} in the middle of the fit that the "
                f"ranks do not share, expected one that the model has had from the beginning. "
                f"Register it in __init__ or configure_model, and freeze it there until it is to "
                f"be trained."
            )

    def _refuse_lost(self, listed: Collection[nn.Parameter]) -> None:
        names = [
            name
            for param, name in self._lost.items()
            if param in listed and (param.requires_grad or param.grad is not None)
        ]
        if names:
            raise ConfigError(
                f"Rank {self._engine.collectives.rank}: {', '.join(map(repr, names))} was replaced "
                f"by another parameter, which {type(self._optimizer).__name__} was not given and "
                f"would train no longer on one device, but has a gradient for; expected the "
                f"parameter that it has. {_ADVICE}"
            )
