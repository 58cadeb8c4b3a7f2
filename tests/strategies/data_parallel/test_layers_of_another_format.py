"""Layers that user code gives another format than the Trainer's flag: they train in it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import PreTrainedModel

from lightning_shard import ConfigError
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.precision.policy import AskedFormats
from tests.strategies.models import Trained
from tests.strategies.parity import GlobalBatches, ignoring, quiet_trainer

pytestmark = ignoring()

STEPS = 3
WAYS: dict[str, Callable[["Routed"], Any]] = {
    "float": lambda module: module.router.float(),
    "to": lambda module: module.router.to(torch.float32),
    "block": lambda module: module.blocks[1].float(),
    "half": lambda module: module.router.half(),
    "double": lambda module: module.blocks[0].double(),
    "made anew": lambda module: setattr(module.router, "weight", nn.Parameter(fresh())),
    "assigned": lambda module: setattr(module.router.weight, "data", fresh()),
}


def fresh() -> Tensor:
    """Return a value with more digits than bfloat16 has."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(5))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x.to(self.up.weight.dtype)).tanh()
        return x + self.down(h).to(x.dtype)


class Routed(Trained):
    """Blocks and a router, each of which takes its input in its own format."""

    def __init__(self, way: str = "", where: str = "") -> None:
        super().__init__()
        self.way, self.where = way, where
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.router = nn.Linear(6, 3)
        self.seen: set[torch.dtype] = set()

    def _act(self, where: str) -> None:
        if where == self.where:
            WAYS[self.way](self)

    def setup(self, stage: str) -> None:
        self._act("setup")

    def configure_model(self) -> None:
        self._act("configure_model")

    def on_fit_start(self) -> None:
        self._act("on_fit_start")

    def on_train_start(self) -> None:
        self._act("on_train_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._act(f"batch {batch_idx}")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        h = x.to(self.blocks[3].up.weight.dtype)
        for block in self.blocks:
            h = block(h)
        weight, bias = self.router.weight, self.router.bias
        out = F.linear(h.to(weight.dtype), weight, bias.to(weight.dtype))
        return F.mse_loss(out.float(), y.float())

    def on_predict_start(self) -> None:
        self._act("on_predict_start")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Steps that are small beside bfloat16's digits of a new value, where there is one.
        rate = 1e-5 if self.way in ("made anew", "assigned") else 1e-3
        return torch.optim.AdamW(self.parameters(), lr=rate)

    def data(self, num_samples: int) -> TensorDataset:
        made = torch.Generator().manual_seed(1)
        x = torch.randn(num_samples, 6, generator=made)
        return TensorDataset(x, torch.randn(num_samples, 3, generator=made))


def fit(
    way: str, where: str, precision: str, strategy: str | None = None, **options: Any
) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = Routed(way, where)
    ranks = {} if strategy is None else {"strategy": f"{strategy}_in_process", "devices": 2}
    kept = {"max_steps": STEPS, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    trainer = quiet_trainer(precision=precision, **kept, **ranks)
    trainer.fit(module, datamodule=GlobalBatches(module, STEPS), **options)
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        close = {"rtol": 2e-2, "atol": 2e-3} if value.itemsize == 2 else {"rtol": 0, "atol": 1e-3}
        torch.testing.assert_close(value, expected[name], **close, msg=name)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "strategy", ["shard_ddp", "zero1", "zero2", "zero3", "tensor_parallel", "pipeline_parallel"]
)
@pytest.mark.parametrize(
    ("way", "where", "precision"),
    [
        ("float", "on_fit_start", "bf16-true"),
        ("block", "on_train_start", "bf16-true"),
        ("made anew", "on_train_start", "bf16-true"),
        ("assigned", "on_fit_start", "bf16-true"),
        ("to", "batch 0", "bf16-true"),
        ("half", "on_fit_start", "64-true"),
        ("double", "on_train_start", "32-true"),
    ],
)
def test_layers_keep_the_format_that_a_hook_gives_them_before_the_first_step(
    way: str, where: str, precision: str, strategy: str
) -> None:
    """They were in the Trainer's format again in the step, after the fit and in what is saved."""
    expected, found = fit(way, where, precision), fit(way, where, precision, strategy)
    assert_close(found, expected)
    if way in ("made anew", "assigned"):
        torch.testing.assert_close(found["router.weight"], fresh(), rtol=0, atol=1e-4)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "tensor_parallel", "local_sgd", "elastic"])
@pytest.mark.parametrize("where", ["setup", "configure_model"])
def test_layers_keep_the_format_that_they_are_given_before_the_trainer_converts(
    where: str, strategy: str
) -> None:
    """Lightning converts them with the others, and so did we."""
    found = fit("float", where, "bf16-true", strategy)
    if strategy != "local_sgd":  # whose ranks take steps of their own
        assert_close(found, fit("float", "on_fit_start", "bf16-true"))
    assert found["router.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("strategy", "where"), [("zero1", "batch 1"), ("zero3", "batch 1"), ("elastic", "on_fit_start")]
)
def test_another_format_that_comes_too_late_is_refused_by_name(strategy: str, where: str) -> None:
    """It was dropped without a word."""
    with pytest.raises(ConfigError, match=r"'router\.weight' \(torch\.float32\).*setup or conf"):
        fit("float", where, "bf16-true", strategy)


def test_a_resumed_fit_has_its_state_in_the_formats_of_its_layers(tmp_path: Any) -> None:
    """The optimizer's state was laid out before the hook had given the layer its format."""
    torch.manual_seed(3)
    saved = Routed("float", "on_fit_start")
    common = {"precision": "bf16-true", "accumulate_grad_batches": 1, "gradient_clip_val": None}
    ranks = {"strategy": "zero2_in_process", "devices": 2, **common}
    first = quiet_trainer(max_steps=2, **ranks)
    first.fit(saved, datamodule=GlobalBatches(saved, STEPS))
    first.save_checkpoint(tmp_path / "two.ckpt")
    states = torch.load(tmp_path / "two.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert {value["exp_avg"].dtype for value in states.values()} == {torch.bfloat16, torch.float32}
    module = Routed("float", "on_fit_start")
    trainer = quiet_trainer(max_steps=STEPS, **ranks)
    trainer.fit(module, datamodule=GlobalBatches(module, STEPS), ckpt_path=tmp_path / "two.ckpt")
    assert_close(module.state_dict(), fit("float", "on_fit_start", "bf16-true"))


def test_what_a_class_of_hugging_face_keeps_in_fp32_stays_so() -> None:
    """It was converted with the rest of the module."""
    names = vars(PreTrainedModel)
    assert {"_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"} <= names.keys()

    class Pretrained(nn.Module):
        _keep_in_fp32_modules = ("wo",)

        def __init__(self) -> None:
            super().__init__()
            self.wi, self.wo = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2)

    module = nn.ModuleDict({"net": Pretrained(), "head": nn.Linear(2, 2)})
    with AskedFormats().kept(module, torch.bfloat16):
        module.to(torch.bfloat16)
    formats = {name: param.dtype for name, param in module.named_parameters()}
    assert formats.pop("net.wo.weight") == formats.pop("net.wo.bias") == torch.float32
    assert {*formats.values()} == {torch.bfloat16}


def test_only_a_conversion_that_names_a_format_is_noted() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    asked = AskedFormats()
    with asked:
        module[0].to("cpu")
        module[1].float()
    with asked.kept(module, torch.bfloat16):
        module.bfloat16()
    assert [one.weight.dtype for one in module] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert module[1].running_mean.dtype == torch.float32


def test_evaluations_look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a validation, test or prediction looked: under a pipeline with a message."""
    looked: list[DataParallelEngine] = []
    look = DataParallelEngine.in_other_formats

    def noted(engine: DataParallelEngine) -> Any:
        looked.append(engine)
        return look(engine)

    monkeypatch.setattr(DataParallelEngine, "in_other_formats", noted)
    trainer = quiet_trainer(strategy="zero2_in_process", devices=2)
    module = Routed("float", "on_predict_start")
    trainer.predict(module, DataLoader(module.data(16), batch_size=2))
    assert len(looked) == len({*looked}) == 2
    assert module.router.weight.dtype == torch.float32
