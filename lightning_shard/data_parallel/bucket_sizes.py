"""The size of buckets that suits a link: where it is chosen, nothing is measured.

    seconds of a bucket     Python's work + start of operations + size x seconds per MB
                            ───────────────────────────────────
                            at most 1/20 of the transfer, so that more joining gains little

The first bucket of a backward waits for more, and the last one takes longer alone, the larger they
are: so the smallest size is taken that is large enough, and none so large that a model has fewer
than three buckets.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from lightning_shard.core.options import Limit

_ABOVE_ZERO = Limit("of MB above 0 (25 is usual)", lambda mb: mb > 0)
BucketMB: TypeAlias = Annotated[float, _ABOVE_ZERO] | Literal["auto"] | None
"""Size up to which blocks are joined, in MB; "auto" measures the link; None is the default."""

LADDER = (1, 2, 4, 8, 16, 32, 64)
"""The sizes in MB that "auto" chooses from."""
FIXED_SHARE = 0.05
"""What a unit costs at any size is at most this share of what its elements take."""
HOST_SECONDS = 3e-4
"""What Python does for a unit, beside what is measured (`tests.benchmarks.host_overhead`)."""
LEAST_BUCKETS = 3
"""Buckets that a model keeps, one of which travels while another computes."""


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """Seconds of a unit's operations at any size, and per MB of parameters, on the slowest rank."""

    fixed_seconds: float
    seconds_per_mb: float

    def seconds(self, mb: float) -> float:
        """Return the seconds that a bucket of so many MB takes."""
        return self.fixed_seconds + mb * self.seconds_per_mb

    def __str__(self) -> str:
        megabytes = 2**20 / self.seconds_per_mb / 1e6
        speed = f"{megabytes:.2g} MB/s" if megabytes < 100 else f"{megabytes / 1e3:.2g} GB/s"
        return f"{1e3 * self.fixed_seconds:.2g} ms, {speed}"


def default_mb(stage: int) -> float:
    """Return the size where none is given: under stage 3 a smaller one took less memory."""
    return 12.5 if stage == 3 else 25.0


def size_for(link: LinkFigures, model_mb: float) -> int:
    """Return the size of buckets in MB, one of `LADDER`."""
    fixed = HOST_SECONDS + link.fixed_seconds
    enough = (mb for mb in LADDER if fixed <= FIXED_SHARE * mb * link.seconds_per_mb)
    room = (mb for mb in LADDER if LEAST_BUCKETS * mb <= model_mb)
    return min(next(enough, LADDER[-1]), max(room, default=LADDER[0]))
