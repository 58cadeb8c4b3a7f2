"""Where a resumed fit goes on in its data: at the next batch, and never twice as far."""

import random
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lightning_shard import DDPStrategy, ZeRO3Strategy
from tests.checkpoint.interrupted import IGNORED, RANKS, SaveAt, fit
from tests.trainers import cpu_trainer

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in IGNORED]

NOT_RESUMABLE = "ignore:You're resuming from a checkpoint that ended before"
NUM_SAMPLES, BATCH = 24, 2


class Seeing(L.LightningModule):
    """Notes its samples.

    Args:
        data: Loader of the samples 0, 1, 2 ...; None for one whose sampler is Lightning's.
    """

    def __init__(self, data: Any = None, batch: int = BATCH) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[float]] = []
        self._data, self._batch = data, batch

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        rows = self.trainer.strategy.all_gather(x.flatten())
        self.seen.append(sorted(rows.flatten().tolist()))
        return (x * self.weight).mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @override
    def train_dataloader(self) -> Any:
        if self._data is not None:
            return self._data()
        return DataLoader(samples(), self._batch, shuffle=True)


def samples() -> Dataset[Any]:
    return TensorDataset(torch.arange(float(NUM_SAMPLES))[:, None])


def seen_after(
    path: Path, at: int, make_module: Any, strategy: Any = None, again: Any = None
) -> tuple[Any, Any]:
    """Return what a fit sees, and what one sees that goes on from a checkpoint of it.

    Args:
        path: Place of the checkpoint.
        at: Number of steps after which it is saved.
        make_module: Makes the module.
        strategy: The strategy of the second fit; None for the same.
        again: Makes the module of the second fit; None for the same.
    """
    whole = fit(DDPStrategy(**RANKS), 6, [SaveAt(path, at)], make_module=make_module)
    second = strategy or DDPStrategy(**RANKS)
    broken = fit(second, 6, resume=path, make_module=again or make_module, seed=77)
    return whole.seen, broken.seen


def test_other_ranks_of_the_same_global_batch_began_the_epoch_anew(tmp_path: Path) -> None:
    whole, got = seen_after(
        tmp_path / "a",
        2,
        Seeing,
        ZeRO3Strategy(**(RANKS | {"num_ranks": 4})),
        lambda: Seeing(batch=1),
    )
    assert got == whole[2:]


def test_a_fit_goes_on_where_more_ranks_have_fewer_batches_than_were_trained_on(
    tmp_path: Path,
) -> None:
    """A fit ended where more ranks had fewer batches than were trained on."""
    with pytest.warns(UserWarning, match="after 16 samples: 4 are trained on once more"):
        whole, got = seen_after(
            tmp_path / "a", 5, Seeing, DDPStrategy(**(RANKS | {"num_ranks": 4}))
        )
    assert len(got) == 1
    assert sorted(got[0]) == sorted([*whole[4], *whole[5]])


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("before", "after", "at", "options"),
    [
        (4, 2, 1, {}),
        (2, 4, 4, {}),
        (2, 3, 3, {}),
        (2, 4, 6, {}),  # all of the epoch
        (4, 2, 2, {"limit_train_batches": 3}),
        (4, 2, 1, {"accumulate_grad_batches": 2}),
    ],
)
def test_a_batch_of_another_size_gives_each_sample_once(
    before: int, after: int, at: int, options: Any, tmp_path: Path
) -> None:
    """A batch of another size left samples out or gave them twice."""
    options |= {"max_epochs": 2}
    fits = [
        fit(
            DDPStrategy(**(RANKS | {"num_ranks": num_ranks})), steps, callbacks, resume=resume,
            make_module=Seeing, **options,
        )
        for num_ranks, steps, callbacks, resume in (
            (before, at, [SaveAt(tmp_path / "a", at)], None),
            (after, -1, [], tmp_path / "a"),
        )
    ]  # fmt: skip
    seen = [sample for one in fits for rows in one.seen for sample in rows]
    every = 2 if "limit_train_batches" not in options else 1
    counts = [seen.count(float(number)) for number in range(NUM_SAMPLES)]
    assert min(counts) >= every - (before == 4 and every == 1)
    if every == 2:
        assert counts == [2] * NUM_SAMPLES
    else:
        first = [sample for rows in (*fits[0].seen, *fits[1].seen[:1]) for sample in rows]
        assert len(set(first)) == len(first) == 20


class Endless(IterableDataset[Any]):
    """Samples without a length."""

    @override
    def __iter__(self) -> Any:
        return iter([torch.tensor([float(number)]) for number in range(NUM_SAMPLES)])


def endless() -> Any:
    return DataLoader(Endless(), BATCH, collate_fn=lambda rows: [torch.stack(rows)])


def test_data_without_a_length_goes_on(tmp_path: Path) -> None:
    whole, got = seen_after(tmp_path / "a", 2, lambda: Seeing(endless))
    assert got == whole[2:]
    assert got[0] == [4.0, 4.0, 5.0, 5.0]


class Placed(TensorDataset):
    """Goes to its place by itself."""

    begin = 0

    @override
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__((index + self.begin) % NUM_SAMPLES)

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place."""


@pytest.mark.filterwarnings(NOT_RESUMABLE)
def test_data_that_goes_to_its_place_by_itself_goes_there_once(tmp_path: Path) -> None:
    """Data that goes to its place by itself went twice as far."""

    def placed() -> Any:
        data = Placed(*samples().tensors)  # type: ignore[attr-defined]
        return DataLoader(data, BATCH)

    whole, got = seen_after(tmp_path / "a", 2, lambda: Seeing(placed))
    assert got == whole[:4]


class Shelf:
    """A loader that knows its place: samples of its own rank, and how many it has handed out."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.state = {"rank": self.rank, "next": 0}

    def __iter__(self) -> Any:
        while self.state["next"] < NUM_SAMPLES:
            self.state["next"] += 1
            yield [torch.tensor([100.0 * self.state["rank"] + self.state["next"]])]

    def __len__(self) -> int:
        return NUM_SAMPLES

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place."""
        self.state = dict(state)


@pytest.mark.filterwarnings(NOT_RESUMABLE)
def test_every_rank_goes_to_its_own_place_in_its_data(tmp_path: Path) -> None:
    """Every rank went to the place of rank 0 in its data."""
    whole, got = seen_after(tmp_path / "a", 2, lambda: Seeing(Shelf))
    assert whole[2] == [3.0, 103.0]
    assert got == whole[2:]


class PlacedModule(L.LightningDataModule):
    """Loads a state, so that it may know its place."""

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(samples(), BATCH)

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.filterwarnings(NOT_RESUMABLE)
def test_a_data_module_that_loads_a_state_is_left_alone(tmp_path: Path) -> None:
    fit(DDPStrategy(**RANKS), 2, [SaveAt(tmp_path / "a", 2)], make_module=Seeing)
    torch.manual_seed(0)
    model = Seeing()
    trainer = cpu_trainer(strategy=DDPStrategy(**RANKS), max_steps=3)
    trainer.fit(model, datamodule=PlacedModule(), ckpt_path=tmp_path / "a")
    assert len(model.seen) == 1


class OwnOrder:
    """A sampler that draws each order from a generator of its own, as torchdata's does."""

    def __init__(self, kind: str = "torch") -> None:
        self.generator: Any = {
            "torch": torch.Generator().manual_seed(5),
            "python": random.Random(5),
            "numpy": np.random.default_rng(5),
        }[kind]

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Any:
        if isinstance(self.generator, torch.Generator):
            return iter(torch.randperm(NUM_SAMPLES, generator=self.generator).tolist())
        order = list(range(NUM_SAMPLES))
        self.generator.shuffle(order)
        return iter(order)


class StatefulLoader(DataLoader[Any]):
    """Goes to its place by the number of batches, as torchdata's `StatefulDataLoader` does."""

    given = begin = 0

    @override
    def __iter__(self) -> Any:
        self.given, begin, self.begin = self.begin, self.begin, 0
        list(self.sampler)  # it asks for the order more than once
        for batch in islice(super().__iter__(), begin, None):
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place."""
        self.begin = state["given"]


class EagerLoader(DataLoader[Any]):
    """Draws an epoch's order, and all else, where it is iterated, as a loader with workers does."""

    @override
    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


def resumed_in_mid_epoch(tmp_path: Path, make: Any, at: int = 8) -> tuple[Any, Any]:
    """Return what a fit sees behind step `at`, and what one sees that is resumed there."""
    whole, broken = (
        fit(DDPStrategy(**RANKS), 10, make_module=lambda: Seeing(make), **options)
        for options in (
            {"callbacks": [SaveAt(tmp_path / "a", at)]},
            {"resume": tmp_path / "a", "seed": 77},
        )
    )
    return whole.seen[at:], broken.seen


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("at", [2, 8])
@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
@pytest.mark.parametrize("loader", [DataLoader, StatefulLoader, EagerLoader])
def test_an_order_that_is_drawn_from_an_own_generator_goes_on(
    loader: Any, kind: str, at: int, tmp_path: Path
) -> None:
    """A new generator had drawn another order: 10 of 40 samples twice, and 10 never."""

    def make() -> Any:
        return loader(samples(), BATCH, sampler=OwnOrder(kind))

    expected, got = resumed_in_mid_epoch(tmp_path, make, at)
    assert got == expected


@pytest.mark.parametrize("at", [2, 8])
def test_an_order_within_a_batch_sampler_goes_on(at: int, tmp_path: Path) -> None:
    """What gives ranks its batches hid its generator: samples were seen twice, and others never."""

    def make() -> Any:
        return DataLoader(samples(), batch_sampler=BatchSampler(OwnOrder(), BATCH, drop_last=True))

    expected, got = resumed_in_mid_epoch(tmp_path, make, at)
    assert got == expected


def test_workers_go_on_in_a_second_epoch(tmp_path: Path) -> None:
    """The order was drawn as that of the first epoch: samples were seen twice, and others never."""

    def make() -> Any:
        return DataLoader(samples(), BATCH, sampler=OwnOrder(), num_workers=1)

    expected, got = resumed_in_mid_epoch(tmp_path, make)
    assert got == expected


class LazyOrder(DistributedSampler[Any]):
    """Draws each number when it is asked for, and tells where it is; nobody loads its state."""

    def __init__(self) -> None:
        super().__init__(range(NUM_SAMPLES), 1, 0)  # type: ignore[arg-type]  # of one rank: its own
        self.generator = torch.Generator().manual_seed(5)

    @override
    def __iter__(self) -> Any:
        for _ in range(NUM_SAMPLES):
            yield int(torch.randint(NUM_SAMPLES, (), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place."""
        self.generator.set_state(state["generator"])


@pytest.mark.parametrize("at", [2, 8])
def test_a_sampler_whose_state_nobody_loads_goes_on(at: int, tmp_path: Path) -> None:
    """Its generator's state was taken for a state that somebody has loaded: other samples."""

    def make() -> Any:
        return DataLoader(samples(), BATCH, sampler=LazyOrder())

    expected, got = resumed_in_mid_epoch(tmp_path, make, at)
    assert got == expected
