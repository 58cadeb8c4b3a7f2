"""Optimizers of full matrices on shards and parts: who updates what, and the update itself.

    before the engine   a trial says which param groups need full parameters (Muon's, Adafactor's)
                        and the engine gives each of their parameters to one rank: `layout/owned`
    a step              owner    param.data, param.grad   full, in the parameter's own shape
                        others   the optimizer's groups leave the parameter out
    tensor parallel     the owner gathers what other ranks have, see `gathered_parameters`

so that the owner takes the step of a single device. State is full on the owner, and nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import has_parts
from lightning_shard.errors import ConfigError
from lightning_shard.optim.elementwise import (
    needs_full_parameters,
    why_not_elementwise,
    why_not_separate,
)
from lightning_shard.optim.gathered_parameters import GatheredParameters


def parameters_to_own(optimizers: Sequence[Optimizer], model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters that have to lie full on one rank each; no communication.

    Args:
        optimizers: Every optimizer of the model, before the engine is made.
        model: The model that is trained.

    Returns:
        The parameters of the param groups that need them. Where there are any, also those that no
            optimizer has yet, since one may be given them later.
    """
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    owned = {
        param
        for optimizer, group in groups
        if needs_full_parameters(optimizer, group)
        for param in group["params"]
    }
    if owned:
        listed = {param for _, group in groups for param in group["params"]}
        owned.update(param for param in model.parameters() if param not in listed)
    return frozenset(owned)


class OwnedParameters:
    """Shows an optimizer the full parameters that this rank owns, inside the optimizer's view.

    Args:
        optimizer: The user's optimizer, whose parameters lie as it needs them.
        engine: The engine that holds its parameters.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer, self._engine = optimizer, engine
        self._known = {param for group in optimizer.param_groups for param in group["params"]}
        self._gathered = GatheredParameters(optimizer, engine)
        self._plans: list[_GroupPlan] = []
        self._listed: list[list[nn.Parameter]] = []
        self._shown: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []
        # a step may raise, and what there is may be saved then
        self._handle = optimizer.register_state_dict_pre_hook(lambda _: self.put_back())

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the matrices and gradients that this rank has gathered for an update."""
        return self._gathered.num_bytes

    def detach(self) -> None:
        """Give the optimizer back with all of its parameters."""
        self._handle.remove()
        self.put_back()

    def take(self) -> None:
        """Show what is owned here in its own shape, and take what others have off the groups.

        Each rank must call.

        Raises:
            ConfigError: The optimizer was given parameters since, which lie in shards.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self._plans) or not all(map(_GroupPlan.fits, self._plans, groups)):
            for group in groups:
                self._check_added(group)
            self._plans = [self._plan(group) for group in groups]
        for group, plan in zip(groups, self._plans, strict=True):
            self._listed.append(group["params"])
            group["params"] = [*plan.updated]
            for param, flat, index in plan.owned:
                self._show(param, flat, index)
        self._gathered.take()

    def send_out(self) -> None:
        """Give ranks that have parts of what was updated theirs; each rank must call."""
        self._gathered.send_out()

    def put_back(self) -> None:
        """Show shards again, and give the groups back what was taken off; no communication."""
        self._gathered.put_back()
        for group, listed in zip(self._optimizer.param_groups, self._listed, strict=False):
            group["params"] = listed
        for param, shard, grad in self._shown:
            updated, left = param.data, param.grad
            param.grad = None
            param.data = shard
            if updated.data_ptr() != shard.data_ptr():  # the optimizer has assigned another tensor
                shard.copy_(updated.reshape(-1))
            if left is not None:
                is_ours = grad is not None and left.data_ptr() == grad.data_ptr()
                param.grad = grad if is_ours else left.reshape(-1)
        self._listed, self._shown = [], []

    def _plan(self, group: dict[str, Any]) -> "_GroupPlan":
        homes = [(param, self._home(param)) for param in group["params"]]
        updated = [(param, home) for param, home in homes if not _is_of_another_rank(home)]
        return _GroupPlan(
            listed=[*group["params"]],
            updated=[param for param, _ in updated],
            owned=[(param, *home) for param, home in updated if home and home[0].is_owned],
        )

    def _home(self, param: nn.Parameter) -> tuple[FlatParameters, int] | None:
        return self._engine.owner(param) if self._engine.split.is_here(param) else None

    def _show(self, param: nn.Parameter, flat: FlatParameters, index: int) -> None:
        shape = flat.layout.slots[index].shape
        shard, grad = param.data, param.grad
        self._shown.append((param, shard, grad))
        param.grad = None
        param.data = shard.view(shape)
        param.grad = None if grad is None else grad.view(shape)

    def _check_added(self, group: dict[str, Any]) -> None:
        added = [param for param in group["params"] if param not in self._known]
        engine = self._engine
        is_cut = engine.options.stage > 0 or has_parts(engine.split)
        others = [param for param in added if is_cut and param not in engine.options.owned]
        cut = [home for param in others if (home := self._home(param)) is not None]
        if cut and needs_full_parameters(self._optimizer, group):
            flat, index = cut[0]
            raise ConfigError(
                f"Rank {self._engine.collectives.rank}: {type(self._optimizer).__name__} was given "
                f"{flat.layout.slots[index].name!r} in the middle of the fit, which lies in shards "
                f"or parts over the ranks, expected a parameter that lies full on one rank: one "
                f"that such an optimizer, or none, had when the fit began. List it there in "
                f"configure_optimizers."
            )
        self._known.update(added)


@dataclass(frozen=True, kw_only=True)
class _GroupPlan:
    """What this rank's step does with the parameters of a param group.

    Attributes:
        listed: The parameters that the group had when the plan was made.
        updated: Those of them that the optimizer updates on this rank.
        owned: Those of `updated` that lie full here, each with its buffer and its index there.
    """

    listed: Sequence[nn.Parameter]
    updated: Sequence[nn.Parameter]
    owned: Sequence[tuple[nn.Parameter, FlatParameters, int]]

    def fits(self, group: dict[str, Any]) -> bool:
        """Whether the group still has these parameters."""
        params = group["params"]
        return len(params) == len(self.listed) and all(map(is_, params, self.listed))


def _is_of_another_rank(home: tuple[FlatParameters, int] | None) -> bool:
    """Whether the parameter is another stage's, or another rank owns it and has all of it."""
    if home is None:
        return True
    if not home[0].is_owned:
        return False
    return home[0].layout.slots[home[1]].numel > 0 and not home[0].local_views[home[1]].numel()


def why_not_as_they_lie(optimizer: Optimizer, engine: DataParallelEngine) -> str | None:
    """Say why an optimizer's update of the parameters as they lie here would be wrong.

    Returns:
        The result of a trial in words: of the first param group with parameters in shards that
            needs full ones, or with full ones that it does not update one by one; None when each
            group has what it needs.
    """
    for group in optimizer.param_groups:
        is_cut = has_elements_only(group, engine)
        reason = (why_not_elementwise if is_cut else why_not_separate)(optimizer, [group])
        if reason is not None:
            return reason
    return None


def has_elements_only(group: Mapping[str, Any], engine: DataParallelEngine) -> bool:
    """Whether a rank may update single elements of a group's parameters, and no full ones."""
    if engine.options.stage == 0 and not has_parts(engine.split):
        return False
    known, owned = set(engine.model.parameters()), engine.options.owned
    held = [param for param in group["params"] if param in known]
    return any(param not in owned for param in held) or not held
