"""Train one model on one device or on many, on the same global batches, and compare.

global batch k   samples  12k ... 12k + 11     one device takes all of it
rank r of N                r, r + N, ...       a DistributedSampler that does not shuffle
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import DDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from tests.strategies.models import MODELS, PIPELINE_MODELS, SPLIT_MODELS, ConvNetOfRanks, Trained
from tests.trainers import SILENT, rank_loader

STRATEGIES: dict[str, type[DataParallelStrategy]] = {
    "shard_ddp": DDPStrategy,
    "zero1": ZeRO1Strategy,
    "zero2": ZeRO2Strategy,
    "zero3": ZeRO3Strategy,
}
GLOBAL_BATCH = 12  # divisible by 2, 3 and 4
NUM_STEPS = int(os.environ.get("PARITY_STEPS", "10"))  # `make test` sets fewer
LONG_STEPS = 2 * NUM_STEPS  # where what differs grows slowly
MANY_STEPS = 20  # where largest errors of low precision are compared: few have a large scatter
ACCUMULATE = 2
CLIP = 0.1  # below every norm of these models, so always active
SMALL_BUCKET_MB = 0.001  # each block of these small models is a unit of its own
# Of weights near zero: a weight is a sum of steps of about the learning rate, 3e-3, each rounded
# to fp32's 6e-8 of it or of the weight before. Measured: at most 8e-8.
ATOL = 2e-7
UPSTREAM_WARNINGS = (
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated",  # lightning 2.6 with torch 2.13
    r".*does not have many workers",  # advice about speed, on hosts with many cores
    r".*You defined a `validation_step` but have no `val_dataloader`",  # the example's GPT
)


def ignoring(*messages: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests in which these warnings and upstream's are no errors."""
    return [pytest.mark.filterwarnings(f"ignore:{one}") for one in (*UPSTREAM_WARNINGS, *messages)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run on several ranks."""

    model: str
    strategy: str
    num_ranks: int
    precision: str = "32-true"
    num_steps: int = NUM_STEPS

    def __str__(self) -> str:
        return f"{self.model}-{self.strategy}-{self.num_ranks}-{self.precision}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run leaves: the curve, and the full weights and buffers.

    Attributes:
        losses: Of each micro-batch, averaged over ranks.
        norms: Of each step's gradient before clipping.
        weights: The `state_dict`.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


@dataclass
class Curve(L.Callback):
    """Records losses and norms."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if isinstance(trainer.strategy, SingleDeviceStrategy):
            grads = [param.grad for param in pl_module.parameters() if param.grad is not None]
            norm = torch.nn.utils.get_total_norm(
                [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
            )
        else:
            norm = trainer.strategy.gradient_norm(optimizer)
        self.norms.append(norm.item())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(outputs["loss"].item())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            ranks = trainer.strategy.collectives.all_gather_object(self.losses)
            self.losses = [sum(losses) / len(losses) for losses in zip(*ranks, strict=True)]


@dataclass
class Gradients(Curve):
    """Records the norm of each parameter's gradient, too; -1 where it has none."""

    of_params: list[list[float]] = field(default_factory=list)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        grads = [param.grad for param in pl_module.parameters()]
        self.of_params.append([-1.0 if grad is None else grad.norm().item() for grad in grads])

    def assert_close(self, expected: "Gradients") -> None:
        """Compare by rtol 1e-5, and by atol 1e-6 of the largest."""
        assert self.of_params
        largest = max(map(max, expected.of_params))
        torch.testing.assert_close(
            self.of_params, expected.of_params, rtol=1e-5, atol=1e-6 * largest
        )


class GlobalBatches(L.LightningDataModule):
    """A model's data, such that the ranks' batches together are the single device's batch."""

    def __init__(self, model: Trained, num_steps: int = NUM_STEPS) -> None:
        super().__init__()
        self.dataset = model.data(GLOBAL_BATCH * ACCUMULATE * num_steps)

    def train_dataloader(self) -> DataLoader:
        return rank_loader(self.trainer, self.dataset, GLOBAL_BATCH)


def fit_alike(
    module: L.LightningModule, strategy: Any, num_steps: int, num_samples: int, **options: Any
) -> L.Trainer:
    """Train on one device, or on two ranks with the same batches, of six features and a target."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(num_samples, n, generator=generator) for n in (6, 1)))
    trainer = quiet_trainer(
        strategy=strategy,
        devices=1 if strategy == "auto" else 2,
        max_steps=num_steps,
        accumulate_grad_batches=1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=4), **options)
    return trainer


def build(name: str) -> Trained:
    """Return the model, with the same values every time."""
    torch.manual_seed(7)
    return (MODELS | SPLIT_MODELS | PIPELINE_MODELS)[name]()


def quiet_trainer(**options: Any) -> L.Trainer:
    """Return a Trainer on CPU ranks that clips and accumulates; a single device by default."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": NUM_STEPS,
        "accumulate_grad_batches": ACCUMULATE,
        "gradient_clip_val": CLIP,
        **SILENT,
    }
    return L.Trainer(**(defaults | options))


def train(
    model: Trained, *, num_steps: int = NUM_STEPS, curve: Curve | None = None, **options: Any
) -> Run:
    """Train `model` for `num_steps` steps; on several processes each must call."""
    curve = Curve() if curve is None else curve
    trainer = quiet_trainer(**({"callbacks": [curve], "max_steps": num_steps} | options))
    trainer.fit(model, datamodule=GlobalBatches(model, num_steps))
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Run(losses=curve.losses, norms=curve.norms, weights=weights)


def train_ranks(case: Case, backend: str = "in_process") -> Run:
    """Train on several ranks: of this process, or of processes that each call this."""
    return train(
        build(case.model),
        strategy=STRATEGIES[case.strategy](backend=backend, bucket_mb=SMALL_BUCKET_MB),
        devices=case.num_ranks,
        precision=case.precision,
        num_steps=case.num_steps,
        sync_batchnorm=case.model == "sync_conv",
    )


def ignore_upstream_warnings() -> None:
    """In a process that a test has started, where warnings are errors."""
    for message in UPSTREAM_WARNINGS:
        warnings.filterwarnings("ignore", message)


def train_cases(cases: Sequence[Case], backend: str = "gloo") -> list[Run]:
    """Train one case after the other on real processes; for `run_processes` and `run_mpi`."""
    ignore_upstream_warnings()
    return [train_ranks(case, backend) for case in cases]


@cache
def single_device(case: Case) -> Run:
    """Return what a single device makes of the same global batches, in the same precision."""
    if case.model == "conv":  # its statistics depend on the number of ranks
        torch.manual_seed(7)
        model: Trained = ConvNetOfRanks(case.num_ranks)
        return train(model, precision=case.precision, num_steps=case.num_steps)
    return _common_single_device(case.model, case.precision, case.num_steps)


@cache
def _common_single_device(model: str, precision: str, num_steps: int) -> Run:
    return train(build(model), precision=precision, num_steps=num_steps)


def assert_parity(
    run: Run,
    expected: Run,
    *,
    rtol: float = 1e-5,
    atol: float = ATOL,
    num_steps: int = NUM_STEPS,
    clips_early: bool = False,
) -> None:
    """Compare losses and norms by `rtol`, and the weights by `rtol` and `atol`.

    With `clips_early` gradients are clipped before they are sent, else after.
    """
    assert len(run.losses) == len(expected.losses) == num_steps * ACCUMULATE
    assert len(run.norms) == len(expected.norms) == num_steps
    assert expected.norms[0] < CLIP if clips_early else min(expected.norms) > CLIP
    _assert_close("losses", _double(run.losses), _double(expected.losses), rtol, 0.0)
    _assert_close("norms", _double(run.norms), _double(expected.norms), rtol, 0.0)
    assert run.weights.keys() == expected.weights.keys()
    for name, weight in run.weights.items():
        _assert_close(name, weight, expected.weights[name], rtol, atol)


def assert_bitwise_equal(run: Run, again: Run) -> None:
    """Compare two runs bit for bit."""
    assert run.losses == again.losses
    assert run.norms == again.norms
    for name, weight in run.weights.items():
        assert torch.equal(weight, again.weights[name]), name


def _assert_close(name: str, got: Tensor, expected: Tensor, rtol: float, atol: float) -> None:
    def message(found: str) -> str:
        return f"{name}: {found}"

    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, msg=message)


def _double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
