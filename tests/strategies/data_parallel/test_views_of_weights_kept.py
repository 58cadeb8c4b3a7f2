"""What user code keeps of a full weight under stage 3 shows its elements as long as it is kept.

    ways        w.detach(), w.data, w[:4], w.T, arrays, DLPack
    places      a step that computes with it, the block's forward, what that returns, hooks ...
    read        in the rest of the step and in backward: as on one device
                after the update: the values of before it, and a warning that names the weight

The memory of a block's weights was freed below the views that others had: a read ended the process.
"""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_shard import ZeRO3Strategy
from tests.strategies.parity import ignoring
from tests.trainers import cpu_trainer

pytestmark = ignoring()
SIZE, NUM_STEPS = 8, 3
ONE_BY_ONE = 1e-5  # MB: each block is a unit
HELD = r"What was made of 'blocks\.1\.layer\.weight' in .* is still held after an update"
WAYS: dict[str, Callable[[Tensor], Any]] = {
    "detach": Tensor.detach,
    "data": lambda weight: weight.data,
    "slice": lambda weight: weight[:4],
    "transposed": lambda weight: weight.T,
    "slice_of_detached": lambda weight: weight.detach()[2:],
    "numpy": lambda weight: weight.detach().numpy(),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
}
PLACES = ["step", "forward", "output", "forward_hook", "backward_hook", "checkpoint"]


def squares(kept: Any) -> float:
    """Return the sum of squares of what was kept."""
    with torch.no_grad():
        return float(torch.as_tensor(kept).detach().double().square().sum())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.on_forward: Callable[[Tensor], None] = lambda _: None
        self.returned: Callable[[Tensor], Any] | None = None

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.layer(x))
        self.on_forward(self.layer.weight)
        return x if self.returned is None else (x, self.returned(self.layer.weight))


class Keeping(L.LightningModule):
    """Keeps something of the second block's weight, and reads it later."""

    def __init__(self, way: str, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.way, self.place, self.kept = WAYS[way], place, None
        self.seen: dict[str, list[float]] = {}

    def keep(self, weight: Tensor) -> None:
        self.kept = self.way(weight)

    def read(self, when: str) -> None:
        if self.kept is not None:
            self.seen.setdefault(when, []).append(squares(self.kept))

    def setup(self, stage: str) -> None:
        block: Any = self.blocks[1]
        if self.place in ("forward", "checkpoint"):
            block.on_forward = self.keep
        if self.place == "output":
            block.returned = self.way
        if self.place == "forward_hook":
            block.register_forward_hook(lambda module, *_: self.keep(module.layer.weight))
        if self.place == "backward_hook":
            block.layer.register_full_backward_hook(lambda module, *_: self.keep(module.weight))

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        checkpoints = self.place == "checkpoint" and block is self.blocks[1]
        result = checkpoint(block, x, use_reentrant=False) if checkpoints else block(x)
        if isinstance(result, tuple):
            result, self.kept = result
        return result

    def training_step(self, x: Tensor) -> Tensor:
        self.read("before")
        x = x.clone().requires_grad_()
        x.register_hook(lambda _: self.read("backward"))
        for block in self.blocks:
            x = self.called(block, x)
        self.read("step")
        weight: Any = self.blocks[1].layer.weight
        if self.place != "step":
            return x.square().mean()
        penalty = weight.sum()
        self.keep(weight)
        return x.square().mean() + penalty

    def on_after_backward(self) -> None:
        self.read("after_backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self.read("batch_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fitted(model: Any, strategy: Any = "auto") -> Any:
    """Return a model after a fit in which all samples are alike."""
    loader = DataLoader(torch.linspace(-1, 1, SIZE).repeat(16, 1), batch_size=2)
    cpu_trainer(strategy=strategy, devices=1, max_steps=NUM_STEPS).fit(model, loader)
    return model


def on_ranks(**options: Any) -> ZeRO3Strategy:
    return ZeRO3Strategy(backend="in_process", num_ranks=2, bucket_mb=ONE_BY_ONE, **options)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_is_read_as_on_one_device_until_the_update(way: str, place: str) -> None:
    expected = fitted(Keeping(way, place)).seen
    with pytest.warns(UserWarning, match=HELD):
        seen = fitted(Keeping(way, place), on_ranks()).seen
    for when in ("step", "backward", "after_backward"):
        assert seen.get(when) == pytest.approx(expected.get(when), rel=1e-4)
    assert seen["batch_end"] == pytest.approx(expected["after_backward"], rel=1e-4)
    assert seen["before"] == pytest.approx(seen["batch_end"][:-1], rel=1e-4)


class Halving(Keeping):
    """Writes to what its block returns, before the update."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.kept.mul_(0.5)
        self.kept = None


def test_what_is_written_to_the_output_of_a_block_goes_to_its_weight() -> None:
    """It was written to freed memory."""
    expected = fitted(Halving("detach", "output")).state_dict()
    torch.testing.assert_close(
        fitted(Halving("detach", "output"), on_ranks()).state_dict(), expected
    )


class KeepingOnRank1(Keeping):
    def keep(self, weight: Tensor) -> None:
        if self.global_rank == 1:
            super().keep(weight)


def test_one_rank_alone_may_keep_something() -> None:
    expected = fitted(Keeping("detach", "forward")).state_dict()
    with pytest.warns(UserWarning, match=HELD):
        model = fitted(KeepingOnRank1("detach", "forward"), on_ranks())
    torch.testing.assert_close(model.state_dict(), expected)


def test_nothing_that_is_let_go_in_its_step_is_warned_of() -> None:
    class LettingGo(Keeping):
        def on_after_backward(self) -> None:
            self.kept = None

    fitted(LettingGo("detach", "forward"), on_ranks())
