"""Closed forms of each schedule's idle share, from the papers.

All stages alike, messages free. A rank computes v stages of m microbatches; a step takes that and
some waiting, and the idle share is the part of the step that is waiting:

    |<------------- v m (F + B) ------------->|<- waiting ->|

F, B, I and W are the durations of one stage and microbatch, p the number of ranks. In the units of
the papers, which divide by the computing: GPipe (p - 1) / m, interleaved (p - 1) / (v m).

| schedule                | waiting                                      | equality        |
|-------------------------|----------------------------------------------|-----------------|
| gpipe, 1f1b             | (p - 1) (F + B)                              | always          |
| interleaved, looped_bfs | (p - 1 + (v - 1) max(0, p - m)) (F + B)      | always          |
| interleaved_zero_bubble | (p - 1) max(F, I, F + I - W)                 | m >= p          |
| zbv                     | (p - 1) F, or 2 (2 p - 1 - m) F for small m  | F = I = W       |
| dual_pipe_v             | (p - 1) F                                    | F = I = W = B/2 |

Elsewhere the waiting is a lower bound (0 for dual_pipe_v, which has both, when B is not I + W).
What is left with zbv is that rank p - 1 starts (p - 1) F later than rank 0, which every schedule
has; with dual_pipe_v short waits on the first ranks come to the same. DeepSeek's
(p - 1) (F&B + B - 3 W) takes the forward and backward of a pair as one kernel of duration F&B; here
each starts as soon as its own input is there.
"""

from typing import NamedTuple

from lightning_shard.pipeline_parallel.schedules import checked_stages
from lightning_shard.pipeline_parallel.simulation import Durations


class IdleShare(NamedTuple):
    """A closed form of the idle share.

    Attributes:
        share: Idle share, 0 to 1.
        exact: Whether the share is exact; else it is a lower bound.
    """

    share: float
    exact: bool


def theoretical_idle_share(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_stages: int | None = None,
    durations: Durations | None = None,
) -> IdleShare:
    """Return the share of a step in which a rank waits.

    Args:
        name: Name of the schedule, one of `SCHEDULES`.
        num_ranks: Number of ranks of the pipeline.
        num_microbatches: Number of microbatches of the batch.
        num_stages: Number of stages over all ranks; by default as in `make_schedule`.
        durations: Duration of each kind of action, by default as in `replay`; messages are free.

    Raises:
        ConfigError: The schedule does not exist, or does not allow these numbers.

    Source:
        gpipe arXiv:1811.06965; 1f1b and interleaved_1f1b arXiv:2104.04473, section 2.2;
        looped_bfs arXiv:2211.05953; interleaved_zero_bubble and zbv arXiv:2401.10241;
        dual_pipe_v https://github.com/deepseek-ai/DualPipe. The terms for fewer microbatches
        than ranks are not in them: the tests find them in the replay.
    """
    num_stages = checked_stages(name, num_ranks, num_microbatches, num_stages)
    durations = durations or Durations()
    stages_per_rank = num_stages // num_ranks
    waiting, exact = _waiting(name, num_ranks, num_microbatches, stages_per_rank, durations)
    computing = stages_per_rank * num_microbatches * _forward_and_backward(name, durations)
    return IdleShare(waiting / (waiting + computing), exact)


def _waiting(name: str, p: int, m: int, v: int, durations: Durations) -> tuple[float, bool]:
    forward, backward_input = durations.forward, durations.backward_input
    backward_weight = durations.backward_weight
    even = forward == backward_input == backward_weight
    if name == "interleaved_zero_bubble":
        hop = max(forward, backward_input, forward + backward_input - backward_weight)
        return (p - 1) * hop, m >= p
    if name == "zbv":
        return max(p - 1, 2 * (2 * p - 1 - m) if even else 0) * forward, even
    if name == "dual_pipe_v":
        full = durations.backward == backward_input + backward_weight
        return (p - 1) * forward * full, even and full
    hops = p - 1 + (v - 1) * max(0, p - m)
    return hops * (forward + durations.backward), True


def _forward_and_backward(name: str, durations: Durations) -> float:
    halves = durations.backward_input + durations.backward_weight
    if name in ("interleaved_zero_bubble", "zbv"):
        return durations.forward + halves
    return durations.forward + durations.backward
