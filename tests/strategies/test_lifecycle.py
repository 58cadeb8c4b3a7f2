"""Before, between and after fits: what is left of a run, and what the next one finds."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_shard
from lightning_shard import CheckpointError, ConfigError
from lightning_shard.precision.plugins import ShardedGradScaler
from tests.trainers import SILENT

STRATEGIES = ["shard_ddp", "zero1", "zero2", "zero3"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


def make_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    name = f"{strategy}_in_process" if isinstance(strategy, str) else strategy
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        "limit_train_batches": 4,
        "limit_val_batches": 0,
        **SILENT,
    }
    return pl.Trainer(strategy=name, **{**defaults, **options})


class Deep(BoringModel):
    """Three blocks, so that stage 3 has something to free."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.layer(x)


class FailsInTheThirdStep(Deep):
    """On rank 1 alone: where all ranks fail at one place they can still make the state whole."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 1:
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)


class Normalised(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_samples_that_do_not_divide_by_the_ranks_are_predicted(strategy: str) -> None:
    """Prediction of samples that do not divide by the ranks was refused."""
    model = Deep()
    trainer = make_trainer(strategy)
    predictions = trainer.predict(model, DataLoader(RandomDataset(32, 5)))
    assert predictions is not None
    assert len(predictions) == 5  # three of rank 0, two of rank 1
    assert [tuple(param.shape) for param in model.blocks.parameters()] == [(32, 32), (32,)] * 3


def test_a_second_fit_with_sync_batchnorm_uses_its_own_groups() -> None:
    """A second fit with `sync_batchnorm` used the groups of the first."""
    trainer = make_trainer("zero2", sync_batchnorm=True)
    model = Normalised()
    loader = DataLoader(RandomDataset(32, 32), batch_size=4)
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader)
    assert trainer.global_step == 8
    assert "forward" not in vars(model.norm)


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_a_failed_mixed_precision_fit_leaves_fp32_parameters(strategy: str) -> None:
    """A failed mixed-precision fit left bf16 parameters."""
    model = FailsInTheThirdStep()
    with pytest.raises(ValueError, match="on purpose"):
        make_trainer(strategy, precision="bf16-mixed").fit(model)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    make_trainer(strategy).validate(model, verbose=False)


def test_shards_that_a_failed_stage_3_leaves_are_refused() -> None:
    model = FailsInTheThirdStep()
    strategy = lightning_shard.ZeRO3Strategy(backend="in_process", bucket_mb=1e-3)
    with pytest.raises(ValueError, match="on purpose"):
        make_trainer(strategy).fit(model)
    with pytest.raises(ConfigError, match="only one rank's shard"):
        make_trainer("zero3").fit(model)
    make_trainer("zero3").fit(Deep())


def test_a_stage_3_that_fails_before_its_first_step_leaves_the_model_full() -> None:
    class WithLBFGS(Deep):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    model = WithLBFGS()
    with pytest.raises(ConfigError, match="LBFGS does not update each element by itself"):
        make_trainer("zero3").fit(model)
    make_trainer("shard_ddp").fit(model)


def test_sixteen_bit_formats_of_two_kinds_fit_together() -> None:
    """16-bit formats of two kinds did not fit together."""
    strategy = lightning_shard.ZeRO2Strategy(backend="in_process", reduce_dtype="float16")
    trainer = make_trainer(strategy, precision="bf16-true")
    trainer.fit(Deep())
    assert trainer.global_step == 4


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1"])
def test_micro_batches_are_not_summed_in_bf16(strategy: str) -> None:
    """Micro batches were summed in bf16."""
    num_micro_batches = 512

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)
            nn.init.constant_(self.layer.weight, 0.0)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(torch.ones(1, 8)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    model = Small()
    trainer = make_trainer(
        strategy,
        precision="bf16-mixed",
        limit_train_batches=num_micro_batches,
        accumulate_grad_batches=num_micro_batches,
    )
    trainer.fit(model, DataLoader(RandomDataset(8, 2 * num_micro_batches)))
    # each brings 1/512, which a running sum in bf16 no longer takes in from 0.5 on
    torch.testing.assert_close(model.layer.weight, torch.full((8, 8), -1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("stage_2", [False, True])
def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path, stage_2: bool) -> None:
    class TwoGroups(Deep):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.layer.parameters()}, {"params": self.blocks.parameters()}]
            return torch.optim.SGD(groups, lr=0.1)

    trainer = make_trainer("zero2", max_epochs=1)
    trainer.fit(TwoGroups())
    path = tmp_path / "two.ckpt"
    trainer.save_checkpoint(path)
    if stage_2:
        checkpoint = torch.load(path)
        checkpoint["optimizer_states"] = []
        torch.save(checkpoint, path)
    message = "state of 0 optimizers, expected 1" if stage_2 else r"groups of \[2, 6\] parameters"
    with pytest.raises(CheckpointError, match=message):
        make_trainer("zero2", max_epochs=2).fit(Deep(), ckpt_path=path)


@pytest.mark.parametrize("strategy", ["zero1", "pipeline_parallel", "local_sgd", "elastic"])
def test_an_empty_dataset_is_skipped_with_a_warning(strategy: str) -> None:
    """It was refused, where one device skips the training with the same warning."""
    with pytest.warns(UserWarning, match=r"Total length of `\w+` across ranks is zero"):
        make_trainer(strategy).fit(Deep(), DataLoader(RandomDataset(32, 0)))


def test_an_empty_stream_is_skipped_with_a_warning() -> None:
    """It was refused, where one device goes on to the next epoch."""

    class Nothing(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(())

    with pytest.warns(UserWarning, match="yielded no batch on any rank"):
        make_trainer("zero1", limit_train_batches=None).fit(Deep(), DataLoader(Nothing()))


def test_num_ranks_and_devices_that_contradict_each_other_are_refused() -> None:
    strategy = lightning_shard.ZeRO1Strategy(backend="in_process", num_ranks=3)
    with pytest.raises(ConfigError, match=r"num_ranks=3 and Trainer\(devices=2\) contradict"):
        make_trainer(strategy)
    trainer = make_trainer(
        lightning_shard.ZeRO1Strategy(backend="in_process", num_ranks=3), devices=1
    )
    assert trainer.world_size == 3


def test_reduce_after_a_fit_uses_no_world_that_has_ended() -> None:
    """`reduce` after a fit used a world that had ended."""
    trainer = make_trainer("zero1")
    trainer.fit(Deep())
    assert trainer.strategy.reduce(torch.tensor(2.0)) == 2.0


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..`")  # a skipped step
def test_the_loss_scaler_does_not_keep_the_engine_alive() -> None:
    """The loss scaler kept the engine alive."""
    plugin = MixedPrecision("16-mixed", device="cpu")
    trainer = make_trainer("zero2", plugins=plugin)
    trainer.fit(Deep())
    scaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
    assert isinstance(scaler, torch.amp.GradScaler)
    assert not isinstance(scaler, ShardedGradScaler)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_shards_of_a_failed_run_are_not_saved(strategy: str, tmp_path: Path) -> None:
    """Shards of a failed run were saved as if full."""
    trainer = make_trainer(strategy)
    with pytest.raises(ValueError, match="on purpose"):
        trainer.fit(FailsInTheThirdStep())
    with pytest.raises(CheckpointError, match="the last run failed and left shards"):
        trainer.save_checkpoint(tmp_path / "broken.ckpt")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_edited_after_the_last_step_are_saved(
    strategy: str, precision: str, tmp_path: Path
) -> None:
    """Weights edited after the last step were not saved."""
    path = tmp_path / "edited.ckpt"

    class Clamped(Deep):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            for param in self.parameters():
                param.data.fill_(0.25)
            if batch_idx == 3:
                self.trainer.save_checkpoint(path)

    model = Clamped()
    make_trainer(strategy, precision=precision).fit(model)
    state = torch.load(path)["state_dict"]
    for values in (state, model.state_dict()):
        assert all(bool((value == 0.25).all()) for value in values.values())


@pytest.mark.parametrize("strategy", ["shard_ddp", "zero3"])
def test_a_checkpoint_is_restored_into_a_fit_that_has_ended(tmp_path: Path, strategy: str) -> None:
    """It asked for the engine, which a run has only; a module may have no trainer yet, too."""
    model = Deep()
    trainer = make_trainer(strategy)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    trainer._checkpoint_connector.restore(tmp_path / "end.ckpt", weights_only=False)
    torch.testing.assert_close(dict(model.state_dict()), expected)
    other, fresh = Deep(), make_trainer(strategy)
    fresh.strategy.connect(other)
    fresh._checkpoint_connector.resume_start(tmp_path / "end.ckpt", weights_only=False)


class CopiesCallbacks(pl.Callback):
    """Copies all callbacks, as one that keeps their states does."""

    def __init__(self, copies: list[Any]) -> None:
        self.copies, self.state = copies, torch.zeros(2)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        copied = copy.deepcopy(callbacks)
        assert copied[0].state is not self.state
        bars = [one for one in copied if isinstance(one, ProgressBar)]
        assert len(bars) == 1
        assert bars[0].trainer is not trainer
        self.copies += bars


@pytest.mark.filterwarnings("ignore:1 microbatches are fewer")
@pytest.mark.filterwarnings("ignore:A step uses 2 parameters outside of their stage")
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "elastic", "pipeline_parallel"])
def test_callbacks_beside_a_progress_bar_are_copied_in_a_hook(strategy: str) -> None:
    """The bar holds its trainer, and that a strategy with contexts, groups and threads of ranks."""
    copies: list[Any] = []
    trainer = make_trainer(strategy, enable_progress_bar=True)
    trainer.callbacks = [CopiesCallbacks(copies), TQDMProgressBar(refresh_rate=0)]  # type: ignore[attr-defined]
    trainer.fit(Deep())
    assert copies
