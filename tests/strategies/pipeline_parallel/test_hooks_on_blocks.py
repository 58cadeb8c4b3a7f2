"""What hooks on blocks log is logged of every stage's blocks; what cannot be is refused by name."""

from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy
from lightning_shard.errors import ConfigError
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring(".*microbatches are fewer than the")
WIDTH, STEPS = 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.act(self.up(x)))
        return result


class Logging(L.LightningModule):
    """Logs in hooks on its blocks, and on modules in them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def setup(self, stage: str) -> None:
        for name, module in self.named_modules():
            if name.startswith("blocks."):
                self.look_at(name, module)

    def look_at(self, name: str, module: nn.Module) -> None:
        def look(_: nn.Module, args: Any, result: Tensor) -> None:
            self.log(f"mean {name}", result.mean(), on_step=True, on_epoch=True)
            self.log(f"most {name}", result.detach().max(), reduce_fx="max")
            self.log(f"sum {name}", args[0].detach().sum(), reduce_fx="sum", batch_size=3)

        module.register_forward_hook(look)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def fit(model: L.LightningModule, strategy: Any, devices: int = 1) -> dict[str, Tensor]:
    data = torch.randn(8 * STEPS, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(
        strategy=strategy,
        devices=devices,
        max_steps=STEPS,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    loaders = [DataLoader(data, batch_size=8) for _ in range(2)]  # type: ignore[arg-type]
    trainer.fit(model, *loaders)
    return dict(trainer.logged_metrics)


@cache
def on_one_device() -> dict[str, Tensor]:
    return fit(Logging(), SingleDeviceStrategy(device="cpu"))


RANKS: dict[str, Any] = {"backend": "in_process", "announce": False}
SCHEMES: dict[str, tuple[int, Callable[[], Any]]] = {
    "1f1b": (2, lambda: PipelineParallelStrategy(**RANKS)),
    "four": (4, lambda: PipelineParallelStrategy(**RANKS)),
    "zbv": (2, lambda: PipelineParallelStrategy(schedule="zbv", **RANKS)),
    "recomputed": (2, lambda: PipelineParallelStrategy(activation_checkpointing="full", **RANKS)),
    "split": (
        4,
        lambda: HybridParallelStrategy(
            pipeline_parallel_size=2, tensor_parallel_size=2, plan=PLAN, **RANKS
        ),
    ),
}
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_hooks_on_blocks_log_on_every_stage(scheme: str) -> None:
    """What other stages' blocks logged was dropped, without a word."""
    num_ranks, make = SCHEMES[scheme]
    got, expected = fit(Logging(), make(), num_ranks), on_one_device()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=lambda m, n=name: f"{n}: {m}")


class Keeping(Logging):
    """Keeps numbers of its blocks, or of modules in them."""

    place = ""

    def look_at(self, name: str, module: nn.Module) -> None:
        if name.count(".") == 1 + bool(self.place) and name.endswith(self.place):
            module.register_forward_hook(lambda *given: self.kept.append(given[-1].mean().item()))

    kept: list[float] = []  # noqa: RUF012


class KeepingInside(Keeping):
    place = "act"


@pytest.mark.parametrize("kind", [Keeping, KeepingInside])
def test_hooks_that_ask_for_numbers_of_other_stages_blocks_are_refused(kind: type[Logging]) -> None:
    """A hook that asked for elements was left out where its block is another stage's."""
    message = r"A hook on the forward of 'blocks\.\d', a block of another stage"
    with pytest.raises(ConfigError, match=message):
        fit(kind(), PipelineParallelStrategy(**RANKS), 2)


class InBackward(Logging):
    def look_at(self, name: str, module: nn.Module) -> None:
        def look(_: nn.Module, args: Any, result: Tensor) -> None:
            if result.requires_grad:
                result.register_hook(lambda grad: self.log(f"grad {name}", grad.norm()))

        if name == "blocks.0":
            module.register_forward_hook(look)


def test_logging_in_a_gradients_hook_is_refused() -> None:
    """What a gradient's hook logged was of one microbatch."""
    with pytest.raises(ConfigError, match=r"log\(\) is called in the backward of a pipeline's"):
        fit(InBackward(), PipelineParallelStrategy(**RANKS), 2)
