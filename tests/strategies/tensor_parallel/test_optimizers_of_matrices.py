"""Optimizers that need full matrices where layers are in parts: one rank gathers each matrix."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from torch.optim import Adafactor, Optimizer

from lightning_shard import ConfigError, HybridParallelStrategy, TensorParallelStrategy
from lightning_shard.data_parallel.held_bytes import HeldBytes
from tests.checkpoint.sharded import runs
from tests.examples.commands import ignoring_advice
from tests.processes import run_processes
from tests.strategies import parity
from tests.strategies.data_parallel.test_optimizers_of_matrices import (
    LAYOUTS,
    MOVED,
    NUM_STEPS,
    alone,
    assert_goes_on,
    assert_same,
    assert_trains,
    distance,
    farthest,
    fit,
    noisy,
    own_spread,
    relative,
)
from tests.strategies.matrix_optimizers import Matrices, MatricesGPT, Muon, build

pytestmark = [
    *ignoring_advice("Be aware that when using `ckpt_path`"),
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in parity.UPSTREAM_WARNINGS),
]
Make = Callable[..., Any]


def tensor(num_ranks: int, **options: Any) -> Make:
    """Return what makes a strategy of two ranks that have parts of each layer, or of all."""
    return lambda **o: TensorParallelStrategy(
        backend="in_process", num_ranks=num_ranks, announce=False, **options, **o
    )


HYBRID: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "tensor_parallel_size": 2,
    "num_microbatches": 2,
}
LAYOUTS |= {
    "tensor-2": tensor(2),
    "tensor-4-stage0": tensor(4, tensor_parallel_size=2),
    "pp2-tp2": lambda **o: HybridParallelStrategy(
        backend="in_process", num_ranks=4, announce=False, **HYBRID, **o
    ),
    "tp2-copies-8": lambda **o: HybridParallelStrategy(
        backend="in_process",
        num_ranks=8,
        pipeline_parallel_size=1,
        tensor_parallel_size=2,
        data_parallel_size=(2, 2),
        zero_stage=2,
        announce=False,
        **o,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor-2", "tensor-4", "tensor-4-stage0", "pp2-tp2"])
@pytest.mark.parametrize("name", ["adafactor", "transformers", "muon", "shampoo"])
def test_weights_equal_a_single_devices(name: str, layout: str) -> None:
    assert_same(fit(name, layout), alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hybrid-8", "tp2-copies-8"])
def test_three_dimensions_and_copies_of_the_state(layout: str) -> None:
    assert_same(fit("muon", layout), alone("muon"))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("layout", ["tensor-2", "tensor-4"])
def test_muon_for_matrices_and_adamw_for_the_rest(layout: str) -> None:
    assert_same(fit("two", layout), alone("two"))


def test_two_optimizers_in_a_pipeline_are_refused() -> None:
    with pytest.raises(ConfigError, match="optimizes by hand, but a pipeline"):
        fit("two", "pp2-tp2")


QUIET: dict[str, Any] = {"backend": "in_process", "announce": False}
GPT_LAYOUTS: dict[str, tuple[int, Make]] = {  # ranks, and what makes the strategy
    "tensor": (2, lambda: TensorParallelStrategy(**QUIET)),
    "tensor-of-4": (4, lambda: TensorParallelStrategy(**QUIET)),
    **{
        f"tensor-zero{n}": (
            4,
            partial(TensorParallelStrategy, **QUIET, tensor_parallel_size=2, zero_stage=n),
        )
        for n in range(4)
    },
    "hybrid": (4, partial(HybridParallelStrategy, **QUIET, **HYBRID)),
    "hybrid-zero2": (8, partial(HybridParallelStrategy, **QUIET, **HYBRID, zero_stage=2)),
}


def gpt(name: str, **options: Any) -> parity.Run:
    torch.manual_seed(7)
    return parity.train(MatricesGPT(name), num_steps=NUM_STEPS, **options)


@cache
def alone_in_double(name: str) -> parity.Run:
    return gpt(name, precision="64-true")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", GPT_LAYOUTS)
@pytest.mark.parametrize("name", ["adafactor", "transformers", "muon"])
def test_a_gpt_equals_a_single_devices(name: str, layout: str) -> None:
    num_ranks, make = GPT_LAYOUTS[layout]
    got = gpt(name, strategy=make(), devices=num_ranks, precision="64-true")
    expected = alone_in_double(name)
    apart = max(map(relative, zip(got.losses, expected.losses, strict=True)))
    print(f"{name}, {layout}: losses {apart:.1e}, weights {farthest(got, expected):.1e}")
    parity.assert_parity(got, expected, num_steps=NUM_STEPS, atol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(900)  # of the first case, which measures one device's own spread
@pytest.mark.parametrize("layout", GPT_LAYOUTS)
def test_torchs_muon_stays_within_its_own_spread(layout: str) -> None:
    expected, allowed = own_spread()
    num_ranks, make = GPT_LAYOUTS[layout]
    found = distance(noisy(0, strategy=make(), devices=num_ranks), expected)
    print(f"{layout}: {found:.2e}, and one device's own spread {allowed:.2e}")
    assert 0 < found <= allowed


RESUMED = [
    ("tensor-2", "sharded", "tensor-2"),
    ("tensor-4", "full", "tensor-4-stage0"),
    ("tensor-4-stage0", "sharded", "zero3-4"),
    ("zero1-3", "full", "tensor-4"),
    ("tensor-4", "sharded", "pp2-tp2"),
    ("pp2-tp2", "full", "zero2-2"),
    ("hybrid-8", "sharded", "tensor-2"),
    ("shard_ddp-2", "sharded", "pp2-tp2"),
    ("tp2-copies-8", "full", "tensor-4"),
    ("pipeline-zero2-4", "full", "hybrid-8"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "kept_as", "after"), RESUMED)
@pytest.mark.parametrize("name", ["muon", "adafactor", "shampoo"])
def test_a_run_goes_on_on_another_layout(
    name: str, before: str, kept_as: str, after: str, tmp_path: Path
) -> None:
    assert_goes_on(name, before, kept_as, after, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor-2", "tensor-4", "pp2-tp2"])
@pytest.mark.parametrize("name", ["adafactor", "shampoo"])
def test_a_checkpoint_is_that_of_a_single_device(name: str, layout: str, tmp_path: Path) -> None:
    paths = [
        runs.saving(strategy, tmp_path / str(number), build(name), precision="64-true")
        for number, strategy in enumerate(("auto", LAYOUTS[layout]()))
    ]
    expected, got = (torch.load(path, weights_only=True)["optimizer_states"] for path in paths)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-9)


@dataclass
class Census(Callback):
    """What all ranks hold in the last step, and what each has sent in it of its layers' parts.

    Attributes:
        held: Bytes of each rank.
        gathered: Elements that each rank has sent to gather parts and give them back.
        averaged: Elements of parameters and gradients that it has sent to other samples' ranks.
        split: Elements of all parameters in parts, and of those that are full on each rank.
    """

    held: list[HeldBytes] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    averaged: list[int] = field(default_factory=list)
    split: tuple[int, int] = (0, 0)
    _before: tuple[int, int] = (0, 0)
    _sent: tuple[int, int] = (0, 0)

    def _counted(self, trainer: L.Trainer) -> tuple[int, int]:
        strategy: Any = trainer.strategy
        parts = strategy.along("tp").traffic.snapshot()
        samples = strategy.gradient_groups.dp.traffic.snapshot()
        gathered = parts["all_to_all"].elements if "all_to_all" in parts else 0
        names = MOVED if strategy.engine.options.stage > 0 else ("all_reduce",)
        return gathered, sum(one.elements for key, one in samples.items() if key in names)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._before = self._counted(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now = self._counted(trainer)
        self._sent = now[0] - self._before[0], now[1] - self._before[1]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        cut = strategy.engine.split.full_shapes
        full = [p.numel() for flat in strategy.engine.flats for p in flat.params if p not in cut]
        self.split = sum(shape.numel() for shape in cut.values()), sum(full)
        ranks = strategy.collectives.all_gather_object((strategy.held_bytes(), self._sent))
        self.held = [held for held, _ in ranks]
        self.gathered, self.averaged = ([sent[at] for _, sent in ranks] for at in (0, 1))


def count(model: L.LightningModule, tp: int, stage: int) -> Census:
    """Train on two models of `tp` ranks."""
    census = Census()
    parity.quiet_trainer(
        strategy=TensorParallelStrategy(**QUIET, tensor_parallel_size=tp, zero_stage=stage),
        devices=2 * tp,
        callbacks=[census],
        max_steps=3,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
    ).fit(model, datamodule=parity.GlobalBatches(model, 3))  # type: ignore[arg-type]
    return census


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("tp", [2, 4])
def test_state_and_traffic(tp: int, stage: int) -> None:
    """State is 1/N and at most the largest matrix's more; ranks of other samples send no more.

    Those of a layer send 1/N of a part, its gradient and what has been updated each but once.
    """
    plain = count(parity.build("gpt"), tp, stage)
    assert set(plain.gathered) == {0}
    for name in ("muon", "adafactor"):
        model = MatricesGPT(name)
        optimizer, census = model.configure_optimizers(), count(model, tp, stage)
        of_each = _state_after_a_step(optimizer)
        held = [one.optimizer_state for one in census.held]
        num_copies = 1 if stage > 0 else 2
        largest = 4 * max(param.numel() for param in model.parameters())
        assert min(held) > 0
        assert max(held) <= sum(held) / len(held) + largest
        # what is full on each rank has AdamW's state on each, as without Muon
        assert name == "muon" or sum(held) == num_copies * sum(of_each)
        assert sum(held) <= sum(one.optimizer_state for one in plain.held)
        cut, full = census.split
        if name == "adafactor":  # which updates all of them
            assert sum(census.gathered) == num_copies * (3 * cut * (tp - 1) // tp + full * (tp - 1))
        agreement = 17 * 2 * tp if stage == 0 else 0
        assert sum(plain.averaged) / 2 < sum(census.averaged) <= sum(plain.averaged) + agreement


def _state_after_a_step(optimizer: Optimizer) -> list[int]:
    """Return the bytes of a single device's state for each parameter."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    states = [optimizer.state[param].values() for param in params]
    found = [sum(v.nbytes for v in one if isinstance(v, torch.Tensor)) for one in states]
    for param in params:
        param.grad = None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor-2", "tensor-4"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_other_formats_train(precision: str, layout: str) -> None:
    assert_trains(precision, layout)


@pytest.mark.slow
def test_clipping_and_accumulation() -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    expected = fit("adafactor", **options)
    assert_same(fit("adafactor", "tensor-4-stage0", **options), expected, 2 * NUM_STEPS)


class OfOneStage(Matrices):
    """Muon has a matrix of the first stage alone."""

    def configure_optimizers(self) -> Any:
        rest = [param for param in self.parameters() if param is not self.embed.weight]
        groups = [
            {"params": [self.embed.weight], "use_muon": True},
            {"params": rest, "use_muon": False},
        ]
        return Muon(groups)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline-zero2-4", "pp2-tp2"])
def test_a_stage_without_muons_matrices_takes_it(layout: str) -> None:
    """A stage without Muon's matrices refused it."""

    def run(strategy: Any) -> OfOneStage:
        torch.manual_seed(0)
        model = OfOneStage()
        runs.fit(strategy, model, max_steps=4, precision="64-true")
        return model

    assert_same(run(LAYOUTS[layout]()), run("auto"), 4)


class Unfrozen(Matrices):
    """Has blocks that a callback unfreezes."""

    def __init__(self) -> None:
        super().__init__("adafactor")
        self.backbone = self.blocks

    def configure_optimizers(self) -> Optimizer:
        return Adafactor([p for p in self.parameters() if p.requires_grad], lr=0.02)


def test_parameters_that_are_unfrozen_in_the_fit_are_gathered() -> None:
    def run(strategy: Any) -> Unfrozen:
        torch.manual_seed(0)
        model = Unfrozen()
        unfreezing = BackboneFinetuning(1, lambda epoch: 1.0, 0.01, verbose=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*")
            runs.fit(strategy, model, max_steps=6, callbacks=[unfreezing], precision="64-true")
        return model

    assert_same(run(LAYOUTS["tensor-4"]()), run("auto"), 6)


class ExchangedForMuon(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        matrices = [param for param in pl_module.parameters() if param.ndim == 2]
        trainer.optimizers = [torch.optim.Muon(matrices)]


def test_muon_in_the_middle_of_a_fit_is_refused() -> None:
    message = "Muon does not update each element by itself, but tensor parallel gives each rank"
    with pytest.raises(ConfigError, match=message):
        runs.fit(LAYOUTS["tensor-2"](), runs.Model(), callbacks=[ExchangedForMuon()])


def over_gloo(layout: str) -> list[float]:
    """Run in each of several processes."""
    for message in (*parity.UPSTREAM_WARNINGS, ".*"):
        warnings.filterwarnings("ignore", message)
    options: dict[str, Any] = {"backend": "gloo", "announce": False, "tensor_parallel_size": 2}
    made: Any = {
        "tensor": lambda: TensorParallelStrategy(**options),
        "hybrid": lambda: HybridParallelStrategy(**options, zero_stage=1, pipeline_parallel_size=1),
    }[layout]()
    model = build("adafactor")
    runs.fit(made, model, devices=2 if layout == "tensor" else 4, precision="64-true")
    return model.losses


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "num_ranks"), [("tensor", 2), ("hybrid", 4)])
def test_processes_over_gloo(layout: str, num_ranks: int) -> None:
    for losses in run_processes(over_gloo, num_ranks, layout=layout):
        torch.testing.assert_close(losses, alone("adafactor", 4).losses, rtol=1e-5, atol=0)
