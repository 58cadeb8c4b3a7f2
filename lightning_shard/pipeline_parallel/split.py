"""The split of a model's parameters over the ranks of a pipeline, by their stages.

    rank 0   embed.weight   blocks.0   blocks.1      -          -       head.weight (tied)
    rank 1        -            -          -       blocks.2   blocks.3   head.weight

A parameter that is not here has no elements; it stays the object that optimizers and schedulers
hold. A parameter that two stages share is on both: its gradients are summed, so both take one step.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.call_site import reading
from lightning_shard.data_parallel.memory.flat_parameters import give_memory
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.pipeline_parallel._torch import computed_before_forward
from lightning_shard.pipeline_parallel.gradients import GradientStash
from lightning_shard.pipeline_parallel.partition import Partition, buffer_stages, parameter_stages


class PipelineSplit(ModelSplit):
    """Takes the parameters of other stages off a rank, until `restore`.

    Args:
        model: The full model, whose values on rank 0 win; parameters on meta, which all ranks would
            make alike, stay there. Each rank of the pipeline must construct this.
        partition: Blocks of each stage.
        stage_ranks: Group rank of each stage.
        group: Group of the pipeline's ranks.
        device: Device for this rank's part of the model.

    Attributes:
        full_shapes: Full shape of each parameter that is not here.
        shapes: Full shape of every parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        stage_ranks: Sequence[int],
        group: Collectives,
        device: torch.device,
    ) -> None:
        self.group = group
        self.groups = self.groups_of_layers = (group,)
        self.group_sets = (self.groups,)
        self.device = device
        self.is_first = group.rank == 0
        self.param_stages = parameter_stages(model, partition)
        self.shapes = {param: param.shape for param in self.param_stages}
        self._model, self._partition, self.stage_ranks = model, partition, stage_ranks
        self._ranks = {param: self._ranks_of(s) for param, s in self.param_stages.items()}
        self.full_shapes = {
            param: shape for param, shape in self.shapes.items() if not self.is_here(param)
        }
        self._changed: list[tuple[dict[str, Any], str, int, nn.Parameter | None]] | None = None
        self._ties = self._groups_of_ties()
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                same = tensor.data.to(device).contiguous()
                group.broadcast(same).wait()
                tensor.data = same.new_empty(0) if tensor in self.full_shapes else same
            elif isinstance(tensor, nn.Parameter) and tensor in self.full_shapes:
                give_memory(tensor, torch.empty(0, dtype=tensor.dtype, device=device))

    def _ranks_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({self.stage_ranks[stage] for stage in stages}))

    def _groups_of_ties(self) -> dict[tuple[int, ...], Collectives]:
        """Make a group of every set of ranks that share a parameter."""
        # A rank outside of a set makes one of itself: c10d names a group by its ranks and by how
        # many this rank has, and ranks with other numbers would not meet.
        made, own = {}, self.group.rank
        for ranks in sorted({ranks for ranks in self._ranks.values() if len(ranks) > 1}):
            members = ranks if own in ranks else (own,)
            known = [dist.get_process_group_ranks(self.group.group)[rank] for rank in members]
            group = self.group.beside(known)
            if own in ranks:
                made[ranks] = group
        return made

    @property
    def stage_params(self) -> dict[int, list[nn.Parameter]]:
        """The parameters of each stage of this rank, in the model's order."""
        own = (stage for stage, rank in enumerate(self.stage_ranks) if rank == self.group.rank)
        each = self.param_stages.items()
        return {stage: [param for param, stages in each if stage in stages] for stage in own}

    def sum_ties(self, stash: GradientStash) -> None:
        """Sum the gradients of shared parameters that some rank has used; each rank must call."""
        for ranks, group in self._ties.items():
            shared = [p for p, own in self._ranks.items() if own == ranks and p.requires_grad]
            used = torch.tensor([stash.holds(param) for param in shared], dtype=torch.uint8)
            used = used.to(self.device)
            group.all_reduce(used, "max").wait()
            for param, is_used in zip(shared, used.tolist(), strict=True):
                if is_used and stash.has_all:
                    first = self.stage_ranks[self.param_stages[param][0]]
                    group.broadcast(stash.own(param), src=ranks.index(first)).wait()
                elif is_used:
                    group.all_reduce(stash.own(param)).wait()

    def beside(self, param: nn.Parameter) -> tuple[Collectives, Sequence[int]]:
        """Return the group of the ranks that share a parameter, and those ranks."""
        return self._ties[self._ranks[param]], self._ranks[param]

    def groups_of(self, param: nn.Parameter) -> Sequence[Collectives]:
        """Return the group of the pipeline's ranks, on some of which `param` is."""
        return self.groups

    def is_here(self, param: nn.Parameter) -> bool:
        """Whether a stage of this rank has a parameter."""
        return self.group.rank in self._ranks[param]

    def full_shape(self, param: nn.Parameter) -> torch.Size:
        """Return the full shape of a parameter."""
        return self.shapes.get(param, param.shape)

    def is_spread(self, param: nn.Parameter) -> bool:
        """Whether a parameter is one of the model's, which only some stages have."""
        return param in self._ranks

    def is_shared(self, param: nn.Parameter) -> bool:
        """Whether several ranks of the pipeline have a parameter."""
        return len(self._ranks[param]) > 1

    def placement(self, param: nn.Parameter) -> Hashable:
        """Return another value for each parameter: other stages do not know how it is cut."""
        return id(param)

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank is the first that has a parameter."""
        return self._ranks[param][0] == self.group.rank

    @torch.no_grad()
    def full(self, param: nn.Parameter, local: Tensor) -> Tensor:
        """Return a tensor shaped as `param` from its first rank; each rank must call."""
        here = self.is_here(param)
        tensor = local.contiguous() if here else local.new_empty(self.shapes[param])
        self.group.broadcast(tensor, src=self._ranks[param][0]).wait()
        return tensor

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Give every rank the buffers as their first stages have them; each rank must call."""
        for buffer, stages in buffer_stages(self._model, self._partition).items():
            same = buffer.contiguous()
            self.group.broadcast(same, src=self.stage_ranks[stages[0]]).wait()
            buffer.copy_(same)

    def follow(self) -> dict[Tensor, Callable[[], Tensor]]:
        """Return what brings each buffer that other ranks change up to date; each rank must call.

        So are weights that torch's older norms compute in each forward, which are no buffers.
        """
        if self._changed is None:
            everywhere = len(self.stage_ranks)
            owners = {
                buffer: self.stage_ranks[stages[0]]
                for buffer, stages in buffer_stages(self._model, self._partition).items()
                if len(stages) < everywhere
            }
            self._changed = [
                (vars(module)["_buffers"], name, owners[buffer], None)
                for module in self._model.modules()
                for name, buffer in module._buffers.items()
                if buffer in owners
            ]
            self._changed += [
                (vars(module), name, self._ranks[weight][0], weight)
                for module in self._model.modules()
                for name, weight in computed_before_forward(module)
            ]
        return {
            home[name]: partial(self._bring, home, name, owner, weight)
            for home, name, owner, weight in self._changed
            if isinstance(home.get(name), Tensor)
        }

    @torch.no_grad()
    def _bring(
        self, home: dict[str, Any], name: str, owner: int, weight: nn.Parameter | None
    ) -> Tensor:
        tensor: Tensor = home[name]
        shape = tensor.shape if weight is None else self.shapes[weight]
        dtype = (tensor if weight is None else weight).dtype
        value = torch.empty(shape, dtype=dtype, device=self.device)
        if self.group.rank == owner:
            value.copy_(tensor)
        with reading(name):
            self.group.broadcast(value, src=owner).wait()
        if weight is None:
            tensor.data.copy_(value)
        elif self.group.rank != owner:  # it was a placeholder, or as it was before the fit
            home[name] = value
        seen: Tensor = home[name]
        return seen

    def restore(self, *, full: bool = True) -> None:
        """With `full`, give every rank all parameters and buffers again; each rank must call."""
        if not full:
            return
        for param in self.shapes:
            param.data = self.full(param, param.data).cpu()
        self.share_buffers()
