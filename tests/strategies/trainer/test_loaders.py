"""Loaders that Lightning takes on one device: empty ones, and batch samplers of the user's own."""

import json
from collections.abc import Callable, Iterator
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_shard import HybridParallelStrategy, TensorParallelStrategy
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.trainer.batch_samplers import AssignedBatches
from tests.examples.commands import ignoring_advice
from tests.trainers import SILENT

pytestmark = ignoring_advice(
    "Total length of `.*` across ranks is zero",
    ".*microbatches are fewer",
    "You defined a `validation_step` but have no",
    "Lightning couldn't infer the indices",
)
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
        **SILENT,
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
def test_an_evaluation_without_batches_is_over_at_once(kind: str) -> None:
    """An evaluation without batches was refused."""

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
def test_a_validation_without_batches_is_left_out_under(strategy: str) -> None:
    """A validation without batches was refused."""
    model = Counting()
    trainer_of(strategy).fit(model, plain(), [])
    assert len(model.seen) >= 4


@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2", "zero3", "local_sgd"])
@pytest.mark.parametrize("batches", [OwnBatches(), DerivedBatches([4] * 7)])
def test_a_batch_sampler_of_ones_own_gets_a_ranks_samples(strategy: str, batches: Any) -> None:
    """A batch sampler of one's own was refused."""
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
def test_ranks_of_one_model_are_assigned_the_same_batches(kind: Any) -> None:
    model = Counting()
    strategy = kind(backend="in_process", tensor_parallel_size=2)
    trainer = trainer_of(strategy, devices=4)
    trainer.fit(model, DataLoader(SAMPLES, batch_sampler=OwnBatches()))
    assert len({str(seen) for seen in model.of_ranks}) == 2  # of two data-parallel ranks
    seen = {sample for batches in model.of_ranks for batch in batches for sample in batch}
    assert seen == set(range(28))


def test_predictions_of_assigned_batches_repeat_none() -> None:
    place = [{"num_replicas": 3, "rank": rank} for rank in range(3)]
    batches = DerivedBatches([2, 3, 1, 4])
    for repeats, expected in ((False, [[0, 3], [1], [2]]), (True, [[0, 3], [1, 0], [2, 1]])):
        drawn = list(batches)
        for rank in range(3):
            assigned = AssignedBatches(
                batches,
                lambda: place[rank],  # noqa: B023
                lambda one: one,
                repeats=repeats,
            )
            assert list(assigned) == [drawn[number] for number in expected[rank]]
            assert len(assigned) == len(expected[rank])
            assert assigned.sizes == batches.sizes


class BatchesLikeTorchs(BatchSampler):
    """Is constructed as torch's, so that Lightning would make it anew."""


def weighted() -> WeightedRandomSampler:
    weights = [1.0 + index % 5 for index in range(28)]
    return WeightedRandomSampler(weights, 28, generator=torch.Generator().manual_seed(5))


def shuffled() -> RandomSampler:
    return RandomSampler(SAMPLES, generator=torch.Generator().manual_seed(6))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return cycle(range(28))


BATCH_SAMPLERS: dict[str, Callable[[], BatchSampler]] = {
    "plain": lambda: BatchSampler(SequentialSampler(SAMPLES), 5, drop_last=False),
    "drop_last": lambda: BatchSampler(SequentialSampler(SAMPLES), 5, drop_last=True),
    "weighted": lambda: BatchSampler(weighted(), 4, drop_last=False),
    "shuffled": lambda: BatchSampler(shuffled(), 4, drop_last=False),
    "like torch's": lambda: BatchesLikeTorchs(weighted(), 4, drop_last=False),
}


def two_epochs_of(kind: str, num_ranks: int) -> list[list[list[int]]]:
    """The batches of one device, of which each rank takes its own and as many as the others."""
    model = OwnLoader(kind)
    trainer_of(SingleDeviceStrategy(), devices=1, max_epochs=2).fit(model)
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    half = len(model.seen) // 2
    for epoch in (model.seen[:half], model.seen[half:]):
        padded = epoch + epoch[: -half % num_ranks]
        for rank, seen in enumerate(ranks):
            seen += padded[rank::num_ranks]
    return ranks


class OwnLoader(Counting):
    """Makes its loader in its hook, where Lightning takes note of how."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> DataLoader:
        return DataLoader(SAMPLES, batch_sampler=BATCH_SAMPLERS[self.kind]())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("kind", BATCH_SAMPLERS)
def test_batches_of_a_batch_sampler_have_its_samples(kind: str) -> None:
    """Batches of a batch sampler had one sample or another sampler."""
    given, hooked = Counting(), OwnLoader(kind)
    loader = DataLoader(SAMPLES, batch_sampler=BATCH_SAMPLERS[kind]())
    trainer_of("zero2", max_epochs=2).fit(given, loader)
    trainer_of("zero2", max_epochs=2).fit(hooked)
    assert given.of_ranks == hooked.of_ranks == two_epochs_of(kind, 2)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["tensor_parallel", "pipeline_parallel", "local_sgd"])
def test_a_batch_sampler_is_assigned_to_data_parallel_ranks_under(strategy: str) -> None:
    model = OwnLoader("weighted")
    trainer_of(strategy, max_epochs=2).fit(model)
    if strategy == "local_sgd":
        assert model.of_ranks == two_epochs_of("weighted", 2)
    else:  # a pipeline sees microbatches
        (expected,) = two_epochs_of("weighted", 1)
        assert list(chain(*model.seen)) == list(chain(*expected))


@pytest.mark.filterwarnings("ignore:You are using a custom batch sampler")
def test_predictions_of_a_plain_batch_sampler_are_made_once_with_their_indices(
    tmp_path: Path,
) -> None:
    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            (tmp_path / f"{trainer.global_rank}-{args[3]}").write_text(str(args[1]))

    for batches in (BATCH_SAMPLERS["plain"](), OwnBatches()):
        loader = DataLoader(SAMPLES, batch_sampler=batches)
        trainer_of("zero2", callbacks=[Writer("batch")]).predict(Counting(), loader)
        written = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
        assert sorted(index for batch in written for index in batch) == list(range(28))


def test_a_batch_sampler_over_a_sampler_of_ranks_has_its_batches() -> None:
    """A batch sampler over a sampler of ranks had batches of one sample."""

    class Model(Counting):
        def train_dataloader(self) -> DataLoader:
            place = self.trainer.distributed_sampler_kwargs
            sampler = DistributedSampler(SAMPLES, shuffle=False, **place)
            return DataLoader(SAMPLES, batch_sampler=BatchSampler(sampler, 7, drop_last=False))

    model = Model()
    trainer_of("zero2").fit(model)
    assert model.of_ranks[1] == [list(range(1, 14, 2)), list(range(15, 28, 2))]


def test_a_batch_sampler_without_an_end_is_refused() -> None:
    loader = DataLoader(SAMPLES, batch_sampler=BatchSampler(Endless(), 4, drop_last=False))
    with pytest.raises(ConfigError, match="BatchSampler has no length"):
        trainer_of("zero2").fit(Counting(), loader)


@pytest.mark.parametrize("assigned_by_trainer", [True, False])
def test_elastic_training_takes_batches_of_a_plain_batch_sampler(
    assigned_by_trainer: bool,
) -> None:
    """Elastic training took single samples of a plain batch sampler."""
    batches = BatchSampler(SequentialSampler(SAMPLES), 5, drop_last=True)
    model = Counting()
    trainer = trainer_of("elastic", max_epochs=2, use_distributed_sampler=assigned_by_trainer)
    trainer.fit(model, DataLoader(SAMPLES, batch_sampler=batches))
    first, second = model.of_ranks
    for steps in zip(first, second, strict=True):
        assert [len(batch) for batch in steps] == [5, 5]
    epoch = [sorted(one + other) for one, other in zip(first, second, strict=True)]
    assert epoch == [list(range(10)), list(range(10, 20))] * 2


def test_a_batch_sampler_that_knows_the_ranks_is_refused() -> None:
    loader = DataLoader(SAMPLES, batch_sampler=BatchesOfRanks())
    with pytest.raises(ConfigError, match="use_distributed_sampler=False"):
        trainer_of("zero2").fit(Counting(), loader)
    model = Counting()
    trainer_of("zero2", use_distributed_sampler=False).fit(model, loader)
    assert len(model.seen) == 7


def test_elastic_training_refuses_a_batch_sampler_by_name() -> None:
    with pytest.raises(ConfigError, match="batch sampler"):
        trainer_of("elastic").fit(Counting(), DataLoader(SAMPLES, batch_sampler=OwnBatches()))
