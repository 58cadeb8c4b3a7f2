"""Where the time of a step goes, on the clock of the rank's host.

    batch end ──loading──> batch start ──forward, backward──> update ──> batch end
                                │   waits for peers, by axis   │
                                └── sending: starting, copying, local sums ──┘

    seconds     from the end of one optimizer step to the end of the next, without validation
    loading     between two batches: the loader, and callbacks after a batch
    waiting     of this, by axis of the mesh, for data of peers
    sending     in collectives besides: starting them, copies, local sums
    optimizer   clipping and the update itself
    compute     what is left: forward and backward, and hooks

On CUDA the host does not wait for the device: waiting within NCCL, which happens in the device's
streams, counts as compute there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from lightning_shard.profiling.axis_counters import AxisTraffic, add_to, seconds_in, waited


@dataclass(kw_only=True)
class StepTime:
    """Seconds of one optimizer step of this rank; see the module's first lines.

    Attributes:
        seconds: Duration of the step.
        loading: Seconds between its batches.
        optimizer: Seconds of clipping and of the update.
        traffic: Counters of the collectives in it, by axis.
        num_batches: Batches whose gradients have added up.
    """

    seconds: float = 0.0
    loading: float = 0.0
    optimizer: float = 0.0
    traffic: AxisTraffic = field(default_factory=dict)
    num_batches: int = 0

    @property
    def waiting(self) -> dict[str, float]:
        """Seconds of waiting for peers, by axis."""
        return waited(self.traffic)

    @property
    def sending(self) -> float:
        """Seconds in collectives in which the rank did not wait for peers."""
        return seconds_in(self.traffic) - sum(self.waiting.values())

    @property
    def compute(self) -> float:
        """Seconds that are left for forward and backward."""
        known = self.loading + self.optimizer + seconds_in(self.traffic)
        return max(self.seconds - known, 0.0)


class StepClock:
    """Takes the time of steps.

    Args:
        traffic_since: Returns the counters of collectives since it was called before.
        now: The clock, in seconds.
    """

    def __init__(
        self, traffic_since: Callable[[], AxisTraffic], now: Callable[[], float] = perf_counter
    ) -> None:
        self._since, self._now = traffic_since, now
        self._step = StepTime()
        self._mark = now()
        self._update_began: float | None = None

    def pause(self) -> None:
        """Begin what is no part of a step: validation, say."""
        self._add_seconds(is_loading=True)
        self._count()

    def go_on(self) -> None:
        """End what is no part of a step."""
        self._mark = self._now()
        self._since()

    def begin_batch(self) -> None:
        """Note that a batch is there; a pause ends."""
        self._add_seconds(is_loading=True)
        talking = seconds_in(self._count())
        self._step.loading = max(self._step.loading - talking, 0.0)

    def begin_update(self) -> None:
        """Note that gradients are complete."""
        self._count()
        self._update_began = self._now()

    def end_update(self) -> None:
        """Note that an optimizer has updated the parameters."""
        if self._update_began is not None:
            talking = seconds_in(self._count())
            own = self._now() - self._update_began - talking
            self._step.optimizer += max(own, 0.0)
        self._update_began = None

    def end_batch(self) -> None:
        """Note that a batch is done."""
        self._add_seconds()
        self._count()
        self._step.num_batches += 1

    def take(self) -> StepTime:
        """Return the step that ends here, and begin the next."""
        step, self._step = self._step, StepTime()
        return step

    def _add_seconds(self, *, is_loading: bool = False) -> None:
        now = self._now()
        seconds, self._mark = now - self._mark, now
        self._step.seconds += seconds
        self._step.loading += seconds if is_loading else 0.0

    def _count(self) -> AxisTraffic:
        more = self._since()
        add_to(self._step.traffic, more)
        return more
