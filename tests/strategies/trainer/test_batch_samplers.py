"""Loaders that Lightning cannot make anew by their constructor's arguments get a rank's samples."""

from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data import TensorDataset as Tensors

from tests.examples.commands import ignoring_advice
from tests.strategies.parity import quiet_trainer

pytestmark = ignoring_advice(
    "Using `DistributedSampler` with the dataloaders",
    "You defined a `validation_step` but have no",
    ".*custom batch sampler",
    "Trying to inject `drop_last=False`",
)
SAMPLES = Tensors(torch.arange(14.0)[:, None].expand(14, 4) / 14)
ENTRIES = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


class OtherNames(DataLoader[Any]):
    """Its constructor has names of its own."""

    def __init__(self, samples: Tensors, size: int = 2, *, ordered: bool = True) -> None:
        super().__init__(samples, size, not ordered, drop_last=True)


class NoArguments(DataLoader[Any]):
    def __init__(self) -> None:
        super().__init__(SAMPLES, batch_size=4, drop_last=True)


class OneNameMore(DataLoader[Any]):
    """Passes what it does not know on, beside a name for the same."""

    def __init__(self, samples: Tensors, *, size: int, **others: Any) -> None:
        super().__init__(samples, batch_size=size, drop_last=True, **others)


class OwnIterator(DataLoader[Any]):
    """Is more than its samples: what it yields must be kept."""

    def __init__(self, size: int) -> None:
        super().__init__(SAMPLES, size, drop_last=True)
        self.offset = 14

    def __iter__(self) -> Any:
        return ([batch[0] + self.offset / 14] for batch in super().__iter__())


class OwnBatches(BatchSampler):
    def __init__(self, size: int) -> None:
        super().__init__(SequentialSampler(SAMPLES), size, drop_last=True)


class InPlace(DataLoader[Any]):
    """Its sampler yields batches for its samples to look up; one that is given yields samples."""

    def __init__(self, samples: Tensors, *, size: int, sampler: Any = None, **others: Any) -> None:
        own = BatchSampler(SequentialSampler(samples), size, True)
        batch_size = None if sampler is None else size
        super().__init__(samples, batch_size=batch_size, sampler=sampler or own, **others)


Make = Callable[[], DataLoader[Any]]
PLAIN: Make = lambda: DataLoader(SAMPLES, batch_size=4, drop_last=True)  # noqa: E731
KINDS: dict[str, Make] = {
    "by position": lambda: DataLoader(SAMPLES, 4, drop_last=True),
    "order by position": lambda: DataLoader(SAMPLES, 4, False, drop_last=True),
    "all by position": lambda: DataLoader(SAMPLES, 4, False, None, None, 0, None, False, True),
    "other names": lambda: OtherNames(SAMPLES, 4),
    "no arguments": NoArguments,
    "one name more": lambda: OneNameMore(SAMPLES, size=4),
}
WITH_BATCHES: Make = lambda: DataLoader(  # noqa: E731
    SAMPLES, batch_sampler=BatchSampler(SequentialSampler(SAMPLES), 4, True)
)
KINDS_WITH_BATCHES: dict[str, Make] = {
    "plain by position": lambda: DataLoader(
        SAMPLES, 1, None, None, BatchSampler(SequentialSampler(SAMPLES), 4, True)
    ),
    "own by position": lambda: DataLoader(SAMPLES, 1, None, None, OwnBatches(4)),
    "own in the sampler's place": lambda: InPlace(SAMPLES, size=4),
}
Seen = dict[str, list[list[list[int]]]]


class Noting(L.LightningModule):
    """Notes the numbers of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append((batch[0][:, 0] * 14).round().int().tolist())
        return self.net(batch[0]).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def teardown(self, stage: str) -> None:
        self.of_ranks = self.trainer.strategy.collectives.all_gather_object(self.seen)


def seen_in(make: Make, *, hooked: bool) -> Seen:
    """What two ranks see in each entry, of a loader that is given or made in its hook."""
    seen = {}
    for entry, hook in ENTRIES.items():
        torch.manual_seed(0)
        model = Noting()
        trainer = quiet_trainer(devices=2, strategy="zero2_in_process", max_epochs=1)
        if hooked:
            setattr(model, f"{hook}_dataloader", make)
            getattr(trainer, entry)(model)
        else:
            getattr(trainer, entry)(model, make())
        seen[entry] = model.of_ranks
    return seen


@cache
def seen_of_keywords(with_batches: bool) -> Seen:
    return seen_in(WITH_BATCHES if with_batches else PLAIN, hooked=True)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_constructor_that_lightning_cannot_call_gets_a_ranks_samples(
    kind: str, hooked: bool
) -> None:
    """A constructor that lightning could not call was an error."""
    assert seen_in(KINDS[kind], hooked=hooked) == seen_of_keywords(False)


@pytest.mark.parametrize("kind", KINDS_WITH_BATCHES)
def test_batches_passed_by_position_are_assigned(kind: str) -> None:
    """In a sampler's place they were taken for samples, of which batches were made once more."""
    seen, expected = seen_in(KINDS_WITH_BATCHES[kind], hooked=True), seen_of_keywords(True)
    if kind.startswith("own"):  # Lightning cannot tell it not to leave out the rest
        seen.pop("predict")
        expected = {entry: expected[entry] for entry in seen}
    assert seen == expected


def test_predictions_leave_no_sample_out() -> None:
    for make in (KINDS["all by position"], KINDS_WITH_BATCHES["plain by position"]):
        ranks = seen_in(make, hooked=True)["predict"]
        assert sorted(number for rank in ranks for batch in rank for number in batch) == [
            *range(14)
        ]


def test_a_loaders_own_iterator_is_kept() -> None:
    for batches in seen_in(lambda: OwnIterator(4), hooked=True).values():
        assert all(number >= 14 for rank in batches for batch in rank for number in batch)


def test_a_sampler_passed_by_position_gives_each_rank_other_samples() -> None:
    def make() -> DataLoader[Any]:
        order = RandomSampler(SAMPLES, generator=torch.Generator().manual_seed(3))
        return DataLoader(SAMPLES, 4, None, order)

    for batches in seen_in(make, hooked=True).values():
        assert sorted(n for rank in batches for batch in rank for n in batch) == [*range(14)]


def test_hooks_in_which_ranks_meet_leave_torchs_loader_as_it_was() -> None:
    """Hooks in which ranks meet left torch's loader wrapped."""

    class Meeting(Noting):
        def train_dataloader(self) -> DataLoader[Any]:
            self.trainer.strategy.barrier()
            return PLAIN()

    before = DataLoader.__init__, BatchSampler.__init__, DataLoader.__setattr__
    quiet_trainer(devices=3, strategy="zero2_in_process", max_epochs=1).fit(Meeting())
    assert before == (DataLoader.__init__, BatchSampler.__init__, DataLoader.__setattr__)
