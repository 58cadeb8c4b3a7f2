"""Optimizers of full matrices on shards and parts: who updates what, and the update itself.

    before the engine   a trial says which param groups need full parameters (Muon's, Adafactor's)
                        and the engine gives each of their parameters to one rank: `OwnedLayout`
    a step              owner    param.data, param.grad   full, in the parameter's own shape
                        others   the optimizer's groups leave the parameter out
    tensor parallel     the owner gathers what other ranks have

                rank 0        rank 1                       the step           rank 0        rank 1
    up.weight   part, grad    part, grad ──all_to_all──>   by rank 0 ──all_to_all──> part   part
    norm.bias   full, grad    full, grad                   by rank 1 ──all_to_all──> full   full

So the owner takes the step of a single device, and alone has the state. A message has parts of many
parameters, for all owners: each part is sent once to the owner, and what it updates once back.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import LayerParts, has_parts
from lightning_shard.errors import ConfigError
from lightning_shard.optim import elementwise


def parameters_to_own(
    optimizers: Sequence[Optimizer], model: nn.Module, blocks: Container[nn.Parameter] = ()
) -> frozenset[nn.Parameter]:
    """Return the parameters that must lie full on one rank each, now or in a group later."""
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    owned = {
        param
        for optimizer, group in groups
        if not all(param in blocks for param in group["params"])
        and elementwise.needs_full_parameters(optimizer, group)
        for param in group["params"]
    }
    if owned:
        listed = {param for _, group in groups for param in group["params"]}
        owned.update(param for param in model.parameters() if param not in listed)
    return frozenset(owned)


class OwnedParameters:
    """Shows an optimizer the full parameters that this rank owns, inside the optimizer's view."""

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer, self._engine = optimizer, engine
        self._known = {param for group in optimizer.param_groups for param in group["params"]}
        self.gathered = GatheredParameters(optimizer, engine)
        self._plans: list[_GroupPlan] = []
        self._listed: list[list[nn.Parameter]] = []
        self._shown: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []
        # a step may raise, and what there is may be saved then

    def take(self) -> None:
        """Show what is owned here in its own shape, and nothing of others; each rank must call."""
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
        self.gathered.take()

    def send_out(self) -> None:
        """Give ranks that have parts of what was updated theirs; each rank must call."""
        self.gathered.send_out()

    def put_back(self) -> None:
        """Show shards again, and give the groups back what was taken off; no communication."""
        self.gathered.put_back()
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
        suited = {*engine.options.owned, *engine.options.blocks}
        others = [param for param in added if is_cut and param not in suited]
        cut = [home for param in others if (home := self._home(param)) is not None]
        if cut and elementwise.needs_full_parameters(self._optimizer, group):
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
    """What this rank's step does with the parameters of a param group."""

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
    """Say why an optimizer's update of the parameters as they lie here would be wrong."""
    for group in optimizer.param_groups:
        reason = elementwise.why_not(optimizer, [group], elementwise.parts_here(group, engine))
        if reason is not None:
            return reason
    return None


_MESSAGE_BYTES = 32 << 20  # of this rank's parts, unless one parameter has more


class GatheredParameters:
    """Shows an optimizer the parameters that this rank gathers, inside the optimizer's view."""

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self.num_bytes = 0
        self._optimizer, self._owners = optimizer, engine.owners
        self._exchange = None if engine.split.parts is None else _PartExchange(engine.split.parts)
        self._listed: list[list[nn.Parameter]] = []
        self._messages: list[list[nn.Parameter]] = []
        self._shown: dict[nn.Parameter, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Gather what is updated here, and hide the others; each rank with parts must call."""
        self.num_bytes = 0
        if self._exchange is None:
            return
        owners, groups = self._owners, self._optimizer.param_groups
        listed = [param for group in groups for param in group["params"]]
        params = [param for param in listed if param in owners.of_parts]
        if not params:
            return
        used = self._exchange.used(params)
        self._messages = list(_messages(params))
        for message in self._messages:
            self._gather(self._exchange, message, used)
        for group in groups:
            self._listed.append(group["params"])
            group["params"] = [p for p in group["params"] if not owners.gathered_elsewhere(p)]

    def _gather(
        self, exchange: "_PartExchange", message: Sequence[nn.Parameter], used: set[nn.Parameter]
    ) -> None:
        sent, awaited = exchange.nothing(), exchange.nothing()
        cut = [param for param in message if exchange.is_cut(param)]
        for param in cut:
            own = [param.data]
            if param in used:
                own.append(torch.zeros_like(own[0]) if param.grad is None else param.grad)
            if self._owners.gathers(param):
                for parts in awaited:
                    parts += own
            else:
                sent[self._owners.of_parts[param]] += own
        coming = zip(*exchange.run(sent, awaited), strict=True)
        for param in filter(self._owners.gathers, cut):
            full = exchange.full(param, next(coming))
            full_grad = exchange.full(param, next(coming)) if param in used else None
            self._shown[param] = param.data, param.grad, full_grad
            self.num_bytes += full.nbytes + (0 if full_grad is None else full_grad.nbytes)
            param.grad = None
            param.data = full
            param.grad = full_grad

    @torch.no_grad()
    def send_out(self) -> None:
        """Give every rank its part of what has been updated; each rank must call."""
        exchange = self._exchange
        if exchange is None:
            return
        for message in self._messages:
            sent, awaited = exchange.nothing(), exchange.nothing()
            for param in message:
                if not self._owners.gathers(param):
                    awaited[self._owners.of_parts[param]].append(param.data)
                    continue
                for rank, tensors in enumerate(sent):
                    tensors.append(exchange.part_of(param, rank))
                if param in self._shown:
                    self._shown[param][0].copy_(sent[exchange.rank][-1])
            for parts, updated in zip(awaited, exchange.run(sent, awaited), strict=True):
                for part, value in zip(parts, updated, strict=True):
                    part.copy_(value)

    def put_back(self) -> None:
        """Show parts again, and give the groups back what was taken off; no communication."""
        for group, listed in zip(self._optimizer.param_groups, self._listed, strict=False):
            group["params"] = listed
        for param, (part, grad, full_grad) in self._shown.items():
            left = param.grad
            param.grad = None
            param.data = part
            if left is full_grad:
                param.grad = grad
            elif left is not None and self._exchange is not None:  # the optimizer has assigned it
                param.grad = self._exchange.own_part(param, left)
        self._listed, self._messages, self._shown = [], [], {}


class _PartExchange:
    """Exchanges parts of parameters among the ranks that have them."""

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        self.rank, self._size = parts.group.rank, parts.group.size

    def nothing(self) -> list[list[Tensor]]:
        """Return no tensors for each of the ranks."""
        return [[] for _ in range(self._size)]

    def is_cut(self, param: nn.Parameter) -> bool:
        """Whether each rank has a part of `param`, not all of it."""
        return param in self._parts.shardings

    def full(self, param: nn.Parameter, parts: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from the parts of all ranks."""
        return self._parts.shardings[param].assemble(parts)

    def part_of(self, param: nn.Parameter, rank: int) -> Tensor:
        """Return what a rank has of a parameter that is full here."""
        cut = self._parts.shardings.get(param)
        return param.data if cut is None else cut.shard(param.data, rank)

    def own_part(self, param: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor that is cut as `param` is."""
        return self._parts.shardings[param].shard(full, self.rank)

    def used(self, params: Sequence[nn.Parameter]) -> set[nn.Parameter]:
        """Return the parameters that have a gradient on some rank; each rank must call."""
        flags = [param.grad is not None for param in params]
        common = torch.tensor(flags, dtype=torch.uint8, device=params[0].device)
        self._parts.group.all_reduce(common, "max").wait()
        return {param for param, is_used in zip(params, common.tolist(), strict=True) if is_used}

    def run(
        self, sent: Sequence[Sequence[Tensor]], awaited: Sequence[Sequence[Tensor]]
    ) -> list[list[Tensor]]:
        """Send tensors of one format, and return what others send; each must call if one does."""
        some = [tensor for of_rank in (*sent, *awaited) for tensor in of_rank]
        if not some:
            return [list(one) for one in awaited]
        given, taken = ([self._numel(*one) for one in enumerate(of)] for of in (sent, awaited))
        outgoing = [
            t.reshape(-1) for rank, one in enumerate(sent) for t in one if rank != self.rank
        ]
        message = torch.cat(outgoing) if outgoing else some[0].new_empty(0)
        received = message.new_empty(sum(taken))
        self._parts.group.all_to_all(
            received, message, output_split_sizes=taken, input_split_sizes=given
        ).wait()
        flats = torch.split(received, taken)
        return [
            list(tensors) if rank == self.rank else _shaped(flat, tensors)
            for rank, (flat, tensors) in enumerate(zip(flats, awaited, strict=True))
        ]

    def _numel(self, rank: int, tensors: Sequence[Tensor]) -> int:
        return 0 if rank == self.rank else sum(tensor.numel() for tensor in tensors)


def _shaped(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that lie one behind the other in a flat one."""
    found = torch.split(flat, [tensor.numel() for tensor in like])
    return [one.view(tensor.shape) for one, tensor in zip(found, like, strict=True)]


def _messages(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield runs of parameters of one format that travel together, the same on all ranks."""
    message: list[nn.Parameter] = []
    size = 0
    for param in params:
        is_other = bool(message) and param.dtype != message[0].dtype
        if message and (is_other or size + param.nbytes > _MESSAGE_BYTES):
            yield message
            message, size = [], 0
        message.append(param)
        size += param.nbytes
    if message:
        yield message
