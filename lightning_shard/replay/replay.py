"""Takes a recorded step again, with all its ranks as threads of this process."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_shard.backends.in_process import like_gloo
from lightning_shard.errors import CheckpointError, ConfigError
from lightning_shard.replay.group_of_one import RecordedData, Replayer, Shelf, alone
from lightning_shard.replay.rank_record import RankRecord, read_record, read_records, versions
from lightning_shard.replay.verdict import Replayed, judge
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.tools.proving.strategies import (
    QUIET_OPTIONS,
    StrategyLike,
    name_of,
    quiet,
    strategy_in_process,
)


def replay(
    folder: str | Path,
    module: "pl.LightningModule",
    *,
    strategy: StrategyLike | None = None,
    callbacks: Sequence[Callback] = (),
    rank: int | None = None,
    trust: bool = False,
) -> Replayed:
    """Take a step again that `RecordSteps` has recorded, with all ranks in this process, or one.

    Every rank gets its shards, optimizer state, buffers, batches and random streams of then, and is
    a thread of this process; one runs at a time, in the same order every time, so that a debugger
    works in user code.

    Args:
        folder: The step's folder, with a file of each rank.
        module: The user's module, made as in the recorded run; it is left as the step leaves it.
        strategy: The recorded run's strategy, if it had options of its own (units, bucket_mb ...);
            its backend does not matter. None takes the recorded name.
        callbacks: The user's callbacks that change what is computed.
        rank: The one rank that is taken, where all do not fit; its collectives get the results
            that `RecordSteps(results=True)` has kept, and no other rank's file is needed.
        trust: Whether classes of user code in the files may be made, which can run any code that
            their writer has put there.

    Returns:
        Whether the failure came again, and whether losses and state have the same bits.

    Raises:
        CheckpointError: A file is missing, damaged, needs trust, or does not fit the module.
        ConfigError: The strategy is not the recorded one.
    """
    if rank is not None:
        records = [read_record(Path(folder), rank, trust=trust)]
    else:
        records = read_records(Path(folder), trust=trust)
    made = _as_named(strategy, records[0], str(folder))
    if rank is None:
        shelf = Shelf(records)
        is_of_gloo = records[0].setup["backend"] == "gloo"
        where: AbstractContextManager[None] = like_gloo() if is_of_gloo else nullcontext()
    else:
        shelf, made, where = alone(records[0], made)
    with quiet(), _as_recorded(records[0]), where:
        error = _fit(module, made, shelf, records[0], callbacks)
    outcomes = list(shelf.outcomes.values())
    return judge(str(folder), records, outcomes, error, _notes(records[0]))


def _as_named(
    strategy: StrategyLike | None, record: RankRecord, folder: str
) -> DataParallelStrategy:
    name = record.setup["strategy"]
    made = strategy_in_process(strategy or name, record.num_ranks, asked_by="replay")
    if name_of(made) != name:
        raise ConfigError(
            f"replay got the strategy {name_of(made)!r}, expected {name!r}, under which {folder} "
            f"was recorded. Leave strategy out, or pass that one."
        )
    assert isinstance(made, DataParallelStrategy)
    chosen = record.setup.get("bucket_mb")  # by measuring, which would come to something else here
    is_given = made._options.bucket_mb not in (None, "auto")
    return made if chosen is None or is_given else made.with_options(bucket_mb=chosen)


def _fit(
    module: "pl.LightningModule",
    strategy: DataParallelStrategy,
    shelf: Shelf,
    record: RankRecord,
    callbacks: Sequence[Callback],
) -> BaseException | None:
    """Take the step; return what it raised."""
    trainer = pl.Trainer(
        **QUIET_OPTIONS,
        **record.setup["options"],
        strategy=strategy,
        devices=record.num_ranks,
        callbacks=[*copy.deepcopy(list(callbacks)), Replayer(shelf)],
    )
    try:
        trainer.fit(module, datamodule=RecordedData(shelf))
    except Exception as raised:
        if not any(one.losses or one.state for one in shelf.outcomes.values()):
            _check_begun(raised)
        return raised
    return None


def _check_begun(error: Exception) -> None:
    """Raise what has kept the step from beginning at all.

    Raises:
        CheckpointError: The records do not fit the module.
        ConfigError: The module cannot be trained by the strategy.
    """
    if isinstance(error, CheckpointError | ConfigError):
        raise error


@contextmanager
def _as_recorded(record: RankRecord) -> Iterator[None]:
    """As many threads as a rank had, on which sums depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(record.setup["threads"])
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _notes(record: RankRecord) -> list[str]:
    """Say what differs between the recorded run and this one, for which values may differ."""
    notes = [
        f"{name} was {then}, and is {now} here: values may differ by rounding."
        for name, now in versions(pl).items()
        if (then := record.setup["versions"].get(name)) != now
    ]
    if record.setup["device"] != "cpu":
        notes.append(
            f"it was recorded on {record.setup['device']} and replayed on the CPU: values differ "
            f"by rounding, and random numbers that were drawn on the device are others."
        )
    if record.start != record.step:
        notes.append(
            f"the replay began at step {record.start}, of which the state was kept, and took the "
            f"steps from there."
        )
    return notes
