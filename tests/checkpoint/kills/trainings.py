"""A training that saves after each step, and what each of its checkpoints must hold."""

import hashlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard import DDPStrategy, ZeRO3Strategy
from lightning_shard.checkpoint.conversion.source import whole_checkpoint
from lightning_shard.checkpoint.files.reading import read_file
from tests.checkpoint.interrupted import RANKS, Dropping, fit

BALLAST = 100_000
GLOO: dict[str, Any] = {"backend": "gloo", "announce": False}
FORMATS: dict[str, dict[str, Any]] = {
    "full": {"checkpoint_format": "full"},
    "sharded": {"checkpoint_format": "sharded"},
    "async": {"checkpoint_format": "sharded", "async_save": True},
}
SCHEMES: dict[str, Callable[..., Any]] = {"shard_ddp": DDPStrategy, "zero3": ZeRO3Strategy}


class Case(NamedTuple):
    """What trains, and how it saves."""

    scheme: str
    format: str
    backend: str = "in_process"
    num_steps: int = 40

    def fit(self, *callbacks: L.Callback, **options: Any) -> None:
        """Train, from the last checkpoint where there is one."""
        warnings.simplefilter("ignore")
        is_in_process = self.backend == "in_process"
        strategy = SCHEMES[self.scheme](
            **(RANKS if is_in_process else GLOO), **FORMATS[self.format]
        )
        devices = {} if is_in_process else {"devices": 2}
        fit(strategy, self.num_steps, callbacks, make_module=Heavy, **devices, **options)


class Heavy(Dropping):
    """Has parameters enough that writing them takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = nn.Parameter(torch.linspace(-1, 1, BALLAST))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.ballast.square().mean()


class Saves(ModelCheckpoint):
    """Saves after each step, and tells a pipe of it.

        begin 3    training begins after step 3
        save 4     the checkpoint of step 4 is about to be saved
        saved 4    `trainer.save_checkpoint` has returned for all files of step 4

    Args:
        folder: Where to save.
        pipe: File descriptor that the first rank writes to.
    """

    def __init__(self, folder: Path, pipe: int) -> None:
        super().__init__(
            folder,
            "{step}",
            monitor="step",
            mode="max",
            save_top_k=2,
            save_last=True,
            every_n_train_steps=1,
            save_on_train_epoch_end=False,
        )
        self._pipe = pipe

    def _tell(self, trainer: L.Trainer, what: str) -> None:
        if trainer.is_global_zero:
            os.write(self._pipe, f"{what} {trainer.global_step}\n".encode())

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._tell(trainer, "begin")
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._tell(trainer, "save")
        super().on_train_batch_end(trainer, *args)
        self._tell(trainer, "saved")


class Dies(L.Callback):
    """Has a rank kill its process before a batch."""

    def __init__(self, rank: int, step: int) -> None:
        self._at = rank, step

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


class Digests(L.Callback):
    """Notes the digest of weights and optimizer state after each step, by step, on rank 0."""

    def __init__(self) -> None:
        self.by_step: dict[int, str] = {}

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        weights = strategy.lightning_module_state_dict()
        states = [strategy.optimizer_state(one) for one in trainer.optimizers]
        if trainer.is_global_zero:
            self.by_step[trainer.global_step] = digest(weights, states)


def digest(weights: Mapping[str, Any], states: Any) -> str:
    """Return a digest of weights by name, and of an optimizer's state whatever it calls them."""
    named = [f"{name} {_of(weights[name])}" for name in sorted(weights)]
    return hashlib.sha256(
        "\n".join([*named, *sorted(map(_of, _tensors(states)))]).encode()
    ).hexdigest()


def read(path: Path) -> tuple[int, str]:
    """Load a checkpoint as anybody may; return its step and its digest."""
    found: Any = (
        whole_checkpoint(path, "cpu", None) if path.is_dir() else read_file(path, weights_only=None)
    )
    return found["global_step"], digest(found["state_dict"], list(found["optimizer_states"]))


def _of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().numpy().tobytes()).hexdigest()


def _tensors(nested: Any) -> Iterator[Tensor]:
    """Yield moments: counts of steps are numbers in one format and tensors in the other."""
    if isinstance(nested, Tensor) and nested.numel() > 1:
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from _tensors(value)
    elif isinstance(nested, list):
        for value in nested:
            yield from _tensors(value)
