"""Ray Train's context without Ray: what a worker is told, for tests that need no cluster."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass
class FakeWorker:
    """One worker, as Ray's context tells of it, and what it reports.

    Attributes:
        rows: Batches of its shard.
        checkpoint: What was reported last.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    folder: Path = Path()
    filesystem: str = "local"
    rows: list[Any] = field(default_factory=list)
    checkpoint: Any = None
    reports: list[tuple[dict[str, Any], Any, dict[str, Any]]] = field(default_factory=list)

    def get_world_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.size

    def get_local_rank(self) -> int:
        return self.local_rank

    def get_local_world_size(self) -> int:
        return self.local_size

    def get_node_rank(self) -> int:
        return self.rank // self.local_size

    def get_storage(self) -> Any:
        filesystem = SimpleNamespace(type_name=self.filesystem)
        return SimpleNamespace(
            storage_filesystem=filesystem, experiment_fs_path=str(self.folder / "run")
        )

    def report(self, metrics: dict[str, Any], checkpoint: Any = None, **options: Any) -> None:
        self.reports.append((metrics, checkpoint, options))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeWorker":
        """Let this process be the worker."""
        train: Any = ModuleType("ray.train")
        train.get_context = lambda: self
        train.get_checkpoint = lambda: self.checkpoint
        train.get_dataset_shard = self._shard
        train.report = self.report
        train.Checkpoint = lambda path, filesystem: SimpleNamespace(
            path=str(path), filesystem=filesystem
        )
        train.Checkpoint.from_directory = lambda path: SimpleNamespace(path=str(path))
        train.CheckpointUploadMode = SimpleNamespace(NO_UPLOAD="no upload")
        collective: Any = ModuleType("ray.train.collective")
        collective.broadcast_from_rank_zero = lambda told: told
        collective.barrier = lambda: None
        util: Any = ModuleType("ray.util")
        util.get_node_ip_address = lambda: "127.0.0.1"
        for name, module in (
            ("ray", ModuleType("ray")),
            ("ray.train", train),
            ("ray.train.v2", ModuleType("ray.train.v2")),
            ("ray.train.collective", collective),
            ("ray.util", util),
        ):
            monkeypatch.setitem(sys.modules, name, module)
        return self

    def _shard(self, name: str) -> Any:
        if name != "rows":
            raise KeyError(name)
        return SimpleNamespace(iter_torch_batches=lambda **_: iter(self.rows))
