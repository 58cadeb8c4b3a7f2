"""A fit that goes on from a checkpoint on the same ranks has the bits of one without a break."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_shard import (
    AsyncSGDStrategy,
    DDPStrategy,
    ElasticStrategy,
    LocalSGDStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
)
from lightning_shard.data_parallel.compression import OneBit, PowerSGD, TopK
from tests.checkpoint.interrupted import (
    EPOCH_BATCHES,
    IGNORED,
    RANKS,
    SCHEMES,
    Dropping,
    SaveAt,
    deviation,
    fit,
    with_a_break,
)
from tests.checkpoint.kept_runs import DILOCO
from tests.trainers import cpu_trainer

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in IGNORED),
    pytest.mark.filterwarnings("error:You're resuming from a checkpoint that ended before"),
]

WITHIN, AT_END = EPOCH_BATCHES + 2, EPOCH_BATCHES  # steps after which a run is interrupted
NUM_STEPS = 2 * EPOCH_BATCHES + 1
EPOCHS: dict[str, Any] = {"max_steps": -1, "max_epochs": 3}


def momentum_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


class Descending(Dropping):
    """Trained by SGD."""

    def __init__(self) -> None:
        super().__init__(momentum_sgd)


class Normed(Dropping):
    """With running statistics, which each rank has of its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.BatchNorm1d(8))


KEPT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "topk": (lambda: DDPStrategy(**RANKS, compression=TopK(ratio=0.05)), Descending),
    "topk_adam": (
        lambda: ZeRO2Strategy(**RANKS, compression=TopK(0.1, warmup_steps=2, adam=True)),
        Dropping,
    ),
    "onebit": (lambda: DDPStrategy(**RANKS, compression=OneBit(warmup_steps=2)), Dropping),
    "onebit_zero1": (lambda: ZeRO1Strategy(**RANKS, compression=OneBit(warmup_steps=2)), Dropping),
    "powersgd": (lambda: DDPStrategy(**RANKS, compression=PowerSGD(rank=1)), Descending),
    "int8": (lambda: DDPStrategy(**RANKS, compression="int8"), Dropping),
    "fp16": (lambda: ZeRO1Strategy(**RANKS, compression="fp16"), Dropping),
    "local_sgd": (lambda: LocalSGDStrategy(**RANKS, sync_every=3), Dropping),
    "local_momentum": (lambda: LocalSGDStrategy(**RANKS, sync_every=3), Descending),
    "local_mixing": (
        lambda: LocalSGDStrategy(**RANKS, sync_every=3, overlap_steps=2, mixing=0.5),
        Dropping,
    ),
    "diloco": (lambda: LocalSGDStrategy(**RANKS, sync_every=3, outer_optimizer=DILOCO), Dropping),
    "diloco_topk": (
        lambda: LocalSGDStrategy(
            **RANKS,
            sync_every=4,
            fragments=2,
            overlap_steps=1,
            outer_optimizer=DILOCO,
            compression=TopK(ratio=0.1),
        ),
        Dropping,
    ),
    # with a bound, who comes first after a break is not who would have without it
    "async_sgd": (lambda: AsyncSGDStrategy(**RANKS, staleness_bound=0), Dropping),
}


SLOW = ("topk_adam", "onebit_zero1", "int8", "fp16", "local_momentum", "diloco")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in KEPT]
)
def test_a_rank_goes_on_from_what_it_has_kept(name: str, tmp_path: Path) -> None:
    """A rank went on from the mean of what all had kept."""
    make, make_module = KEPT[name]
    broken, whole = with_a_break(
        make, tmp_path / "a.ckpt", at=WITHIN, num_steps=NUM_STEPS, make_module=make_module
    )
    assert broken.losses == whole.losses[WITHIN:]
    assert deviation(broken, whole) == 0.0


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("at", [WITHIN, pytest.param(AT_END, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_resumed_fit_draws_the_same_dropout_and_goes_on_in_the_epoch(
    name: str, at: int, tmp_path: Path
) -> None:
    """A resumed fit dropped others and began the epoch anew."""
    broken, whole = with_a_break(SCHEMES[name], tmp_path / "a.ckpt", at=at, num_steps=NUM_STEPS)
    assert broken.losses == whole.losses[at:]
    assert deviation(broken, whole) == 0.0


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("at", [WITHIN, AT_END])
def test_dropout_of_elastic_ranks_is_that_of_their_run(at: int, tmp_path: Path) -> None:
    """Dropout of elastic ranks was that of another run."""

    def make() -> ElasticStrategy:
        return ElasticStrategy(**RANKS, scheme="zero2", snapshot_every=1)

    broken, whole = with_a_break(make, tmp_path / "a.ckpt", at=at, num_steps=NUM_STEPS)
    assert broken.losses == whole.losses[at:]
    assert deviation(broken, whole) == 0.0


def test_running_statistics_of_each_rank_are_its_own_under_local_sgd(tmp_path: Path) -> None:
    """Running statistics of each rank were averaged under local SGD."""
    broken, whole = with_a_break(
        KEPT["local_sgd"][0], tmp_path / "a", at=WITHIN, num_steps=NUM_STEPS, make_module=Normed
    )
    assert deviation(broken, whole) == 0.0


class Validating(Dropping):
    """Validates with a loader that draws random numbers."""

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("error", self.training_step(batch, batch_idx), sync_dist=True)

    @override
    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), 4)


def check(
    callbacks: list[L.Callback],
    path: Callable[[], Path],
    make_module: Callable[[], Any] = Dropping,
    **options: Any,
) -> None:
    """Compare a fit with one that goes on from what a callback of it has saved."""
    make = SCHEMES["shard_ddp"]
    whole = fit(make(), NUM_STEPS, callbacks, make_module=make_module, **options)
    options["enable_checkpointing"] = False
    broken = fit(make(), NUM_STEPS, resume=path(), make_module=make_module, seed=77, **options)
    assert 0 < len(broken.losses) < len(whole.losses)
    assert broken.losses == whole.losses[-len(broken.losses) :]
    assert deviation(broken, whole) == 0.0


@pytest.mark.parametrize("options", [{}, EPOCHS], ids=["steps", "epochs"])
def test_the_last_batch_of_an_epoch_is_not_repeated_after_its_hooks_have_saved(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The last batch of an epoch was repeated after its hooks had saved."""
    saving = SaveAt(tmp_path / "a.ckpt", AT_END, at_epoch_end=True)
    check([saving], lambda: tmp_path / "a.ckpt", **options)


class Beginning(Dropping):
    """Notes the epochs that begin."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    @override
    def on_train_epoch_start(self) -> None:
        self.epochs.append(self.current_epoch)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("options", [{}, EPOCHS], ids=["steps", "epochs"])
def test_an_epoch_counts_after_the_last_batch_of_another_was_saved(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """An epoch was not counted after the last batch of another was saved."""
    make, told = SCHEMES["shard_ddp"], {"make_module": Beginning, **options}
    whole = fit(make(), NUM_STEPS, **told)
    fit(make(), NUM_STEPS, [SaveAt(tmp_path / "a", AT_END)], **told)
    second = SaveAt(tmp_path / "b", 2 * AT_END)
    once = fit(make(), NUM_STEPS, [second], resume=tmp_path / "a", seed=77, **told)
    twice = fit(make(), NUM_STEPS, resume=tmp_path / "b", seed=78, **told)
    assert (once.epochs, twice.epochs) == ([1, 2], [2])
    assert once.losses == whole.losses[AT_END:]
    assert twice.losses == whole.losses[2 * AT_END :]
    assert deviation(twice, whole) == 0.0


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("options", [{}, EPOCHS], ids=["steps", "epochs"])
def test_a_validation_within_an_epoch_is_neither_repeated_nor_left_out(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A validation within an epoch was repeated or left out."""
    saving = ModelCheckpoint(tmp_path, "{step}", monitor="error", save_top_k=-1)
    options = options | {"val_check_interval": 2, "enable_checkpointing": True}
    check([saving], lambda: tmp_path / f"step={WITHIN}.ckpt", Validating, **options)


def test_a_step_of_several_batches_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    check(
        [SaveAt(tmp_path / "a.ckpt", 3)],
        lambda: tmp_path / "a.ckpt",
        accumulate_grad_batches=2,
        **EPOCHS,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("at_epoch_end", [False, True])
def test_workers_of_a_loader_go_on_in_their_order(at_epoch_end: bool, tmp_path: Path) -> None:
    """Workers of a loader shuffled anew."""
    at = AT_END if at_epoch_end else WITHIN
    check(
        [SaveAt(tmp_path / "a.ckpt", at, at_epoch_end=at_epoch_end)],
        lambda: tmp_path / "a.ckpt",
        lambda: Dropping(workers=1),
    )


def test_a_checkpoint_of_a_finished_fit_has_random_streams(tmp_path: Path) -> None:
    """A checkpoint of a finished fit had no random streams."""
    torch.manual_seed(0)
    first, path = Dropping(), tmp_path / "a.ckpt"
    trainer = cpu_trainer(strategy=SCHEMES["zero3"](), max_epochs=1)
    trainer.fit(first)
    trainer.save_checkpoint(path)
    whole = fit(SCHEMES["zero3"](), 0, **EPOCHS)
    broken = fit(SCHEMES["zero3"](), 0, resume=path, seed=77, **EPOCHS)
    assert first.losses + broken.losses == whole.losses
    assert deviation(broken, whole) == 0.0
