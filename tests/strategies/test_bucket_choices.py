"""Buckets, units and gradient formats: what they may be, and what "auto" chooses for a run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy
from lightning_shard.data_parallel.bucket_choice import BucketChoice, LinkTrial
from lightning_shard.errors import ConfigError
from lightning_shard.fabric import ZeRO3Strategy as FabricZeRO3
from lightning_shard.fabric import strategy as fabric_strategy
from lightning_shard.replay import RecordSteps, replay
from lightning_shard.strategies import engine_setup
from lightning_shard.testing import Fault
from tests.elastic.runs import fit as elastic_fit
from tests.examples.commands import set_arguments
from tests.fabric.loops import fabric_of
from tests.mpirun import run_mpi
from tests.processes import run_processes
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    STRATEGIES,
    GlobalBatches,
    Run,
    assert_bitwise_equal,
    build,
    ignore_upstream_warnings,
    ignoring,
    quiet_trainer,
    train,
)

pytestmark = ignoring()

MEASURED = "measured: 0.12 ms, 1.9 GB/s"
NO_TIMES = "buckets of 25 MB (the default: times within one process tell nothing)"
WIDTH = 256
NUM_BLOCKS = 24  # of a little more than 0.25 MB each
NUM_UNITS = {1: 8, 2: 4, 25: 1}  # by the size of buckets in MB


class Wide(L.LightningModule):
    """A model of 6 MB, of which "auto" makes three buckets or more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

    def data(self, num_samples: int) -> Tensor:
        return torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(5))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = torch.tanh(block(batch))
        return batch.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


Give = Callable[..., None]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Let the ranks choose sizes that are given: one for each time, the last one ever after."""

    def give(*sizes: float) -> None:
        times = count()

        def choose(*_: Any) -> BucketChoice:
            return BucketChoice(mb=sizes[min(next(times), len(sizes) - 1)], reason=MEASURED)

        monkeypatch.setattr(engine_setup, "choose", choose)
        monkeypatch.setattr(fabric_strategy, "choose", choose)

    return give


def in_process(name: str, **options: Any) -> Any:
    return STRATEGIES[name](backend="in_process", bucket_mb="auto", **options)


# --- on processes ---------------------------------------------------------------------------------


def run_on_processes(make: str, sizes: list[Any], **options: Any) -> list[tuple[Run, str, int]]:
    """Train with each of the sizes; return runs, choices and numbers of units."""
    ignore_upstream_warnings()
    found = []
    for size in sizes:
        strategy = getattr(lightning_shard, make)(bucket_mb=size, **options)
        numbers = Units()
        run = train(Wide(), num_steps=2, strategy=strategy, devices=2, callbacks=[numbers])
        found.append((run, str(strategy.bucket_choice), numbers.found[0]))
    return found


class Units(L.Callback):
    """Counts the units of each run."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found.append(len(trainer.strategy.engine.units))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found.append(len(trainer.strategy.engine.units))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    ["ZeRO2Strategy", "DDPStrategy", "ZeRO1Strategy", "ZeRO3Strategy"],
)
def test_it_changes_neither_weights_nor_losses(make: str) -> None:
    ranks = run_processes(run_on_processes, 2, make=make, sizes=[25, "auto"], backend="gloo")
    (fixed, nothing, few), (auto, choice, many) = ranks[0]
    assert (nothing, few) == ("None", 1)
    assert many > 2
    assert "MB (measured: " in choice
    assert [one[1:] for one in ranks[0]] == [one[1:] for one in ranks[1]]
    assert_bitwise_equal(fixed, auto)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_it_measures_on_other_backends(backend: str) -> None:
    start: Any = run_mpi if backend == "mpi" else run_processes
    run, other = start(run_on_processes, 2, make="ZeRO3Strategy", sizes=["auto"], backend=backend)
    assert run[0][1] == other[0][1]
    assert "measured" in run[0][1]


def choices_of_meshes() -> list[str]:
    """Return what rank chooses under each mesh of four ranks."""
    ignore_upstream_warnings()
    common: dict[str, Any] = {"backend": "gloo", "bucket_mb": "auto"}
    found = []
    for strategy in (
        lightning_shard.HybridParallelStrategy(pipeline_parallel_size=2, zero_stage=2, **common),
        lightning_shard.HybridParallelStrategy(data_parallel_size=(2, 2), **common),
        lightning_shard.TensorParallelStrategy(
            tensor_parallel_size=2,
            zero_stage=3,
            plan={"blocks.0": "colwise_gather_output"},
            **common,
        ),
        lightning_shard.PipelineParallelStrategy(**common),
        lightning_shard.LocalSGDStrategy(**common),
        lightning_shard.AsyncSGDStrategy(**common),
    ):
        quiet_trainer(
            strategy=strategy,
            devices=4,
            max_steps=1,
            accumulate_grad_batches=1,
            gradient_clip_val=None,
        ).fit(Wide(), DataLoader(Wide().data(32), batch_size=8))
        found.append(str(strategy.bucket_choice))
    return found


@pytest.mark.slow
def test_all_ranks_choose_the_same_under_every_mesh() -> None:
    first, *others = run_processes(choices_of_meshes, 4)
    assert others == [first] * 3
    assert ["measured" in choice for choice in first] == [True, True, True, False, True, True]
    assert first[3] == "buckets of 25 MB (the default: no gradients travel)"


# --- within one process ---------------------------------------------------------------------------


def test_nothing_is_measured_in_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(LinkTrial, "figures")
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    strategy = in_process("zero2")
    assert strategy.bucket_choice is None
    quiet_trainer(strategy=strategy, devices=2, max_steps=1).fit(
        Wide(), DataLoader(Wide().data(16), batch_size=4)
    )
    assert str(strategy.bucket_choice) == NO_TIMES
    (line,) = (text for text in caplog.messages if "each rank will hold" in text)
    assert line.endswith(f"; {NO_TIMES}")


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
def test_a_fit_tells_its_choice_once_and_an_evaluation_keeps_it(
    given: Give, caplog: pytest.LogCaptureFixture
) -> None:
    given(1)
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    units, data = Units(), DataLoader(Wide().data(16), batch_size=4)
    trainer = quiet_trainer(strategy=in_process("zero3"), devices=2, max_steps=1, callbacks=[units])
    module = Wide()
    trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    lines = [text for text in caplog.messages if "buckets" in text]
    assert len(lines) == 1
    assert lines[0].endswith(f"; buckets of 1 MB ({MEASURED})")
    assert units.found == [1, NUM_UNITS[1], NUM_UNITS[1]]


@pytest.mark.slow
def test_a_run_that_has_another_size_goes_on_from_a_checkpoint(given: Give, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"

    def fit(steps: int, **options: Any) -> Wide:
        module = Wide()
        strategy = in_process("zero2", checkpoint_format="sharded")
        trainer = quiet_trainer(
            strategy=strategy, devices=2, max_steps=steps, use_distributed_sampler=False
        )
        same_batches = module.data(8).repeat(8, 1)
        trainer.fit(module, DataLoader(same_batches, batch_size=4), **options)
        trainer.save_checkpoint(path)
        return module

    given(SMALL_BUCKET_MB)
    expected = fit(4).state_dict()
    fit(2)
    given(25)
    resumed = fit(4, ckpt_path=path, weights_only=False).state_dict()
    for name, value in expected.items():
        assert torch.equal(value, resumed[name]), name


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("asked", [None, "zero2", "auto"])
def test_a_replay_has_the_size_that_was_chosen(
    given: Give, tmp_path: Path, asked: str | None
) -> None:
    given(1)
    trainer = quiet_trainer(
        strategy=in_process("zero2"),
        devices=2,
        max_steps=2,
        callbacks=[RecordSteps(tmp_path, steps=[1])],
    )
    trainer.fit(Wide(), DataLoader(Wide().data(64), batch_size=4))
    given(25)
    strategy = lightning_shard.ZeRO2Strategy(bucket_mb="auto") if asked == "auto" else asked
    found = replay(tmp_path / "step-00000001", Wide(), strategy=strategy)
    assert found.is_bitwise


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero2"])
def test_elastic_ranks_keep_what_the_first_ones_chose(given: Give, scheme: Any) -> None:
    given(*[SMALL_BUCKET_MB] * 4, 25)  # of four ranks, and of a newcomer alone
    faults = [Fault(2, 3, "drop", at_step=4), Fault(4, 1, "add", at_step=8)]
    journal, trainer = elastic_fit(faults, scheme=scheme, bucket_mb="auto")
    assert len({one.generation for one in journal.attempts}) == 3
    assert trainer.strategy.bucket_choice.mb == SMALL_BUCKET_MB


@pytest.mark.slow
def test_fabric_chooses_for_each_module(given: Give) -> None:
    given(1, 1, 2, 2)

    def loop(fabric: L.Fabric) -> list[tuple[int, str]]:
        found = []
        for _ in range(2):
            fabric.setup_module(Wide())
            engine = fabric.strategy.held[-1].present_engine
            found.append((len(engine.units), str(fabric.strategy.bucket_choice)))
        return found

    strategy = FabricZeRO3(backend="in_process", bucket_mb="auto")
    found = fabric_of(strategy).launch(loop)
    assert found == [(NUM_UNITS[mb], f"buckets of {mb} MB ({MEASURED})") for mb in (1, 2)]


def fabric_choice() -> str:
    """Set a module up on a real rank; for `run_processes`."""
    ignore_upstream_warnings()
    fabric = fabric_of(FabricZeRO3(backend="gloo", bucket_mb="auto"))
    fabric.launch()
    fabric.setup_module(Wide())
    return str(fabric.strategy.bucket_choice)


@pytest.mark.slow
def test_fabric_measures_on_processes() -> None:
    mine, theirs = run_processes(fabric_choice, 2)
    assert mine == theirs
    assert "measured" in mine


class Model(L.LightningModule):
    """A model that the command line makes."""


def test_a_dry_run_takes_the_default() -> None:
    def dry(size: Any) -> str:
        strategy = lightning_shard.ZeRO3Strategy(bucket_mb=size)
        module = build("gpt")
        batch = next(iter(DataLoader(module.data(4), batch_size=4)))
        return repr(strategy.dry_run(module, batch, world_size=4))

    assert dry("auto") == dry(None)


def command_line(monkeypatch: pytest.MonkeyPatch, size: str, folder: Path) -> Any:
    config = folder / "config.yaml"
    config.write_text(
        "trainer:\n  accelerator: cpu\n  devices: 2\n  logger: false\n  strategy:\n"
        "    class_path: lightning_shard.ZeRO2Strategy\n    init_args:\n"
        f"      backend: in_process\n      bucket_mb: {size}\n"
    )
    set_arguments(monkeypatch, "program", f"--config={config}", "--seed_everything=0")
    made = LightningCLI(Model, run=False, save_config_callback=None)
    return made.trainer.strategy.run.options.bucket_mb


@pytest.mark.parametrize(("text", "size"), [("auto", "auto"), ("2", 2.0), ("null", None)])
def test_a_yaml_file_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, size: Any
) -> None:
    assert command_line(monkeypatch, text, tmp_path) == size


def test_a_yaml_file_with_another_word_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line(monkeypatch, "automatic", tmp_path)
    assert "'automatic'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind",
    [
        lightning_shard.ZeRO2Strategy,
        lightning_shard.LocalSGDStrategy,
        lightning_shard.ElasticStrategy,
        FabricZeRO3,
    ],
)
@pytest.mark.parametrize("size", ["", "Auto", "25", "25MB"])
def test_other_words_are_refused(kind: Any, size: str) -> None:
    words = r"must be a finite number of MB above 0 \(25 is usual\) or 'auto' or None, got "
    with pytest.raises(ConfigError, match=f"bucket_mb {words}{size!r}"):
        kind(bucket_mb=size)


@pytest.mark.parametrize("size", [0, -1.5])
def test_other_numbers_are_refused(size: float) -> None:
    with pytest.raises(ConfigError, match=f"number of MB above 0.* got {size}"):
        lightning_shard.ZeRO3Strategy(bucket_mb=size)


SCHEMES: dict[str, Any] = {
    "tensor": lambda **options: TensorParallelStrategy(
        tensor_parallel_size=2, zero_stage=3, **options
    ),
    "pipeline": lambda **options: PipelineParallelStrategy(
        pipeline_parallel_size=2, num_microbatches=3, **options
    ),
    "hybrid": lambda **options: HybridParallelStrategy(
        pipeline_parallel_size=2, num_microbatches=3, zero_stage=2, **options
    ),
}


@dataclass
class Seen(L.Callback):
    """What rank 0 has of a fit, on four ranks of which two share data."""

    losses: list[float]
    num_units: int = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.num_units = len(trainer.strategy.engine.flats)


@cache
def seen(scheme: str, **options: Any) -> Seen:
    units = {"units": list(options.pop("units"))} if "units" in options else {}
    callback, model = Seen([]), build("gpt")
    quiet_trainer(
        strategy=SCHEMES[scheme](backend="in_process", **options, **units),
        devices=4,
        max_steps=2,
        callbacks=[callback],
    ).fit(model, datamodule=GlobalBatches(model, num_steps=2))
    return callback


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_small_buckets_make_more_units_and_the_same_training(scheme: str) -> None:
    usual, small = seen(scheme), seen(scheme, bucket_mb=SMALL_BUCKET_MB)
    assert small.num_units > usual.num_units
    assert small.losses == pytest.approx(usual.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_units_are_named_by_the_classes_of_the_model_that_was_split(scheme: str) -> None:
    small = seen(scheme, bucket_mb=SMALL_BUCKET_MB)
    blocks = seen(scheme, bucket_mb=SMALL_BUCKET_MB, units=("Block",))
    layers = seen(scheme, bucket_mb=SMALL_BUCKET_MB, units=("Linear",))
    assert blocks.num_units == small.num_units < layers.num_units
    assert layers.losses == pytest.approx(small.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_travel_in_the_format_that_is_asked_for(scheme: str) -> None:
    usual, narrow = seen(scheme), seen(scheme, reduce_dtype="bfloat16")
    assert narrow.losses == pytest.approx(usual.losses, rel=1e-3)
    assert narrow.losses != usual.losses  # the last two are after an update
