"""Activations in host memory beside all else: styles of training, models, formats, compilers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_shard import (
    ContextParallelStrategy,
    DDPStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.data_parallel.offload import activations
from lightning_shard.data_parallel.offload.activations import HostActivations
from lightning_shard.errors import ConfigError
from tests.strategies import styles
from tests.strategies.activation_checkpointing.test_styles import (
    CompiledBlocks,
    Dropping,
    Normed,
    SpectralStack,
)
from tests.strategies.expert_parallel import test_parity as experts
from tests.strategies.offload.places import WARNINGS
from tests.strategies.parity import (
    LONG_STEPS,
    SMALL_BUCKET_MB,
    Case,
    assert_parity,
    build,
    single_device,
    train,
)
from tests.strategies.stacks import Stack, fit

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        *WARNINGS,
        r".* microbatches are fewer than the .* stages",
        r"The .grad attribute of a Tensor that is not a leaf",  # of dynamo
        r"`gradient_checkpointing_enable` is deprecated",
    )
]
SLOW = pytest.mark.slow
Make = Callable[..., Any]
IN_PROCESS: dict[str, Any] = {"backend": "in_process", "activation_offload": True}
STAGES: dict[str, Any] = {**IN_PROCESS, "num_microbatches": 4}
zero3: Make = partial(ZeRO3Strategy, bucket_mb=SMALL_BUCKET_MB, **IN_PROCESS)
zero2: Make = partial(ZeRO2Strategy, **IN_PROCESS)
MAKES: dict[str, Make] = {
    "zero2": zero2,
    "zero3": zero3,
    "zero3-parameters": partial(zero3, offload="parameters"),
    "zero1-optimizer": partial(ZeRO1Strategy, offload="optimizer", **IN_PROCESS),
    "tensor": partial(TensorParallelStrategy, **IN_PROCESS),
    "sequence": partial(TensorParallelStrategy, sequence_parallel=True, **IN_PROCESS),
    "context": partial(ContextParallelStrategy, **IN_PROCESS),
    "1f1b": partial(PipelineParallelStrategy, **STAGES),
    "zbv": partial(PipelineParallelStrategy, schedule="zbv", **STAGES),
}


@pytest.fixture(autouse=True)
def all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even these models' activations leave, and most of them come back."""
    monkeypatch.setattr(activations, "LEAST_BYTES", 32)
    monkeypatch.setattr(HostActivations, "in_flight_bytes", 4_000)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("choice", [None, "full", "selective"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("style", [*styles.AUTOMATIC, *styles.MANUAL])
def test_styles_of_training(style: Any, stage: int, choice: Any) -> None:
    options: dict[str, Any] = {"num_ranks": 2, "bucket_mb": 1e-4, **IN_PROCESS}
    strategy = styles.STRATEGIES[stage](activation_checkpointing=choice, **options)
    styles.check(style, strategy)
    assert strategy.activation_traffic["down"].bytes > 0


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("choice", [None, "full", "selective"])
@pytest.mark.parametrize("name", ["zero3-parameters", "zero1-optimizer"])
def test_beside_parameters_and_state_in_host_memory(
    name: str, choice: Any, accumulate: int
) -> None:
    make = MAKES[name]
    run = train(build("gpt"), strategy=make(activation_checkpointing=choice), devices=2)
    assert_parity(run, single_device(Case(model="gpt", strategy="", num_ranks=1)))


MODELS = [
    ("llama", None, "zero3"),
    ("llama", "full", "zero2"),
    ("gpt2", "selective", "zero3"),
    ("bert", None, "tensor"),
    ("bert", "full", "zero3"),
    ("mixtral", None, "zero3"),
    ("llama", None, "tensor"),
    ("llama", "full", "context"),
    ("gpt2", None, "context"),
    ("llama_8", None, "zbv"),
    ("gpt2_8", "selective", "1f1b"),
    ("vit", None, "zero3"),
    ("encoder", None, "tensor"),
    ("encoder", "full", "sequence"),
    ("t5", None, "zero3"),
    ("conv", None, "zero2"),
]


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("model", "choice", "name"), MODELS, ids=str)
def test_models_of_others(model: str, choice: Any, name: str) -> None:
    strategy = MAKES[name](activation_checkpointing=choice)
    run = train(build(model), strategy=strategy, devices=2)
    num_ranks = 2 if model == "conv" else 1
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=num_ranks)))
    assert strategy.activation_traffic["up"].bytes > 0


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["zero3", "tensor", "1f1b"])
def test_models_that_checkpoint_themselves(name: str, reentrant: bool) -> None:
    model: Any = build("llama")
    model.network.gradient_checkpointing_enable({"use_reentrant": reentrant})
    strategy = MAKES[name]()
    run = train(model, strategy=strategy, devices=2)
    assert_parity(run, single_device(Case(model="llama", strategy="", num_ranks=1)))
    assert strategy.activation_traffic["up"].bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("choice", [None, "full", "selective"])
@pytest.mark.parametrize("model", ["mixtral", "listed"])
def test_experts(model: str, choice: Any, stage: int) -> None:
    strategy = HybridParallelStrategy(
        expert_parallel_size=2, zero_stage=stage, activation_checkpointing=choice, **IN_PROCESS
    )
    run = train(experts.build(model), strategy=strategy, devices=2, num_steps=LONG_STEPS)
    assert_parity(run, experts.single_device(model), num_steps=LONG_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [None, "full", "selective"])
@pytest.mark.parametrize("name", ["zero3", "1f1b", "zbv"])
def test_dropout_is_the_same_to_the_bit(name: str, choice: Any) -> None:
    options: dict[str, Any] = {"devices": 2, "max_epochs": 1}
    plain = fit(Dropping, MAKES[name](activation_offload=False), **options)
    moved = fit(Dropping, MAKES[name](activation_checkpointing=choice), **options)
    assert moved.curve.losses == plain.curve.losses
    torch.testing.assert_close(moved.weights, plain.weights, rtol=0, atol=0)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("sync_batchnorm", [False, True])
@pytest.mark.parametrize("stack", [Normed, SpectralStack])
def test_statistics_and_buffers_that_forward_changes(stack: Any, sync_batchnorm: bool) -> None:
    options: dict[str, Any] = {"devices": 2, "max_epochs": 1, "sync_batchnorm": sync_batchnorm}
    plain = fit(stack, zero3(activation_offload=False), **options)
    moved = fit(stack, zero3(), **options)
    torch.testing.assert_close(moved.weights, plain.weights, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("name", ["zero3", "tensor", "1f1b"])
def test_formats_have_the_same_bits(name: str, precision: str) -> None:
    def run(**options: Any) -> Any:
        given: dict[str, Any] = {"precision": precision}
        if precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            given = {"precision": None, "plugins": [MixedPrecision(precision, "cpu", scaler)]}
        return train(build("gpt"), strategy=MAKES[name](**options), devices=2, **given)

    moved, plain = run(), run(activation_offload=False)
    assert moved.losses == plain.losses
    torch.testing.assert_close(moved.weights, plain.weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        pytest.param(name, choice, marks=SLOW)
        for name in ("zero3", "tensor", "1f1b")
        for choice in (None, "full", "selective")
    ],
)
def test_compiled_blocks(name: str, choice: Any) -> None:
    torch._dynamo.reset()
    model = build("gpt")
    model.__class__ = CompiledBlocks
    strategy = MAKES[name](activation_checkpointing=choice)
    run = train(model, strategy=strategy, devices=2)
    assert_parity(run, single_device(Case(model="gpt", strategy="", num_ranks=1)))
    assert strategy.activation_traffic["up"].bytes > 0


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("choice", [None, "full"])
def test_once_local_sgd_has_parted(choice: Any) -> None:
    def run(**options: Any) -> Any:
        strategy = LocalSGDStrategy(backend="in_process", sync_every=2, **options)
        return train(build("gpt"), strategy=strategy, devices=2)

    moved, plain = run(activation_offload=True, activation_checkpointing=choice), run()
    assert moved.losses == plain.losses


class Functional(Stack):
    """Differentiates by torch.func in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        slope = torch.func.grad(lambda x: x.square().sum())(batch[0])
        return self.loss(batch) + 0 * slope.sum()


def test_a_step_with_torch_func_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="activation_offload=True moves what autograd saves"):
        fit(Functional, zero2(), devices=2, max_epochs=1)
    fit(Functional, zero2(activation_offload=False), devices=2, max_epochs=1)


class InPlace(Stack):
    """Changes a tensor that its exponential has saved."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        wave = self.head(self.embed(batch[0])).exp()
        loss = wave.square().mean() + self.loss(batch)
        return loss + 0 * wave.add_(1).mean()


def test_what_a_step_changes_in_place_is_an_error_as_it_is_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostActivations, "in_flight_bytes", 10**9)
    for options in ({}, {"activation_offload": False}):
        with pytest.raises(Exception, match="modified by an inplace operation"):
            fit(InPlace, zero2(**options), devices=2, max_epochs=1)


def test_it_says_once_that_it_saves_nothing_on_cpu_ranks() -> None:
    with pytest.warns(UserWarning, match="activation_offload=True saves nothing on CPU ranks"):
        fit(Stack, DDPStrategy(**IN_PROCESS), devices=2, max_epochs=1)


def test_nothing_is_left_after_a_fit() -> None:
    fitted = fit(Stack, zero3(), devices=2, max_epochs=1)
    assert fitted.model.trainer.strategy.run.steps.activations.host_bytes == 0
    loss: Tensor = nn.functional.cross_entropy(
        fitted.model(torch.randn(2, 4)), torch.tensor([0, 1])
    )
    loss.backward()  # outside of a fit, autograd saves as ever
