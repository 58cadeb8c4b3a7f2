"""The schedule by which fragments of parameters are exchanged: arithmetic over optimizer steps.

    sync_every=6, fragments=2, overlap_steps=1            (b begins, l lands)

    step         1   2   3   4   5   6   7   8   9  10  11  12  13
    fragment 0           b   l                   b   l
    fragment 1                       b   l                   b   l

Steps count from the end of the warm-up. Each fragment has its turn every `sync_every` steps, and
the turns are spread evenly, so that at no time more than a part of the model travels.

Source: streaming DiLoCo, arXiv:2501.18512; with one fragment DiLoCo, arXiv:2311.08105, and local
SGD, arXiv:1805.09767.
"""

from dataclasses import dataclass

from lightning_shard.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """The schedule of the exchanges.

    Attributes:
        sync_every: Number of steps between two exchanges of one fragment.
        warmup_steps: Number of steps at the beginning that average gradients instead.
        fragments: Number of parts of the model, which take turns.
        overlap_steps: Number of steps that an exchange may take; training goes on meanwhile.
        mixing: Share that a rank keeps of its own values when a fragment lands, 0 to below 1.

    Raises:
        ConfigError: The numbers make no schedule.
    """

    sync_every: int
    warmup_steps: int = 0
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        """Refuse numbers that make no schedule, before any process starts."""
        _check_at_least("sync_every", self.sync_every, 1)
        _check_at_least("warmup_steps", self.warmup_steps, 0)
        _check_at_least("fragments", self.fragments, 1)
        _check_at_least("overlap_steps", self.overlap_steps, 0)
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
        if not 0.0 <= self.mixing < 1.0:
            raise ConfigError(
                f"mixing={self.mixing!r} must be at least 0 (take over the common values) and "
                f"below 1 (keep the own ones); 0.5 is usual with overlap_steps."
            )

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


def _check_at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}.")
