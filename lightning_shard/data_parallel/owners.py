"""Who updates a parameter that an optimizer needs full: one rank of those that have parts of it.

    stage 1 to 3              the shard ranks have shards     one of them has it full, all the time
    tensor parallel           the ranks of a layer have parts one gathers it for each update
    both                      S x T ranks, of which one       shard rank s has its T ranks' parts
                              updates                         full, and rank t of those gathers

Parameters go to S x T ranks by size, see `layout/owned`: state is 1/(S T), and one matrix more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.layout.owned import assign_owners


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The owner of each parameter that lies here, or in part, and is updated full.

    Attributes:
        rank: This rank, of those that have parts of the same layers; 0 where layers have no parts.
        of_shards: Rank of the shard group that has the parameter, or all shards of its part; none
            under stage 0.
        of_parts: Rank, of those that have parts of the same layers, that gathers the parameter for
            each update, and has its state; none where layers have no parts.
    """

    rank: int = 0
    of_shards: Mapping[nn.Parameter, int] = field(default_factory=dict)
    of_parts: Mapping[nn.Parameter, int] = field(default_factory=dict)

    def gathers(self, param: nn.Parameter) -> bool:
        """Whether this rank gathers the parts of `param` that ranks of its layer have."""
        return self.of_parts.get(param) == self.rank

    def gathered_elsewhere(self, param: nn.Parameter) -> bool:
        """Whether another rank of its layer gathers `param`, and has its state."""
        return self.of_parts.get(param, self.rank) != self.rank


def share_out(
    model: nn.Module, groups: DataGroups, options: EngineOptions, split: ModelSplit
) -> Owners:
    """Give each parameter that is updated full an owner; no communication.

    Those that are trained are shared out first.

    Args:
        model: The model, the same on all ranks but for what `split` has taken off.
        groups: Groups of the data-parallel ranks.
        options: Stage of the engine, and the parameters that are updated full.
        split: How the model is split over other ranks.
    """
    parts = split.parts
    num_shards = groups.shard.size if options.stage > 0 else 1
    num_parts = 1 if parts is None else parts.group.size
    if num_shards == num_parts == 1 and options.stage == 0:
        return Owners()
    owned = [one for one in model.parameters() if one in options.owned and split.is_here(one)]
    ranks: dict[nn.Parameter, int] = {}
    for is_trained in (True, False):
        some = [param for param in owned if param.requires_grad is is_trained]
        numels = [split.full_shape(param).numel() for param in some]
        ranks.update(
            zip(some, assign_owners(numels, num_ranks=num_shards * num_parts), strict=True)
        )
    return Owners(
        rank=0 if parts is None else parts.group.rank,
        of_shards={} if options.stage == 0 else {p: one % num_shards for p, one in ranks.items()},
        of_parts={} if parts is None else {p: one // num_shards for p, one in ranks.items()},
    )
