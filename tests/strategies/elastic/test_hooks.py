"""Elastic fits whose hooks freeze layers and set attributes: as on one device, come who may."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_shard import ElasticStrategy
from lightning_shard.testing import Fault, injected_faults
from tests.strategies.parity import ignoring
from tests.trainers import cpu_trainer

pytestmark = ignoring(
    ".*callbacks used to create the checkpoint need to be",
    ".*ModelCheckpoint.*exists and is not empty",
)

STEPS_PER_EPOCH = 4
LOST = [Fault(1, 1, "drop", at_step=6)]  # back from epoch 1 into epoch 0's last snapshot
ENDS = [Fault(1, 1, "drop", at_step=10)]
JOINS = [Fault(3, 1, "add", at_step=9)]
IN_VALIDATION = [Fault(1, 1, "drop", at_step=8)]  # that of the second epoch


class Points(Dataset[Any]):
    """Points that get larger with their difficulty."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(48, 8, generator=generator)
        self.y = torch.randn(48, 4, generator=generator)
        self.difficulty = 0

    def __len__(self) -> int:
        return len(self.x)

    @override
    def __getitem__(self, index: int) -> Any:
        return self.x[index] * (1 + self.difficulty), self.y[index]


class Net(L.LightningModule):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(self.body(batch[0]))), batch[1])

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


def fit(
    net: Net,
    faults: Iterable[Fault] = (),
    scheme: Any = None,
    *,
    validates: bool = False,
    callbacks: Any = (),
    max_epochs: int = 3,
    **options: Any,
) -> Net:
    """Fit on three ranks, or without a scheme on one device."""
    strategy: Any = "auto"
    if scheme:
        options = {"snapshot_every": 3, "global_batch_size": 12} | options
        strategy = ElasticStrategy(backend="in_process", scheme=scheme, **options)
    trainer = cpu_trainer(
        strategy=strategy,
        devices=3 if scheme else 1,
        max_epochs=max_epochs,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[*callbacks],
    )
    validation = DataLoader(Points(), batch_size=4) if validates else None
    with injected_faults(faults):
        trainer.fit(net, DataLoader(Points(), batch_size=12), validation)
    return net


def made(kind: Any, *args: Any) -> Any:
    L.seed_everything(0, verbose=False)
    return kind(*args)


def assert_same_weights(net: Net, expected: Net) -> None:
    for (name, got), wanted in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            got, wanted, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


class Thawing(Net):
    """Trains its body, or freezes it, from the second epoch on."""

    def __init__(self, thaws: bool) -> None:
        super().__init__()
        self._thaws = thaws
        self.body.requires_grad_(not thaws)

    @override
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.body.requires_grad_(self._thaws)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("thaws", [True, False], ids=["thaws", "freezes"])
@pytest.mark.parametrize("faults", [LOST, ENDS, JOINS], ids=["lost", "ends", "joins"])
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero1", "zero2", "zero3"])
def test_layers_frozen_or_thawed_in_mid_run_stay_so(scheme: Any, faults: Any, thaws: bool) -> None:
    """The next loss ended the job ("flat buffers of (144, 68) elements"), and nobody could join."""
    expected = fit(made(Thawing, thaws))
    net = fit(made(Thawing, thaws), faults, scheme)
    assert_same_weights(net, expected)
    assert net.body.weight.requires_grad == thaws


class AddingAGroup(Thawing):
    """Gives its body to the optimizer when it is thawed."""

    def __init__(self) -> None:
        super().__init__(True)

    @override
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            optimizer: Any = self.optimizers()
            optimizer.optimizer.add_param_group({"params": self.body.parameters(), "lr": 0.03})

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.5)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "faults",
    [[*LOST, Fault(3, 1, "add", at_step=9)], [Fault(1, 2, "drop", at_step=5)]],
    ids=["lost-joins", "lost behind the border"],
)
def test_groups_added_in_mid_run_are_there_on_newcomers(faults: Any) -> None:
    """Their optimizers had one group too few, which a check of the snapshot refused."""
    expected = fit(made(AddingAGroup))
    assert_same_weights(fit(made(AddingAGroup), faults, "zero2"), expected)


@pytest.mark.slow
def test_a_checkpoint_that_is_gone_back_to_says_what_trained(tmp_path: Path) -> None:
    """The steps after it were done again with the body thawed, epochs before it was."""
    expected = fit(made(Thawing, True))
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=1)
    faults = [Fault(1, 3, "drop", at_step=5), Fault(2, 4, "drop", at_step=5)]  # buddies
    net = fit(made(Thawing, True), faults, "zero2", callbacks=[saver], snapshot_every=5)
    assert_same_weights(net, expected)


class Curriculum(Net):
    """Sets a loss weight in several ways, and a dataset's difficulty, when an epoch begins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factors, self.scale = 1.0, {"loss": 1.0}, torch.ones(())

    @override
    def on_train_epoch_start(self) -> None:
        epoch = self.current_epoch
        self.weight, self.factors["loss"] = 0.5**epoch, 1.0 + epoch
        self.scale, self.late = torch.tensor(1.0 + epoch), epoch
        self.trainer.train_dataloader.dataset.difficulty = epoch / 4

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight * self.factors["loss"] * self.scale * self.loss(batch) / (1 + self.late)


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        [Fault(3, 1, "add", at_step=5)],
        [Fault(1, 1, "drop", at_step=5)],
        [Fault(1, 2, "fail", at_step=5)],
        [Fault(3, 1, "add", at_step=2), Fault(0, 1, "drop", at_step=10)],
    ],
    ids=["joins", "back over a border", "fails", "newcomer tells"],
)
@pytest.mark.parametrize("scheme", ["zero2", "shard_ddp"])
def test_what_an_epochs_hooks_set_counts_for_who_joins_or_goes_back(
    scheme: Any, faults: Any
) -> None:
    """Who joined in mid-epoch had the values of before, who went back those of the next epoch."""
    expected = fit(made(Curriculum))
    assert_same_weights(fit(made(Curriculum), faults, scheme), expected)


class CollectsInValidation(Net):
    """Collects losses of validation in a list and in a sum, without emptying them at its begin."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.total = torch.zeros(2)
        self.results: list[list[float]] = []

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch).detach()
        self.losses.append(loss.item())
        self.total += torch.stack([loss, torch.ones(())])
        if batch_idx == 2:
            self.all_gather(loss)  # where a rank is lost

    @override
    def on_validation_epoch_end(self) -> None:
        mine = torch.tensor([sum(self.losses), float(len(self.losses)), *self.total.tolist()])
        a, b, c, d = self.all_gather(mine).reshape(-1, 4).sum(0).tolist()
        self.results.append([a / b, c / d])
        self.losses.clear()
        self.total.zero_()


@pytest.mark.slow
def test_a_validation_that_is_done_again_collects_nothing_twice() -> None:
    """Lists and sums kept what the part that was cut short had added."""
    expected = fit(made(CollectsInValidation), validates=True)
    net = fit(made(CollectsInValidation), IN_VALIDATION, "zero2", validates=True)
    assert torch.tensor(net.results).allclose(torch.tensor(expected.results), atol=1e-5)
    assert len(net.results) == 3


class EachItsOwn(Net):
    """Sets another value on every rank."""

    mine = -1

    @override
    def on_train_epoch_start(self) -> None:
        self.mine = 10 * self.current_epoch + self.global_rank


class Raises(Callback):
    """Raises an error on one rank, once."""

    has_raised = False

    def __init__(self) -> None:
        self.has_raised = False

    @override
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4 and trainer.global_rank == 1 and not self.has_raised:
            self.has_raised = True
            raise ZeroDivisionError("once")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Thread 3 of the in-process ranks failed")
def test_values_of_each_rank_are_not_told_to_who_joins() -> None:
    """Nobody said that newcomers lack them."""
    with pytest.warns(UserWarning, match="mine of the module"):
        fit(made(EachItsOwn), [Fault(3, 1, "add", at_step=5)], "zero2")


@pytest.mark.slow
def test_a_rank_that_raises_once_remembers_that_it_has() -> None:
    """Taken back, its flag would let it raise again until it is evicted."""
    expected = fit(made(Net))
    assert_same_weights(fit(made(Net), scheme="zero2", callbacks=[Raises()]), expected)
