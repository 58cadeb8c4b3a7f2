"""Training with parameters that are gathered in 8 bits: what is saved, evaluated, seen, refused."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import HybridParallelStrategy, TensorParallelStrategy
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from tests.data_parallel.compression.buffers import Exact
from tests.data_parallel.compression.test_quantized_gather import rounded
from tests.processes import run_processes
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    STRATEGIES,
    Curve,
    GlobalBatches,
    Run,
    assert_bitwise_equal,
    build,
    ignore_upstream_warnings,
    ignoring,
    quiet_trainer,
    train,
)

pytestmark = ignoring("Be aware that when using `ckpt_path`")

STAGES = ("zero1", "zero2", "zero3")
_NUM_STEPS = 3


def strategy(name: str, **options: Any) -> DataParallelStrategy:
    given = {"backend": "in_process", "bucket_mb": SMALL_BUCKET_MB, "quantized_gathers": "int8"}
    return STRATEGIES[name](**(given | options))


def still(model: Any) -> Any:
    """Let a model's optimizer change nothing."""
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.0)
    return model


@dataclass
class Seen(L.Callback):
    """What hooks and layers see of one weight, of a block."""

    between: list[Tensor] = field(default_factory=list)
    inside: list[Tensor] = field(default_factory=list)
    evaluated: list[Tensor] = field(default_factory=list)

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        def noted(module: Any, *_: Any) -> None:
            seen = self.inside if pl_module.training else self.evaluated
            seen.append(module.weight.detach().clone())

        pl_module.blocks[0].attention_out.register_forward_pre_hook(noted)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        weight = pl_module.blocks[0].attention_out.weight
        self.between.append(weight.detach().clone())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", STAGES)
def test_layers_compute_with_rounded_weights_and_hooks_of_stage_3_see_masters(name: str) -> None:
    """Under the stages 1 and 2 the full parameters are there all the time, rounded."""
    model, seen = still(build("gpt")), Seen()
    model.validation_step = lambda batch, batch_idx: model.loss(batch)
    before = model.blocks[0].attention_out.weight.detach().clone()
    trainer = quiet_trainer(strategy=strategy(name), devices=2, max_steps=2, callbacks=[seen])
    batches = DataLoader(model.data(16), batch_size=2)
    trainer.fit(model, batches, batches)
    for seen_in in (seen.inside, seen.evaluated):
        assert seen_in
        assert all(torch.equal(one, rounded(before)) for one in seen_in)
    between = before if name == "zero3" else rounded(before)
    assert all(torch.equal(torch.as_tensor(one), between) for one in seen.between)
    assert torch.equal(model.blocks[0].attention_out.weight, before)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
@pytest.mark.parametrize("name", STAGES)
def test_checkpoints_hold_the_masters(name: str, checkpoint_format: str, tmp_path: Path) -> None:
    model = still(build("gpt"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    made = strategy(name, checkpoint_format=checkpoint_format)
    writer = ModelCheckpoint(tmp_path, "last", every_n_train_steps=2)
    options = {"devices": 2, "max_steps": 2, "callbacks": [writer], "enable_checkpointing": True}
    trainer = quiet_trainer(strategy=made, **options)
    trainer.fit(model, datamodule=GlobalBatches(model, 2))
    torch.manual_seed(8)
    loaded = still(type(model)())
    again = quiet_trainer(strategy=strategy(name), devices=3, max_steps=2)
    again.fit(loaded, datamodule=GlobalBatches(model, 2), ckpt_path=tmp_path / "last.ckpt")
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value)
        assert torch.equal(loaded.state_dict()[key], value)


def fit(name: str, num_steps: int, **options: Any) -> tuple[Run, L.Trainer]:
    model, curve = build("gpt"), Curve()
    given = {"callbacks": [curve], "max_steps": num_steps, "devices": 2, **options}
    path = given.pop("ckpt_path", None)
    trainer = quiet_trainer(strategy=strategy(name), **given)
    trainer.fit(model, datamodule=GlobalBatches(model, 2 * _NUM_STEPS), ckpt_path=path)
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return Run(losses=curve.losses, norms=curve.norms, weights=weights), trainer


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", STAGES)
def test_a_run_goes_on_as_if_it_had_not_stopped(name: str, tmp_path: Path) -> None:
    """Its first step computes with what would have been gathered, not with the masters."""
    through, _ = fit(name, 2 * _NUM_STEPS)
    _, trainer = fit(name, _NUM_STEPS)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest, _ = fit(name, 2 * _NUM_STEPS, ckpt_path=tmp_path / "half.ckpt")
    assert rest.losses == through.losses[-len(rest.losses) :]
    for key, value in through.weights.items():
        assert torch.equal(rest.weights[key], value), key


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("model", ["lstm", "mixture", "conv", "t5"])
@pytest.mark.parametrize("name", STAGES)
def test_losses_stay_near_those_of_exact_gathers(name: str, model: str, precision: str) -> None:
    """With tied weights, parameters that only some ranks use, frozen ones and buffers."""
    runs = [
        train(
            build(model),
            strategy=strategy(name, quantized_gathers=choice),
            devices=2,
            precision=precision,
            num_steps=4,
        )
        for choice in (None, "int8")
    ]
    dense, quantized = (torch.tensor(run.losses) for run in runs)
    assert not torch.equal(dense, quantized)
    torch.testing.assert_close(quantized, dense, rtol=2e-2, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*CPU ranks")
@pytest.mark.parametrize("name", STAGES)
def test_masters_may_lie_in_host_memory(name: str) -> None:
    runs = [
        train(build("gpt"), strategy=strategy(name, offload=one), devices=2, num_steps=_NUM_STEPS)
        for one in (None, "optimizer")
    ]
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)


SPLITS: dict[str, dict[str, Any]] = {
    "copies": {"data_parallel_size": (2, 2)},
    "layers": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2, "num_microbatches": 2},
}


def hybrid(split: str, stage: int, **options: Any) -> Run:
    made = HybridParallelStrategy(
        backend="in_process",
        zero_stage=stage,
        bucket_mb=SMALL_BUCKET_MB,
        **SPLITS[split],
        **options,
    )
    return train(build("gpt"), strategy=made, devices=4, num_steps=_NUM_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("split", SPLITS)
def test_ranks_that_split_a_model_gather_in_few_bits(split: str, stage: int) -> None:
    dense, quantized = (hybrid(split, stage, quantized_gathers=one) for one in (None, "int8"))
    assert dense.losses != quantized.losses
    assert quantized.losses == pytest.approx(dense.losses, rel=2e-2)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_of_the_state_average_what_each_has_decoded(stage: int) -> None:
    dense, exact = (hybrid("copies", stage, compression=one) for one in (None, Exact()))
    assert exact.losses == pytest.approx(dense.losses, rel=1e-5)
    assert exact.norms == pytest.approx(dense.norms, rel=1e-5)


def train_over_gloo() -> list[Run]:
    ignore_upstream_warnings()
    return [
        train(
            build("gpt"), strategy=strategy(name, backend="gloo"), devices=2, num_steps=_NUM_STEPS
        )
        for name in STAGES
    ]


@pytest.mark.slow
def test_gloo_processes_train_as_ranks_of_one_process() -> None:
    ranks = run_processes(train_over_gloo, 2)
    for number, name in enumerate(STAGES):
        here = train(build("gpt"), strategy=strategy(name), devices=2, num_steps=_NUM_STEPS)
        for run in ranks:
            assert_bitwise_equal(run[number], here)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"compression": "int4"}, {"compression": "bf16"}])
@pytest.mark.parametrize("name", STAGES)
def test_a_dry_run_counts_what_travels_and_is_held(name: str, options: dict[str, Any]) -> None:
    """Gradients were counted as if they were not compressed."""
    model = build("gpt")
    made = strategy(name, **options)
    batch = next(iter(DataLoader(model.data(4), batch_size=2)))
    dense = strategy(name, quantized_gathers=None)
    found, before = (one.dry_run(model, batch, world_size=2).ranks[0] for one in (made, dense))
    counted = Bytes()
    steps = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_steps": 3}
    again = strategy(name, **options)
    trainer = quiet_trainer(strategy=again, devices=2, callbacks=[counted], **steps)
    trainer.fit(model, DataLoader(model.data(16), batch_size=2))
    assert found.sent["dp"] < before.sent["dp"]
    assert counted.sent[-1] == pytest.approx(found.sent["dp"], rel=1e-3)
    assert counted.held == found.memory.parameters


@dataclass
class Bytes(L.Callback):
    """Bytes that a step sends, and that parameters take between steps."""

    sent: list[int] = field(default_factory=list)
    held: int = 0
    before: int = 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.before = trainer.strategy.collectives.traffic.total_bytes

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.sent.append(trainer.strategy.collectives.traffic.total_bytes - self.before)
        self.held = trainer.strategy.held_bytes().parameters


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_stage_3_sends_over_four_times_fewer_bytes_with_int4_gradients(num_ranks: int) -> None:
    sent = []
    for options in ({"quantized_gathers": None}, {"compression": "int4"}):
        counted, model = Bytes(), ExampleGPT(width=128)
        trainer = quiet_trainer(
            strategy=strategy("zero3", **options),
            devices=num_ranks,
            callbacks=[counted],
            accumulate_grad_batches=1,
            gradient_clip_val=None,
            max_steps=2,
        )
        trainer.fit(model, DataLoader(model.data(4 * num_ranks), batch_size=2))
        sent.append(counted.sent[-1])
    assert sent[0] > 4 * sent[1]


def test_a_strategy_without_such_gathers_has_no_such_option() -> None:
    with pytest.raises(ConfigError, match="has no option 'quantized_gathers'"):
        TensorParallelStrategy(quantized_gathers="int8")  # type: ignore[call-arg]
