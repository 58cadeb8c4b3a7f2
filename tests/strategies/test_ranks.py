"""What user code is told of ranks fits together under every scheme and mesh, as on one device."""

import contextlib
from math import prod
from typing import Any, ClassVar

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import has_torch_function
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import SumMetric

from lightning_shard import (
    ContextParallelStrategy,
    DDPStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.errors import ConfigError
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()
WIDTH, LENGTH, WORDS, SAMPLES, STEPS = 8, 6, 20, 48, 2
BATCH = 24  # of one device
OF_MODELS = ("pipeline_parallel", "tensor_parallel", "context_parallel")
_MESHES = [  # pipeline, tensor, context, data
    *((1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)),
    *((2, 2, 1, 1), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 2, 2, 1), (4, 1, 1, 1)),
    *((2, 2, 1, 2), (1, 2, 2, 2), (1, 2, 1, 3), (2, 1, 1, 3), (1, 4, 1, 2), (1, 1, 1, 8)),
]
MESHES = [
    pytest.param(one, marks=pytest.mark.slow if prod(one) > 4 else (), id="x".join(map(str, one)))
    for one in _MESHES
]
ALONE: dict[str, Any] = {
    "tensor_parallel": TensorParallelStrategy,
    "pipeline_parallel": PipelineParallelStrategy,
    "context_parallel": ContextParallelStrategy,
    "shard_ddp": DDPStrategy,
    "zero2": ZeRO2Strategy,
    "zero3": ZeRO3Strategy,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class OfTokens(L.LightningModule):
    """A mean over the tokens of all ranks, on samples that it takes by its rank."""

    told: ClassVar[dict[int, dict[str, Any]]] = {}  # of all ranks, each of which has a copy

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.seen = SumMetric()

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)
        return TensorDataset(ids, ids.roll(-1, 1).where(torch.arange(LENGTH) < lengths, -100))

    def train_dataloader(self) -> Any:
        data, trainer = self.data(), self.trainer
        size = BATCH // trainer.world_size
        sampler: Any = DistributedSampler(data, trainer.world_size, self.global_rank, shuffle=False)
        return DataLoader(data, batch_size=size, sampler=sampler)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        count = self.all_gather((labels != -100).sum().float())
        self.seen.update(len(ids))
        loss: Tensor = total * self.trainer.world_size / count.sum()
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        strategy: Any = self.trainer.strategy
        own = torch.tensor([float(self.global_rank)])
        self.told[getattr(strategy, "mesh_rank", 0)] = {
            "rank": (self.global_rank, self.trainer.global_rank, strategy.global_rank),
            "size": (self.trainer.world_size, strategy.world_size),
            "gathered": self.all_gather(own).flatten().tolist(),
            "sum": float(strategy.reduce(own.clone(), reduce_op="sum")),
            "mean": float(strategy.reduce(own.clone())),
            "sampler": getattr(strategy, "distributed_sampler_kwargs", None),
            "is_zero": (self.trainer.is_global_zero, strategy.is_global_zero),
            "samples": float(self.seen.compute()),
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def fitted(strategy: Any = "auto", devices: int = 1, kind: type[OfTokens] = OfTokens) -> Any:
    torch.manual_seed(0)
    kind.told.clear()
    model = kind()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=devices,
        max_steps=STEPS,
        log_every_n_steps=1,
        use_distributed_sampler=False,
    )
    trainer.fit(model)
    return model


def assert_one_device(model: Any, kind: type[OfTokens] = OfTokens) -> None:
    expected = fitted(kind=kind)
    assert float(model.trainer.callback_metrics["loss"]) == pytest.approx(
        float(expected.trainer.callback_metrics["loss"]), rel=1e-5
    )
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


def of_mesh(sizes: tuple[int, int, int, int]) -> HybridParallelStrategy:
    given: Any = {f"{name}_size": size for name, size in zip(OF_MODELS, sizes, strict=False)}
    return HybridParallelStrategy(
        backend="in_process",
        announce=False,
        data_parallel_size=sizes[-1],
        num_microbatches=1,
        **given,
    )


def check_numbers(told: dict[int, dict[str, Any]], num_ranks: int, num_samplers: int) -> None:
    """Check what each rank was told; `num_samplers` ranks are given other samples."""
    ranks = list(range(num_samplers))
    assert sorted(told) == list(range(num_ranks))
    assert [rank for rank, one in told.items() if all(one["is_zero"])] == [0]
    assert sum(any(one["is_zero"]) for one in told.values()) == 1
    numbers = [one["rank"][0] for one in told.values()]
    assert all(numbers.count(rank) == num_ranks // num_samplers for rank in ranks)
    for one in told.values():
        assert set(one["size"]) == {num_samplers}
        assert len(set(one["rank"])) == 1
        assert one["gathered"] == ranks
        assert one["sum"] == sum(ranks)
        assert one["mean"] == pytest.approx(sum(ranks) / num_samplers)
        assert one["sampler"] == {"num_replicas": num_samplers, "rank": one["rank"][0]}


@pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the .* stages")
@pytest.mark.few_cases(2)
@pytest.mark.parametrize("sizes", MESHES)
def test_ranks_count_once_in_a_mesh(sizes: tuple[int, int, int, int]) -> None:
    """The world had all ranks, a gather those of other samples: means came out twice as large."""
    model = fitted(of_mesh(sizes), prod(sizes))
    check_numbers(model.told, prod(sizes), sizes[-1])
    assert_one_device(model)


@pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the .* stages")
@pytest.mark.parametrize("name", ALONE)
def test_a_scheme_alone_counts_ranks_of_other_samples(name: str) -> None:
    """A tensor or context parallel mean over tokens was 6.007 for one device's 3.004."""
    options = {"num_microbatches": 1} if name == "pipeline_parallel" else {}
    model = fitted(ALONE[name](backend="in_process", announce=False, **options), 2)
    check_numbers(model.told, 2, 1 if name in OF_MODELS else 2)
    assert_one_device(model)


def test_a_mean_over_tokens_is_refused_where_microbatches_have_their_own() -> None:
    """A mean over tokens was one over those of each microbatch."""
    with pytest.raises(ConfigError, match=r"gathers a count, .*Set num_microbatches=1"):
        fitted(PipelineParallelStrategy(backend="in_process", announce=False), 2)


class ByTorch(OfTokens):
    """Asks torch.distributed, which knows of processes, and lets gradients through a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not dist.is_initialized():
            return super().training_step(batch, batch_idx)
        assert (dist.get_rank(), dist.get_world_size()) == (
            self.global_rank,
            self.trainer.world_size,
        )
        ids, labels = batch
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        count = (labels != -100).sum().float()
        dist.all_reduce(count)
        first = torch.full((), float(self.global_rank))
        dist.broadcast(first, src=dist.get_world_size() - 1)
        assert first == dist.get_world_size() - 1
        loss: Tensor = torch.distributed.nn.functional.all_reduce(total) / count
        self.seen.update(len(ids))
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_reduce is deprecated")
@pytest.mark.few_cases(2)
@pytest.mark.parametrize("sizes", [(1, 2, 1, 1), (1, 2, 1, 2), (1, 1, 2, 2)])
def test_torch_counts_ranks_of_other_samples_in_a_step(sizes: tuple[int, int, int, int]) -> None:
    """A sum over the default group had each token as often as ranks share the model."""
    functions = dist.get_rank, dist.all_reduce
    assert_one_device(fitted(of_mesh(sizes), prod(sizes), ByTorch), ByTorch)
    assert functions == (dist.get_rank, dist.all_reduce)


class TakesShare(OfTokens):
    """Takes its rank's share of each batch in the step."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.data(), batch_size=BATCH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank, size = self.global_rank, self.trainer.world_size
        return super().training_step([one[rank::size] for one in batch], batch_idx)


@pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the .* stages")
@pytest.mark.few_cases(2)
@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 1)])
def test_stages_take_shares_of_the_same_samples(sizes: tuple[int, int, int, int]) -> None:
    """A pipeline's first stage had the inputs of one share, its last the targets of another."""
    assert_one_device(fitted(of_mesh(sizes), prod(sizes), TakesShare), TakesShare)


class TakesByProcess(TakesShare):
    """Takes samples by what differs between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.cached: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.cached = torch.arange(LENGTH) if self.cached is None else self.cached
        own = self.taken(batch)
        noise = torch.empty(len(own[0])).normal_() * torch.rand(len(own[0])) * self.scale.sum()
        return OfTokens.training_step(self, own, batch_idx) + 0 * noise.sum()

    def taken(self, batch: Any) -> Any:
        return batch


class BySlices(TakesByProcess):
    def taken(self, batch: Any) -> Any:
        return [one[self.local_rank :: 2] for one in batch]


class ByGenerator(TakesByProcess):
    def taken(self, batch: Any) -> Any:
        generator = torch.Generator().manual_seed(self.local_rank)
        some = torch.randperm(len(batch[0]), generator=generator)[:8]
        return [one[some] for one in batch]


class OnOneStage(TakesByProcess):
    def taken(self, batch: Any) -> Any:
        return [one.flip(0) for one in batch] if self.local_rank else batch


class ByNumpy(TakesByProcess):
    def taken(self, batch: Any) -> Any:
        rows = np.random.default_rng(self.local_rank).permutation(len(batch[0]))[:8]
        return [torch.from_numpy(one.numpy()[rows]) for one in batch]


@pytest.mark.parametrize("kind", [BySlices, ByGenerator, OnOneStage, ByNumpy])
def test_stages_with_other_samples_are_refused_before_anything_trains(
    kind: type[TakesByProcess],
) -> None:
    """Inputs of one share met targets of another: 1.413 for 1.819, without a word."""
    with pytest.raises(ConfigError, match=r"before the blocks the training step .*LOCAL_RANK"):
        fitted(PipelineParallelStrategy(backend="in_process", announce=False), 2, kind)


@pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the .* stages")
def test_what_stages_draw_and_keep_alike_is_no_difference() -> None:
    fitted(of_mesh((2, 1, 1, 1)), 2, TakesByProcess)


class SeesItself(TakesByProcess):
    """Sees what runs its step, has numbers of its own process, and computes in ways of its own."""

    runs: ClassVar[list[int]] = []
    mode: Any = contextlib.nullcontext

    def forward(self, ids: Tensor) -> Tensor:
        self.runs.append(self.local_rank)
        seconds = torch.tensor(float(self.local_rank)).squeeze()
        self.log("seconds", seconds)
        scaled = torch.func.vmap(lambda row: row.float() * row.sum())(ids)
        x: Tensor = self.embed(ids) + 0 * scaled[..., None]
        x.register_hook(lambda grad: grad)
        x.retain_grad()
        raw = ids.float().requires_grad_()
        (slope,) = torch.autograd.grad(raw.square().sum(), raw)
        return x + 0 * slope[..., None]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        with self.mode():
            x = self.forward(ids)
            for block in self.blocks:
                x = block(x)
        assert self.mode is not contextlib.nullcontext or not has_torch_function((x.detach(),))
        self.seen.update(len(ids))
        loss: Tensor = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss


@pytest.mark.parametrize("mode", [contextlib.nullcontext, lambda: torch.device("cpu")])
def test_a_step_is_not_run_once_more_to_compare_it(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks were set on tensors without a gradient, and torch.func had values read; both failed."""
    monkeypatch.setattr(SeesItself, "mode", staticmethod(mode))
    SeesItself.runs.clear()
    strategy = PipelineParallelStrategy(backend="in_process", announce=False, num_microbatches=2)
    fitted(strategy, 2, SeesItself)
    assert SeesItself.runs.count(0) == 2 * 2 * STEPS  # a step is of two batches


class LeavesOut(OfTokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("sizes", [(1, 2, 1, 1), (1, 1, 2, 1)])
def test_a_step_may_be_left_out_by_ranks_of_the_same_samples(
    sizes: tuple[int, int, int, int],
) -> None:
    """Lightning refuses it where the world has several ranks, which were all of one model."""
    assert_one_device(fitted(of_mesh(sizes), prod(sizes), LeavesOut), LeavesOut)
