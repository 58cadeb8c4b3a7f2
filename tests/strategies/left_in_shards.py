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
from torch import Tensor

from lightning_shard import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO3Strategy,
)
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
Tensors = dict[str, Tensor]


def prepared() -> None:
    """Ignore, in a process that a test has started, what upstream warns of."""
    ignore_upstream_warnings()
    warnings.filterwarnings("ignore", message=".*you are resuming")
    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")


def made() -> Model:
    torch.manual_seed(0)
    return Model(dropout=0.2)


def trainer_of(scheme: str, *, left: bool, num_steps: int = SAVED_AFTER, **options: Any) -> Any:
    num_ranks, make = SCHEMES[scheme]
    strategy = make(backend="gloo", announce=False, full_parameters_after_fit=not left, **options)
    return quiet_trainer(strategy, devices=num_ranks, max_steps=num_steps, limit_val_batches=None)


def content(path: Path) -> dict[str, Any]:
    """Return a checkpoint of the full format, with the optimizer's tensors by place."""
    loaded = torch.load(path, weights_only=True)
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
        self.at_end = trainer.strategy._bytes_so_far()


def sent_at_the_end(after_fit: bool) -> int:
    """Return the bytes that this rank sends after the last step of a fit under `zero3`."""
    prepared()
    trainer = trainer_of("zero3", left=not after_fit)
    trainer.callbacks.append(noted := BytesSent())
    trainer.fit(made())
    return trainer.strategy._bytes_so_far() - noted.at_end


def decided(free: Sequence[int | None]) -> dict[str, Any]:
    """Fit with "auto" where ranks find so many free bytes; return what is left on this rank."""
    prepared()
    model, rank = made(), int(os.environ["RANK"])
    strategy = ZeRO3Strategy(backend="gloo", announce=False)
    with (
        patch.object(fit_ends, "free_host_bytes", lambda: free[rank]),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        quiet_trainer(strategy, devices=2, max_steps=1).fit(model)
    about = [str(one.message) for one in told if "leaves the parameters" in str(one.message)]
    return {"told": about, "left": "expected full ones" in " ".join(refusals(model)[:2])}


def without_its_strategy() -> tuple[str, int]:
    """Return the error of a module whose strategy is gone, and what is left of the engine."""
    prepared()
    model = made()
    trainer = trainer_of("zero3", left=True)
    trainer.fit(model)
    engine = weakref.ref(trainer.strategy.engine)
    model.trainer = None
    del trainer
    gc.collect()
    try:
        trainer_of("zero3", left=True).validate(model, verbose=False)
    except ConfigError as error:
        return str(error), int(engine() is not None)
    return "nothing was refused", int(engine() is not None)


def averaged() -> None:
    """Ask for shards after a fit whose weights are averaged."""
    prepared()
    trainer = trainer_of("zero3", left=True)
    trainer.callbacks.append(WeightAveraging())
    trainer.fit(made())
