"""In a loader as Lightning leaves it: dataset, workers, collation stay; ranks come and go."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler
from lightning.pytorch.utilities.data import _update_dataloader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_shard import ZeRO2Strategy
from lightning_shard.elastic.elastic_sampler import ElasticBatchSampler, find_order, install
from lightning_shard.elastic.epoch_order import EpochOrder
from lightning_shard.errors import ConfigError
from tests.elastic.test_elastic_sampler import resume
from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.trainers import cpu_trainer

DATA = torch.arange(23)


class Squares(Dataset[tuple[int, int]]):
    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index**2

    def __len__(self) -> int:
        return 23


class OfTheUser(BatchSampler):
    pass


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def as_list(samples: list[Any]) -> list[Any]:
    return [sample[0] for sample in samples]


def by_lightning(loader: DataLoader[Any], num_ranks: int = 3, rank: int = 1) -> DataLoader[Any]:
    """What Lightning passes to the strategy."""
    sampler = _get_distributed_sampler(
        loader, shuffle=True, overfit_batches=0, num_replicas=num_ranks, rank=rank, seed=9
    )
    updated: DataLoader[Any] = _update_dataloader(loader, sampler)
    return updated


def put(loader: DataLoader[Any], **options: Any) -> ElasticBatchSampler:
    sampler = ElasticBatchSampler(find_order(loader), **({"rank_batch": 4} | options))
    install(loader, sampler)
    return sampler


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_behind_lightnings_distributed_sampler(shuffle: bool) -> None:
    loader = by_lightning(DataLoader(Squares(), batch_size=4, shuffle=shuffle))
    assert type(loader.sampler) is DistributedSampler
    theirs = DistributedSampler[Any](
        Squares(), 1, 0, seed=9
    )  # Lightning shuffles whatever was asked
    order = find_order(loader)
    for epoch in (0, 2):
        theirs.set_epoch(epoch)
        order.set_epoch(epoch)
        assert list(order) == list(theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler([1.0, 2.0] * 9, 30),
        lambda: SubsetRandomSampler(range(3, 19)),
        lambda: list(range(22, -1, -1)),
    ],
)
def test_the_users_sampler_behind_lightnings_wrapper(make: Callable[[], Any]) -> None:
    sampler = make()
    loader = by_lightning(DataLoader(Squares(), batch_size=4, sampler=sampler))
    assert isinstance(loader.sampler, DistributedSampler)
    order = find_order(loader, seed=5)
    assert order.source is sampler
    assert list(order) == list(EpochOrder(make(), seed=5))


def test_the_order_of_a_loader_that_lightning_has_left_alone() -> None:
    assert list(find_order(DataLoader(Squares()))) == list(range(23))
    shuffled = DataLoader(Squares(), shuffle=True)
    assert list(find_order(shuffled, 3)) == list(EpochOrder(RandomSampler(Squares()), 3))


def test_all_else_of_the_loader_stays() -> None:
    loader = DataLoader(
        Squares(), batch_size=4, drop_last=True, collate_fn=as_list, worker_init_fn=print
    )
    kept = {k: v for k, v in vars(loader).items() if k not in ("sampler", "batch_sampler")}
    sampler = put(loader, rank=1, num_ranks=2, global_batch=10)
    assert {k: v for k, v in vars(loader).items() if k in kept} == kept
    assert len(loader) == len(sampler) == 5
    assert list(loader) == [[1, 3, 5], [7, 9], [11, 13, 15], [17, 19], [21]]


def test_a_loader_gets_back_what_it_had() -> None:
    loader = DataLoader(Squares(), batch_size=4)
    had = loader.sampler, loader.batch_sampler
    order = find_order(loader)
    sampler = ElasticBatchSampler(order, rank_batch=4, global_batch=8)
    remove = install(loader, sampler)
    assert find_order(loader) is order
    remove()
    assert (loader.sampler, loader.batch_sampler) == had
    with pytest.raises(ValueError, match="should not be set"):
        loader.batch_sampler = None


def test_an_iterator_of_before_goes_on() -> None:
    loader = DataLoader(Squares(), batch_size=4, collate_fn=as_list)
    old = iter(loader)
    put(loader, global_batch=23)
    assert next(old) == [0, 1, 2, 3]
    assert next(iter(loader)) == list(range(4))


def test_loaders_that_cannot_be_assigned() -> None:
    batches = OfTheUser(SequentialSampler(DATA), 2, False)
    refused: list[tuple[Any, str]] = [
        (DataLoader(Stream(), batch_size=2), r"stream \(of type Stream\)"),
        ([1, 2, 3], r"stream \(of type list\)"),
        (DataLoader(Squares(), batch_size=None), "with batch_size=None"),
        (
            DataLoader(Squares(), batch_sampler=batches),
            "sampler of type tests.elastic.test_data_loaders.OfTheUser",
        ),
    ]
    for loader, message in refused:
        with pytest.raises(ConfigError, match=message):
            find_order(loader)


class Regression(L.LightningModule):
    """Least squares in float64; knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss: Tensor = (self.layer(inputs)[:, 0] - targets).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Assigning(ZeRO2Strategy):
    """Assigns 10 samples a step, at most 2 at once."""

    batch_sampler: ElasticBatchSampler

    def process_dataloader(self, dataloader: object) -> object:
        assert isinstance(dataloader, DataLoader)
        self.batch_sampler = ElasticBatchSampler(
            find_order(dataloader),
            rank_batch=2,
            rank=self.global_rank,
            num_ranks=self.world_size,
            global_batch=10,
        )
        install(dataloader, self.batch_sampler)
        self.trainer.accumulate_grad_batches = self.batch_sampler.accumulation
        return super().process_dataloader(dataloader)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        return loss * self.batch_sampler.weight_of_batch(self.trainer.fit_loop.batch_idx)

    @property
    def trainer(self) -> L.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def regression_data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(23, 3, dtype=torch.float64, generator=generator)
    return [(one, one.sum()) for one in inputs]


def train_alone(num_epochs: int, *, shuffle: bool) -> Regression:
    """The same steps on a single device; Lightning shuffles for several ranks."""
    model, data = Regression(), regression_data()
    optimizer = model.configure_optimizers()
    order = DistributedSampler[Any](data, 1, 0, shuffle=shuffle)  # type: ignore[arg-type]
    for epoch in range(num_epochs):
        order.set_epoch(epoch)
        full = list(order)
        for begin in range(0, len(full), 10):
            samples = [data[index] for index in full[begin : begin + 10]]
            inputs, targets = (torch.stack(parts) for parts in zip(*samples, strict=True))
            optimizer.zero_grad()
            model.training_step([inputs, targets], 0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings(*(f"ignore:{message}" for message in UPSTREAM_WARNINGS))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_lightning_takes_the_steps_of_a_single_device(num_ranks: int) -> None:
    model = Regression()
    strategy = Assigning(backend="in_process", num_ranks=num_ranks)
    trainer = cpu_trainer(devices=1, strategy=strategy, precision="64-true", max_epochs=3)
    trainer.fit(model, DataLoader(regression_data(), batch_size=2))  # type: ignore[arg-type]
    assert trainer.global_step == 9
    alone = train_alone(3, shuffle=num_ranks > 1)
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_have_fetched_ahead_begin_anew_at_the_position(persistent: bool) -> None:
    loader = DataLoader(
        Squares(),
        batch_size=2,
        collate_fn=as_list,
        num_workers=2,
        persistent_workers=persistent,
        prefetch_factor=3,
    )
    assert next(iter(loader)) == [0, 1]
    sampler = put(loader, rank_batch=2, rank=0, num_ranks=2, global_batch=8)
    assert list(itertools.islice(loader, 2)) == [[0, 2], [4, 6]]
    workers = loader._iterator
    assert (workers is not None) is persistent
    resume(sampler, 0, 8)
    sampler.rescale(1, 4)
    assert len(loader) == 3
    assert list(loader) == [[9, 13], [17, 21]]
    sampler.set_epoch(1)
    assert list(loader) == [[1, 5], [9, 13], [17, 21]]
    assert loader._iterator is workers
