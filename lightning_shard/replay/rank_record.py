"""One rank's file of a recorded step: what it began from, what it was given, and what came of it.

    begun from   shards, optimizer state, buffers, the Trainer's place, the set-up of the fit
    given        of each batch: the batch as the loader gave it, and the random streams then
    came of it   the loss of each backward pass, an error, a digest of the state at the end

It is read without running any code. Where a user's batch or a callback's state is of a class of its
own, reading it takes `trust`.
"""

import hashlib
import pickle
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.backends.in_process.world import current_world
from lightning_shard.backends.packing import bits_of
from lightning_shard.checkpoint.files.new import new_file
from lightning_shard.checkpoint.optimizer_state import params_of
from lightning_shard.checkpoint.rank_snapshot import (
    CommonValue,
    Scalar,
    ShardMark,
    Snapshot,
    SnapshotMetadata,
    TensorEntry,
    TensorKey,
)
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import CheckpointError
from lightning_shard.replay.tape import Result

_OWN_CLASSES: list[Any] = [TensorKey, TensorEntry, ShardMark, Scalar, CommonValue]
_FORMAT = 2


@dataclass(kw_only=True)
class Given:
    """What a step is given at one batch."""

    batch: Any
    random: dict[str, Any]
    is_last: bool


@dataclass(kw_only=True)
class RankRecord:
    """What one rank has recorded of a step, or of a few that end with it.

    Attributes:
        start: Optimizer steps done when the record begins.
        step: Optimizer steps done before the step that it is about.
        reason: "failure", "loss" (one that is not finite) or "asked".
        setup: The Trainer's and the strategy's options that change what is computed, and versions.
        losses: The loss of each backward pass.
        error: Class and message of what was raised; None for nothing.
        state: Digest of the shards, the optimizer state and the buffers at the end.
        results: What collectives have given the rank since the record begins; None unless asked
            for.
        full: The full parameters that the rank then had beside its shards, with `results`.
        orders: The orders that the engine had learnt; see `DataParallelEngine.learnt_orders`.
    """

    rank: int
    num_ranks: int
    start: int
    step: int
    reason: str
    setup: dict[str, Any]
    place: dict[str, Any]
    buffers: dict[str, Tensor]
    snapshot: Snapshot
    given: list[Given] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    error: tuple[str, str] | None = None
    state: str = ""
    results: list[Result] | None = None
    full: list[Tensor] = field(default_factory=list)
    orders: tuple[list[int], list[int], tuple[Any, ...]] = ([], [], ())

    def save(self, folder: Path) -> Path:
        """Write the record, whole or not at all, and return the file's path."""
        path = path_of(folder, self.rank)
        metadata = {**vars(self.snapshot.metadata), "extra": None}
        content = {
            **vars(self),
            "format": _FORMAT,
            "snapshot": {"data": self.snapshot.data.clone(), "metadata": metadata},
            "given": [vars(one) for one in self.given],
            "results": None if self.results is None else [vars(one) for one in self.results],
        }
        with new_file(path) as file:
            torch.save(content, file)
        return path

    @classmethod
    def load(cls, path: Path, *, trust: bool = False) -> "RankRecord":
        """Read a record; `trust` lets it make classes of others, which can run code of its writer.

        Raises:
            CheckpointError: The file is damaged, of another version, or needs trust.
        """
        content = _read(path, trust=trust)
        names = {one.name for one in fields(cls)}
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise CheckpointError(
                f"{path} is no record of a rank in the format {_FORMAT}; expected one that "
                f"RecordSteps of this version has written."
            )
        if names != set(content):
            raise CheckpointError(
                f"{path} has the entries {sorted(content)}, expected {sorted(names)}: it was "
                f"written by another version. Replay it with that one."
            )
        saved = content.pop("snapshot")
        metadata = SnapshotMetadata(**{**saved["metadata"], "extra": b""})
        given = [Given(**one) for one in content.pop("given")]
        snapshot = Snapshot(data=saved["data"], metadata=metadata)
        results = content.pop("results")
        results = None if results is None else [Result(**one) for one in results]
        return cls(**content, given=given, snapshot=snapshot, results=results)


def _read(path: Path, *, trust: bool) -> Any:
    if not is_zipfile(path):
        raise CheckpointError(
            f"{path} cannot be read: it is no whole archive. Record the step again."
        )
    try:
        with torch.serialization.safe_globals(_OWN_CLASSES):
            return torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0] if trust else _named_class(error)
        raise CheckpointError(
            f"{path} cannot be read without running code: {reason}. If you trust whoever wrote it, "
            f"pass trust=True, or --trust on the command line."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Record the step again."
        ) from error


def _named_class(error: BaseException) -> str:
    """Return the class that torch does not make, of its long advice."""
    words = str(error).replace("\n", " ").split("Unsupported global: GLOBAL ")
    return f"it holds {words[1].split()[0]}" if len(words) > 1 else "it holds classes of its own"


def path_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank in a recorded step's folder."""
    return folder / f"rank-{rank:05d}.pt"


def read_record(folder: Path, rank: int, *, trust: bool = False) -> RankRecord:
    """Read a recorded step of one rank, which is to be taken alone."""
    path = path_of(folder, rank)
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no file of rank {rank}, expected {path.name}. Pass a rank that has one."
        )
    record = RankRecord.load(path, trust=trust)
    if record.results is None:
        raise CheckpointError(
            f"{path} has no results of collectives, without which rank {rank} cannot be taken "
            f"alone. Record the step with RecordSteps(results=True), or replay all ranks."
        )
    return record


def read_records(folder: Path, *, trust: bool = False) -> list[RankRecord]:
    """Read a recorded step of all ranks."""
    paths = sorted(folder.glob("rank-*.pt"))
    if not paths:
        raise CheckpointError(
            f"{folder} holds no recorded step, expected files such as rank-00000.pt. RecordSteps "
            f"writes folders such as step-00000012; pass one of them."
        )
    first = RankRecord.load(paths[0], trust=trust)
    missing = [r for r in range(first.num_ranks) if not path_of(folder, r).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} has no file of rank {', '.join(map(str, missing))} of {first.num_ranks}: a "
            f"rank that was killed, or that was in another step, writes none. Copy the files of "
            f"all hosts into one folder; or record the step before, with steps=[{first.step}]."
        )
    records = [
        RankRecord.load(path_of(folder, r), trust=trust) if r else first
        for r in range(first.num_ranks)
    ]
    begun = [one.start for one in records]
    if len(set(begun)) > 1:
        raise CheckpointError(
            f"{folder} has ranks whose records begin at different steps, {begun}, which cannot be "
            f"taken together. Remove the folder and record into a new one."
        )
    return records


def state_digest(
    engine: DataParallelEngine, optimizers: Sequence[Optimizer], buffers: Iterable[Tensor]
) -> str:
    """Return a digest of this rank's shards, optimizer state and buffers; no communication."""
    digest = hashlib.sha256()
    tensors = [*buffers, *(view for flat in engine.flats for view in flat.local_views)]
    for optimizer in optimizers:
        for param in params_of(optimizer):
            state = optimizer.state.get(param, {})
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    for one in tensors:
        digest.update(bits(one))
    return digest.hexdigest()


def bits(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements, which tell a NaN from another."""
    return bits_of(tensor.detach().cpu()).numpy().tobytes()


def versions(lightning: ModuleType) -> dict[str, str]:
    """Return the versions that compute here, Lightning's among them."""
    return {
        "torch": str(torch.__version__),
        "lightning": version(lightning.__name__.partition(".")[0]),
        "python": platform.python_version(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def own_error(told: BaseException) -> tuple[str, str]:
    """Return class and message of what this rank has raised."""
    world = current_world()
    own = None if world is None else world.scheduler.running.failing
    error = told if own is None else own
    return type(error).__name__, str(error)
