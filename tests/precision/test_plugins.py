"""Number formats: each trains as a single device does in that format, and holds what it says."""

import math
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_shard.backends.traffic import OperationTraffic, ring_share
from tests.processes import run_processes
from tests.strategies.models import Trained
from tests.strategies.parity import (
    MANY_STEPS,
    STRATEGIES,
    Case,
    GlobalBatches,
    Run,
    build,
    ignore_upstream_warnings,
    ignoring,
    quiet_trainer,
    single_device,
    train_ranks,
)

pytestmark = [*ignoring(), pytest.mark.usefixtures("torchs_own_kernels")]

LOW = ("bf16-true", "bf16-mixed")
ALL = [
    Case(model=model, strategy=strategy, num_ranks=2, precision=precision, num_steps=MANY_STEPS)
    for model, strategy, precision in product(
        ("gpt", "lstm", "sync_conv", "conv", "mixture", "gpt2", "llama"), STRATEGIES, LOW
    )
]
QUICK = [case for case in ALL if case.model == "gpt" and case.strategy in ("shard_ddp", "zero3")]
QUICK += [case for case in ALL if case.model == "lstm" and case.strategy in ("zero1", "zero3")]
QUICK += [case for case in ALL if case.model == "sync_conv" and case.strategy == "zero2"]


def _error(run: Run, exact: Run) -> tuple[float, float]:
    """Return the largest relative error of the losses, and of the norms."""
    return tuple(
        max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
        for got, expected in ((run.losses, exact.losses), (run.norms, exact.norms))
    )


def _check(case: Case) -> None:
    """Ranks may be as far from float32 as a single device is in the same format; thrice that."""
    exact = single_device(replace(case, precision="32-true"))
    run, plain = train_ranks(case), single_device(case)
    for error, allowed in zip(_error(run, exact), _error(plain, exact), strict=True):
        assert error <= 3 * allowed
    for name, weight in run.weights.items():
        assert weight.dtype == plain.weights[name].dtype


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_is_as_close_to_float32_as_a_single_device(case: Case) -> None:
    _check(case)


def test_a_gradient_that_only_another_rank_has_is_zeros() -> None:
    """Between micro-batches, where hooks may meet gradients; torch fills such memory with NaN."""
    case = Case(model="mixture", strategy="shard_ddp", num_ranks=2, precision="bf16-mixed")
    torch.use_deterministic_algorithms(True)
    try:
        run = train_ranks(case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(math.isfinite, [*run.losses, *run.norms]))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in QUICK], ids=str)
def test_is_as_close_to_float32_as_a_single_device_everywhere(case: Case) -> None:
    _check(case)


@dataclass
class Formats(L.Callback):
    """What the optimizer sees in its step, and what a later step sends."""

    params: set[torch.dtype] = field(default_factory=set)
    grads: set[torch.dtype] = field(default_factory=set)
    state: set[torch.dtype] = field(default_factory=set)
    rounded: int = 0  # elements whose gradients travel in bf16
    others: int = 0
    num_params: int = 0
    before: dict[str, OperationTraffic] = field(default_factory=dict)
    sent: dict[str, OperationTraffic] = field(default_factory=dict)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        for group in optimizer.param_groups:
            self.params |= {param.dtype for param in group["params"]}
            self.grads |= {p.grad.dtype for p in group["params"] if p.grad is not None}
        for entries in optimizer.state.values():
            self.state |= {entries[key].dtype for key in ("exp_avg", "exp_avg_sq")}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        traffic = trainer.strategy.collectives.traffic.snapshot()
        self.before, self.sent = self.sent, traffic

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        for flat in trainer.strategy.engine.flats:
            self.num_params += len(flat.params)
            if flat.reduce_dtype == torch.bfloat16:
                self.rounded += flat.layout.full_numel
            else:
                self.others += flat.layout.full_numel

    def sent_bytes(self, operation: str) -> int:
        """Bytes of this operation in the last step."""
        return self.sent[operation].bytes - self.before[operation].bytes


def _train_mixed(strategy: str, backend: str) -> tuple[L.Trainer, Trained, Formats]:
    formats, model = Formats(), build("gpt")
    trainer = quiet_trainer(
        strategy=f"{strategy}_{backend}",
        devices=2,
        precision="bf16-mixed",
        max_steps=3,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        callbacks=[formats],
    )
    trainer.fit(model, datamodule=GlobalBatches(model, 3))
    return trainer, model, formats


def train_mixed_over_gloo() -> dict[str, Formats]:
    """Run in each of two processes."""
    ignore_upstream_warnings()
    return {strategy: _train_mixed(strategy, "gloo")[2] for strategy in STRATEGIES}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_mixed_keeps_and_saves_fp32(strategy: str, tmp_path: Path) -> None:
    trainer, model, formats = _train_mixed(strategy, "in_process")
    assert formats.params == formats.grads == formats.state == {torch.float32}
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    trainer.save_checkpoint(tmp_path / "mixed.ckpt")
    checkpoint = torch.load(tmp_path / "mixed.ckpt", weights_only=True)
    assert {value.dtype for value in checkpoint["state_dict"].values()} == {torch.float32}


LOOKS_BYTES = 3 * 17  # a hook that meets gradients may have edited them: ranks ask three times


@pytest.mark.slow
def test_bf16_mixed_sends_gradients_of_matrices_in_bf16_over_gloo() -> None:
    """Updated parameters travel in fp32, so that every rank has them unrounded."""
    for rank in run_processes(train_mixed_over_gloo, 2):
        for strategy, formats in rank.items():
            assert formats.rounded > 0
            assert formats.others > 0
            once = (2 * formats.rounded + 4 * formats.others) // 2  # half of it, on two ranks
            summed = formats.sent_bytes("all_reduce")
            if strategy == "shard_ddp":
                # A byte of each parameter, of failed updates, and of weights that have moved.
                agreement = ring_share(2 * (formats.num_params + 2), 2)
                assert summed == 2 * once + agreement + LOOKS_BYTES
            else:
                # only the agreement on usage, and looks
                assert summed < 2 * formats.num_params + LOOKS_BYTES
                assert formats.sent_bytes("reduce_scatter") == once
            if strategy in ("zero1", "zero2"):
                assert (
                    formats.sent_bytes("all_gather") == 4 * (formats.rounded + formats.others) // 2
                )


class Overflowing(Trained):
    """Sample 1 makes the gradient of `last` overflow at the first loss scale, not at half of it."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.first = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 8, bias=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, weight = batch
        return self.first(x).mean() / 1000 + (self.last(x) * weight).sum() / len(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        weight = torch.full((num_samples, 1), 0.01)
        weight[1] = 5.0
        return TensorDataset(torch.ones(num_samples, 8), weight)


@dataclass
class Scales(L.Callback):
    """After each step, each rank's loss scale and the number of updates that it has made."""

    scales: list[list[float]] = field(default_factory=list)
    updates: list[list[float]] = field(default_factory=list)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        steps = [state["step"].item() for state in trainer.optimizers[0].state.values()]
        gather = getattr(trainer.strategy, "collectives", None)
        mine = (trainer.precision_plugin.scaler.get_scale(), max(steps, default=0.0))
        dp = [mine] if gather is None else gather.all_gather_object(mine)
        self.scales.append([scale for scale, _ in dp])
        self.updates.append([updates for _, updates in dp])


def _train_scaled(strategy: str, num_ranks: int, *, fused: bool, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(7)
    model, scales = Overflowing(fused), Scales()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=num_ranks,
        plugins=[MixedPrecision("16-mixed", device="cpu")],
        max_steps=3,
        limit_train_batches=3,  # an epoch
        accumulate_grad_batches=1,
        callbacks=[scales],
        **options,
    )
    trainer.fit(model, datamodule=GlobalBatches(model, 3))
    return trainer, model, scales


@pytest.mark.parametrize(("fused", "clip"), [(False, None), (False, 0.05), (True, None)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_in_one_shard_skips_the_step_everywhere(
    strategy: str, fused: bool, clip: float | None
) -> None:
    """From stage 1 on only the last rank has the shard that overflows."""
    _, full, single = _train_scaled("auto", 1, fused=fused, gradient_clip_val=clip)
    _, model, ranks = _train_scaled(
        f"{strategy}_in_process", 4, fused=fused, gradient_clip_val=clip
    )
    assert single.scales == [[32768.0]] * 3  # half of the first one
    assert ranks.scales == [[32768.0] * 4] * 3
    assert single.updates == [[0.0], [1.0], [2.0]]
    assert ranks.updates == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    for got, expected in zip(model.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [(("auto", 1), ("zero2_in_process", 2)), (("zero3_in_process", 4), ("auto", 1))],
)
def test_the_loss_scale_travels_in_the_checkpoint(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    trainer, _, _ = _train_scaled(*before, fused=False)
    trainer.save_checkpoint(tmp_path / "scaled.ckpt")
    model, scales = Overflowing(fused=False), Scales()
    resumed = quiet_trainer(
        strategy=after[0],
        devices=after[1],
        plugins=[MixedPrecision("16-mixed", device="cpu")],
        max_steps=4,
        limit_train_batches=3,
        accumulate_grad_batches=1,
        callbacks=[scales],
    )
    resumed.fit(model, datamodule=GlobalBatches(model, 3), ckpt_path=tmp_path / "scaled.ckpt")
    assert scales.scales == [[32768.0] * after[1]]  # not the first one's 65536, halved or not
    assert scales.updates == [[3.0] * after[1]]
