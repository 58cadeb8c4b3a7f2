"""Validation, checkpoints and the end see what ranks agree on; training does not notice."""

from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_shard.data_parallel.compression import PowerSGD, TopK
from tests.checkpoint.saved_sections import own_parameters_in
from tests.strategies.local_sgd.local_training import (
    BATCH,
    ByHand,
    OnRanks,
    Tiny,
    TinyData,
    Weights,
    assert_same_weights,
    slow_but,
    tiny_data,
    trainer_of,
    weights_of,
)
from tests.strategies.models import ConvNet
from tests.strategies.parity import GlobalBatches, build, ignoring, quiet_trainer

pytestmark = ignoring(
    "Be aware that when using `ckpt_path`", "You're resuming from a checkpoint that ended before"
)

STREAMING: dict[str, Any] = {
    "sync_every": 4,
    "fragments": 2,
    "overlap_steps": 2,
    "outer_optimizer": "nesterov",
}
WAYS: dict[str, dict[str, Any]] = {
    "average": {"sync_every": 3},
    "average, overlapped": {"sync_every": 4, "overlap_steps": 2},
    "diloco": {"sync_every": 3, "outer_optimizer": "nesterov"},
    "streaming": STREAMING,
    "int8": STREAMING | {"compression": "int8"},
    "topk": STREAMING | {"compression": TopK(ratio=0.25, warmup_steps=2)},
    "powersgd": STREAMING | {"compression": PowerSGD(rank=1)},
}


class ValidatedConvNet(ConvNet):
    """Counts its validations."""

    num_validated = 0

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.num_validated += 1
        self.log("val_loss", self.loss(batch), sync_dist=True)


class WithValidation(GlobalBatches):
    """The module's own loader does not count beside a datamodule."""

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.dataset, batch_size=6)


class Final(L.Callback):
    """Every rank's module when the fit has ended, while the strategy still holds it."""

    def __init__(self) -> None:
        self.of_ranks: list[Weights] = []

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = weights_of(pl_module)
        self.of_ranks = trainer.strategy.collectives.all_gather_object(weights)


def assert_same_bits(got: Weights, expected: Weights) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("way", "precision"),
    slow_but(
        [("average", "bf16-mixed"), ("streaming", "32-true")],
        product(WAYS, ("32-true", "bf16-mixed")),
    ),
)
def test_validation_does_not_change_training(way: str, precision: str) -> None:
    """A model with running statistics, validated at steps where fragments are on their way, too."""

    def fit(*, num_validations: int, **validation: Any) -> tuple[list[list[Weights]], Weights]:
        torch.manual_seed(7)
        model, steps = ValidatedConvNet(), OnRanks()
        data = WithValidation(model, 5)
        trainer = trainer_of(2, 10, WAYS[way], callbacks=[steps], precision=precision, **validation)
        trainer.fit(model, datamodule=data)
        assert model.num_validated >= num_validations
        return steps.of_ranks, weights_of(model)

    steps, weights = fit(num_validations=0, limit_val_batches=0)
    validated_steps, validated_weights = fit(
        num_validations=10, val_check_interval=1, limit_val_batches=1
    )
    assert_same_bits(validated_weights, weights)
    for mine, validated in zip(steps, validated_steps, strict=True):
        for one, other in zip(mine, validated, strict=True):
            assert_same_bits(other, one)


@pytest.mark.parametrize("way", slow_but(["int8"], WAYS))
def test_every_rank_ends_with_the_consensus(way: str) -> None:
    final, model = Final(), build("conv")
    trainer_of(3, 7, WAYS[way], callbacks=[final]).fit(model, datamodule=GlobalBatches(model))
    for weights in final.of_ranks:
        assert_same_bits(weights, final.of_ranks[0])
        assert_same_bits(weights, weights_of(model))


class Watch(L.Callback):
    """What validation sees of each rank, what it logs, and what a checkpoint then holds."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seen: list[Weights] = []
        self.val_losses: list[float] = []

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.seen = trainer.strategy.collectives.all_gather_object(weights_of(pl_module))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.val_losses.append(trainer.callback_metrics["val_loss"].item())
            trainer.save_checkpoint(self.file)


@pytest.mark.parametrize("outer", [None, "nesterov"])
def test_validation_and_checkpoints_see_the_consensus(outer: str | None, tmp_path: Path) -> None:
    """After step 5, two steps after ranks have met."""
    watch, module = Watch(tmp_path / "five.ckpt"), Tiny()
    options = {"sync_every": 3, "outer_optimizer": outer}
    validation = {"val_check_interval": 5, "limit_val_batches": 2}
    trainer = trainer_of(2, 5, options, callbacks=[watch], **validation)
    trainer.fit(module, datamodule=TinyData(tiny_data(2 * BATCH * 5)))
    expected = ByHand.of(2)
    for step in range(5):
        expected.step(step)
        if step == 2 and outer is None:
            expected.average()
        elif step == 2:
            for name in expected.common:
                expected.set(name, expected.outer_step(name, expected.outer_gradient(name)))
    means = {name: expected.mean(lambda own, n=name: own[n]) for name in expected.common}
    consensus = expected.common if outer else means
    for seen in watch.seen:
        assert_same_weights(seen, consensus)
    judge = Tiny()
    judge.load_state_dict(consensus)
    values, wanted = tiny_data(16).tensors
    assert watch.val_losses == [pytest.approx(judge.training_step([values, wanted]).item())]
    checkpoint = torch.load(tmp_path / "five.ckpt", weights_only=True)
    assert_same_weights(dict(checkpoint["state_dict"]), consensus)
    saved = checkpoint["optimizer_states"][0]["state"]
    of_ranks = [one.state_dict()["state"] for one in expected.optimizers]
    for index, entries in saved.items():
        momenta = torch.stack([state[index]["momentum_buffer"] for state in of_ranks])
        torch.testing.assert_close(entries["momentum_buffer"], momenta.mean(0))
    assert_same_weights(own_parameters_in(checkpoint["lightning_shard"]), means)


class SaveAt(L.Callback):
    def __init__(self, file: Path, step: int) -> None:
        self.file, self.step = file, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("way", "step"),
    slow_but(
        [("average, overlapped", 5), ("topk", 3), ("streaming", 6)], product(WAYS, (3, 4, 5, 6))
    ),
)
def test_a_single_rank_resumes_with_the_same_bits(way: str, step: int, tmp_path: Path) -> None:
    """What is the mean over ranks in a checkpoint is everything there is of one."""
    same_batches = TensorDataset(*(part.repeat(12, 1) for part in tiny_data(BATCH).tensors))
    data, file, full = TinyData(same_batches), tmp_path / "saved.ckpt", Tiny()
    trainer_of(1, 12, WAYS[way], callbacks=[SaveAt(file, step)]).fit(full, datamodule=data)
    resumed = Tiny(learning_rate=0.0)
    trainer_of(1, 12, WAYS[way]).fit(resumed, datamodule=data, ckpt_path=file)
    assert_same_bits(weights_of(resumed), weights_of(full))


@pytest.mark.parametrize("num_ranks", slow_but([3], [1, 3, 4]))
def test_another_number_of_ranks_resumes_diloco(num_ranks: int, tmp_path: Path) -> None:
    """Every rank begins with the mean of the ranks' parameters and momenta, one round goes on."""
    options: dict[str, Any] = {"sync_every": 4, "outer_optimizer": "nesterov"}
    file = tmp_path / "six.ckpt"
    data = TinyData(tiny_data(2 * BATCH * 6))
    trainer_of(2, 6, options, callbacks=[SaveAt(file, 6)]).fit(Tiny(), datamodule=data)
    saved = torch.load(file, weights_only=True)
    state = saved["lightning_shard"]["local_sgd"]
    expected = ByHand.of(num_ranks)
    expected.common = dict(saved["state_dict"])
    outer = state["outer"]["state"]
    expected.momentum = {name: one["momentum_buffer"] for name, one in outer.items()}
    for copy, optimizer in zip(expected.copies, expected.optimizers, strict=True):
        copy.load_state_dict(own_parameters_in(saved["lightning_shard"]))
        optimizer.load_state_dict(deepcopy(saved["optimizer_states"][0]))
    steps = OnRanks()
    module = Tiny()
    data = TinyData(tiny_data(num_ranks * BATCH * 6))
    trainer = trainer_of(num_ranks, 9, options, callbacks=[steps], max_epochs=2)
    trainer.fit(module, datamodule=data, ckpt_path=file)
    for step in range(3):
        expected.step(step)
        if step == 1:  # the eighth
            for name in expected.common:
                expected.set(name, expected.outer_step(name, expected.outer_gradient(name)))
        for rank, copy in enumerate(expected.copies):
            assert_same_weights(steps.of_ranks[rank][step], dict(copy.state_dict()))


def test_a_checkpoint_after_the_fit_keeps_the_outer_momentum(tmp_path: Path) -> None:
    """Going on from the end of a round is going on."""
    options: dict[str, Any] = {"sync_every": 3, "outer_optimizer": "nesterov"}
    same_batches = TensorDataset(*(part.repeat(12, 1) for part in tiny_data(BATCH).tensors))
    data, full, first, second = TinyData(same_batches), Tiny(), Tiny(), Tiny()
    trainer_of(1, 9, options).fit(full, datamodule=data)
    trainer = trainer_of(1, 6, options)
    trainer.fit(first, datamodule=data)
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    trainer_of(1, 9, options).fit(second, datamodule=data, ckpt_path=tmp_path / "six.ckpt")
    assert_same_bits(weights_of(second), weights_of(full))


def test_a_checkpoint_of_averaged_gradients_goes_on_as_local_sgd(tmp_path: Path) -> None:
    """The steps that it has count towards the warm-up."""
    file, data = tmp_path / "four.ckpt", TinyData(tiny_data(2 * BATCH * 4))
    trainer = quiet_trainer(
        strategy="shard_ddp_in_process",
        devices=2,
        max_steps=4,
        callbacks=[SaveAt(file, 4)],
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        limit_val_batches=0,
    )
    trainer.fit(Tiny(), datamodule=data)
    steps = OnRanks()
    options = {"sync_every": 2, "warmup_steps": 5}
    trainer = trainer_of(2, 8, options, callbacks=[steps], max_epochs=2)
    trainer.fit(Tiny(), datamodule=data, ckpt_path=file)
    name = "network.0.weight"
    first, second = ([one[name] for one in way] for way in steps.of_ranks)
    met = [torch.equal(one, other) for one, other in zip(first, second, strict=True)]
    assert met == [True, False, True, False]


def test_another_outer_optimizer_starts_anew(tmp_path: Path) -> None:
    """Adam could not do anything with the momentum of SGD."""
    file, data = tmp_path / "six.ckpt", TinyData(tiny_data(BATCH * 6))
    options: dict[str, Any] = {"sync_every": 2, "outer_optimizer": "nesterov"}
    trainer_of(1, 6, options, callbacks=[SaveAt(file, 6)]).fit(Tiny(), datamodule=data)
    options["outer_optimizer"] = partial(torch.optim.Adam, lr=0.01)
    module = Tiny()
    trainer_of(1, 10, options, max_epochs=2).fit(module, datamodule=data, ckpt_path=file)
    assert all(torch.isfinite(value).all() for value in weights_of(module).values())
