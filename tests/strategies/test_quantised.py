"""A frozen quantised base under an adapter: packed elements are sharded, other kinds are refused.

Stand-ins are as the packages' parameters: bitsandbytes' has packed elements of its own and scales
as an attribute, torchao's is one tensor made of several.
"""

from typing import Any, Self

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import (
    ConfigError,
    DDPStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.checkpoint.sharded.runs import quiet_trainer
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice()

RANKS: dict[str, Any] = {"backend": "in_process", "num_ranks": 2, "announce": False}
WIDTH, BLOCKS = 64, 4


class Packed(nn.Parameter):
    """Whole numbers, and beside them what they mean."""

    def __new__(cls, codes: Tensor, quant_state: Tensor) -> Self:
        made = Tensor._make_subclass(cls, codes, False)
        made.quant_state = quant_state
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "Packed":
        return type(self)(self.data.clone(), self.quant_state.clone())


class Packed8(Packed):
    """One of a layer that keeps the elements once more."""

    SCB = None


class Several(Tensor):
    """One tensor made of two."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Several":
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


class Adapted(nn.Module):
    """A linear layer of eight bits, with an adapter of low rank around it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        full = nn.Linear(WIDTH, WIDTH).weight.data
        scale = full.abs().amax(1, keepdim=True) / 127
        codes = ((full / scale).round() + 128).to(torch.uint8)
        if kind == "several":
            self.weight = nn.Parameter(Several(codes, scale), requires_grad=False)
        else:
            self.weight = (Packed if kind == "packed" else Packed8)(codes, scale)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.float() - 128) * self.weight.quant_state
        return x + functional.linear(x, weight).tanh() + self.up(self.down(x))


class Net(L.LightningModule):
    """Adapted layers, of which the adapters learn."""

    def __init__(self, kind: str = "packed", batch_size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.Sequential(*(Adapted(kind) for _ in range(BLOCKS)))
        self.batch_size = batch_size

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.blocks(batch[0]).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)

    def train_dataloader(self) -> Any:
        data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=self.batch_size)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("kind", [ZeRO3Strategy, ZeRO2Strategy, DDPStrategy])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.few_cases(2)
def test_adapters_of_a_packed_base_train_as_on_one_device(kind: Any, precision: Any) -> None:
    alone = Net(batch_size=8)
    one = DDPStrategy(**{**RANKS, "num_ranks": 1})
    quiet_trainer(one, max_steps=5, precision=precision).fit(alone)
    module = Net()
    quiet_trainer(kind(**RANKS), max_steps=5, precision=precision).fit(module)
    before = Net().state_dict()
    tolerance = 1e-5 if precision == "32-true" else 0.1
    for name, value in alone.state_dict().items():
        found = module.state_dict()[name]
        torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance * 1e-1)
        is_adapter = ".up." in name or ".down." in name
        assert torch.equal(found, before[name]) != is_adapter
    assert isinstance(module.blocks[0].weight, Packed)
    assert module.blocks[0].weight.quant_state.shape == (WIDTH, 1)


def test_the_packed_elements_are_sharded_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def tell(self: Net, *_: Any) -> None:
        held.append(self.trainer.strategy.held_bytes().parameters)

    monkeypatch.setattr(Net, "on_train_batch_end", tell, raising=False)
    quiet_trainer(ZeRO3Strategy(**RANKS), max_steps=1).fit(Net())
    adapters = BLOCKS * 2 * 4 * WIDTH * 4
    assert len(held) == 2
    assert max(held) < 0.55 * (BLOCKS * WIDTH * WIDTH + adapters)


@pytest.mark.parametrize(
    ("kind", "strategy", "told"),
    [
        ("several", ZeRO3Strategy, "'blocks.0.weight' of Net is a Several .* made of several"),
        ("several", DDPStrategy, "Quantise the frozen layers with bitsandbytes in 4 bits"),
        ("packed8", ZeRO3Strategy, "would save nothing; expected 4 bits"),
        ("packed", PipelineParallelStrategy, "quantised Packed, which a pipeline cannot leave"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(kind: str, strategy: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        quiet_trainer(strategy(**RANKS), max_steps=1).fit(Net(kind))


def test_a_plan_that_cuts_packed_elements_is_refused_by_name() -> None:
    module = Net()
    for block in module.blocks:
        block.base = nn.Linear(WIDTH, WIDTH, bias=False)
        block.base.weight = block.weight
    strategy = TensorParallelStrategy(**RANKS, plan={"blocks.*.base": "colwise"})
    with pytest.raises(ConfigError, match=r"blocks.0.base.weight is a quantised Packed"):
        quiet_trainer(strategy, max_steps=1).fit(module)


def test_packed_parameters_on_meta_are_refused_by_name() -> None:
    trainer = quiet_trainer(ZeRO3Strategy(**RANKS), max_steps=1)
    with torch.device("meta"):
        module = Net()
    with pytest.raises(ConfigError, match=r"'blocks.0.weight', .* on meta are quantised"):
        trainer.fit(module)
