"""Hooks of the fit that work with split weights, run steps of their own, or find a rate."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import (
    ConfigError,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO3Strategy,
)
from lightning_shard.errors import DeadlockError
from lightning_shard.tensor_parallel.split import SplitModel
from tests.features.columns import COLUMNS, ONE_DEVICE, Column, Here
from tests.features.network import Report, fitted
from tests.strategies.data_parallel.hooked import (
    PLAN,
    STYLES,
    Edits,
    Hooked,
    Initialises,
    Reads,
    Teaches,
    assert_equal,
    both,
    fit,
    pipeline,
    replicas,
    tensor,
)
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import GlobalBatches, ignoring, quiet_trainer

pytestmark = ignoring()

alone: Any = cache(fit)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("strategy", [tensor, pipeline])
def test_hooks_have_full_weights(style: type[Hooked], strategy: Any) -> None:
    """Hooks had a rank's own part of the weights."""
    assert_equal(fit(style, strategy()), alone(style))


class ReadsWhatItSets(Hooked):
    """Gradients that a hook sets, and reads, edits and sets again, of all kinds of parameters."""

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in (self.blocks[0].layer.weight, self.blocks[2].layer.bias, self.net.head.weight):
            full = torch.arange(param.numel(), dtype=param.dtype).view(param.shape) / 100
            param.grad = full.clone()
            self.see(param.grad.sum())
            param.grad.add_(1)
            param.grad *= 2
            self.see(param.grad.norm() + param.grad.numel())
            param.grad = None
            self.see(param.grad is None)
            param.grad = full.clone()
            param.grad.copy_(full + 0.5)
            torch._foreach_mul_([param.grad], 2.0)
            self.see(param.grad.clone().sum())
            param.grad.zero_()
            param.grad += full
            self.see((param.grad * param).sum())


class ReadsWhatItSetsAfterBackward(Hooked):
    def on_after_backward(self) -> None:
        ReadsWhatItSets.on_before_optimizer_step(self, None)  # type: ignore[arg-type]


def sharded(kind: Any, **options: Any) -> Any:
    return lambda: kind(backend="in_process", num_ranks=2, **options)


OF_GRADIENTS = {
    "tensor": tensor,
    "pipeline": pipeline,
    "zero1": sharded(ZeRO1Strategy),
    "zero3": sharded(ZeRO3Strategy),
    "replicas": replicas,
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("style", [ReadsWhatItSets, ReadsWhatItSetsAfterBackward])
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_a_gradient_that_a_hook_has_set_is_read_back_full(style: type[Hooked], name: str) -> None:
    """Under split layers it was this rank's part, and under pipelines nothing on other ranks."""
    assert_equal(fit(style, OF_GRADIENTS[name]()), alone(style))


class Differentiates(Hooked):
    def on_train_batch_end(self, *_: Any) -> None:
        layer = self.blocks[0].layer
        with torch.enable_grad():
            value = layer(torch.ones(1, 8, dtype=torch.float64)).sum()
            self.see(torch.autograd.grad(value, [layer.weight])[0].norm())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", [tensor, pipeline])
def test_a_derivative_by_a_weight_in_parts_is_refused_in_hooks(strategy: Any) -> None:
    """Torch said that a tensor required no gradient."""
    with pytest.raises(ConfigError, match=r"for the gradient of 'net\.blocks\.0\.layer\.weight'"):
        fit(Differentiates, strategy())


class CallsAndDifferentiates(Hooked):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        layer, x = self.blocks[0].layer, torch.ones(1, 8, dtype=torch.float64)
        self.see(layer(x).sum())
        grads = torch.func.grad(lambda given: torch.func.functional_call(layer, given, x).sum())
        for grad in grads(dict(layer.named_parameters())).values():
            self.see(grad.norm())


class Transforms(Hooked):
    def on_train_batch_end(self, *_: Any) -> None:
        CallsAndDifferentiates.on_before_optimizer_step(self, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("style", [Transforms, CallsAndDifferentiates])
def test_functions_of_layers_are_transformed_in_hooks(style: type[Hooked]) -> None:
    """Torch could not look into tensors of a transform, of which ranks sent their shards."""
    assert_equal(fit(style, OF_GRADIENTS["zero3"]()), alone(style))


class StatesInSteps(Hooked):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        state = self.blocks[0].layer.state_dict()
        self.see(state["weight"].norm())
        self.see(state["weight"].numel())
        self.blocks[0].layer.load_state_dict({name: one * 0.9 for name, one in state.items()})
        self.blocks[1].layer.register_parameter("bias", self.blocks[1].layer._parameters["bias"])
        return super().training_step(batch, batch_idx)


def test_a_state_that_a_step_takes_is_full() -> None:
    """It was that of this rank's parts."""
    assert_equal(fit(StatesInSteps, tensor()), alone(StatesInSteps))


class CallsBeforeAnUpdate(Hooked):
    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see(self.blocks[0].layer(torch.ones(1, 8, dtype=torch.float64)).norm())


def test_a_split_layer_whose_gradients_are_in_shards_is_called_before_an_update() -> None:
    """It met the shard that its rank was about to update."""
    strategy = HybridParallelStrategy(
        backend="in_process", num_ranks=4, tensor_parallel_size=2, zero_stage=2, plan=PLAN
    )
    assert_equal(fit(CallsBeforeAnUpdate, strategy), alone(CallsBeforeAnUpdate))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("style", [Initialises, Teaches])
def test_hooks_have_full_layers_where_both_split_them(style: type[Hooked]) -> None:
    """Hooks had parts of some layers where both split them."""
    assert_equal(fit(style, both()), alone(style))


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("style", [Edits, Reads])
def test_hooks_have_full_layers_in_two_pipelines(style: type[Hooked]) -> None:
    """Hooks had shards of some layers in two pipelines."""
    assert_equal(fit(style, replicas()), alone(style))


class Calls(Hooked):
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for block in self.blocks:
            self.see(block.layer(torch.ones(1, 8, dtype=torch.float64)).norm())


@pytest.mark.parametrize("strategy", [tensor, both])
def test_split_layers_that_hooks_call_compute_with_their_parts(strategy: Any) -> None:
    assert_equal(fit(Calls, strategy()), alone(Calls))


class SeesWherever(Hooked):
    """Reads norms where the Trainer asks for a schedule's step, a batch's place and loaders."""

    options: ClassVar[dict[str, Any]] = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}

    def look(self) -> None:
        if self.trainer.global_step:  # weights are in parts by then
            self.see(sum(float(one.detach().norm()) for one in self.parameters()))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.look()
        scheduler.step()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.look()
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def train_dataloader(self) -> Any:
        self.look()
        return super().train_dataloader()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "strategy",
    [tensor, pipeline, both, partial(ZeRO3Strategy, backend="in_process", num_ranks=2)],
)
def test_weights_are_full_wherever_the_trainer_asks_a_module(strategy: Any) -> None:
    """They were a rank's elements in a schedule's step, a batch's transfer and for loaders."""
    assert_equal(fit(SeesWherever, strategy()), alone(SeesWherever))


def test_split_layers_that_hooks_call_gather_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering, full = list[int](), SplitModel.full

    def noted(split: SplitModel, param: nn.Parameter, local: Tensor) -> Tensor:
        gathering.append(get_ident())
        return full(split, param, local)

    class Counts(Calls):
        def on_train_batch_end(self, *args: Any) -> None:
            before = gathering.count(get_ident())
            super().on_train_batch_end(*args)
            self.see(gathering.count(get_ident()) - before)

    monkeypatch.setattr(SplitModel, "full", noted)
    assert not any(fit(Counts, tensor()).seen[3::4])
    assert gathering, "the fit's end gathers them"


class TeachesInSteps(Teaches):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.lerp_(other, 0.3)
        return super().training_step(batch, batch_idx)


def test_a_teacher_that_steps_update_stays_in_parts_until_the_end() -> None:
    assert_equal(fit(TeachesInSteps, tensor()), alone(TeachesInSteps))


def test_a_pipeline_that_is_asked_for_one_weight_after_the_other_gets_advice() -> None:
    """A pipeline that is asked for one weight after the other raised a key error."""
    with (
        pytest.warns(UserWarning, match="outside of their stage"),
        pytest.raises(ConfigError, match=r"still asks for 'net\..*on_train_batch_end"),
    ):
        fit(TeachesInSteps, pipeline())


class Replaces(Hooked):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[1].layer = nn.Linear(8, 8).double()


class Misfits(Hooked):
    def on_train_batch_end(self, *_: Any) -> None:
        self.blocks[1].layer.weight.data = torch.eye(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("style", "message"),
    [
        (Replaces, r"Rank \d: the module that held .*blocks\.1\.layer\.weight.*load_state_dict"),
        (Misfits, r"Rank \d: a tensor of shape \(4, 4\).*blocks\.1\.layer\.weight.*\(8, 8\)"),
    ],
)
@pytest.mark.parametrize("strategy", [tensor, pipeline])
def test_what_cannot_be_cut_is_refused_by_name(
    style: type[Hooked], message: str, strategy: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(style, strategy())


class OnOneRank(Hooked):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            self.see(self.blocks[1].layer.weight.norm())


@pytest.mark.parametrize("strategy", [tensor, pipeline])
def test_a_norm_that_one_rank_asks_for_is_no_silent_part(strategy: Any) -> None:
    with pytest.raises(DeadlockError):
        fit(OnOneRank, strategy())


class Saves(Hooked):
    """Saves in a hook, after it has changed weights in the same hook."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        weight: Any = self.blocks[1].layer.weight
        view = weight.data
        view[0] = 0.25
        file = f"{self.trainer.default_root_dir}/own.ckpt"
        self.trainer.save_checkpoint(file)
        self.trainer.strategy.barrier()
        saved = torch.load(file, weights_only=True)["state_dict"]
        self.see(saved["net.blocks.1.layer.weight"].sum())


@pytest.mark.parametrize("strategy", [tensor, pipeline])
def test_a_checkpoint_has_what_its_hook_has_written_before(
    strategy: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Saves, "options", {"default_root_dir": tmp_path})
    assert_equal(fit(Saves, strategy()), fit(Saves))


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "alone": nullcontext,
    "another mode": lambda: torch.device("cpu"),
}


class Trains(Callback):
    """Takes two steps, validates one batch, and notes what the weights are in between."""

    def __init__(self, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self.around = around
        self.norms: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batch = next(iter(trainer.datamodule.train_dataloader()))
        optimizer = pl_module.optimizers(use_pl_optimizer=False)
        with self.around():
            for _ in range(2):
                optimizer.zero_grad()
                self.step(trainer, optimizer, batch)
                self.norms.append(sum(param.norm().item() for param in pl_module.parameters()))

    def step(self, trainer: L.Trainer, optimizer: Any, batch: Any) -> None:
        loss = trainer.strategy.training_step(batch, 0)
        trainer.strategy.backward(loss, None)
        trainer.strategy.optimizer_step(optimizer, closure=lambda: loss)


def trained(column: Column, around: str, folder: Path) -> Report:
    trains = Trains(AROUND[around])
    report = fitted(Here(column, folder), callbacks=[trains], max_steps=2, limit_val_batches=0)
    return report | {"norms": trains.norms}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["zero3", "tensor_parallel", "pipeline_parallel"])
def test_steps_of_a_hook_met_full_weights(name: str, around: str, tmp_path: Path) -> None:
    got = trained(COLUMNS[name], around, tmp_path)
    expected = trained(ONE_DEVICE, around, tmp_path)
    torch.testing.assert_close(got["weights"], expected["weights"], rtol=1e-5, atol=1e-7)
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5)


class Tuned(ExampleGPT):
    """A model whose learning rate can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


STRATEGIES: dict[str, dict[str, Any]] = {
    "zero1": {"kind": ZeRO1Strategy},
    "zero3": {"kind": ZeRO3Strategy},
    "tensor": {"kind": TensorParallelStrategy},
    "pipeline": {"kind": PipelineParallelStrategy},
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.filterwarnings("ignore:.*suggested_lr.*")
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_learning_rate_finder_goes_back_to_the_weights_it_began_with(
    name: str, tmp_path: Any
) -> None:
    torch.manual_seed(3)
    model = Tuned()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = DataLoader(GlobalBatches(model).dataset, batch_size=4)
    strategy = STRATEGIES[name]["kind"](backend="in_process")
    trainer = quiet_trainer(
        strategy=strategy, devices=2, default_root_dir=tmp_path, accumulate_grad_batches=1
    )
    finder = Tuner(trainer).lr_find(
        model, train_dataloaders=data, num_training=8, update_attr=False
    )
    assert finder is not None
    assert all(math.isfinite(loss) for loss in finder.results["loss"])
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, msg=key)
