"""Trainings with `same_bits=True` have the same bits on one rank, two, four and eight."""

import hashlib
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, TensorDataset

from lightning_shard import (
    ConfigError,
    ElasticStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.patience import patient
from tests.strategies.models import MODELS, warm_up
from tests.strategies.parity import SMALL_BUCKET_MB, STRATEGIES, UPSTREAM_WARNINGS
from tests.trainers import SILENT

MICRO_BATCHES = 8
BATCH = 2
NUM_STEPS = 4
RANKS = (1, 2, 4, 8)
CLIP = 0.5

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{one}")
    for one in (*UPSTREAM_WARNINGS, ".*sync_dist=True.*", "The dirpath has changed")
]


class Images(L.LightningModule):
    """Convolutions with batch norms and dropout, on images that are drawn when they are asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Flatten(), nn.Linear(6 * 16, 33), nn.ReLU(), nn.Dropout(0.5), nn.Linear(33, 5)),
        )

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        noisy = images + 0.1 * torch.randn_like(images)
        return nn.functional.cross_entropy(self.layers(noisy), labels)

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, warm_up), "interval": "step"},
        }

    def data(self, num_samples: int) -> Dataset[Any]:
        drawn = torch.Generator().manual_seed(1)
        images = torch.randn(num_samples, 3, 4, 4, generator=drawn)
        return TensorDataset(images, torch.arange(num_samples) % 5)


class Centred(Images):
    """Takes a running mean off its images, which it uses as it changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        if self.training:
            self.mean.mul_(0.9).add_(images.mean(), alpha=0.1)
        return super().loss((images - self.mean.clone(), labels))


class DrawingData(Dataset[Any]):
    """Images that are drawn, and turned, each time that one is read."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.of_numpy, self.of_torch = np.random.default_rng(0), torch.Generator()
        self.of_python = random.Random(0)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.randn(3, 4, 4) + index + float(np.random.rand() + self.of_numpy.random())
        image += torch.randn((), generator=self.of_torch)
        is_turned = random.random() + self.of_python.random() < 1
        return (image.flip(-1) if is_turned else image), index % 5


class Drawn(Images):
    """Trains on images that are drawn when they are read."""

    def data(self, num_samples: int) -> Dataset[Any]:
        return Subset(DrawingData(num_samples), range(num_samples))


class LeavesOut(Images):
    """Uses a layer for some micro-batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        images = batch[0]
        return loss + self.rare(images).pow(2).mean() if images[0, 0, 0, 0] > 0 else loss


class DrawsInHooks(Images):
    """Adds noise to gradients and rates around a step, and to weights after it and in epochs."""

    def on_after_backward(self) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(1 + 0.1 * torch.rand_like(param.grad))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        optimizer.param_groups[0]["lr"] = 0.05 + 0.01 * torch.rand(()).item()
        optimizer.step(closure=closure)

    def on_train_epoch_start(self) -> None:
        self.shake()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for number, param in enumerate(self.parameters()):
            grad = param.grad
            assert grad is not None
            if number % 3 == 0:
                param.grad = grad + torch.randn_like(grad) * 0.01
            elif number % 3 == 1:
                grad.mul_(torch.bernoulli(torch.full_like(grad, 0.8)))
            else:
                grad.add_(torch.empty_like(grad).uniform_(-0.01, 0.01).flatten().view_as(grad))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.shake()

    def on_train_epoch_end(self) -> None:
        self.shake()

    def on_validation_epoch_end(self) -> None:
        self.shake()

    def shake(self) -> None:
        """Add noise to the weights."""
        with torch.no_grad():
            for param in self.parameters():
                param.add_(torch.randn_like(param) * 0.001)


KINDS: dict[str, Callable[[], Any]] = {
    "leaves out": LeavesOut,
    "draws in hooks": DrawsInHooks,
    "images": Images,
    "centred": Centred,
    "drawn": Drawn,
    **MODELS,
}


def checksum(*of: Any) -> str:
    """Return a digest of tensors, numbers and names, to the bit."""
    digest = hashlib.blake2b(digest_size=8)
    for one in of:
        if isinstance(one, Tensor):
            digest.update(
                one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(one, dict):
            digest.update(checksum(*(part for pair in one.items() for part in pair)).encode())
        elif isinstance(one, (list, tuple)):
            digest.update(checksum(*one).encode())
        else:
            digest.update(repr(one).encode())
    return digest.hexdigest()


def fit(
    folder: Path,
    *,
    model: str = "images",
    strategy: str = "zero2",
    num_ranks: int = 1,
    precision: Any = "32-true",
    backend: str = "in_process",
    kind: Any = None,
    num_steps: int = NUM_STEPS,
    resumed: Any = None,
    shuffle: bool = True,
    num_workers: int = 0,
    **options: Any,
) -> tuple[str, str, Path]:
    """Train, and return the digest of what is saved, what is logged, and the last file."""
    L.seed_everything(7)
    module = KINDS[model]()
    in_process = backend == "in_process"
    kept: dict[str, Any] = {"num_ranks": num_ranks} if in_process else {}
    checkpoints = ModelCheckpoint(
        folder / "saved", filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    trainer = L.Trainer(
        **SILENT
        | {
            "logger": CSVLogger(folder / "logs", name="", version=num_ranks),
            "enable_checkpointing": True,
        },
        accelerator="cpu",
        devices=1 if in_process else num_ranks,
        strategy=(kind or STRATEGIES[strategy])(
            backend=backend,
            same_bits=True,
            bucket_mb=SMALL_BUCKET_MB,
            announce=False,
            **kept,
            **options,
        ),
        precision=precision,
        max_steps=num_steps,
        accumulate_grad_batches=MICRO_BATCHES // num_ranks,
        gradient_clip_val=CLIP,
        log_every_n_steps=1,
        callbacks=[checkpoints],
    )
    dataset = module.data(MICRO_BATCHES * BATCH * 3)
    given = {"batch_size": BATCH, "num_workers": num_workers}
    loaders = [DataLoader(dataset, shuffle=mixes, **given) for mixes in (shuffle, False)]
    validated = loaders[1] if isinstance(module, Images) else None
    trainer.fit(module, loaders[0], validated, ckpt_path=resumed)
    last = folder / "saved" / f"step={num_steps}.ckpt"
    saved = torch.load(last, weights_only=False)
    logged = folder / "logs" / f"version_{num_ranks}" / "metrics.csv"
    text = logged.read_text() if isinstance(module, Images) else ""
    return checksum(saved["state_dict"], saved["optimizer_states"]), text, last


def digests(folder: Path, cases: Sequence[tuple[str, int]], **options: Any) -> set[str]:
    """Return the different digests of a training on so many ranks each."""
    found = set()
    for strategy, num_ranks in cases:
        place = folder / f"{strategy}_{num_ranks}"
        saved, logged, _ = fit(place, strategy=strategy, num_ranks=num_ranks, **options)
        found.add(saved + logged)
    return found


def test_bits_are_those_of_one_rank(tmp_path: Path) -> None:
    """Sums in the order of ranks, and random numbers of each rank, made each size another run."""
    assert len(digests(tmp_path, [("shard_ddp", 1), ("zero3", 2)], num_steps=2)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_processes_have_the_bits_of_one_rank(strategy: str, backend: str, tmp_path: Path) -> None:
    """Backends carry parts; that they are added here, in one order, is the same on all."""
    command = f"-m tests.strategies.same_bits_job {backend} {strategy} 2 {tmp_path}".split()
    subprocess.run([sys.executable, *command], check=True, timeout=patient(120))
    saved, logged, _ = fit(tmp_path / "one")
    assert (tmp_path / "digest").read_text() == saved + logged


@pytest.mark.slow
def test_a_loader_that_does_not_shuffle_keeps_its_order_on_any_ranks(tmp_path: Path) -> None:
    """Lightning shuffled for several ranks, so that one rank had other micro-batches."""
    assert len(digests(tmp_path, [("zero2", 1), ("zero2", 2)], shuffle=False)) == 1


@pytest.mark.slow
def test_a_micro_batch_begins_with_the_buffers_of_the_step_on_every_rank(tmp_path: Path) -> None:
    """The second one of a rank began with what the rank's own first one had left before."""
    cases = [("zero1", 1), ("zero1", 2), ("zero2", 2), ("zero3", 4)]
    assert len(digests(tmp_path, cases, model="centred")) == 1


@pytest.mark.slow
def test_a_layer_that_some_ranks_leave_out_is_summed_in_order(tmp_path: Path) -> None:
    """Stage 0 sent second halves among first ones, at places that other ranks lacked."""
    cases = [("zero1", 1), ("shard_ddp", 2), ("zero2", 2), ("zero3", 4)]
    assert len(digests(tmp_path, cases, model="leaves out")) == 1


@pytest.mark.slow
def test_what_hooks_draw_follows_the_step(tmp_path: Path) -> None:
    """It followed the rank's last micro-batch, of whose gradients stages showed other parts."""
    cases = [("zero1", 1), ("shard_ddp", 2), ("zero1", 4), ("zero2", 2), ("zero3", 4)]
    assert len(digests(tmp_path, cases, model="draws in hooks")) == 1


@pytest.mark.slow
def test_samples_that_workers_draw_follow_the_micro_batch(tmp_path: Path) -> None:
    """Each worker drew by its own number, so that ranks with other workers had other samples."""
    cases: list[Any] = [("zero1", 1, 0), ("zero1", 1, 2), ("zero2", 2, 1), ("zero3", 4, 0)]
    found = {
        fit(tmp_path / f"{place}", model="drawn", strategy=one, num_ranks=ranks, num_workers=many)
        for place, (one, ranks, many) in enumerate(cases)
    }
    assert len({(saved, logged) for saved, logged, _ in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["images", "gpt", "llama"])
def test_every_stage_and_size_has_the_same_bits(model: str, tmp_path: Path) -> None:
    """One digest of weights, buffers, optimizer state and logged losses for all of them."""
    assert len(digests(tmp_path, [*product(STRATEGIES, RANKS)], model=model)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["images", "gpt"])
def test_resuming_on_other_ranks_keeps_the_bits(model: str, tmp_path: Path) -> None:
    """A fit that goes on elsewhere in the middle of an epoch ends as one that was not stopped."""
    whole, _, _ = fit(tmp_path / "whole", model=model, num_steps=6)
    kinds: list[Any] = [("zero1", 2, 2), ("zero3", 8, 4), ("zero2", 4, 6)]
    saved, last = "", None
    for strategy, num_ranks, num_steps in kinds:
        place = tmp_path / strategy
        given = {"model": model, "num_ranks": num_ranks, "num_steps": num_steps, "resumed": last}
        saved, _, last = fit(place, strategy=strategy, **given)
    assert saved == whole


class ByHand(Images):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Synchronised(Images):
    """Has a batch norm over the ranks' batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.SyncBatchNorm(6)


class OfAllRanks(Images):
    """Computes a loss of the samples of all ranks."""

    def training_step(self, batch: Any, _: int) -> Tensor:
        losses: Any = self.all_gather(self.loss(batch), sync_grads=True)
        return torch.as_tensor(losses).mean()


class Deterministic(Images):
    """Looks whether torch refuses what is not deterministic."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert torch.are_deterministic_algorithms_enabled()
        return loss


class Seldom(Images):
    """Schedules every second batch, of which a step has more on fewer ranks."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"]["frequency"] = 2
        return made


class NoLoss(Images):
    """Leaves a micro-batch out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class CountsSteps(Images):
    """Logs once in a step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("count", float(self.global_step), on_step=True)


def test_what_is_logged_once_in_a_step_is_of_that_step(tmp_path: Path) -> None:
    """As many values as a step has micro-batches were taken, and so those of steps before."""
    module, logger = CountsSteps(), CSVLogger(tmp_path, name="", version=0)
    trainer = L.Trainer(
        **SILENT | {"logger": logger},
        accelerator="cpu",
        devices=1,
        strategy=ZeRO2Strategy(backend="in_process", same_bits=True, announce=False),
        accumulate_grad_batches=2,
        max_steps=3,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(module.data(12), batch_size=2))
    assert trainer.callback_metrics["count"] == trainer.global_step - 1 == 2
    rows = (tmp_path / "version_0" / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("count")
    assert [row.split(",")[column] for row in rows[1:] if row.split(",")[column]] == [
        *("0.0", "1.0", "2.0")
    ]


def refused(
    match: str,
    module: L.LightningModule | None = None,
    *,
    kind: Any = ZeRO2Strategy,
    size: int = 48,
    loader: Any = None,
    **options: Any,
) -> None:
    """Expect a fit to be refused."""
    module = Images() if module is None else module
    strategy = kind(backend="in_process", num_ranks=2, same_bits=True, announce=False)
    given = {"accumulate_grad_batches": 4, "max_steps": 2, **SILENT, **options}
    if loader is None:
        loader = DataLoader(Images().data(size), batch_size=BATCH)
    with pytest.raises(ConfigError, match=match):
        L.Trainer(accelerator="cpu", devices=1, strategy=strategy, **given).fit(module, loader)


def test_what_cannot_have_the_same_bits_is_refused_before_training() -> None:
    """Each is refused by name, on one rank as on several."""
    refused("optimizes by hand", ByHand(), accumulate_grad_batches=1)
    refused("batch norms are synchronised", Synchronised())
    refused("leaves out steps", precision="16-true")
    refused("GradientAccumulationScheduler", callbacks=[GradientAccumulationScheduler({0: 2})])
    averaging = StochasticWeightAveraging(0.01)
    refused("computes the statistics of batch norms anew", callbacks=[averaging])
    refused("a loss of the samples of all ranks", OfAllRanks())
    refused("LambdaLR steps every 2 batches", Seldom())
    refused("returned no loss", NoLoss())
    refused("the axis 'tp' add up parts of sums", kind=TensorParallelStrategy)


def test_samples_that_cannot_be_dealt_by_their_numbers_are_refused() -> None:
    """Ranks would repeat samples, leave some out, or draw orders of their own."""
    data = Images().data(48)
    own = DataLoader(data, batch_sampler=BatchSampler(range(48), BATCH, drop_last=False))
    refused("an epoch of 25 batches would have fewer samples", size=50)
    refused("expected a torch DataLoader", loader=own)
    refused("a multiple of accumulate_grad_batches", limit_train_batches=6)


def test_options_that_cannot_have_the_same_bits_are_refused() -> None:
    """Schemes whose ranks train apart, or have parts of layers, say why."""
    with pytest.raises(ConfigError, match="the compressor"):
        ZeRO2Strategy(same_bits=True, compression="int8")
    with pytest.raises(ConfigError, match="reduce_dtype"):
        ZeRO2Strategy(same_bits=True, reduce_dtype="bfloat16")
    with pytest.raises(ConfigError, match="whose scales are of blocks"):
        ZeRO3Strategy(same_bits=True, quantized_gathers="int8")
    with pytest.raises(ConfigError, match="let ranks train apart"):
        LocalSGDStrategy(same_bits=True, sync_every=4)
    with pytest.raises(ConfigError, match="add up each micro-batch by itself"):
        ElasticStrategy(same_bits=True, scheme="zero1")


SOME = [("shard_ddp", 1), ("shard_ddp", 4), ("zero1", 2), ("zero2", 2), ("zero3", 8)]
SOME += [("zero2", 1), ("zero2", 4)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("model", ["images", "gpt"])
def test_narrow_formats_have_the_same_bits(model: str, precision: str, tmp_path: Path) -> None:
    """Sums are rounded once; a step on several parameters at once rounded bf16 otherwise."""
    assert len(digests(tmp_path, SOME, model=model, precision=precision)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding_has_the_same_bits(stage: int, precision: str, tmp_path: Path) -> None:
    """Sums within a copy are parts of the same tree; bf16-true was refused, as of pipelines."""
    one, logged, _ = fit(tmp_path / "one", precision=precision)
    for num_ranks, size in ((4, (2, 2)), (8, (2, 4))):
        given: dict[str, Any] = {"zero_stage": stage, "data_parallel_size": size}
        given |= {"kind": HybridParallelStrategy, "precision": precision}
        found = fit(tmp_path / f"{num_ranks}", num_ranks=num_ranks, **given)
        assert found[:2] == (one, logged)


def test_operations_are_deterministic_in_a_fit_and_as_before_after_it(tmp_path: Path) -> None:
    """Torch names what it has no such form of; ranks of one process ask for it together."""
    KINDS["deterministic"] = Deterministic
    fit(tmp_path, model="deterministic", num_ranks=2, num_steps=2)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
