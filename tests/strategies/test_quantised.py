"""A frozen quantised base under an adapter: elements are sharded, on whatever they lie.

Stand-ins are as the packages' parameters: bitsandbytes' has packed elements of its own and scales
as an attribute, torchao's is one tensor made of several.
"""

from functools import partial
from pathlib import Path
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
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.checkpoint.sharded.runs import quiet_trainer
from tests.examples.commands import ignoring_advice

pytestmark = [
    *ignoring_advice(),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training"),
]

RANKS: dict[str, Any] = {"backend": "in_process", "num_ranks": 2, "announce": False}
PIPELINE = partial(PipelineParallelStrategy, **RANKS, num_microbatches=2)
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
    """One of a layer that keeps the elements and scales once more, from its first forward on."""

    def __new__(cls, codes: Tensor, quant_state: Tensor) -> Self:
        made = super().__new__(cls, codes, quant_state)
        made.CB, made.SCB = made.data, quant_state
        return made


class EightBits(nn.Module):
    """A layer that computes with what its state has, as bitsandbytes' in eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed8(*coded(nn.Linear(WIDTH, WIDTH).weight.data))
        self.state = SimpleState()

    def init_8bit_state(self) -> None:
        self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
        self.weight.CB = self.weight.SCB = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.CB is not None:
            self.init_8bit_state()
        result = functional.linear(x, (self.state.CB.float() - 128) * self.state.SCB)
        self.weight.data = self.state.CB
        return result


class _KeepsWeight(torch.autograd.Function):
    """Sets a weight on its context, as bitsandbytes' product does, and saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.tensors, ctx.scale = (None, weight.view(-1, 1)), scale
        return functional.linear(x, (weight.float() - 128) * scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        codes = ctx.tensors[1].view(WIDTH, WIDTH).float()
        return grad @ ((codes - 128) * ctx.scale), None, None


class KeepsWeight(nn.Module):
    """A layer in whose graphs the weight stays."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(*coded(nn.Linear(WIDTH, WIDTH).weight.data))

    def forward(self, x: Tensor) -> Tensor:
        return _KeepsWeight.apply(x.requires_grad_(), self.weight, self.weight.quant_state)


class SimpleState:
    """What a layer keeps beside its parameter."""

    CB = SCB = None


class PacksAnew(nn.Module):
    """A layer that lays its elements out anew in eval mode, as bitsandbytes' in four bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(*coded(nn.Linear(WIDTH, WIDTH).weight.data))
        self.support_avx512bf16_for_cpu = True

    def forward(self, x: Tensor) -> Tensor:
        if self.support_avx512bf16_for_cpu and not self.training:
            self.weight.data = self.weight.data.view(-1, 1).clone()
        codes = self.weight.data.view(WIDTH, WIDTH).float()
        return functional.linear(x, (codes - 128) * self.weight.quant_state)


class Around(nn.Module):
    """A layer, which Hugging Face leaves in eval mode, and an adapter around it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.eval()
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x).tanh() + self.up(self.down(x))


class Several(Tensor):
    """One tensor made of two, the second of which may be made of two itself."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Several":
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["codes", "scale"], 128

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], middle: int, size: Any, stride: Any
    ) -> "Several":
        assert middle == 128
        return cls(**inner)

    def plain(self) -> Tensor:
        scale = self.scale.plain() if isinstance(self.scale, Several) else self.scale
        return (self.codes.float() - 128) * scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, *bias = args
            return functional.linear(x, weight.plain(), *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(*(func(one) for one in (args[0].codes, args[0].scale)))
        if func is torch.ops.aten.copy_.default and isinstance(args[1], Several):
            for name in ("codes", "scale"):
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        raise NotImplementedError(func)


def coded(full: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a matrix."""
    scale = full.abs().amax(1, keepdim=True) / 127
    return ((full / scale).round() + 128).to(torch.uint8), scale


class Headed(nn.Module):
    """A frozen linear layer whose weight is made of several tensors, with an adapter around it."""

    def __init__(self, *, nested: bool = True, trained: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        codes, scale = coded(self.base.weight.data)
        inner = Several(*coded(scale)) if nested else scale
        self.base.weight = nn.Parameter(Several(codes, inner), requires_grad=trained)
        self.base.bias.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x).tanh() + self.up(self.down(x))


class Adapted(nn.Module):
    """A linear layer of eight bits, with an adapter of low rank around it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = (Packed if kind == "packed" else Packed8)(
            *coded(nn.Linear(WIDTH, WIDTH).weight.data)
        )
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.float() - 128) * self.weight.quant_state
        return x + functional.linear(x, weight).tanh() + self.up(self.down(x))


class Net(L.LightningModule):
    """Adapted layers, of which the adapters learn."""

    def __init__(self, kind: str = "packed", batch_size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(2)
        others: dict[str, Any] = {
            "several": Headed,
            "trained": partial(Headed, trained=True),
            "eight bits": lambda: Around(EightBits()),
            "packs anew": lambda: Around(PacksAnew()),
            "keeps": lambda: Around(KeepsWeight()),
        }
        made = others.get(kind)
        self.blocks = nn.Sequential(*((made or partial(Adapted, kind))() for _ in range(BLOCKS)))
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


def test_memory_that_contexts_of_functions_keep_is_given_back() -> None:
    """Weights of 4 bits stayed full on each rank from a forward to the next, with a warning."""
    alone, module = Net("keeps", batch_size=8), Net("keeps")
    quiet_trainer("auto", max_steps=3).fit(alone)
    full: list[int] = []

    class Looks(L.Callback):
        def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
            flats = [one for unit in trainer.strategy.engine.units[:-1] for one in unit.flats]
            packed = [one for one in flats if one.full.dtype == torch.uint8]
            assert packed
            full.append(max(one.full.untyped_storage().nbytes() for one in packed))

        on_train_batch_end = on_before_backward

    strategy = ZeRO3Strategy(**RANKS, bucket_mb=1e-3)
    quiet_trainer(strategy, max_steps=3, callbacks=[Looks()]).fit(module)
    assert full == [0] * len(full)
    for mine, theirs in zip(module.blocks, alone.blocks, strict=True):
        torch.testing.assert_close(mine.up.weight, theirs.up.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["eight bits", "packs anew"])
@pytest.mark.parametrize("strategy", [partial(ZeRO3Strategy, **RANKS), PIPELINE])
@pytest.mark.few_cases(2)
def test_elements_lie_where_the_parameter_has_them(kind: str, strategy: Any) -> None:
    """Eight bits were refused under stage 3, and a layer that packs its elements anew failed."""
    alone = Net(kind, batch_size=8)
    quiet_trainer("auto", max_steps=3).fit(alone)
    module = Net(kind, batch_size=8 if strategy is PIPELINE else 4)
    quiet_trainer(strategy(), max_steps=3).fit(module)
    for mine, theirs in zip(module.blocks, alone.blocks, strict=True):
        torch.testing.assert_close(mine.up.weight, theirs.up.weight, rtol=1e-5, atol=1e-6)
        if kind == "packs anew":
            assert mine.base.support_avx512bf16_for_cpu
            assert mine.base.weight.shape == (WIDTH, WIDTH)
        else:
            assert mine.base.state.CB.data_ptr() == mine.base.weight.data_ptr()
            assert type(mine.base.state) is SimpleState


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "strategy",
    [
        ZeRO3Strategy,
        ZeRO2Strategy,
        ZeRO1Strategy,
        DDPStrategy,
        PIPELINE,
    ],
)
@pytest.mark.few_cases(3)
def test_adapters_of_a_base_made_of_several_tensors_train_as_on_one_device(
    strategy: Any, precision: Any
) -> None:
    """They were refused: a flat buffer has plain elements, as the inner tensors have."""
    alone = Net("several", batch_size=8)
    quiet_trainer("auto", max_steps=5, precision=precision).fit(alone)
    module = Net("several", batch_size=8 if strategy is PIPELINE else 4)
    quiet_trainer(strategy(**RANKS), max_steps=5, precision=precision).fit(module)
    tolerance = 1e-5 if precision == "32-true" else 0.1
    for mine, theirs in zip(module.blocks, alone.blocks, strict=True):
        assert type(mine.base) is nn.Linear
        assert isinstance(mine.base.weight, Several)
        assert torch.equal(mine.base.weight.plain(), theirs.base.weight.plain())
        for name in ("up", "down"):
            found, expected = mine.get_submodule(name).weight, theirs.get_submodule(name).weight
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 1e-1)
    assert [*dict(module.named_parameters())] == [*dict(alone.named_parameters())]


@pytest.mark.parametrize("kind", ["packed", "several", "eight bits"])
@pytest.mark.parametrize("strategy", [partial(ZeRO3Strategy, **RANKS), PIPELINE])
@pytest.mark.few_cases(2)
def test_a_rank_holds_its_share_of_the_packed_bytes(
    kind: str, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def tell(self: Net, *_: Any) -> None:
        held.append(self.trainer.strategy.held_bytes().parameters)

    monkeypatch.setattr(Net, "on_train_batch_end", tell, raising=False)
    quiet_trainer(strategy(), max_steps=1).fit(Net(kind))
    adapters = BLOCKS * 2 * 4 * WIDTH * 4
    assert len(held) == 2
    assert max(held) < 0.57 * (BLOCKS * WIDTH * WIDTH + adapters)


@pytest.mark.slow
def test_adapters_of_a_packed_base_train_in_a_pipeline() -> None:
    """A pipeline refused packed weights, which it leaves to other stages like any other."""
    alone, module = Net(batch_size=8), Net(batch_size=8)
    quiet_trainer("auto", max_steps=3).fit(alone)
    quiet_trainer(PIPELINE(), max_steps=3).fit(module)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-6)


class Saves(L.Callback):
    """Saves in the run after one step, whatever else looks at the checkpoint."""

    def __init__(self, path: Path, *, looked_at: bool) -> None:
        self.path, self.looked_at = path, looked_at

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if self.looked_at and trainer.strategy.checkpoint_format == "full":
            assert checkpoint["state_dict"]["blocks.0.base.bias"].sum() is not None


def test_a_dry_run_counts_elements_as_they_are() -> None:
    """Tensors made of several were counted in float32."""
    batch = [torch.zeros(4, WIDTH)]
    found = ZeRO3Strategy(**RANKS).dry_run(Net("several"), batch, world_size=2)
    base, others = WIDTH * WIDTH + WIDTH + 2 * 4 * WIDTH, 2 * 4 * WIDTH * 4
    assert found.ranks[0].memory.parameters == pytest.approx(BLOCKS * (base + others) / 2, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"save_trainable_only": True}, {"checkpoint_format": "sharded"}]
)
def test_a_run_goes_on_from_a_base_made_of_several_tensors(
    options: dict[str, Any], looked_at: bool, tmp_path: Path
) -> None:
    whole = Net("several")
    quiet_trainer(ZeRO3Strategy(**RANKS), max_steps=2).fit(whole)
    save = Saves(tmp_path / "a.ckpt", looked_at=looked_at)
    first = Net("several")
    quiet_trainer(ZeRO3Strategy(**RANKS, **options), max_steps=1, callbacks=[save]).fit(first)
    if options == {}:
        state = torch.load(tmp_path / "a.ckpt", weights_only=False)["state_dict"]
        weight = state["blocks.0.base.weight"]
        assert torch.equal(weight.plain(), Net("several").blocks[0].base.weight.plain())
        Net("several").load_state_dict(state)
    for strategy, batch_size in ((ZeRO2Strategy(**RANKS), 4), (PIPELINE(), 8)):
        second = Net("several", batch_size=batch_size)
        trainer = quiet_trainer(strategy, max_steps=2)
        trainer.fit(second, ckpt_path=tmp_path / "a.ckpt", weights_only=False)
        for mine, theirs in zip(second.blocks, whole.blocks, strict=True):
            torch.testing.assert_close(mine.up.weight, theirs.up.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "strategy", "told"),
    [
        ("trained", ZeRO3Strategy, "'blocks.0.base.weight' of Net is a Several .* of several"),
        ("trained", DDPStrategy, "is trained; expected plain elements.* Freeze it"),
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


def test_a_plan_of_layers_made_of_several_tensors_is_refused_before_a_run_too() -> None:
    """A dry run raised KeyError: 'weight'."""
    strategy = TensorParallelStrategy(**RANKS, plan={"blocks.*.base": "colwise"})
    with pytest.raises(ConfigError, match=r"The plan splits 'blocks.0.base' colwise, but it is a"):
        strategy.dry_run(Net("several"), [torch.empty(2, WIDTH)], world_size=2)
