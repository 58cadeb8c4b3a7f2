"""How a pipeline is cut into stages and what runs when: the options, and what follows from them."""

from dataclasses import dataclass
from typing import Literal, cast

from torch import nn

from lightning_shard.pipeline_parallel.batch_reading import BatchLists
from lightning_shard.pipeline_parallel.blocks import BlockList
from lightning_shard.pipeline_parallel.partition import (
    BlockCosts,
    Partition,
    Split,
    partition_blocks,
)
from lightning_shard.pipeline_parallel.schedules import (
    Schedule,
    default_stages_per_rank,
    make_schedule,
    place_stages,
    with_full_backwards,
)


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """A pipeline's options, on any number of ranks.

    Attributes:
        schedule: Name of the pipeline's schedule.
        num_microbatches: Microbatches of a batch; None for twice the ranks.
        blocks: Path of the list of repeated blocks; None finds it.
        split: What the stages have alike, or the first block of each stage but the first.
        batch_lists: What lists in batches are, see `BatchReader`.
        joins_halves: Whether both halves of a backward run at once, since each would compute the
            activations of checkpointed blocks again.
    """

    schedule: str
    num_microbatches: int | None
    blocks: str | None
    split: str | list[int]
    batch_lists: BatchLists = "auto"
    joins_halves: bool = False

    @property
    def measured(self) -> Literal["flops", "memory"] | None:
        """What has to be measured of the blocks before they are cut into stages; None: nothing."""
        if self.split in ("flops", "memory"):
            return cast(Literal["flops", "memory"], self.split)
        return None

    def num_parts(self, num_ranks: int) -> int:
        """Return the microbatches of a batch that has as many samples."""
        return self.num_microbatches or 2 * num_ranks

    def num_stages(self, num_ranks: int) -> int:
        """Return the stages over all ranks of the pipeline."""
        if isinstance(self.split, list):
            return len(self.split) + 1
        return num_ranks * default_stages_per_rank(self.schedule)

    def stage_ranks(self, num_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        return place_stages(self.schedule, num_ranks, self.num_stages(num_ranks))

    def table(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return what the ranks do with a batch of so many parts.

        Raises:
            ConfigError: The schedule does not allow it.
        """
        table = make_schedule(
            self.schedule,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_stages=self.num_stages(num_ranks),
        )
        return with_full_backwards(table) if self.joins_halves else table

    def cut(
        self, model: nn.Module, blocks: BlockList, measured: BlockCosts | None, num_ranks: int
    ) -> Partition:
        """Cut a model into stages.

        Args:
            model: The model that has the blocks.
            blocks: The repeated blocks, in their order.
            measured: Costs of the blocks, where `split` asks for them.
            num_ranks: Number of the pipeline's ranks.
        """
        return partition_blocks(
            model,
            blocks,
            num_stages=self.num_stages(num_ranks),
            split=cast(Split | list[int], self.split),
            measured=measured,
        )
