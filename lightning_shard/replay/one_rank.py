"""One rank of a recorded run, alone in this process: its peers are what they gave it then."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_shard.errors import RankFailedError
from lightning_shard.replay.group_of_one import RecordedBackend, group_of_one
from lightning_shard.replay.rank_record import RankRecord
from lightning_shard.replay.replayer import Shelf
from lightning_shard.replay.tape import Tape
from lightning_shard.strategies.data_parallel import DataParallelStrategy


def alone(
    record: RankRecord, strategy: DataParallelStrategy
) -> tuple[Shelf, DataParallelStrategy, AbstractContextManager[None]]:
    """Prepare to take one rank alone.

    Args:
        record: What the rank has recorded, with results.
        strategy: The recorded run's strategy.

    Returns:
        Where what comes of it is noted, the strategy of the rank, and what must be around its fit.
    """
    is_cut_short = record.error is not None and record.error[0] == RankFailedError.__name__
    tape = Tape(rank=record.rank, results=record.results or (), is_cut_short=is_cut_short)
    environment = _OneRank(record.rank, record.num_ranks)
    made = strategy.with_options(backend="gloo", num_ranks=None, cluster_environment=environment)
    made._local_ranks.use(RecordedBackend(record.setup["backend"]))
    vars(made)["compare_settings"] = lambda _: None  # with whom?
    return Shelf([record], tape), made, _as_rank(tape, record.num_ranks)


@contextmanager
def _as_rank(tape: Tape, num_ranks: int) -> Iterator[None]:
    before = getattr(rank_zero_only, "rank", None)
    try:
        with group_of_one(tape, num_ranks):
            yield
    finally:
        setattr(rank_zero_only, "rank", before)  # noqa: B010  (a function attribute)


class _OneRank(ClusterEnvironment):
    """Knows the rank, of a run on one host whose other processes are not there."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self._rank, self._num_ranks = rank, num_ranks

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return 0  # nobody connects

    @staticmethod
    @override
    def detect() -> bool:
        return False  # only ever asked for by name

    @override
    def world_size(self) -> int:
        return self._num_ranks

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: the record knows."""

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the record knows."""

    @override
    def local_rank(self) -> int:
        return self._rank

    @override
    def node_rank(self) -> int:
        return 0
