"""Loaders that Lightning takes on one device: empty ones, and batch samplers of the user's own."""

from collections.abc import Iterator
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from lightning_shard import HybridParallelStrategy, TensorParallelStrategy
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.batch_samplers import DealtBatches
from tests.examples.commands import ignore_upstream_warnings

pytestmark = [
    *ignore_upstream_warnings,
    pytest.mark.filterwarnings("ignore:Total length of `.*` across ranks is zero"),
    pytest.mark.filterwarnings("ignore:.*microbatches are fewer"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Lightning couldn't infer the indices"),
]
STRATEGIES = ("shard_ddp", "zero2", "zero3", "tensor_parallel", "pipeline_parallel", "local_sgd")
SAMPLES = TensorDataset(torch.arange(28.0)[:, None].expand(28, 4) / 28)


class Counting(L.LightningModule):
    """Notes the samples that it is given, which are numbered."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.seen: list[list[int]] = []
        self.evaluated = 0

    def note(self, batch: list[Tensor]) -> None:
        self.seen.append((batch[0][:, 0] * 28).round().int().tolist())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not hasattr(batch[0], "origin"):  # on a later stage of a pipeline
            self.note(batch)
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluated += 1

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.note(batch)
        return batch[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        if hasattr(strategy, "collectives"):
            self.of_ranks = strategy.collectives.all_gather_object(self.seen)


class OwnBatches:
    """Batches of four in an order of its own, drawn anew each time; derives from nothing."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(28).tolist()
        return iter([order[start : start + 4] for start in range(0, 28, 4)])

    def __len__(self) -> int:
        return 7


class DerivedBatches(BatchSampler):
    """Derives from torch's and is constructed in another way."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


class BatchesOfRanks(OwnBatches):
    num_replicas = 2


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def trainer_of(strategy: Any, **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": f"{strategy}_in_process" if isinstance(strategy, str) else strategy,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return L.Trainer(**(defaults | options))


def plain() -> DataLoader:
    return DataLoader(SAMPLES, batch_size=4)


EMPTY: dict[str, Any] = {
    "list": list,
    "dict": dict,
    "combined": lambda: CombinedLoader([]),
    "combined-empty": lambda: CombinedLoader({"one": []}),
    "one-of-two": lambda: [plain(), []],
    "dataset": lambda: DataLoader(TensorDataset(torch.zeros(0, 4)), batch_size=4),
    "stream": lambda: DataLoader(Nothing()),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_evaluation_without_batches_was_refused(kind: str) -> None:
    class Model(Counting):
        def validation_step(
            self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            self.evaluated += 1

        test_step = validation_step

        def train_dataloader(self) -> DataLoader:
            return plain()

        def val_dataloader(self) -> Any:
            return EMPTY[kind]()

    model = Model()
    trainer_of("zero2", num_sanity_val_steps=0).fit(model)
    assert len(model.seen) == 4
    trainer = trainer_of("zero2")
    trainer.validate(model, verbose=False)
    trainer.test(model, EMPTY[kind](), verbose=False)
    assert (model.evaluated > 0) == (kind == "one-of-two")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_validation_without_batches_was_refused_under(strategy: str) -> None:
    model = Counting()
    trainer_of(strategy).fit(model, plain(), [])
    assert len(model.seen) >= 4


def test_training_without_batches_is_still_refused() -> None:
    with pytest.raises(ConfigError, match="no batch on any rank"):
        trainer_of("zero2").fit(Counting(), [])


@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2", "zero3", "local_sgd"])
@pytest.mark.parametrize("batches", [OwnBatches(), DerivedBatches([4] * 7)])
def test_a_batch_sampler_of_ones_own_was_refused(strategy: str, batches: Any) -> None:
    L.seed_everything(3)
    model = Counting()
    trainer_of(strategy, max_epochs=2).fit(
        model,
        DataLoader(SAMPLES, batch_sampler=batches),
        DataLoader(SAMPLES, batch_sampler=batches),
    )
    first, second = model.of_ranks
    assert [len(batch) for batch in first + second] == [4] * 16
    for epoch in (slice(0, 4), slice(4, 8)):  # seven batches, and one of them again
        seen = sorted(sample for batch in first[epoch] + second[epoch] for sample in batch)
        assert set(seen) == set(range(28))
    assert model.evaluated > 0


@pytest.mark.parametrize("kind", [TensorParallelStrategy, HybridParallelStrategy])
def test_ranks_of_one_model_are_dealt_the_same_batches(kind: Any) -> None:
    model = Counting()
    strategy = kind(backend="in_process", tensor_parallel_size=2)
    trainer = trainer_of(strategy, devices=4)
    trainer.fit(model, DataLoader(SAMPLES, batch_sampler=OwnBatches()))
    assert len({str(seen) for seen in model.of_ranks}) == 2  # of two data-parallel ranks
    seen = {sample for batches in model.of_ranks for batch in batches for sample in batch}
    assert seen == set(range(28))


def test_predictions_of_dealt_batches_repeat_none() -> None:
    place = [{"num_replicas": 3, "rank": rank} for rank in range(3)]
    batches = DerivedBatches([2, 3, 1, 4])
    for repeats, expected in ((False, [[0, 3], [1], [2]]), (True, [[0, 3], [1, 0], [2, 1]])):
        drawn = list(batches)
        for rank in range(3):
            dealt = DealtBatches(batches, lambda: place[rank], lambda one: one, repeats=repeats)  # noqa: B023
            assert list(dealt) == [drawn[number] for number in expected[rank]]
            assert len(dealt) == len(expected[rank])
            assert dealt.sizes == batches.sizes


def test_a_batch_sampler_that_knows_the_ranks_is_left_to_lightning() -> None:
    loader = DataLoader(SAMPLES, batch_sampler=BatchesOfRanks())
    with pytest.raises(TypeError, match="use_distributed_sampler=False"):
        trainer_of("zero2").fit(Counting(), loader)
    model = Counting()
    trainer_of("zero2", use_distributed_sampler=False).fit(model, loader)
    assert len(model.seen) == 7


def test_elastic_training_refuses_a_batch_sampler_by_name() -> None:
    with pytest.raises(ConfigError, match="batch sampler"):
        trainer_of("elastic").fit(Counting(), DataLoader(SAMPLES, batch_sampler=OwnBatches()))
