"""Values of one rank come to the others whole, and what is logged is one value of all ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.core.placeholders import Placeholder
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.trainer.shared_values import SharedValues
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks
from tests.strategies.parity import quiet_trainer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Output:
    loss: Tensor
    name: str


def _shared(make_values: list[Any], num_ranks: int = 3) -> list[list[Any]]:
    """Share values of the last rank one after the other; what each rank has got."""

    def on_rank(rank: int) -> list[Any]:
        shared = SharedValues(all_ranks(), num_ranks - 1)
        is_source = rank == num_ranks - 1
        return [shared.share(value if is_source else None, CPU) for value in make_values]

    return [found or [] for found in run_ranks(on_rank, num_ranks)]


VALUES: list[Any] = [
    None,
    torch.tensor(0.1),
    {"loss": torch.tensor(0.5, dtype=torch.bfloat16), "n": 3, "share": 0.1, "text": "a"},
    Output(torch.zeros(2, 3), "first"),
    (torch.ones(65), [torch.arange(3), torch.tensor([True, False])], torch.zeros(0, 4)),
    [2**60, -(2**60), True, 1 + 2j, torch.Size([2, 3]), torch.float16, {1, 2}],
    torch.zeros(3, 4).t(),
    {"sparse": torch.eye(3).to_sparse(), "complex": torch.ones(2, dtype=torch.complex64)},
    [],
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11, which unpickles them
def test_every_rank_gets_equal_values_again_and_again() -> None:
    for received in _shared(VALUES * 2):
        for value, expected in zip(received, VALUES * 2, strict=True):
            assert type(value) is type(expected)
            assert _plain(value) == _plain(expected)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.to_dense().tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return (_plain(value.loss), value.name) if isinstance(value, Output) else value


def test_the_source_keeps_its_value_and_graph_and_others_get_copies() -> None:
    value = {"loss": torch.tensor(1.0, requires_grad=True) * 2, "x": torch.ones(100)}
    first, second = _shared([value], 2)
    assert second[0] is value
    assert first[0]["loss"] == 2.0
    assert not first[0]["loss"].requires_grad
    first[0]["x"].zero_()
    assert value["x"].sum() == 100


def test_forms_without_end_are_forgotten_and_still_arrive() -> None:
    values = [{f"name {index}": float(index)} for index in range(150)]
    first, _ = _shared(values + values[-3:], 2)
    assert first == values + values[-3:]


def test_a_value_of_another_stage_is_refused() -> None:
    elsewhere = Placeholder.of(torch.zeros(()), (4, 2), "embedding.weight")
    with pytest.raises(ConfigError, match=r"\(4, 2\) that is computed from 'embedding.weight'"):
        _shared([{"out": elsewhere}], 2)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings(r"ignore:.*`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]
SCHEMES = ["shard_ddp", "zero1", "zero2", "zero3", "elastic", "local_sgd", "async_sgd"]
# Samples of odd places go up from epoch to epoch, those of even ones down, but less.
LOGGED_VALUES = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).repeat(4, 1)


class Net(L.LightningModule):
    """Validates to known values: those of its samples, which change from epoch to epoch."""

    def __init__(self, interval: str = "epoch", monitor: str = "val", **log: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.interval, self.monitor, self.log_options = interval, monitor, log
        self.seen: dict[str, list[float]] = {"val": [], "lr": [], "train": []}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        value = self.value_of(batch[0])
        self.log("train", value, on_step=True, on_epoch=False)
        self.seen["train"].append(float(value))
        self.seen["lr"].append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.value_of(batch[0]), **self.log_options)

    def on_validation_end(self) -> None:
        self.seen["val"].append(float(self.trainer.callback_metrics["val"]))

    def value_of(self, x: Tensor) -> Tensor:
        falling, rising = x.mean(0)
        return falling / (1 + self.trainer.current_epoch) + rising * self.trainer.current_epoch

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        scheduler = {"scheduler": plateau, "monitor": self.monitor, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class OfRanks(L.Callback):
    """Keeps what the module of each rank has seen."""

    seen: dict[int, Any]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen[trainer.global_rank] = vars(pl_module)["seen"]


def fit(module: L.LightningModule, strategy: str, ranks: int = 2, **options: Any) -> list[Any]:
    """Return what each rank has seen."""
    OfRanks.seen = {}
    options = {"max_epochs": 4, "max_steps": -1, "num_sanity_val_steps": 0, **options}
    callbacks = [*options.pop("callbacks", ()), OfRanks()]
    trainer = quiet_trainer(
        strategy=strategy if ranks == 1 else f"{strategy}_in_process",
        devices=ranks,
        accumulate_grad_batches=1,
        callbacks=callbacks,
        **options,
    )
    loaders = [DataLoader(TensorDataset(LOGGED_VALUES), batch_size=4 // ranks) for _ in range(2)]
    trainer.fit(module, *loaders)
    return [OfRanks.seen[rank] for rank in sorted(OfRanks.seen)]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("strategy", SCHEMES)
def test_a_plateau_lowers_the_rates_of_all_ranks_by_one_value(strategy: str) -> None:
    """Each followed its own share: one rank's value falls here, the other's rises."""
    (alone,) = fit(Net(), "auto", ranks=1)
    first, second = fit(Net(), strategy)
    assert first["val"] == second["val"] == alone["val"]
    assert first["lr"] == second["lr"]
    assert first["lr"][::2] == alone["lr"][::2]
    assert first["lr"][-1] < 0.1


def test_a_plateau_of_steps_follows_the_mean_of_all_ranks() -> None:
    first, second = fit(Net("step", "train"), "zero2", max_epochs=2)
    assert first["train"] != second["train"]
    assert first["lr"] == second["lr"]
    assert first["lr"][-1] < 0.1


def test_the_best_checkpoint_is_that_of_one_value(tmp_path: Path) -> None:
    """Ranks kept scores, and names, of their own share."""
    scores: dict[int, Any] = {}

    class Best(ModelCheckpoint):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            scores[trainer.global_rank] = (float(self.best_model_score), self.best_model_path)

    best = Best(tmp_path, "{epoch}-{val:.3f}", monitor="val", save_top_k=1)
    (first, _) = fit(Net(), "zero2", callbacks=[best], enable_checkpointing=True)
    assert scores[0] == scores[1]
    assert scores[0][0] == min(first["val"])
    assert [one.name for one in tmp_path.iterdir()] == [f"epoch=0-val={min(first['val']):.3f}.ckpt"]


def test_a_checkpoint_of_steps_has_the_mean_of_all_ranks(tmp_path: Path) -> None:
    scores: dict[int, float] = {}

    class Best(ModelCheckpoint):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            scores[trainer.global_rank] = float(self.best_model_score)

    best = Best(tmp_path, monitor="train", every_n_train_steps=1, save_top_k=1)
    first, second = fit(Net(), "zero2", callbacks=[best], enable_checkpointing=True)
    pairs = zip(first["train"], second["train"], strict=True)
    assert scores[0] == scores[1] == min((one + other) / 2 for one, other in pairs)


def test_a_monitored_value_keeps_the_format_that_one_device_gives_it(tmp_path: Path) -> None:
    """In double precision a mean over ranks was a double: scores of checkpoints were others."""
    formats: list[torch.dtype] = []

    class Best(ModelCheckpoint):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            formats.append(self.best_model_score.dtype)  # type: ignore[union-attr]

    for strategy, ranks in (("auto", 1), ("zero2", 2)):
        best, double = Best(tmp_path / strategy, monitor="val"), {"precision": "64-true"}
        fit(Double(), strategy, ranks, callbacks=[best], enable_checkpointing=True, **double)
    assert len(formats) == 3
    assert len(set(formats)) == 1


class Double(Net):
    def value_of(self, x: Tensor) -> Tensor:
        return super().value_of(x).double()


def test_early_stopping_stops_where_one_device_does() -> None:
    """It stopped where any rank's own share had risen."""
    (alone,) = fit(Net(), "auto", ranks=1, callbacks=[EarlyStopping("val", patience=1)])
    first, second = fit(Net(), "shard_ddp", callbacks=[EarlyStopping("val", patience=1)])
    assert first["val"] == second["val"] == alone["val"]


def test_batches_of_other_sizes_count_by_their_samples() -> None:
    class Uneven(Net):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            rank = self.trainer.global_rank
            self.log("val", torch.tensor(float(rank)), batch_size=1 + 2 * rank)

    first, second = fit(Uneven(), "zero1", max_epochs=1)
    assert first["val"] == second["val"] == [0.75]


@pytest.mark.parametrize("sync_dist", [True, False])
def test_values_of_an_epoch_are_matched_by_name(sync_dist: bool) -> None:
    """With sync_dist names of one place were mixed up: .6 of .5 and .7."""

    class Names(Net):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            odd = self.trainer.global_rank % 2
            self.log(("even", "odd")[odd], torch.tensor((0.5, 0.7)[odd]), sync_dist=sync_dist)
            self.log("val", 1.0, sync_dist=sync_dist)

        def on_validation_end(self) -> None:
            found = self.trainer.callback_metrics
            self.seen["val"].append((float(found["even"]), float(found["odd"])))  # type: ignore[arg-type]

    first, second = fit(Names(), "zero2", max_epochs=1)
    assert first["val"] == second["val"] == [pytest.approx((0.5, 0.7))]


@pytest.mark.parametrize("reduce_fx", ["sum", "max", "min"])
def test_other_reductions_are_those_of_one_device(reduce_fx: str) -> None:
    (alone,) = fit(Net(reduce_fx=reduce_fx), "auto", ranks=1)
    first, second = fit(Net(reduce_fx=reduce_fx), "zero2")
    of_ranks = first["val"] if reduce_fx != "sum" else [value / 2 for value in first["val"]]
    assert first["val"] == second["val"]
    if reduce_fx == "sum":  # the batches' values: there are twice as many, of half the samples
        assert of_ranks == pytest.approx(alone["val"])


def test_values_of_steps_under_other_names_are_refused_by_name() -> None:
    class Names(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            name = ("even", "odd")[self.trainer.global_rank % 2]
            self.log(name, torch.tensor(0.5), sync_dist=True)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigError, match=r"first has logged {'even': 2} .* number 1 {'odd': 2}"):
        fit(Names(), "zero2", max_epochs=1)


def test_a_decision_in_a_hook_by_what_callbacks_get_is_the_same_on_all_ranks() -> None:
    class Decides(Net):
        def on_validation_epoch_end(self) -> None:
            if self.trainer.callback_metrics["val"] > 1:
                self.trainer.should_stop = True

    first, second = fit(Decides(), "zero3", max_epochs=8)
    assert first["val"] == second["val"]
    assert len(first["val"]) < 8
