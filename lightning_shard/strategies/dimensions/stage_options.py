"""How a pipeline is cut into stages and what runs when: the options, and what follows from them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn

from lightning_shard.core.options import AtLeastOne, Limit, Options
from lightning_shard.pipeline_parallel.blocks import BlockList
from lightning_shard.pipeline_parallel.microbatches import BatchLists
from lightning_shard.pipeline_parallel.partition import (
    BlockCosts,
    Partition,
    Split,
    partition_blocks,
)
from lightning_shard.pipeline_parallel.schedules import (
    SCHEDULES,
    Schedule,
    default_stages_per_rank,
    make_schedule,
    place_stages,
    with_full_backwards,
)

_NAME = Limit(f"that is one of {', '.join(SCHEDULES)}", SCHEDULES.__contains__)
_FIRST_BLOCKS = Limit("(the first block of each stage but the first)")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """How a pipeline is cut into stages, and what runs when.

    Attributes:
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble",
            "zbv" or "dual_pipe_v".
        num_microbatches: Microbatches of each batch; by default twice the ranks of the pipeline;
            they need not be equal. A batch of fewer samples has one for each.
        blocks: Path of the list of repeated blocks; found where there is one.
        split: What the stages have alike: "parameters", "flops" or "memory" (measured in the
            first batch); or the first block of each stage but the first.
        batch_lists: What lists and tuples in a batch are that can be read in two ways: "samples",
            one value for each, or "fields", each of all samples. "auto" goes by the loader, refuses
            what it cannot tell, and leaves batches of samples of different shapes whole.
    """

    schedule: Annotated[str, _NAME] = "1f1b"
    num_microbatches: AtLeastOne | None = None
    blocks: str | None = None
    split: Split | Annotated[list[int], _FIRST_BLOCKS] = "parameters"
    batch_lists: BatchLists = "auto"


@dataclass(frozen=True, kw_only=True)
class StageOptions(ScheduleOptions):
    """What follows from a pipeline's options, on any number of ranks.

    It joins both halves of a backward where each would compute the activations of checkpointed
    blocks again.
    """

    joins_halves: bool = False

    @property
    def measured(self) -> Literal["flops", "memory"] | None:
        """What has to be measured of the blocks before they are cut into stages; None: nothing."""
        return self.split if self.split in ("flops", "memory") else None

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
        """Return what the ranks do with a batch of so many parts."""
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
        """Cut a model into stages, by the blocks' measured costs where `split` asks for them."""
        return partition_blocks(
            model,
            blocks,
            num_stages=self.num_stages(num_ranks),
            split=self.split,
            measured=measured,
        )
