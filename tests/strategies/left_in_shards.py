"""Fits on real processes that leave their parameters in shards, and what is done with them then."""

import copy
import gc
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.checkpoint.conversion.source import whole_checkpoint
from lightning_shard.errors import ConfigError
from lightning_shard.strategies import fit_ends
from tests.checkpoint.sharded.runs import SAVED_AFTER, Model, quiet_trainer
from tests.strategies.parity import ignore_upstream_warnings

SCHEMES: dict[str, tuple[int, Callable[..., Any]]] = {
    "zero3": (2, lambda **o: ZeRO3Strategy(bucket_mb=1e-3, **o)),
    "pipeline": (2, lambda **o: PipelineParallelStrategy(num_microbatches=2, **o)),
    "tensor": (2, lambda **o: TensorParallelStrategy(**o)),
    "tensor-zero3": (
        4,
        lambda **o: TensorParallelStrategy(tensor_parallel_size=2, zero_stage=3, **o),
    ),
    "hybrid-zero3": (
        4,
        lambda **o: HybridParallelStrategy(
            pipeline_parallel_size=2, zero_stage=3, num_microbatches=2, **o
        ),
    ),
    "copies-zero3": (
        4,
        lambda **o: HybridParallelStrategy(data_parallel_size=(2, 2), zero_stage=3, **o),
    ),
}
FULL_SCHEMES: dict[str, tuple[int, Callable[..., Any]]] = {  # whose parameters are full anyway
    "zero1": (3, lambda **o: ZeRO1Strategy(**o)),
    "zero2": (2, lambda **o: ZeRO2Strategy(bucket_mb=1e-3, **o)),
    "zero2-offload": (2, lambda **o: ZeRO2Strategy(offload="optimizer", **o)),
    "copies-zero1": (
        4,
        lambda **o: HybridParallelStrategy(data_parallel_size=(2, 2), zero_stage=1, **o),
    ),
}
Tensors = dict[str, Tensor]


def prepared() -> None:
    """Ignore, in a process that a test has started, what upstream warns of."""
    ignore_upstream_warnings()
    warnings.filterwarnings("ignore", message=".*you are resuming")
    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
    warnings.filterwarnings("ignore", message="offload='optimizer' saves nothing on CPU ranks")


def made() -> Model:
    torch.manual_seed(0)
    return Model(dropout=0.2)


def trainer_of(scheme: str, *, left: bool, num_steps: int = SAVED_AFTER, **options: Any) -> Any:
    num_ranks, make = (SCHEMES | FULL_SCHEMES)[scheme]
    strategy = make(backend="gloo", announce=False, full_parameters_after_fit=not left, **options)
    return quiet_trainer(strategy, devices=num_ranks, max_steps=num_steps, limit_val_batches=None)


def content(path: Path) -> dict[str, Any]:
    """Return a checkpoint's weights and optimizers' states, of either format."""
    loaded = whole_checkpoint(path, "cpu", True)
    return {"weights": loaded["state_dict"], "optimizers": loaded["optimizer_states"]}


def refusals(model: Model) -> list[str]:
    """Return the errors of what takes shards for parameters."""
    told = []
    attempts: list[Callable[[], Any]] = [
        lambda: model.head(torch.ones(1, 8)),
        model.state_dict,
        lambda: model.load_state_dict({}),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: pickle.dumps(model.head),
    ]
    for attempt in attempts:
        try:
            attempt()
            told.append("nothing was refused")
        except ConfigError as error:
            told.append(str(error))
    return told


def left_fit(scheme: str, folder: Path, kind: str) -> dict[str, Any]:
    """Fit, save, validate, save, go on; on every rank."""
    prepared()
    model, path = made(), folder / "left.ckpt"
    trainer = trainer_of(scheme, left=True, checkpoint_format=kind)
    trainer.fit(model)
    found: dict[str, Any] = {"refusals": refusals(model)}
    held = trainer.strategy.held_bytes()
    trainer.save_checkpoint(path)
    found["grown"] = trainer.strategy.held_bytes().total - held.total
    found["validated"] = trainer.validate(model, verbose=False)
    found["refusals"] += refusals(model)
    trainer.save_checkpoint(folder / "again.ckpt")
    again = trainer_of(scheme, left=True, num_steps=2 * SAVED_AFTER)
    resumed = made()
    again.fit(resumed, ckpt_path=path)
    again.save_checkpoint(folder / "resumed.ckpt")
    return found


def fit_leaving_states(scheme: str, folder: Path, kind: str) -> dict[str, Any]:
    """Fit, save, validate, save, edit, save, go on; on every rank, with a module that is full."""
    prepared()
    model = made()
    trainer = trainer_of(scheme, left=True, checkpoint_format=kind)
    trainer.fit(model)
    (optimizer,) = trainer.optimizers
    found = {"held": sum(one["exp_avg"].numel() for one in optimizer.state.values())}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.save_checkpoint(folder / "left.ckpt")
    copy.deepcopy(model)
    pickle.dumps(model)
    found["validated"] = trainer.validate(model, verbose=False)
    trainer.save_checkpoint(folder / "again.ckpt")
    with torch.no_grad():
        model.head.weight.add_(1.0)
    trainer.save_checkpoint(folder / "edited.ckpt")
    resumed = made()
    again = trainer_of(scheme, left=True, num_steps=2 * SAVED_AFTER)
    again.fit(resumed, ckpt_path=folder / "left.ckpt")
    again.save_checkpoint(folder / "resumed.ckpt")
    return found | {"weights": weights}


def full_fit(scheme: str, folder: Path) -> dict[str, Any]:
    """Do the same with full parameters after the fit, and once without a break."""
    prepared()
    model = made()
    trainer = trainer_of(scheme, left=False)
    trainer.fit(model)
    trainer.save_checkpoint(folder / "full.ckpt")
    validated = trainer.validate(model, verbose=False)
    once = trainer_of(scheme, left=False, num_steps=2 * SAVED_AFTER)
    once.fit(made())
    once.save_checkpoint(folder / "once.ckpt")
    return {"validated": validated}


def fit_twice(scheme: str, *, left: bool) -> tuple[Tensors, list[Any]]:
    """Fit, fit on with the same trainer, and return the weights that another one evaluates."""
    prepared()
    model = made()
    trainer = trainer_of(scheme, left=left)
    trainer.fit(model)
    trainer.fit_loop.epoch_loop.max_steps = 2 * SAVED_AFTER
    trainer.fit(model)
    other = trainer_of(scheme, left=False)
    tested = other.validate(model, verbose=False)
    return {name: value.clone() for name, value in model.state_dict().items()}, tested


class BytesSent(L.Callback):
    """Notes the bytes that this rank has sent when training ends."""

    at_end = 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.at_end = trainer.strategy.run.groups.sent_bytes()


def sent_at_the_end(after_fit: bool) -> int:
    """Return the bytes that this rank sends after the last step of a fit under `zero3`."""
    prepared()
    trainer = trainer_of("zero3", left=not after_fit)
    trainer.callbacks.append(noted := BytesSent())
    trainer.fit(made())
    return trainer.strategy.run.groups.sent_bytes() - noted.at_end


def decided(free: Sequence[int | None], scheme: str = "zero3") -> dict[str, Any]:
    """Fit with "auto" where ranks find so many free bytes; return what is left on this rank."""
    prepared()
    model, rank = made(), int(os.environ["RANK"])
    strategy = (SCHEMES | FULL_SCHEMES)[scheme][1](backend="gloo", announce=False)
    with (
        patch.object(fit_ends, "free_host_bytes", lambda: free[rank]),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        quiet_trainer(strategy, devices=2, max_steps=1).fit(model)
    about = [str(one.message) for one in told if "The fit leaves the" in str(one.message)]
    if scheme in FULL_SCHEMES:
        sizes = [one["exp_avg"].numel() for one in strategy.optimizers[0].state.values()]
        full = sum(param.numel() for param in model.parameters() if param.requires_grad)
        return {"told": about, "left": 0 < sum(sizes) < full}
    try:
        model.state_dict()
    except ConfigError:
        return {"told": about, "left": True}
    return {"told": about, "left": False}


class WeightsAtTheEnd(L.Callback):
    """Keeps each in-process rank's parameters as `on_fit_end` finds them."""

    def __init__(self) -> None:
        self.weights: dict[int, list[Tensor]] = {}

    def __deepcopy__(self, memo: object) -> "WeightsAtTheEnd":
        return self

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights[trainer.global_rank] = [one.detach() for one in pl_module.parameters()]
        self.weights = dict(sorted(self.weights.items()))


def given_up() -> tuple[str, list[bool]]:
    """Give up strategies that have left shards, one of them with its module.

    Returns:
        The error of a run of the other module, and what is there still of the first one's shards
        and of the other one's optimizer.
    """
    prepared()
    held = []
    for model in (made(), other := made()):
        trainer = trainer_of("zero3", left=True)
        trainer.fit(model)
        engine, optimizer = trainer.strategy.engine, trainer.strategy.optimizers[0]
        held.append((weakref.ref(engine.flats[0].shard), weakref.ref(optimizer)))
    other.trainer = None
    del trainer, model, engine, optimizer
    for _ in range(4):  # what is suspended in a context is ended by the first
        gc.collect()
    found = [held[0][0]() is not None, held[1][1]() is not None]
    try:
        trainer_of("zero3", left=True).validate(other, verbose=False)
    except ConfigError as error:
        return str(error), found
    return "nothing was refused", found


def averaged() -> None:
    """Ask for shards after a fit whose weights are averaged."""
    prepared()
    trainer = trainer_of("zero3", left=True)
    trainer.callbacks.append(WeightAveraging())
    trainer.fit(made())


class Wide(L.LightningModule):
    """Blocks of 4 MB each."""

    def __init__(self, num_blocks: int = 16, width: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_blocks))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = torch.tanh(block(batch))
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(8, self.blocks[0].in_features), 2)


def status_bytes(name: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if name in one)
    return int(line.split()[1]) * 1024


class Watermark(L.Callback):
    """Notes what is resident at the end of training, from where the high-water mark begins anew."""

    at_end = 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.barrier()
        self.at_end = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")


def bytes_above(folder: Path, *, left: bool, kind: str) -> tuple[int, int]:
    """Return the most that this rank takes above training's, at the end of a fit and in a save."""
    prepared()
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"  # what is freed is not kept, and so is seen
    strategy = ZeRO3Strategy(
        backend="gloo", announce=False, full_parameters_after_fit=not left,
        checkpoint_format=kind, bucket_mb=1e-3,
    )  # fmt: skip
    trainer = quiet_trainer(strategy, devices=2, callbacks=[noted := Watermark()])
    trainer.fit(Wide())
    at_end = status_bytes("VmHWM") - noted.at_end
    trainer.save_checkpoint(folder / "wide.ckpt")
    return at_end, status_bytes("VmHWM") - noted.at_end
