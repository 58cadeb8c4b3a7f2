"""With the same kernel for the update, a run in host memory has the bits of one without offload."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging
from torch import Tensor

from tests.strategies.models import EPS, ExampleGPT
from tests.strategies.offload.places import PLACES, WARNINGS, offloaded
from tests.strategies.parity import SMALL_BUCKET_MB, GlobalBatches, quiet_trainer

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in WARNINGS]

NUM_STEPS = 3


class Plain(ExampleGPT):
    """Updates without the fused kernel, which rounds otherwise."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=EPS, fused=False)


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        next(self.children()).requires_grad_(False)


class TwoOptimizers(Plain):
    """Steps by hand, one optimizer for matrices and one for vectors; one backward is not zeroed."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.parameters() if param.ndim > 1]
        vectors = [param for param in self.parameters() if param.ndim < 2]
        return (
            torch.optim.AdamW(matrices, lr=3e-3, eps=EPS, fused=False),
            torch.optim.SGD(vectors, lr=0.1, momentum=0.9, fused=False),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        matrices, vectors = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            self.manual_backward(loss)
            matrices.step()
        matrices.zero_grad()
        vectors.step()
        vectors.zero_grad()
        return loss


def _seeded(like: Tensor) -> Tensor:
    return torch.full_like(like, 0.99)


class Edits(Plain):
    """Changes parameters and gradients in whatever hook there is."""

    def on_train_batch_start(self, *_: Any) -> None:
        for param in self.parameters():
            param.data = param.data * 0.999

    def on_after_backward(self) -> None:
        for param in self.parameters():
            param.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            param.data.clamp_(-0.5, 0.5)
            param.grad.add_(param.data, alpha=0.01)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.mul_(0.99)


class Averages(L.Callback):
    """An average of the weights as user code keeps it."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not self.kept:
            self.kept = [param.data.clone() for param in pl_module.parameters()]
        for kept, param in zip(self.kept, pl_module.parameters(), strict=True):
            kept.lerp_(param.data, 0.1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for kept, param in zip(self.kept, pl_module.parameters(), strict=True):
            param.data.copy_(kept)


class Unfreezing(BackboneFinetuning):
    """Trains the rest from the second epoch on."""


def trained(strategy: Any, model: Plain, **options: Any) -> dict[str, Tensor]:
    steps = {"max_steps": NUM_STEPS, "accumulate_grad_batches": 1, "devices": 2}
    if not model.automatic_optimization:
        steps |= {"gradient_clip_val": None, "max_steps": 4 * NUM_STEPS}
    quiet_trainer(strategy=strategy, **(steps | options)).fit(
        model, datamodule=GlobalBatches(model, NUM_STEPS)
    )
    return {name: value.clone() for name, value in model.state_dict().items()}


def check(
    place: str,
    make: Callable[[], Plain],
    expects: Callable[[], Plain] | None = None,
    **options: Any,
) -> None:
    def run(strategy: Any, make: Callable[[], Plain]) -> dict[str, Tensor]:
        torch.manual_seed(3)
        chosen = {key: value() if key == "callbacks" else value for key, value in options.items()}
        return trained(strategy, make(), **chosen)

    found = run(offloaded(place), make)
    without = PLACES[place][0](backend="in_process", bucket_mb=SMALL_BUCKET_MB)
    expected = run(without, expects or make)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("place", PLACES)
def test_precisions(place: str, precision: str) -> None:
    check(place, Plain, precision=precision, accumulate_grad_batches=2)


class Free(Plain):
    """Leaves the choice of a kernel to torch, or asks for the fused one."""

    def __init__(self, kind: str, fused: bool | None = None) -> None:
        super().__init__()
        self.kind, self.fused = kind, fused

    def configure_optimizers(self) -> Any:
        options = {"lr": 2.0**-4, "fused": self.fused}
        if self.kind == "AdamW":
            return torch.optim.AdamW(self.parameters(), eps=1e-3, **options)
        momentum = 0.9 if self.kind == "momentum" else 0.0
        return torch.optim.SGD(self.parameters(), momentum=momentum, **options)


@pytest.mark.few_cases(1)
@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["SGD", "momentum", "AdamW"])
@pytest.mark.parametrize("place", PLACES)
def test_elements_of_16_bits_are_updated_without_the_fused_kernel(place: str, kind: str) -> None:
    """It was chosen on the host: SGD left parameters as they were, and Adam rounded otherwise."""
    check(place, partial(Free, kind), precision="bf16-true", accumulate_grad_batches=2)


def test_elements_of_16_bits_are_updated_where_the_user_has_chosen_it() -> None:
    """On a GPU SGD's is right; the step that offload brings to the host was not."""
    fused, plain = (partial(Free, "momentum", fused) for fused in (True, False))
    check("zero2", fused, plain, precision="bf16-true")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("model", [Edits, Frozen, TwoOptimizers])
@pytest.mark.parametrize("place", PLACES)
def test_modules(place: str, model: type[Plain]) -> None:
    check(place, model)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_edits_in_mixed_precision(place: str) -> None:
    """Under "zero3" the device had a shard in 16 bits, to which edits in hooks were rounded."""
    check(place, Edits, precision="bf16-mixed")


AVERAGES = {
    "by hand": Averages,
    "ema": lambda: EMAWeightAveraging(decay=0.9, update_every_n_steps=1),
}
AVERAGED = [
    (place, precision, average)
    for place in PLACES
    for precision in ("32-true", "bf16-mixed")
    for average in AVERAGES
]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("place", "precision", "average"), AVERAGED)
def test_averages_of_weights(place: str, precision: str, average: str) -> None:
    check(place, Plain, precision=precision, callbacks=AVERAGES[average])
