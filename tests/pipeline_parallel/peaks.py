"""The peaks of activations that schedules are known for; simulated and real ones are these."""

from collections.abc import Callable

from lightning_shard.pipeline_parallel.schedules import checked_stages


def theoretical_peak_activations(
    name: str, *, num_ranks: int, num_microbatches: int, num_stages: int | None = None
) -> tuple[int, ...]:
    """Return for each rank the most forwards that await their B or W at once.

    The unit is what one stage holds of one microbatch: with v stages per rank, 1 / v of what a
    rank holds of it.

    Args:
        name: One of `SCHEDULES`.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Parts of the batch.
        num_stages: Stages over all ranks; by default what `make_schedule` takes.

    Raises:
        ConfigError: The schedule does not exist, or does not allow these numbers.

    Source:
        As `theoretical_idle_share`; Megatron's warm-up for interleaved_1f1b, arXiv:2104.04473.
    """
    num_stages = checked_stages(name, num_ranks, num_microbatches, num_stages)
    p, m, v = num_ranks, num_microbatches, num_stages // num_ranks
    earlier = (v - 1) * (m // max(1, m // p))  # a round of forwards through all stages but one
    peaks: dict[str, Callable[[int], int]] = {
        "gpipe": lambda rank: m,
        "1f1b": lambda rank: p - rank,
        "interleaved_1f1b": lambda rank: earlier + 2 * (p - 1 - rank) + 1,
        "looped_bfs": lambda rank: v * m,
        "interleaved_zero_bubble": lambda rank: earlier + p,
        "zbv": lambda rank: min(2 * p, m + 1 + rank),
        "dual_pipe_v": lambda rank: 2 * p + 1,
    }
    return tuple(min(v * m, peaks[name](rank)) for rank in range(p))
