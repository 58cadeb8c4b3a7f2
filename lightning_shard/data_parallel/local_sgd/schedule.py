"""The schedule by which fragments of parameters are exchanged: arithmetic over optimizer steps.

    sync_every=6, fragments=2, overlap_steps=1            (b begins, l lands)

    step         1   2   3   4   5   6   7   8   9  10  11  12  13
    fragment 0           b   l                   b   l
    fragment 1                       b   l                   b   l

Steps count from the end of the warm-up. Turns are spread evenly, so that at no time more than a
part of the model travels. Source: streaming DiLoCo, arXiv:2501.18512.
"""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from lightning_shard.core.options import AtLeastOne, AtLeastZero, Limit, Options
from lightning_shard.errors import ConfigError

KeptShare: TypeAlias = Annotated[
    float,
    Limit(
        "of at least 0 (take over the common values) and below 1 (keep the own ones)",
        lambda share: 0.0 <= share < 1.0,
    ),
]


@dataclass(frozen=True, kw_only=True)
class SyncSchedule(Options):
    """When ranks that train by themselves exchange what.

    Attributes:
        sync_every: Steps between two exchanges of the same parameters.
        warmup_steps: Steps at the beginning that average gradients, as "shard_ddp" does: post-local
            SGD. Of a batch with several steps by hand, all belong to it if one does.
        fragments: Parts of the model that are exchanged in turns.
        overlap_steps: Steps that training goes on while a fragment travels.
        mixing: The share of its own parameters that a rank keeps when a fragment lands; by default
            0, with `overlap_steps` 0.5.

    Raises:
        ConfigError: The numbers make no schedule.
    """

    sync_every: AtLeastOne = 10
    warmup_steps: AtLeastZero = 0
    fragments: AtLeastOne = 1
    overlap_steps: AtLeastZero = 0
    mixing: KeptShare | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that make no schedule, before any process starts."""
        super().__post_init__()
        if self.fragments > self.sync_every:
            raise ConfigError(
                f"fragments={self.fragments} take turns within sync_every={self.sync_every} steps, "
                f"expected at most one fragment per step. Use fewer fragments, or a larger "
                f"sync_every."
            )
        if self.overlap_steps >= self.sync_every:
            raise ConfigError(
                f"overlap_steps={self.overlap_steps} must be below sync_every={self.sync_every}: "
                f"a fragment has to land before it is sent again."
            )

    @property
    def kept_share(self) -> float:
        """The share of its own parameters that a rank keeps when a fragment lands."""
        usual = 0.5 if self.overlap_steps else 0.0
        return usual if self.mixing is None else self.mixing

    def is_warming_up(self, step: int) -> bool:
        """Whether ranks still average gradients after `step` steps of the run."""
        return step < self.warmup_steps

    def beginning(self, step: int) -> list[int]:
        """Return the fragments whose exchange begins after `step` steps of the run."""
        turn = (step - self.warmup_steps) % self.sync_every
        return [part for part in range(self.fragments) if self._turn(part) == turn]

    def _turn(self, fragment: int) -> int:
        return (fragment + 1) * self.sync_every // self.fragments % self.sync_every

    def ends_round(self, step: int) -> bool:
        """Whether every fragment has had its turn after `step` steps of the run."""
        return (step - self.warmup_steps) % self.sync_every == 0
