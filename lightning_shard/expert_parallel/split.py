"""The split of experts over ranks that are given different samples: whole experts on each.

    batched   gate_up (E, 2 I, H)   rank 0 [0, E / W)   rank 1 [E / W, 2 E / W) ...
    listed    experts.0, experts.1  rank 0              experts.2, experts.3   rank 1

An expert that is not here has parameters without elements.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.layout import PlacedBox, whole
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.deferred_init.start import MetaStart
from lightning_shard.data_parallel.memory.flat_parameters import give_memory
from lightning_shard.data_parallel.model_split import FewerRanks, ModelSplit, in_place
from lightning_shard.expert_parallel.finding import Mixture


class ExpertSplit(ModelSplit):
    """Takes other ranks' experts off a rank, until `restore`.

    Args:
        model: The model, whose experts' values on the first rank win.
        mixtures: The mixtures of the model.
        group: The W ranks that share the experts; each must construct this.
        data: The ranks that have the same experts.
        reducing: Second groups of those, for gradients.
        start: Knows the values of parameters on meta.
    """

    def __init__(
        self,
        model: nn.Module,
        mixtures: Sequence[Mixture],
        group: Collectives,
        data: DataGroups,
        reducing: DataGroups,
        start: MetaStart | None = None,
    ) -> None:
        self.group = group
        self.groups = (group,)
        self.group_sets = ((), self.groups)  # of what every rank has, and of the experts
        self.is_first = group.rank == 0
        self._batched: dict[nn.Parameter, torch.Size] = {}
        self._owners: dict[nn.Parameter, int] = {}
        self._alike: dict[nn.Parameter, nn.Parameter] = {}  # that of an expert which is here
        lists = set[nn.Module]()
        for one in mixtures:
            if one.is_batched:
                shapes = {p: p.shape for p in one.module.parameters(recurse=False)}
                self._batched |= shapes
                continue
            lists.add(model.get_submodule(one.name))
            num_here = one.num_experts // group.size
            for number, expert in enumerate(one.experts):
                self._owners |= dict.fromkeys(expert.parameters(), number // num_here)
                first = one.experts[group.rank * num_here]
                self._alike |= dict(zip(expert.parameters(), first.parameters(), strict=True))
        self._shapes = {param: param.shape for param in self._owners}
        self.groups_of_layers = self.groups if self._owners else ()
        self.fewer_ranks = (FewerRanks(group=group, data=data, reducing=reducing),)
        self.undivided = lists
        absent = {p: shape for p, shape in self._shapes.items() if not self.is_here(p)}
        self.full_shapes = {**self._batched, **absent}
        for param in (*self._batched, *self._owners):
            self._take_off(param, start)

    @torch.no_grad()
    def _take_off(self, param: nn.Parameter, start: MetaStart | None) -> None:
        if param.is_meta and self.is_here(param) and start is not None:
            start.make(param)
        if param.is_meta:
            device = torch.device("cpu") if start is None else start.device
            give_memory(param, torch.empty(0, dtype=param.dtype, device=device))
            return
        same = param.data.contiguous()
        if start is None:
            self.group.broadcast(same).wait()
        own = self.local(param, same) if self.is_here(param) else same.new_empty(0)
        param.data = own.clone()

    def is_batched(self, param: nn.Parameter) -> bool:
        """Whether a parameter has the experts as its first dimension."""
        return param in self._batched

    def is_here(self, param: nn.Parameter) -> bool:
        """Whether this rank has a parameter, or its experts' part of it."""
        return self._owners.get(param, self.group.rank) == self.group.rank

    def like(self, param: nn.Parameter) -> Tensor:
        """Return what is here of a parameter, or no elements in the format that it has now."""
        return param.data if self.is_here(param) else self._alike[param].data.new_empty(0)

    def full_shape(self, param: nn.Parameter) -> torch.Size:
        """Return the full shape of a parameter."""
        return self._batched.get(param) or self._shapes.get(param) or param.shape

    def is_spread(self, param: nn.Parameter) -> bool:
        """Whether a parameter is of experts, some of which are on other ranks."""
        return param in self._batched or param in self._owners

    def placement(self, param: nn.Parameter) -> Hashable:
        """Return whose an expert's parameter is, and whether it is batched; None for others."""
        return (param in self._batched, self._owners.get(param)) if self.is_spread(param) else None

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank has elements that no other one of the group has, or all have."""
        return self.is_here(param)

    @torch.no_grad()
    def full(self, param: nn.Parameter, local: Tensor) -> Tensor:
        """Return the full tensor of parts shaped as `param`; each rank of the group must call."""
        if param in self._owners:
            owner = self._owners[param]
            own = local if owner == self.group.rank else local.new_empty(self._shapes[param])
            tensor = own.contiguous()
            self.group.broadcast(tensor, src=owner).wait()
            return tensor
        if param not in self._batched:
            return local
        full = local.new_empty((local.shape[0] * self.group.size, *local.shape[1:]))
        self.group.all_gather(full.view(-1), local.contiguous().view(-1)).wait()
        return full

    def local(self, param: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's experts' part of a tensor of the full shape; others as is."""
        if param not in self._batched or full.shape != self._batched[param]:
            return full
        return full.chunk(self.group.size)[self.group.rank].clone()

    def places(self, param: nn.Parameter, shape: Sequence[int]) -> Sequence[PlacedBox]:
        """Return where this rank's own tensor lies in the full one."""
        if param not in self._batched:
            return [in_place(shape)]
        first = self.group.rank * self._batched[param][0] // self.group.size
        return [PlacedBox(whole(shape), (first, *[0] * (len(shape) - 1)))]

    def restore(self, *, full: bool) -> None:
        """With `full`, give every rank all experts again; each rank must call."""
        if not full:
            return
        for param in (*self._batched, *self._owners):
            param.data = self.full(param, param.data)
