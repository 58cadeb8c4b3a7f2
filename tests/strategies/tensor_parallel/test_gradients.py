"""Norms, clipping and bytes under tensor parallel: each element of the whole counts once."""

import copy
from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import ConfigError, TensorParallelStrategy
from lightning_shard.backends.traffic import OperationTraffic
from lightning_shard.data_parallel.held_bytes import HeldBytes
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import SMALL_BUCKET_MB, GlobalBatches, build, ignoring, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring()

INFINITY = float("inf")
MESHES = [(2, 2, 0), (4, 4, 0), *((4, 2, stage) for stage in range(4))]  # ranks, tp, stage


class TwoOptimizers(L.LightningModule):
    """A pair of split layers with one optimizer, and a norm and a head with another."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)
        self.clip: dict[str, Any] = {}
        self.norms: list[float] = []
        self.history: list[float] = []

    def configure_optimizers(self) -> Any:
        inner = [*self.up.parameters(), *self.down.parameters()]
        outer = [*self.norm.parameters(), *self.head.parameters()]
        return torch.optim.AdamW(inner, lr=0.01), torch.optim.SGD(outer, lr=0.1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x = batch[0] + self.down(torch.relu(self.up(batch[0])))
        loss = self.head(self.norm(x)).exp().mean()
        self.history.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            self.norms += [self.norm_of(optimizer.optimizer, p) for p in (1.0, 2.0, INFINITY)]
            self.clip_gradients(optimizer, **self.clip)
            self.norms.append(self.norm_of(optimizer.optimizer, 2.0))
            optimizer.step()
        self.norms.append(self.norm_of(None, 2.0))

    def norm_of(self, optimizer: Any, norm_type: float) -> float:
        if not isinstance(self.trainer.strategy, SingleDeviceStrategy):
            return float(self.trainer.strategy.gradient_norm(optimizer, norm_type))
        groups = [{"params": self.parameters()}] if optimizer is None else optimizer.param_groups
        grads = [param.grad for group in groups for param in group["params"]]
        return float(nn.utils.get_total_norm(grads, norm_type))

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        x = torch.randn(48, 8, generator=generator)[place["rank"] :: place["num_replicas"]]
        return DataLoader(TensorDataset(x), batch_size=12 // place["num_replicas"])


def strategy_of(num_ranks: int, size: int, stage: int, plan: Any) -> TensorParallelStrategy:
    return TensorParallelStrategy(
        backend="in_process",
        num_ranks=num_ranks,
        tensor_parallel_size=size,
        plan=plan,
        zero_stage=stage,
    )


PAIR = {"up": "colwise", "down": "rowwise"}


def fit_pair(clip: dict[str, Any], **options: Any) -> TwoOptimizers:
    torch.manual_seed(5)
    model = TwoOptimizers()
    model.clip = clip
    trainer = quiet_trainer(
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        max_steps=8,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(model)
    return model


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "clip",
    [
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["norm", "value"],
)
@pytest.mark.parametrize(("num_ranks", "size", "stage"), MESHES)
def test_norms_and_clipping_of_two_optimizers(
    num_ranks: int, size: int, stage: int, clip: dict[str, Any]
) -> None:
    alone = fit_pair(clip)
    split = fit_pair(clip, strategy=strategy_of(num_ranks, size, stage, PAIR))
    assert split.norms == pytest.approx(alone.norms, rel=1e-5)
    assert split.history == pytest.approx(alone.history, rel=1e-5)
    torch.testing.assert_close(dict(split.state_dict()), dict(alone.state_dict()))


class TorchClipping(TwoOptimizers):
    def clip_gradients(self, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@pytest.mark.parametrize("stage", range(4))
def test_torchs_clipping_takes_the_full_norm(stage: int) -> None:
    """Each rank scaled by another norm, and what they had replicated drifted apart."""
    alone, split = fit_clipping(), fit_clipping(strategy=strategy_of(2, 2, stage, PAIR))
    torch.testing.assert_close(dict(split.state_dict()), dict(alone.state_dict()))


def fit_clipping(**options: Any) -> TorchClipping:
    torch.manual_seed(5)
    model = TorchClipping()
    model.clip = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}
    quiet_trainer(
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        max_steps=4,
        use_distributed_sampler=False,
        **options,
    ).fit(model)
    return model


class LimitedMemory(TwoOptimizers):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def test_an_optimizer_of_full_matrices_is_refused_on_parts() -> None:
    """An optimizer of full matrices stepped on parts of them."""
    with pytest.raises(ConfigError, match=r"LBFGS does not update.*parallel gives each rank"):
        quiet_trainer(strategy=strategy_of(2, 2, 0, PAIR)).fit(LimitedMemory())


@dataclass
class Census(L.Callback):
    """What each rank holds in its last step, and what it would hold whole."""

    held: list[HeldBytes] = field(default_factory=list)
    replicated: HeldBytes | None = None
    local_norms: list[float] = field(default_factory=list)
    _mine: HeldBytes | None = None

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._mine = trainer.strategy.held_bytes()
        self.replicated = trainer.strategy.replicated_bytes()
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.local_norms.append(sum(float(grad.norm()) ** 2 for grad in grads))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.held = trainer.strategy.collectives.all_gather_object(self._mine)
        norms = trainer.strategy.collectives.all_gather_object(self.local_norms)
        assert all(norm > 0 for norm in norms[0])


SHARES = {  # of a parameter's bytes, on 2 data-parallel ranks: parameters, gradients, Adam's state
    0: (1, 1, 2),
    1: (1, 1, 1),
    2: (1, 0.5, 1),
    3: (0.5, 0.5, 1),
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", range(4))
def test_held_bytes_are_divided_by_the_ranks_of_a_group(stage: int) -> None:
    model, census = build("gpt"), Census()
    split = {"qkv", "attention_out", "up", "down", "head", "byte_embedding", "position_embedding"}
    full = sum(param.nbytes for param in model.parameters())
    local = full
    for name, param in model.named_parameters():
        layer, kind = name.split(".")[-2:]
        rowwise_bias = kind == "bias" and layer in ("attention_out", "down")
        if layer in split and not rowwise_bias:
            local -= param.nbytes // 2
    quiet_trainer(
        strategy=strategy_of(4, 2, stage, PLANS["gpt"]), max_steps=2, callbacks=[census]
    ).fit(model, datamodule=GlobalBatches(model, 2))
    assert local < 0.55 * full
    for held in census.held:
        got = [held.parameters, held.gradients, held.optimizer_state]
        assert got == pytest.approx([share * local for share in SHARES[stage]], rel=0.02)
    replicated = census.replicated
    assert replicated is not None
    got = [replicated.parameters, replicated.gradients, replicated.optimizer_state]
    assert got == pytest.approx([full, full, 2 * full], rel=0.02)


def test_gpt_is_full_in_the_model_summary() -> None:
    """The summary is made before the split, so that it counts what the user wrote."""
    model = ExampleGPT()
    numel = sum(param.numel() for param in model.parameters())
    copied = copy.deepcopy(model)
    quiet_trainer(strategy=strategy_of(2, 2, 0, PLANS["gpt"]), max_steps=1).fit(
        copied, datamodule=GlobalBatches(copied, 1)
    )
    assert sum(param.numel() for param in copied.parameters()) == numel


MATRICES = 1000  # elements; what ranks agree on is smaller, gradients are larger


@dataclass
class Sent(L.Callback):
    """Elements sent in the data-parallel group, batch by batch."""

    reduced: list[int] = field(default_factory=list)
    _before: int = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        traffic: dict[str, OperationTraffic] = (
            trainer.strategy.gradient_groups.dp.traffic.snapshot()
        )
        names = ("all_reduce", "reduce_scatter")
        total = sum(traffic[name].elements for name in names if name in traffic)
        self.reduced.append(total - self._before)
        self._before = total


def sent(stage: int, accumulate: int) -> list[bool]:
    """Return for each batch whether gradients travelled in the data-parallel group."""
    model, census = build("gpt"), Sent()
    strategy = TensorParallelStrategy(
        backend="in_process", tensor_parallel_size=2, plan=PLANS["gpt"], zero_stage=stage
    )
    strategy.run.options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    quiet_trainer(
        strategy=strategy,
        devices=4,
        callbacks=[census],
        accumulate_grad_batches=accumulate,
        max_steps=2,
        gradient_clip_val=None,
    ).fit(model, datamodule=GlobalBatches(model, 3))
    return [elements > MATRICES for elements in census.reduced]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", range(4))
def test_accumulation_waits_with_the_gradients(stage: int) -> None:
    boundaries = [False, False, True] * 2
    assert sent(stage, 3) == (boundaries if stage < 2 else [True] * 6)


class ByHand(L.LightningModule):
    """Accumulates inside `no_sync`, as manual optimization may."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gpt = build("gpt")
        self.sent: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss: Tensor = self.gpt.loss(batch) / 2
        if batch_idx % 2:
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with self.trainer.strategy.engine.no_sync():
                self.manual_backward(loss)
        traffic = self.trainer.strategy.gradient_groups.dp.traffic.snapshot()
        self.sent.append(traffic["all_reduce"].elements if "all_reduce" in traffic else 0)

    def configure_optimizers(self) -> Any:
        return self.gpt.configure_optimizers()["optimizer"]


@pytest.mark.slow
def test_no_sync_sends_no_gradients() -> None:
    model = ByHand()
    plan = {f"gpt.{pattern}": style for pattern, style in PLANS["gpt"].items()}
    strategy = TensorParallelStrategy(backend="in_process", tensor_parallel_size=2, plan=plan)
    quiet_trainer(
        strategy=strategy, devices=4, accumulate_grad_batches=1, gradient_clip_val=None, max_steps=2
    ).fit(model, datamodule=GlobalBatches(model.gpt, 2))
    steps = [after - before for before, after in zip([0, *model.sent], model.sent, strict=False)]
    assert [elements > MATRICES for elements in steps] == [False, True, False, True]
