"""Which batches the ranks are given: the same within a tensor-parallel group, or an error."""

from collections.abc import Iterator
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_shard import ConfigError, TensorParallelStrategy
from lightning_shard.pipeline_parallel.containers import digest
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring(
    r"Using `DistributedSampler` with the dataloaders", r"This process .* is multi-threaded"
)


class Pair(L.LightningModule):
    """Two split layers; `seen` has the first feature of each sample that a rank was given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 8), nn.Linear(8, 2)
        self.seen: dict[str, list[list[float]]] = {"fit": [], "validate": [], "predict": []}
        self.gathered: dict[str, list[list[list[float]]]] = {}

    def step(self, batch: list[Tensor], stage: str) -> Tensor:
        self.seen[stage].append(batch[0][:, 0].tolist())
        return self.down(torch.relu(self.up(batch[0]))).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step(batch, "fit")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch, "validate")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step(batch, "predict")

    def gather(self, stage: str) -> None:
        self.gathered[stage] = self.trainer.strategy.collectives.all_gather_object(self.seen[stage])

    def on_train_end(self) -> None:
        self.gather("fit")

    def on_validation_end(self) -> None:
        self.gather("validate")

    def on_predict_end(self) -> None:
        self.gather("predict")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(num_ranks: int = 4, **options: Any) -> L.Trainer:
    strategy = TensorParallelStrategy(
        backend="in_process",
        num_ranks=num_ranks,
        tensor_parallel_size=2,
        plan={"up": "colwise", "down": "rowwise"},
    )
    defaults: dict[str, Any] = {
        "max_steps": -1,
        "max_epochs": 2,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
    }
    return quiet_trainer(strategy=strategy, **(defaults | options))


def numbered(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * num_samples).view(num_samples, 2) / 100)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_group_shares_shuffled_batches_and_groups_share_none(num_ranks: int) -> None:
    model = Pair()
    loader = DataLoader(numbered(24), batch_size=3, shuffle=True)
    trainer(num_ranks).fit(model, loader)
    batches = model.gathered["fit"]
    assert batches[0] == batches[1]
    first_epoch = len(batches[0]) // 2
    samples = [x for rank in batches[::2] for batch in rank[:first_epoch] for x in batch]
    assert sorted(samples) == sorted(numbered(24).tensors[0][:, 0].tolist())
    assert samples != sorted(samples)
    assert batches[0][:first_epoch] != batches[0][first_epoch:]  # another order in each epoch
    assert batches[-1] == batches[-2]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("num_samples", [5, 7, 9])
def test_uneven_lengths_in_validation_and_prediction(num_samples: int) -> None:
    model = Pair()
    loader = DataLoader(numbered(num_samples), batch_size=2)
    trainer().validate(model, loader, verbose=False)
    validated = model.gathered["validate"]
    assert validated[0] == validated[1]
    assert validated[2] == validated[3]
    trainer().predict(model, loader)
    predicted = model.gathered["predict"]
    assert predicted[0] == predicted[1]
    assert predicted[2] == predicted[3]
    samples = [x for rank in predicted[::2] for batch in rank for x in batch]
    assert sorted(samples) == sorted(numbered(num_samples).tensors[0][:, 0].tolist())


class OfRank(Dataset[Tensor]):
    """A dataset that differs from rank to rank, as one that reads its rank's file."""

    def __init__(self, width: bool) -> None:
        self.width = width

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        rank = torch.distributed.get_rank() % 2
        return torch.full((2,), index + rank / 8)


def collate_of_rank(samples: list[Tensor]) -> list[Tensor]:
    """Give ranks batches of different sizes: their collectives would never fit."""
    rank = torch.distributed.get_rank() % 2
    return [torch.stack(samples[rank:])]


@pytest.mark.parametrize("collate", [None, collate_of_rank])
def test_other_batches_on_the_ranks_of_a_group_are_refused(collate: Any) -> None:
    """Other batches on the ranks of a group trained nonsense."""
    dataset = OfRank(width=collate is not None)
    collate = collate or (lambda samples: [torch.stack(samples)])
    loader = DataLoader(dataset, batch_size=2, collate_fn=collate)
    with pytest.raises(ConfigError, match=r"ranks [02], [13] share every layer.*batch 0 of"):
        trainer().fit(Pair(), loader)


class LateStranger(OfRank):
    """Differs from the eighth batch on."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) if index >= 32 else torch.full((2,), float(index))


def test_a_difference_that_comes_late_is_found() -> None:
    loader = DataLoader(
        LateStranger(width=False), batch_size=2, collate_fn=lambda samples: [torch.stack(samples)]
    )
    with pytest.raises(ConfigError, match=r"batch 16 of train loader 0"):
        trainer(use_distributed_sampler=False).fit(Pair(), loader)


class Stream(IterableDataset[Tensor]):
    """As many samples as the rank says."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.lengths[torch.distributed.get_rank()]):
            yield torch.full((2,), float(index))


def test_streams_of_different_lengths_in_a_group() -> None:
    loader = DataLoader(Stream((8, 6, 8, 8)), batch_size=2, collate_fn=lambda s: [torch.stack(s)])
    with pytest.raises(ConfigError, match=r"only 3 of 4 ranks have one more batch"):
        trainer().fit(Pair(), loader)


class Augmented(Dataset[Tensor]):
    """Each sample is made by the worker's random numbers."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2) + float(np.random.rand())


def test_seeded_workers_draw_the_same_numbers_on_each_rank_of_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeded workers drew other numbers on each rank of a group."""
    monkeypatch.setenv("PL_SEED_WORKERS", "0")  # restored by monkeypatch
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    L.seed_everything(3, workers=True, verbose=False)
    model = Pair()
    loader = DataLoader(
        Augmented(), batch_size=2, num_workers=1, collate_fn=lambda s: [torch.stack(s)]
    )
    trainer(max_epochs=1).fit(model, loader)
    batches = model.gathered["fit"]
    assert batches[0] == batches[1]
    assert batches[2] == batches[3]
    assert batches[0] != batches[2]


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.double)),
        ({"text": ["a", "b"]}, {"text": ["a", "c"]}),
        ([torch.ones(3, dtype=torch.bfloat16)], [torch.tensor([1, 1, 2], dtype=torch.bfloat16)]),
        ({"x": (1, np.arange(3))}, {"x": (1, np.arange(1, 4))}),
        (torch.tensor(True), torch.tensor(False)),
    ],
)
def test_the_digest_tells_batches_apart(batch: Any, other: Any) -> None:
    assert digest(batch) != digest(other)
    assert digest(batch) == digest(batch)


def test_the_digest_looks_at_part_of_a_large_batch() -> None:
    large = torch.zeros(1 << 22)
    changed = large.clone()
    changed[:1024] = 1
    assert digest(large) != digest(changed)
    assert digest([torch.zeros(0), torch.zeros(3, 2).t()]) != 0
