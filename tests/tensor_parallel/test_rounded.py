"""Linear layers that round their weights are split like any other, or left full by name.

Stand-ins are as the packages' layers: torchao's rounds as it multiplies, bitsandbytes' has packed
elements, and beside them a scale for each block of a row.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import ConfigError, TensorParallelStrategy
from lightning_shard.tensor_parallel.rounded import cut_scales, rounds_product
from lightning_shard.tensor_parallel.styles import ParameterCut
from tests.checkpoint.sharded.runs import quiet_trainer
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice()

STRATEGY = partial(TensorParallelStrategy, backend="in_process", num_ranks=2, announce=False)
WIDTH, HIDDEN, BLOCK = 16, 64, 8


class Rounds(nn.Linear):
    """A layer that multiplies by a coarse weight, and trains the fine one."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        coarse = (self.weight * 32).round() / 32
        return functional.linear(input, self.weight + (coarse - self.weight).detach(), self.bias)


class Packed(nn.Parameter):
    """Elements in one column, and beside them what they mean."""

    quant_state: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> "Packed":
        made = Packed(self.data.clone(), requires_grad=False)
        made.quant_state = self.quant_state
        return made


class PackedLinear(nn.Linear):
    """A frozen layer with a scale for each block of a row."""

    def __init__(self, inputs: int, outputs: int, *, nested: bool = False) -> None:
        super().__init__(inputs, outputs)
        blocks = self.weight.data.view(-1, BLOCK)
        scales = blocks.abs().amax(1) / 127
        self.weight = Packed((blocks / scales[:, None]).round().to(torch.int8).view(-1, 1), False)
        self.weight.quant_state = state(scales, (outputs, inputs), nested=nested)
        self.bias.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        known = self.weight.quant_state
        weight = self.weight.view(-1, BLOCK).float() * plain(known)[:, None]
        return functional.linear(input, weight.view(known.shape), self.bias)


def state(scales: Tensor, shape: tuple[int, int], *, nested: bool) -> Any:
    known = {"blocksize": BLOCK, "shape": torch.Size(shape), "state2": None, "offset": None}
    if not nested:
        return SimpleNamespace(absmax=scales, nested=False, **known)
    code = torch.linspace(0, 1, 256)
    steps = scales.amax()[None]
    known["state2"] = SimpleNamespace(absmax=steps, code=code, blocksize=1 << 20)
    known["offset"] = torch.tensor(0.0)
    return SimpleNamespace(absmax=(scales / steps * 255).to(torch.uint8), nested=True, **known)


def plain(known: Any) -> Tensor:
    if not known.nested:
        return known.absmax
    return known.state2.code[known.absmax.long()] * known.state2.absmax + known.offset


class Block(nn.Module):
    """A pair of layers, with a thin path around them that learns."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.up, self.down = kind(WIDTH, HIDDEN), kind(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(L.LightningModule):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(*(Block(kind) for _ in range(2)))
        self.first = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.blocks(self.first(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)

    def train_dataloader(self) -> Any:
        data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=4)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@pytest.mark.parametrize("plan", [None, PLAN])
@pytest.mark.parametrize(
    "kind", [Rounds, PackedLinear, partial(PackedLinear, nested=True)], ids=str
)
@pytest.mark.few_cases(2)
def test_layers_that_round_are_split(kind: Any, plan: Any) -> None:
    """A layer with a forward of its own was refused rowwise, and found by no trial."""
    alone, module = Net(kind), Net(kind)
    quiet_trainer("auto", max_epochs=2).fit(alone)
    held: list[int] = []

    class Tells(L.Callback):
        def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
            held.append(trainer.strategy.held_bytes().parameters)

    quiet_trainer(STRATEGY(plan=plan), max_epochs=2, callbacks=[Tells()]).fit(module)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    full = sum(one.nbytes for one in alone.parameters())
    assert len(held) == 2
    assert max(held) < 0.75 * full
    assert type(module.blocks[0].up) is type(alone.blocks[0].up)


def test_a_cut_within_a_block_of_scales_is_refused_by_name() -> None:
    module = Net(lambda inputs, outputs: PackedLinear(inputs, outputs))
    for block in module.blocks:
        block.down = PackedLinear(WIDTH, BLOCK)  # whose rows have two blocks, for four ranks
    strategy = STRATEGY(plan={"blocks.*.down": "rowwise"}, num_ranks=4)
    with pytest.raises(ConfigError, match=r"blocks.0.down.weight of \(8, 16\) .* whole blocks"):
        quiet_trainer(strategy, max_steps=1).fit(module)


def test_scales_are_cut_as_the_blocks_that_they_belong_to() -> None:
    known = state(torch.arange(8.0), (4, 2 * BLOCK), nested=False)
    rows = cut_scales(known, ParameterCut(name="weight", dim=0), 1, 2)
    columns = cut_scales(known, ParameterCut(name="weight", dim=1), 1, 2)
    assert rows.absmax.tolist() == [4, 5, 6, 7]
    assert rows.shape == (2, 2 * BLOCK)
    assert columns.absmax.tolist() == [1, 3, 5, 7]
    assert columns.shape == (4, BLOCK)


def test_a_layer_that_multiplies_exactly_or_by_something_else_does_not_round() -> None:
    class Same(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return functional.linear(input, self.weight, self.bias)

    class Squares(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return functional.linear(input, self.weight.square(), self.bias)

    assert rounds_product(Rounds(4, 4))
    assert not rounds_product(Same(4, 4))
    assert not rounds_product(Squares(4, 4))
    assert not rounds_product(nn.Linear(4, 4))
