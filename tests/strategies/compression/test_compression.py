"""Training with compressed gradients, also over Gloo: what it must not change, sends, refuses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import DDPStrategy, ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from lightning_shard.data_parallel.compression import (
    COMPRESSORS,
    Compressor,
    OneBit,
    PowerSGD,
    TopK,
)
from lightning_shard.errors import ConfigError
from lightning_shard.profiling import CompressionRatio
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from tests.data_parallel.compression.buffers import Exact
from tests.examples.commands import set_arguments
from tests.processes import run_processes
from tests.strategies.models import ExampleGPT, Trained
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

STAGES = ("shard_ddp", "zero1", "zero2")
LOSSY: dict[str, Callable[[], Compressor]] = {
    **{name: COMPRESSORS[name] for name in ("fp16", "bf16", "int8", "powersgd")},
    "topk": lambda: TopK(ratio=0.1),
    "onebit": lambda: OneBit(warmup_steps=5),
}


def slowly(*values: str) -> list[Any]:
    """Parameters of tests that take a while."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def strategy(name: str, **options: Any) -> DataParallelStrategy:
    return STRATEGIES[name](backend="in_process", bucket_mb=SMALL_BUCKET_MB, **options)


def short(model: str, name: str, num_ranks: int, *, compression: Any, **options: Any) -> Run:
    """Train for a few steps that clip and accumulate."""
    defaults = {"max_steps": 4, "devices": num_ranks}
    made = strategy(name, compression=compression)
    return train(build(model), strategy=made, **(defaults | options))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", STAGES)
def test_none_is_dense_bit_for_bit(name: str) -> None:
    """With clipping and accumulation."""
    dense = short("gpt", name, 2, compression=None, max_steps=2)
    assert_bitwise_equal(short("gpt", name, 2, compression="none", max_steps=2), dense)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("model", ["mixture", pytest.param("lstm", marks=pytest.mark.slow)])
def test_an_exact_codec_trains_as_dense_does(name: str, model: str) -> None:
    """With parameters that only some ranks use, or none, tied ones, clipping and accumulation."""
    precision = {"precision": "64-true"}  # the exchange is in float32, so this is its rounding
    dense = short(model, name, 3, compression=None, **precision)
    exact = short(model, name, 3, compression=Exact(), **precision)
    assert exact.losses == pytest.approx(dense.losses, rel=1e-5)
    assert exact.norms == pytest.approx(dense.norms, rel=1e-5)
    for key, weight in dense.weights.items():
        torch.testing.assert_close(exact.weights[key], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.usefixtures("torchs_own_kernels")
@pytest.mark.parametrize("model", ["mixture", "lstm", "t5"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_stage_3_sums_what_it_decodes_in_float32(model: str, precision: str) -> None:
    """Each rank gets its shard of the average, of units that are sent while backward runs."""
    runs = [
        short(model, "zero3", 3, compression=one, precision=precision) for one in (None, Exact())
    ]
    rounding = 1e-5 if precision == "32-true" else 2e-2
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=rounding)
    assert runs[1].norms == pytest.approx(runs[0].norms, rel=rounding)


@pytest.mark.usefixtures("torchs_own_kernels")
@pytest.mark.parametrize("name", ["zero1", *slowly("shard_ddp", "zero2")])
def test_mixed_precision(name: str) -> None:
    dense = short("lstm", name, 2, compression=None, precision="bf16-mixed")
    exact = short("lstm", name, 2, compression=Exact(), precision="bf16-mixed")
    assert exact.losses == pytest.approx(dense.losses, rel=2e-2)
    assert exact.norms == pytest.approx(dense.norms, rel=5e-2)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("name", "compression"), [("shard_ddp", "topk"), ("zero1", "onebit")])
def test_a_loss_scale_that_grows_changes_nothing(name: str, compression: str) -> None:
    """The residual does not carry the scale of the step that left it.

    Not every CPU has an LSTM in float16.
    """

    def run(growth_interval: int) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=growth_interval)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        made = LOSSY[compression]()
        return short("gpt", name, 2, compression=made, plugins=[plugin], max_steps=8)

    growing, steady = run(growth_interval=2), run(growth_interval=1000)
    assert growing.losses == pytest.approx(steady.losses, rel=1e-3)
    assert growing.norms == pytest.approx(steady.norms, rel=1e-2)


@pytest.mark.parametrize(
    "compression", ["topk", *slowly("onebit", "powersgd", "int8", "fp16", "bf16")]
)
def test_the_same_seed_gives_the_same_bits_and_the_loss_falls(compression: str) -> None:
    name = {"topk": "zero1", "powersgd": "zero2", "int8": "zero2"}.get(compression, "shard_ddp")
    runs = [short("gpt", name, 2, compression=LOSSY[compression](), max_steps=12) for _ in range(2)]
    assert_bitwise_equal(*runs)
    losses = runs[0].losses
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.2


@dataclass
class Sent(L.Callback):
    """Bytes of each step but for the parameters that stages 1 and 2 gather, on rank 0."""

    steps: list[int] = field(default_factory=list)
    before: int = 0
    ratio: float = 0.0

    def _total(self, trainer: L.Trainer) -> int:
        traffic = trainer.strategy.collectives.traffic
        return traffic.total_bytes - traffic["all_gather"].bytes * (trainer.strategy.stage > 0)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.before = self._total(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(self._total(trainer) - self.before)
        self.ratio = trainer.strategy.compression_tally().ratio


class FullGPT(ExampleGPT):
    """The example's model in its own size."""

    def __init__(self) -> None:
        super().__init__(width=128, num_layers=4)

    @staticmethod
    def data(num_samples: int) -> TensorDataset:
        return ExampleGPT.data(num_samples)


def sent_bytes(made: DataParallelStrategy, num_ranks: int, num_steps: int = 2) -> Sent:
    sent, model = Sent(), FullGPT()
    options = {"accumulate_grad_batches": 1, "max_steps": num_steps, "gradient_clip_val": None}
    trainer = quiet_trainer(strategy=made, devices=num_ranks, callbacks=[sent], **options)
    trainer.fit(model, datamodule=GlobalBatches(model, num_steps=num_steps))
    return sent


# A ring's reduce-scatter sends half of what its all-reduce sends; PowerSGD needs the latter.
LEAST = {
    "fp16": 1.99,
    "bf16": 1.99,
    "int8": 3.9,
    "int4": 7.3,
    "topk": 40,
    "powersgd": 20,
    "onebit": 25,
}
WIRES = [
    *(("shard_ddp", 2, compression, times) for compression, times in LEAST.items()),
    pytest.param("shard_ddp", 2, PowerSGD(6, factor_dtype="bfloat16"), 27, id="powersgd6 bfloat16"),
    ("zero1", 2, "onebit", 25),
    ("zero1", 2, "powersgd", 15),
    ("zero2", 3, "topk", 40),
]


@cache
def dense_bytes(name: str, num_ranks: int) -> list[int]:
    return sent_bytes(STRATEGIES[name](backend="in_process"), num_ranks).steps


def check_wire(name: str, num_ranks: int, compression: str | Compressor, times: float) -> None:
    made = OneBit(warmup_steps=1) if compression == "onebit" else compression
    compressed = STRATEGIES[name](backend="in_process", compression=made)
    sent = sent_bytes(compressed, num_ranks).steps
    assert dense_bytes(name, num_ranks)[-1] / sent[-1] >= times


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("name", "num_ranks", "compression", "times"), WIRES)
def test_bytes_on_the_wire(
    name: str, num_ranks: int, compression: str | Compressor, times: float
) -> None:
    """Counted by the group of the gradients, all that a step sends."""
    check_wire(name, num_ranks, compression, times)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3, 4, 8])
@pytest.mark.parametrize("compression", LEAST)
@pytest.mark.parametrize("name", STAGES)
def test_bytes_on_the_wire_everywhere(name: str, compression: str, num_ranks: int) -> None:
    halved = compression == "powersgd" and name != "shard_ddp"
    check_wire(name, num_ranks, compression, 15 if halved else LEAST[compression])


class AllSent(Sent):
    """All bytes of each step."""

    def _total(self, trainer: L.Trainer) -> int:
        return trainer.strategy.collectives.traffic.total_bytes


@cache
def all_sent(name: str, compression: str | None, precision: str, num_ranks: int) -> AllSent:
    sent, model = AllSent(), ExampleGPT(width=64)
    made: Any = OneBit(warmup_steps=1) if compression == "onebit" else compression
    trainer = quiet_trainer(
        strategy=strategy(name, compression=made),
        devices=num_ranks,
        callbacks=[sent],
        max_steps=3,
        precision=precision,
        accumulate_grad_batches=1,
    )
    trainer.fit(model, datamodule=GlobalBatches(model, num_steps=3))
    assert trainer.strategy.compression_tally().sent_bytes == sum(sent.steps)
    return sent


RATIOS = [
    *((name, compression, "32-true", 2) for name in STAGES for compression in COMPRESSORS),
    ("zero1", "topk", "bf16-mixed", 2),
    ("zero2", "int8", "64-true", 3),
]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("name", "compression", "precision", "num_ranks"), RATIOS)
def test_the_ratio_is_that_of_all_bytes_of_a_step(
    name: str, compression: str, precision: str, num_ranks: int
) -> None:
    """Parameters and flags as well: with top-k "zero2" sends half of dense's bytes, not 1/99."""
    dense, sent = (all_sent(name, one, precision, num_ranks) for one in (None, compression))
    assert sent.ratio == pytest.approx(sum(dense.steps) / sum(sent.steps), rel=1e-2)
    if name != "shard_ddp" and precision == "32-true":
        assert sent.ratio < 2


def test_the_progress_bar_shows_the_ratio() -> None:
    model = build("lstm")
    made = strategy("shard_ddp", compression="bf16")
    trainer = quiet_trainer(strategy=made, devices=2, max_steps=2, callbacks=[CompressionRatio()])
    trainer.fit(model, datamodule=GlobalBatches(model, num_steps=2))
    assert trainer.progress_bar_metrics["compression"] == pytest.approx(2.0, rel=0.02)


def test_the_ratio_of_nothing_compressed_is_refused() -> None:
    model = build("lstm")
    trainer = quiet_trainer(
        strategy=strategy("zero1"), devices=2, max_steps=2, callbacks=[CompressionRatio()]
    )
    with pytest.raises(ConfigError, match=r"CompressionRatio .* compresses nothing"):
        trainer.fit(model, datamodule=GlobalBatches(model, num_steps=2))


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_names(compression: str) -> None:
    trainer = quiet_trainer(strategy=f"shard_ddp_{compression}_in_process", devices=2)
    assert isinstance(trainer.strategy.compression, COMPRESSORS[compression])
    assert isinstance(ZeRO1Strategy(compression=compression).compression, Compressor)


TOP_K = "lightning_shard.data_parallel.compression.TopK"
FROM_YAML = [
    ("int8", {"block": 256, "rounding": "stochastic", "seed": 0}),
    (
        f"{{class_path: {TOP_K}, init_args: {{ratio: 0.02}}}}",
        {"ratio": 0.02, "momentum": 0.0, "warmup_steps": 0},
    ),
]


@pytest.mark.parametrize(("value", "expected"), FROM_YAML, ids=["name", "class_path"])
def test_from_yaml(value: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = f"{{class_path: lightning_shard.ZeRO2Strategy, init_args: {{compression: {value}}}}}"
    arguments = [f"--trainer.strategy={made}", "--trainer.accelerator=cpu"]
    set_arguments(monkeypatch, "program", *arguments, "--trainer.logger=false")
    cli = LightningCLI(
        BoringModel, run=False, save_config_callback=None, seed_everything_default=False
    )
    assert expected.items() <= vars(cli.trainer.strategy.compression).items()


def test_from_a_mapping() -> None:
    named = ZeRO2Strategy(compression={"class_path": "powersgd", "init_args": {"rank": 4}})
    assert isinstance(named.compression, PowerSGD)
    assert named.compression.rank == 4
    path = f"{Exact.__module__}.Exact"
    assert isinstance(DDPStrategy(compression={"class_path": path}).compression, Exact)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("int3", "compression must be a string that is one of 'none', 'fp16'.* got 'int3'"),
        (3, "compression must be a string .* got 3"),
        ({"class_path": "no.such.Thing"}, "'no.such.Thing' .* cannot be made: No module"),
        ({"class_path": "topk", "init_args": {"share": 1}}, "cannot be made: .*'share'"),
        ({"class_path": "builtins.int"}, "Unknown compression 'builtins.int'"),
        ({"name": "topk"}, "Unknown compression"),
    ],
)
def test_what_is_no_compression(choice: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DDPStrategy(compression=choice)


def test_what_keeps_values_under_stage_3_and_a_second_format_are_refused() -> None:
    for one in ("topk", "powersgd", "onebit"):
        with pytest.raises(ConfigError, match=r"keeps on each rank .* got ZeRO stage 3"):
            ZeRO3Strategy(compression=one)
    with pytest.raises(ConfigError, match=r"FP16 says .* reduce_dtype of torch\.bfloat16"):
        ZeRO1Strategy(compression="fp16", reduce_dtype="bfloat16")


class WithSGD(Trained):
    """The LSTM with SGD."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.inner = build("lstm")
        self.momentum = momentum

    def loss(self, batch: Any) -> Tensor:
        return self.inner.loss(batch)

    def data(self, num_samples: int) -> TensorDataset:  # type: ignore[override]
        return self.inner.data(num_samples)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


@pytest.mark.parametrize(
    ("name", "compression", "model", "message"),
    [
        ("shard_ddp", OneBit(), lambda: WithSGD(0.0), "sends Adam's momentum, which SGD"),
        ("zero1", TopK(momentum=0.9), lambda: WithSGD(0.9), "SGD has a momentum of 0.9 of its own"),
        ("zero1", TopK(momentum=0.9), lambda: build("lstm"), "AdamW has a momentum of 0.9"),
        ("zero2", OneBit(), lambda: build("lstm"), "second gradient .* Use strategy='zero1'"),
    ],
)
def test_momentum_that_would_be_wrong_is_refused(
    name: str, compression: Compressor, model: Callable[[], Trained], message: str
) -> None:
    made = model()
    trainer = quiet_trainer(
        strategy=strategy(name, compression=compression), devices=2, gradient_clip_val=None
    )
    with pytest.raises(ConfigError, match=message):
        trainer.fit(made, datamodule=GlobalBatches(made, num_steps=2))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", STAGES)
def test_momentum_correction_trains_as_sgd_with_momentum(name: str) -> None:
    """Where everything is sent at once, momentum starts anew each time: SGD without it."""

    def run(momentum: float, compression: Any) -> Run:
        made = strategy(name, compression=compression)
        options = {"max_steps": 4, "devices": 2, "accumulate_grad_batches": 1}
        torch.manual_seed(7)
        return train(WithSGD(momentum), strategy=made, gradient_clip_val=None, **options)

    full = run(0.0, TopK(ratio=1.0, momentum=0.9))
    assert full.losses == pytest.approx(run(0.0, None).losses, rel=1e-5)
    some = run(0.0, TopK(ratio=0.3, momentum=0.9))
    assert some.losses != full.losses


CASES = [
    ("int8", "shard_ddp"),
    ("topk", "zero1"),
    ("powersgd", "zero2"),
    ("powersgd", "shard_ddp"),
    ("onebit", "zero1"),
    ("fp16", "zero2"),
]


def train_cases() -> list[Run]:
    """Train one case after the other; each process must call."""
    ignore_upstream_warnings()
    return [_train("gloo", *case) for case in CASES]


def _train(backend: str, compression: str, strategy: str) -> Run:
    choice = OneBit(warmup_steps=2) if compression == "onebit" else COMPRESSORS[compression]()
    made = STRATEGIES[strategy](backend=backend, bucket_mb=SMALL_BUCKET_MB, compression=choice)
    return train(build("gpt"), strategy=made, devices=2, max_steps=3)


@pytest.mark.slow
def test_gloo_trains_as_one_process_does() -> None:
    first, second = run_processes(train_cases, 2)
    for case, run, other in zip(CASES, first, second, strict=True):
        assert_bitwise_equal(run, other)
        inside = _train("in_process", *case)
        assert run.losses == pytest.approx(inside.losses, rel=1e-4), case
        assert run.norms == pytest.approx(inside.norms, rel=1e-3), case


class SometimesUsed(BoringModel):
    """A batch norm, which may talk in backward, and layers that some ranks' samples leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
        self.rare = nn.Linear(32, 2)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64), batch_size=4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.body(batch)
        loss = self.layer(hidden).pow(2).mean()
        rank = self.trainer.strategy.global_rank
        return loss + self.rare(hidden).pow(2).mean() if batch_idx % 2 == rank else loss


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("compression", ["int8", "topk", "powersgd"])
def test_ranks_that_leave_layers_out_send_in_one_order(compression: str, name: str) -> None:
    """Second halves went out amid first halves, at places that ranks without a layer lacked."""
    made = strategy(name, compression=compression)
    trainer = quiet_trainer(max_steps=4, devices=2, strategy=made)
    module = SometimesUsed()
    trainer.fit(module)
    assert trainer.global_step == 4
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())
