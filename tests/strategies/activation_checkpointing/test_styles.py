"""Dropout, batch norms, compiled blocks and Hugging Face's models under checkpointing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.errors import ConfigError
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    UPSTREAM_WARNINGS,
    Case,
    Run,
    assert_parity,
    build,
    single_device,
    train,
)
from tests.strategies.stacks import NUM_BATCHES, Block, Stack, fit

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        *UPSTREAM_WARNINGS,
        r".* microbatches are fewer than the .* stages",
        r"The .grad attribute of a Tensor that is not a leaf",  # of dynamo
    )
]
SLOW = pytest.mark.slow
Make = Callable[..., Any]
zero3: Make = partial(ZeRO3Strategy, backend="in_process", bucket_mb=SMALL_BUCKET_MB)
zero2: Make = partial(ZeRO2Strategy, backend="in_process")
tensor: Make = partial(TensorParallelStrategy, backend="in_process")
STAGES: dict[str, Any] = {"backend": "in_process", "num_microbatches": 4}


class DroppingBlock(nn.Module):
    """Drops activations between its layers, where a tensor-parallel rank has a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.dropout(torch.tanh(self.up(self.norm(x))))
        return x + F.dropout(self.down(wide), 0.1, self.training)


class Dropping(Stack):
    block = DroppingBlock


DROPPING: dict[str, tuple[Make, int]] = {
    "zero3": (zero3, 2),
    "tensor": (partial(tensor, plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}), 2),
    "zbv": (partial(PipelineParallelStrategy, schedule="zbv", **STAGES), 2),
    "1f1b": (partial(PipelineParallelStrategy, schedule="1f1b", **STAGES), 2),
    "hybrid": (
        partial(
            HybridParallelStrategy,
            pipeline_parallel_size=2,
            tensor_parallel_size=2,
            plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
            zero_stage=3,
            **STAGES,
        ),
        8,
    ),
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        pytest.param(name, choice, marks=() if (name, choice) in quick else SLOW)
        for quick in [{("tensor", "full"), ("zero3", "selective")}]
        for name in DROPPING
        for choice in ("full", "selective")
    ],
)
def test_dropout_is_the_same_with_and_without(name: str, choice: Any) -> None:
    make, num_ranks = DROPPING[name]
    options: Any = {"devices": num_ranks, "max_epochs": 1}
    plain = fit(Dropping, make(), **options)
    again = fit(Dropping, make(activation_checkpointing=choice), **options)
    assert again.curve.losses == plain.curve.losses
    torch.testing.assert_close(again.weights, plain.weights, rtol=0, atol=0)


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.layer(x)))


class Normed(Stack):
    block = NormedBlock


@pytest.mark.parametrize("sync_batchnorm", [False, pytest.param(True, marks=SLOW)])
def test_running_statistics_are_updated_once(sync_batchnorm: bool) -> None:
    """Running statistics were updated twice."""
    options: Any = {"devices": 2, "max_epochs": 1, "sync_batchnorm": sync_batchnorm}
    plain = fit(Normed, zero3(), **options)
    again = fit(Normed, zero3(activation_checkpointing="full"), **options)
    assert again.weights["blocks.0.norm.num_batches_tracked"] > 0
    torch.testing.assert_close(again.weights, plain.weights, rtol=0, atol=0)


class SpectralStack(Stack):
    """Its weights' norms are estimated better in each forward, in buffers."""

    class block(Block):  # noqa: D106, N801
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.spectral_norm(self.layer)


def test_a_block_whose_forward_changes_buffers_is_refused() -> None:
    strategy = zero3(activation_checkpointing="full")
    with pytest.raises(ConfigError, match=r"'blocks\.3' \(block\) changes its buffer"):
        fit(SpectralStack, strategy, devices=2, max_epochs=1)


class CountingStack(Stack):
    """Its blocks keep what users keep in attributes: a counter, a list, the last value."""

    class block(Block):  # noqa: D106, N801
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.means = 0, list[float]()

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.means.append(float(x.detach().mean()))
            self.last = x.detach().mean()
            return super().forward(x)


def test_recomputation_changes_no_attributes_of_a_block() -> None:
    """Attributes of a block were changed again by its recomputation."""
    fitted = fit(CountingStack, zero3(activation_checkpointing="full"), devices=2, max_epochs=1)
    block = fitted.model.blocks[0]
    assert block.calls == len(block.means) == NUM_BATCHES
    assert float(block.last) == pytest.approx(block.means[-1])


class ShrinkingStack(Stack):
    """Its weights shrink by hand in each forward."""

    class block(Block):  # noqa: D106, N801
        def forward(self, x: Tensor) -> Tensor:
            self.layer.weight.data.mul_(0.9)
            return super().forward(x)


def test_a_block_whose_forward_edits_weights_is_refused() -> None:
    strategy = zero2(activation_checkpointing="full")
    with pytest.raises(ConfigError, match=r"changes its parameter 'layer\.weight', and so does"):
        fit(ShrinkingStack, strategy, devices=2, max_epochs=1)


def test_after_a_fit_the_module_is_what_it_was() -> None:
    fitted = fit(Stack, zero3(activation_checkpointing="full"), devices=2, max_epochs=1)
    for module in fitted.model.modules():
        assert "forward" not in vars(module)
        assert not [name for name in vars(module) if name.startswith("_lightning_shard")]


def test_after_a_fit_that_fails_too() -> None:
    class Failing(Stack):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("enough")

    seen = []

    class Seen(Failing):
        def on_fit_start(self) -> None:
            seen.append(self)
            assert "forward" in vars(self.blocks[0])

    with pytest.raises(ValueError, match="enough"):
        fit(Seen, zero3(activation_checkpointing="full"), devices=2)
    assert seen
    assert all("forward" not in vars(module) for model in seen for module in model.modules())


def of_model(model: str, make: Make, num_ranks: int) -> Run:
    return train(build(model), strategy=make(), devices=num_ranks)


@pytest.mark.parametrize(
    ("model", "choice", "name"),
    [
        ("llama", "full", "zero3"),
        *(
            pytest.param(model, choice, name, marks=SLOW)
            for model, choice, name in [
                ("llama", "selective", "tensor"),
                ("gpt2", "full", "zero3"),
                ("bert", "selective", "zero3"),
                ("mixtral", "full", "zero3"),
                ("bert", "full", "tensor"),
                ("llama_8", "full", "zbv"),
                ("gpt2_8", "full", "1f1b"),
                ("vit", ["ViTLayer"], "zero3"),
                ("encoder", "full", "tensor"),
                ("t5", "full", "zero3"),
            ]
        ),
    ],
    ids=str,
)
def test_a_cache_of_keys_and_values_is_filled_once(model: str, choice: Any, name: str) -> None:
    """A cache of keys and values was filled twice."""
    make, num_ranks = DROPPING[name]
    if name == "tensor":
        make = tensor
    run = of_model(model, partial(make, activation_checkpointing=choice), num_ranks)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=1)))


class CompiledBlocks(ExampleGPT):
    backend: Any = "aot_eager"

    def setup(self, stage: str) -> None:
        for block in self.blocks:
            block.compile(backend=self.backend)


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        pytest.param(name, choice, marks=SLOW)
        for name in ("zero3", "tensor", "1f1b")
        for choice in ("full", "selective")
    ],
)
def test_compiled_blocks(name: str, choice: Any) -> None:
    torch._dynamo.reset()
    make, num_ranks = DROPPING[name]
    make = tensor if name == "tensor" else make
    model = build("gpt")
    model.__class__ = CompiledBlocks
    run = train(model, strategy=make(activation_checkpointing=choice), devices=num_ranks)
    assert_parity(run, single_device(Case(model="gpt", strategy="", num_ranks=1)))
