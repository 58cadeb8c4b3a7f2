"""What `RecordSteps` records, and what it refuses; ranks of this process."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_shard
from lightning_shard.errors import ConfigError
from lightning_shard.replay import RecordSteps
from tests.replay.recorded import Failing, NotFinite, fit, replayed
from tests.strategies.matrix_optimizers import muon_groups
from tests.strategies.models import ExampleGPT, TiedLSTM
from tests.strategies.parity import STRATEGIES, GlobalBatches, build, ignoring, quiet_trainer

pytestmark = ignoring()


def recorded(folder: Path) -> dict[str, int]:
    """Return the number of files in each recorded step's folder."""
    return {one.name: len(list(one.iterdir())) for one in sorted(folder.iterdir())}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failing_step_is_taken_again_to_the_bit(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the norm is") as raised:
        fit(tmp_path, strategy, ranks=3, callbacks=[Failing()])
    folder = tmp_path / "step-00000003"
    notes = raised.value.__notes__
    assert notes[0] == f"The step is recorded: lightning-shard replay {folder}"
    assert recorded(tmp_path) == {"step-00000003": 3}
    found = replayed(tmp_path, 3, strategy, callbacks=[Failing()])
    assert (found.outcome, found.is_bitwise) == ("reproduced", True)
    assert str(found.error) == str(raised.value)
    assert found.recorded.startswith("rank 2: ValueError: ")


def test_a_loss_of_one_rank_that_is_not_finite_is_recorded_by_all_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="a loss that is not finite"):
        fit(tmp_path, "zero2", ranks=2, callbacks=[NotFinite()])
    assert recorded(tmp_path) == {"step-00000002": 2}
    found = replayed(tmp_path, 2, "zero2", callbacks=[NotFinite()])
    assert (found.outcome, found.is_bitwise) == ("reproduced", True)
    assert found.recorded == "a loss that is not finite on rank 1"
    mended = replayed(tmp_path, 2, "zero2", callbacks=[NotFinite(step=9)])
    assert (mended.outcome, mended.replayed) == ("not reproduced", "no error")
    assert mended.exit_status == 1


def test_a_loss_that_is_not_finite_is_told_once_with_what_replays_it(tmp_path: Path) -> None:
    """The step was recorded without a word, and the fit went on to its end."""
    with pytest.warns(UserWarning, match="not finite") as told:
        fit(tmp_path, "zero2", ranks=2, callbacks=[NotFinite()])
    (said,) = [str(one.message) for one in told if "RecordSteps" in str(one.message)]
    assert "step 2 has a loss that is not finite, on one rank at least" in said
    assert f"lightning-shard replay {tmp_path / 'step-00000002'}" in said
    assert "The fit goes on" in said


def test_what_was_asked_for_and_what_of_it_never_came_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps that no step of the fit had the number of were left out without a word."""
    caplog.set_level("INFO")
    with pytest.warns(UserWarning, match=r"has not recorded the steps \[70\]"):
        fit(tmp_path, "zero2", ranks=2, recording={"steps": [1, 70], "failures": False})
    told = [one.getMessage() for one in caplog.records if "RecordSteps" in one.getMessage()]
    folder = tmp_path / "step-00000001"
    assert len(told) == 1
    assert "step 1 was asked for, and is recorded. Take it again" in told[0]
    assert f"lightning-shard replay {folder}" in told[0]


def test_steps_that_are_asked_for_are_recorded_and_nothing_else(tmp_path: Path) -> None:
    fit(tmp_path, "zero3", ranks=2, recording={"steps": [0, 3], "failures": False})
    assert recorded(tmp_path) == {"step-00000000": 2, "step-00000003": 2}
    for step in (0, 3):
        found = replayed(tmp_path, step, "zero3")
        assert (found.outcome, found.is_bitwise) == ("reproduced", True)


def test_between_two_copies_of_the_state_the_steps_before_are_taken_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the norm is"):
        fit(tmp_path, "zero3", ranks=2, callbacks=[Failing(1, 4)], recording={"snapshot_every": 3})
    found = replayed(tmp_path, 4, "zero3", callbacks=[Failing(1, 4)])
    assert (found.outcome, found.is_bitwise) == ("reproduced", True)
    assert any("began at step 3" in note for note in found.notes)


def test_later_epochs_and_manual_optimization_come_to_their_place(tmp_path: Path) -> None:
    class ByHand(pl.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            loss = (self.layer(batch) * (1 + self.current_epoch) * (1 + batch_idx)).square().sum()
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
                self.manual_backward(loss, retain_graph=True)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam([self.layer.weight], lr=0.1),
                torch.optim.SGD([self.layer.bias], lr=0.1),
            ]

    def loader() -> Any:
        torch.manual_seed(3)
        return torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2)

    recorder = RecordSteps(tmp_path, steps=[8])
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_steps": -1}
    strategy = STRATEGIES["zero1"](backend="in_process")
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=2, callbacks=[recorder], **options
    )
    trainer.fit(ByHand(), loader())
    found = lightning_shard.replay.replay(tmp_path / "step-00000008", ByHand())
    assert (found.outcome, found.is_bitwise) == ("reproduced", True)


def test_a_recorded_fit_has_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [RecordSteps(tmp_path, steps=[1])]):
        model = build("lstm")
        trainer = quiet_trainer(
            strategy=STRATEGIES["zero3"](backend="in_process"),
            devices=2,
            max_steps=3,
            callbacks=callbacks,
        )
        trainer.fit(model, datamodule=GlobalBatches(model, 3))
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshot_every": 0}, "snapshot_every must be .* of at least 1"),
        ({"steps": [-1]}, "steps must be a list, each entry a whole number of at least 0"),
        ({"failures": False}, "would record nothing"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecordSteps("runs/steps", **options)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lightning_shard.LocalSGDStrategy, "'local_sgd', expected one of shard_ddp"),
        (lightning_shard.PipelineParallelStrategy, "'pipeline_parallel', expected one of"),
        (lightning_shard.ElasticStrategy, "'elastic', expected one of"),
        ("shard_ddp_int8_in_process", "'shard_ddp_int8', expected one of"),
        ("zero2_offload_in_process", "'zero2_offload', expected one of"),
        ("auto", "'SingleDeviceStrategy', expected one of"),
    ],
)
def test_steps_that_depend_on_more_are_refused(strategy: Any, message: str, tmp_path: Path) -> None:
    made = strategy if isinstance(strategy, str) else strategy(backend="in_process")
    model = build("layers")
    trainer = quiet_trainer(
        strategy=made,
        devices=1 if strategy == "auto" else 2,
        accumulate_grad_batches=1,
        callbacks=[RecordSteps(tmp_path)],
    )
    with pytest.raises(ConfigError, match=message):
        trainer.fit(model, datamodule=GlobalBatches(model, 2))


class Muons(ExampleGPT):
    """Matrices by Muon, each in full on the rank that owns it."""

    def configure_optimizers(self) -> Any:
        return muon_groups(self)


class Streamed(GlobalBatches):
    """The same batches from a loader that does not know how many there are."""

    def train_dataloader(self) -> Any:
        return Stream(super().train_dataloader())


class Stream:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return iter(self._loader)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("make", "data", "options"),
    [
        (Muons, GlobalBatches, {"gradient_clip_val": None}),
        (TiedLSTM, Streamed, {}),
        (TiedLSTM, GlobalBatches, {"precision": "bf16-mixed"}),
        (TiedLSTM, GlobalBatches, {"precision": "bf16-true"}),
    ],
    ids=["full matrices", "no length", "bf16-mixed", "bf16-true"],
)
def test_other_optimizers_loaders_and_formats(
    make: Any, data: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model = make()
    recorder = RecordSteps(tmp_path, steps=[2])
    trainer = quiet_trainer(
        strategy=STRATEGIES["zero3"](backend="in_process"),
        devices=3,
        max_steps=4,
        callbacks=[recorder],
        **options,
    )
    trainer.fit(model, datamodule=data(model, 4))
    torch.manual_seed(99)
    found = lightning_shard.replay.replay(tmp_path / "step-00000002", make())
    assert (found.outcome, found.is_bitwise) == ("reproduced", True)
