"""What goes wrong is one clear error of ours, at once, and the next run in this process works."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_shard import DDPStrategy, ZeRO2Strategy, ZeRO3Strategy
from lightning_shard.errors import (
    CollectiveMismatchError,
    ConfigError,
    DeadlockError,
    RankFailedError,
    ShardError,
)
from tests.processes import run_processes
from tests.trainers import SILENT

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:.*does not have many workers"),
    pytest.mark.filterwarnings(r"ignore:.*`isinstance\(treespec, LeafSpec\)` is deprecated"),
]
STRATEGIES = ["shard_ddp", "zero1", "zero2", "zero3"]


class Model(L.LightningModule):
    """A linear layer and two blocks; tests spoil one of its parts on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(8), batch_size=2)


def samples(num: int) -> TensorDataset:
    return TensorDataset(torch.ones(num, 4))


def trainer(strategy: Any, **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        **SILENT,
        "use_distributed_sampler": False,
    }
    return L.Trainer(strategy=strategy, **(defaults | options))


def fit_fails(model: L.LightningModule, strategy: str = "zero2", **options: Any) -> BaseException:
    """Return the error of a fit on two in-process ranks, after another fit that works."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the tests look at it
        trainer(f"{strategy}_in_process", **options).fit(model)
    trainer(f"{strategy}_in_process").fit(Model())
    return caught.value


# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ZeRO3Strategy(bucket_mbs=1), ["ZeRO3Strategy", "bucket_mbs", "'bucket_mb'"]),
        (lambda: DDPStrategy(backend="glo"), ["glo", "gloo"]),
        (lambda: DDPStrategy(backend="gloo", num_ranks=2), ["num_ranks=2", "gloo", "devices=2"]),
        (lambda: DDPStrategy(num_ranks=2), ["num_ranks=2", "in_process"]),
        (lambda: DDPStrategy(backend="in_process", num_ranks=0), ["num_ranks", "0"]),
        (lambda: ZeRO2Strategy(bucket_mb=0), ["bucket_mb", "above 0", "0"]),
        (lambda: ZeRO2Strategy(bucket_mb=float("nan")), ["bucket_mb", "nan"]),
        (lambda: ZeRO3Strategy(units="Block"), ["units", "'Block'", "['Block']"]),
        (lambda: ZeRO3Strategy(units=[]), ["units", "[]"]),
        (lambda: ZeRO3Strategy(activation_checkpointing="ful"), ["'full'", "'selective'", "'ful'"]),
        (
            lambda: ZeRO3Strategy(activation_checkpointing=True),  # type: ignore[arg-type]
            ["'selective' or None or a list, each entry a string such as ['Block'], got True"],
        ),
        (lambda: ZeRO3Strategy(activation_checkpointing=[]), ["activation_check", "['Block']"]),
        (lambda: ZeRO3Strategy(reduce_dtype="float8"), ["reduce_dtype", "float8", "bfloat16"]),
        (lambda: ZeRO3Strategy(timeout=0), ["timeout", "above 0", "0"]),
    ],
)
def test_options_are_checked_when_they_are_given(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_precision_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"bf16-mixd.*bf16-mixed"):
        trainer("zero3_in_process", precision="bf16-mixd")


def test_a_precision_plugin_that_cannot_work_on_shards() -> None:
    class Odd(L.pytorch.plugins.precision.MixedPrecision):
        pass

    with pytest.raises(ConfigError, match=r"Odd.*bf16-mixed"):
        trainer("zero3_in_process", plugins=[Odd("bf16-mixed", "cpu")])


def test_in_process_is_one_host() -> None:
    with pytest.raises(ConfigError, match="num_nodes=2"):
        trainer("zero3_in_process", num_nodes=2)


def test_units_of_an_unknown_class_name_the_nearest() -> None:
    error = _fit_error(ZeRO3Strategy(backend="in_process", num_ranks=2, units=["Linaer"]))
    assert isinstance(error, ConfigError)
    assert "'Linaer'" in str(error)
    assert "Linear" in str(error)


def _fit_error(strategy: Any, model: L.LightningModule | None = None) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        trainer(strategy, devices=1).fit(model or Model())
    return caught.value


# --- models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_to_train(strategy: str) -> None:
    model = Model()
    model.requires_grad_(False)
    error = fit_fails(model, strategy)
    assert isinstance(error, ConfigError)
    assert "Model has no parameter that requires a gradient" in str(error)


class Lazy(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(1)


def test_lazy_parameters_have_no_shape_yet() -> None:
    error = fit_fails(Lazy())
    assert isinstance(error, ConfigError)
    assert "head.weight" in str(error)


class Baseline(L.LightningModule):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("mean", batch[0].mean(), sync_dist=True)

    def val_dataloader(self) -> Any:
        return DataLoader(samples(4), batch_size=2)


def test_a_model_without_parameters_can_be_validated() -> None:
    (metrics,) = trainer("zero2_in_process").validate(Baseline(), verbose=False)
    assert metrics["mean"] == 1.0


# --- ranks that disagree ---------------------------------------------------------------------


class OtherShape(Model):
    def configure_model(self) -> None:
        self.head = nn.Linear(4, 1 + self.global_rank)


class OtherName(Model):
    def configure_model(self) -> None:
        if self.global_rank:
            self.more = nn.Linear(1, 1)


class OtherFrozen(Model):
    def configure_model(self) -> None:
        self.head.requires_grad_(self.global_rank == 0)


class OtherBuffer(Model):
    def configure_model(self) -> None:
        self.register_buffer("table", torch.zeros(3 + self.global_rank))


class OtherOptimizer(Model):
    def configure_optimizers(self) -> Optimizer:
        kind = [torch.optim.SGD, torch.optim.Adagrad][self.global_rank]
        return kind(self.parameters(), lr=0.1)


class OtherGroups(Model):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD([self.parameters, self.head.parameters][self.global_rank](), lr=0.1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (OtherShape, ["head.weight is (1, 4)", "(2, 4)", "on rank 1"]),
        (OtherName, ["more.weight is nothing", "on rank 1"]),
        (OtherFrozen, ["head.weight", "requires_grad=True", "requires_grad=False"]),
        (OtherBuffer, ["table", "(3,)", "(4,)"]),
        (OtherOptimizer, ["SGD", "Adagrad"]),
        (OtherGroups, ["layers.0.weight", "6 on rank 0 and 2 on rank 1"]),
    ],
)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero3"])
def test_different_models(model: type[Model], words: list[str], strategy: str) -> None:
    error = fit_fails(model(), strategy)
    assert isinstance(error, ConfigError)
    for word in words:
        assert word in str(error)


class Unequal(Model):
    sizes = (8, 6)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.sizes[self.global_rank]), batch_size=2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise AssertionError("training has begun")


class OneIsEmpty(Unequal):
    sizes = (8, 0)


@pytest.mark.parametrize(("model", "counts"), [(Unequal, "{0: 4, 1: 3}"), (OneIsEmpty, "1: 0}")])
def test_unequal_numbers_of_batches_before_training(model: type[Model], counts: str) -> None:
    error = fit_fails(model())
    assert isinstance(error, ConfigError)
    assert counts in str(error)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[list[Tensor]]:
        return ([torch.ones(4)] for _ in range(self.num))


class Streams(Model):
    sizes = (8, 6)

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(self.sizes[self.global_rank]), batch_size=2)


class OneStreamIsEmpty(Streams):
    sizes = (8, 0)


class OneHasALength(Model):
    def train_dataloader(self) -> Any:
        return DataLoader([Stream(8), samples(8)][self.global_rank], batch_size=2)


@pytest.mark.parametrize("model", [Streams, OneStreamIsEmpty])
def test_a_stream_that_ends_early(model: type[Model]) -> None:
    error = fit_fails(model())
    assert isinstance(error, ConfigError)
    assert "only 1 of 2 ranks have one more batch" in str(error)


def test_a_stream_beside_a_sized_loader() -> None:
    trainer("zero2_in_process").fit(OneHasALength())


class StopsAlone(Model):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.global_rank == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_stops_alone_does_not_hang(strategy: str) -> None:
    error = fit_fails(StopsAlone(), strategy)
    assert isinstance(error, (DeadlockError, CollectiveMismatchError, RankFailedError))


class BlockOnOneRank(Model):
    """Uses a block that its peer does not: stage 3 cannot gather it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.head(self.layers[1](x) if self.global_rank else x)


def test_a_block_used_on_one_rank_only_does_not_hang() -> None:
    with pytest.raises((CollectiveMismatchError, DeadlockError)):
        trainer(ZeRO3Strategy(backend="in_process", num_ranks=2, bucket_mb=1e-5)).fit(
            BlockOnOneRank()
        )
    trainer("zero3_in_process").fit(Model())


# --- ranks that raise ------------------------------------------------------------------------


class Oops(Exception):  # noqa: N818
    """The user's own."""


class RaisesInStep(Model):
    rank = 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == self.rank and batch_idx == 2:
            raise Oops("in training_step")
        return super().training_step(batch, batch_idx)


class RaisesOnRankZero(RaisesInStep):
    rank = 0


class RaisesInBackward(Model):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.layers(batch[0])
        if self.global_rank == 1:
            hidden.register_hook(self.fail)
        return self.head(hidden).sum()

    def fail(self, grad: Tensor) -> None:
        raise Oops("in backward")


class RaisesInOptimizers(Model):
    def configure_optimizers(self) -> Optimizer:
        if self.global_rank == 1:
            raise Oops("in configure_optimizers")
        return super().configure_optimizers()


class RaisesInLoader(Model):
    def train_dataloader(self) -> Any:
        if self.global_rank == 1:
            raise Oops("in train_dataloader")
        return super().train_dataloader()


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise Oops("in the dataset")


class RaisesInDataset(Model):
    def train_dataloader(self) -> Any:
        if self.global_rank == 1:
            return DataLoader(Broken(torch.ones(8, 4)), batch_size=2)
        return super().train_dataloader()


RAISING = [
    RaisesInStep,
    RaisesOnRankZero,
    RaisesInBackward,
    RaisesInOptimizers,
    RaisesInLoader,
    RaisesInDataset,
]


@pytest.mark.parametrize("model", RAISING)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero3"])
def test_the_callers_error_is_the_users_own(model: type[Model], strategy: str) -> None:
    error = fit_fails(model(), strategy)
    assert isinstance(error, Oops)
    rank = getattr(model, "rank", 1)
    assert f"rank {rank} of 2" in " ".join(error.__notes__)


class Interrupted(Model):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 0 and batch_idx == 1:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_then_another_fit(strategy: str) -> None:
    assert isinstance(fit_fails(Interrupted(), strategy), (SystemExit, KeyboardInterrupt))


def test_the_same_module_trains_again_after_a_failure() -> None:
    model = RaisesInStep()
    for strategy in ("shard_ddp", "zero2"):
        fit_fails(model, strategy)
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        assert shapes == {name: tuple(param.shape) for name, param in Model().named_parameters()}


# --- two processes ---------------------------------------------------------------------------


def failures_over_gloo() -> list[tuple[str, str]]:
    """Run what can fail one after the other in one process group; return types and messages."""
    seen = []
    for model in (OtherShape(), Unequal(), Streams()):
        strategy = ZeRO3Strategy(backend="gloo", timeout=3, bucket_mb=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream's
            try:
                trainer(strategy).fit(model)
            except ShardError as error:
                seen.append((type(error).__name__, str(error)))
            else:
                seen.append(("none", ""))
    return seen


@pytest.mark.slow
def test_ranks_that_disagree_over_gloo() -> None:
    for rank, errors in enumerate(run_processes(failures_over_gloo, 2)):
        shape, unequal, stream = errors
        assert shape[0] == "ConfigError", rank
        assert "head.weight is (1, 4) " in shape[1]
        assert "on rank 0 and (2, 4) " in shape[1]
        assert unequal[0] == "ConfigError"
        assert "{0: 4, 1: 3}" in unequal[1]
        assert stream[0] == "ConfigError"
