"""Predictions of in-process ranks: the list that one device has, whatever the scheme."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler
from typing_extensions import override

from tests.strategies.parity import ignoring
from tests.trainers import cpu_trainer

pytestmark = ignoring(".*Couldn't infer the batch indices")


class Numbers(Dataset[Any]):
    """The numbers from 0."""

    def __init__(self, length: int) -> None:
        self.x = torch.arange(float(length))[:, None]

    def __len__(self) -> int:
        return len(self.x)

    @override
    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


class Stream(IterableDataset[Any]):
    """The same without a length, all of it on every rank."""

    @override
    def __iter__(self) -> Any:
        return iter(Numbers(10))


class Adding(L.LightningModule):
    """Predicts the numbers and what it adds to them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(1, 64), nn.Linear(64, 64), nn.Linear(64, 1))

    @override
    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"x": batch, "y": self.blocks(batch), "loader": dataloader_idx}

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def predict(
    strategy: str, devices: int, loaders: Any, module: type[Adding] = Adding, **options: Any
) -> Any:
    callbacks = options.pop("callbacks", [])
    torch.manual_seed(0)
    trainer = cpu_trainer(
        strategy=strategy, devices=devices, callbacks=callbacks,
        )  # fmt: skip
    return trainer.predict(module(), loaders, **options)


def loader(length: int, batch: int = 4) -> DataLoader[Any]:
    return DataLoader(Numbers(length), batch)


def assert_like_one_device(strategy: str, devices: int, make: Any) -> None:
    expected, got = predict("auto", 1, make()), predict(strategy, devices, make())
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("length", [16, 17, 23])
def test_all_shares_come_in_the_order_of_the_data(length: int) -> None:
    """Rank 0's were given: 8 rows for 16."""
    assert_like_one_device("zero2_in_process", 2, lambda: loader(length))


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(
    ("scheme", "devices"),
    [
        ("zero3", 3), ("shard_ddp", 2), ("pipeline_parallel", 2),
        ("hybrid_parallel", 4), ("elastic", 2), ("local_sgd", 2),
    ],
)  # fmt: skip
def test_every_scheme_gives_each_sample_once(scheme: str, devices: int) -> None:
    """Ranks of one model were not to count twice."""
    assert_like_one_device(f"{scheme}_in_process", devices, lambda: loader(20))


MAKERS: dict[str, Any] = {
    "several": lambda: [loader(9), loader(16), loader(13, 5)],
    "batch sampler": lambda: DataLoader(
        Numbers(11), batch_sampler=BatchSampler(SequentialSampler(range(11)), 3, drop_last=False)
    ),
    "single samples": lambda: DataLoader(Numbers(5), batch_size=None),
    "a stream": lambda: DataLoader(Stream(), 4),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_loaders_of_every_kind_give_what_one_device_has(kind: str) -> None:
    assert_like_one_device("zero2_in_process", 2, MAKERS[kind])


@pytest.mark.parametrize("length", [16, 5, 2])
def test_fewer_batches_than_ranks_are_made_smaller(length: int) -> None:
    """Whole batches would leave a rank without any, which Lightning refuses."""
    got = predict("zero2_in_process", 2, loader(length, 32))
    rows = torch.cat([one["x"] for one in got])
    assert rows.flatten().tolist() == list(range(length))


@pytest.mark.parametrize("length", [1, 2])
def test_fewer_samples_than_ranks_are_predicted_once(length: int) -> None:
    """A forecast of one series: Lightning refused the rank that was left without any."""
    expected, got = (
        predict("auto", 1, loader(length)),
        predict("zero3_in_process", 3, loader(length)),
    )
    assert len(got) == length
    for name in ("x", "y"):
        rows, all_ = (torch.cat([one[name] for one in given]) for given in (got, expected))
        torch.testing.assert_close(rows, all_)


class Drawing(Adding):
    """Predicts (1, samples, 1)."""

    @override
    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.blocks(batch)[None]


@pytest.mark.parametrize("length", [2, 5])
def test_samples_of_a_later_dimension_come_one_after_the_other_from_a_pipeline(length: int) -> None:
    """Microbatches of one sample each were put behind each other along the first dimension."""
    expected, got = (
        predict(strategy, devices, loader(length, 8), module=Drawing)
        for strategy, devices in (("auto", 1), ("pipeline_parallel_in_process", 2))
    )
    torch.testing.assert_close(got, expected)


class Writes(BasePredictionWriter):
    """Notes what it is given, on all ranks together."""

    given: list[Any]

    def __init__(self, interval: Any, given: list[Any]) -> None:
        super().__init__(interval)
        self.given = given

    def __deepcopy__(self, memo: Any) -> "Writes":
        return Writes(self.interval.value, self.given)

    @override
    def write_on_batch_end(
        self, trainer: Any, module: Any, one: Any, numbers: Any, *_: Any
    ) -> None:
        self.given.append((one["x"].flatten().tolist(), [float(number) for number in numbers]))

    @override
    def write_on_epoch_end(self, trainer: Any, module: Any, every: Any, numbers: Any) -> None:
        for one, mine in zip(every, numbers[0], strict=True):
            self.write_on_batch_end(trainer, module, one, mine)


@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_writers_have_each_batch_on_one_rank_and_nothing_is_returned(interval: str) -> None:
    given: list[Any] = []
    options = {"callbacks": [Writes(interval, given)], "return_predictions": False}
    assert predict("zero2_in_process", 2, loader(17), **options) is None
    assert all(rows == numbers for rows, numbers in given)
    assert sorted(row for rows, _ in given for row in rows) == list(range(17))
